"""The DFlash drafter and the measurement of its acceptance length. Importing this package imports no torch."""

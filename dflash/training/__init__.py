"""Training of drafters: data, features, objective, loop, checkpoints. ``import dflash.training`` imports no torch."""

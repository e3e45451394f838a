"""Fixtures: the local lab."""

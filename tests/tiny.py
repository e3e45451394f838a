"""Fixtures: the tiny target and drafter pairs."""

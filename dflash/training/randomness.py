"""Random numbers by name: what is drawn for a sample is the same on every rank, in every row, after every resume."""

import hashlib

import torch


def generator(seed: int, *key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for ``key``, e.g. (epoch, sample, "anchors"); equal keys draw equal numbers on one device."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    # torch's generator on the CPU keeps the lower 32 bits; two keys that share them share their numbers, no more.
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "little"))

"""Sizes, rates and durations as people write them: ``2TB``, ``200MB/s``, ``10m``, ``30d``."""

import re

from dflash.errors import UsageError

DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SIZE_UNITS = DECIMAL | BINARY
DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LARGEST_SIZE = 2**63 - 1
LONGEST_DURATION = 2**31 - 1
"""Seconds; ssh-keygen signs for no longer."""


class QuantityError(UsageError, ValueError):
    """A size, rate or duration that cannot be read."""


def size(text: str) -> int:
    """``"2TB"`` → bytes; decimal (kB, MB, GB, TB) and binary (KiB … TiB) units."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", text.strip())
    factor = SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise QuantityError(f"{text!r} is not a size; write a number and a unit, as in 500MB, 17GB or 2TiB")
    if (value := float(match[1]) * factor) >= LARGEST_SIZE:
        raise QuantityError(f"{text[:40]!r} is more than any disk holds; write less than {show_size(LARGEST_SIZE)}")
    return round(value)


def rate(text: str) -> int:
    """``"200MB/s"`` → bytes a second, at least 1."""
    per_second = text.strip().removesuffix("/s")
    try:
        value = size(per_second) if text.strip().endswith("/s") else 0
    except QuantityError:
        value = 0
    if value < 1:
        raise QuantityError(f"{text!r} is not a rate; write a number, a unit and /s, as in 200MB/s")
    return value


def duration(text: str) -> int:
    """``"10m"`` → seconds; parts may be joined (``1h30m``), units s, m, h, d."""
    parts = re.findall(r"([0-9]{1,12})([smhd])", text.strip())
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        raise QuantityError(f"{text!r} is not a duration; write it as in 90s, 10m, 1h30m or 30d")
    seconds = sum(int(number) * DURATION_UNITS[unit] for number, unit in parts)
    if seconds < 1:
        raise QuantityError(f"{text!r} is no time at all; write at least 1s")
    if seconds > LONGEST_DURATION:
        raise QuantityError(f"{text!r} is too long; the longest is {show_duration(LONGEST_DURATION)}")
    return seconds


def show_size(count: int) -> str:
    """Bytes → ``"17.2 GB"``, decimal units."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} B"


def show_rate(bytes_per_second: int) -> str:
    """Bytes a second → ``"200 MB/s"``."""
    return f"{show_size(bytes_per_second)}/s"


def show_duration(seconds: float) -> str:
    """Seconds → the two largest units, ``"29d 23h"``."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length}{unit}")
            left %= length
    return " ".join(parts[:2])

"""How a check says what it found."""

from typing import Literal

from dflash.report import Check

Status = Literal["pass", "warn", "fail", "skipped"]
Value = float | int | str | None


def verdict(name: str, status: Status | bool, measured: Value, limit: Value, explanation: str) -> Check:
    """A check's result; a bool for ``status`` is pass or fail."""
    if isinstance(status, bool):
        status = "pass" if status else "fail"
    return Check(name=name, status=status, measured=measured, limit=limit, explanation=explanation)


def skipped(name: str, limit: Value, missing: str) -> Check:
    """Not verified; ``missing`` says what is lacking and how to get it."""
    return verdict(name, "skipped", None, limit, f"not verified: {missing}")

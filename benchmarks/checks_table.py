"""What each check measures on a clean pair and on one with the fault it is there to find: the table of docs/checks.md.

    python -m benchmarks.checks_table [--dtype bfloat16] [--only gqa]

The faults are those of the tests (tests/dflash/checks/injections.py), the pairs the tiny trained ones. Two minutes on
a core; exit code 1 if a clean pair does not pass or a fault is not found.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from dflash.metrics import tau_pooled
from dflash.report import Check
from tests.dflash.checks.bench import Bench, tiny_bench
from tests.dflash.checks.injections import IN_THE_PATH, INJECTIONS, Injection
from tests.dflash.checks.mutate import mutate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    options = parser.parse_args()
    disable_progress_bar()
    chosen = [one for one in INJECTIONS if options.only in one.check]
    with tempfile.TemporaryDirectory() as temporary:
        directory, dtype = Path(temporary), getattr(torch, options.dtype)
        benches = {kind: tiny_bench(kind, directory, dtype=dtype) for kind in ("dense", "hybrid")}
        missed = checks_table(benches, chosen)
        print()
        tau_table(benches)
    return 1 if missed else 0


def checks_table(benches: Mapping[str, Bench], injections: Sequence[Injection]) -> int:
    """Print a line for each injection; returns how many were not found, or found on a clean pair."""
    print(f"| fault | check | planted | clean | spoiled | limit |\n|{'---|' * 6}")
    missed = 0
    for one in injections:
        clean, spoiled = one.clean(benches[one.pair]), one.spoiled(benches[one.pair])
        found = clean.status == "pass" and spoiled.status == "fail"
        missed += not found
        note = "" if found else f" **({clean.status}, {spoiled.status})**"
        print(
            f"| {one.fault or '–'} | `{one.check}` | {one.title} | {_value(clean)} | {_value(spoiled)}{note} | "
            f"{_limit(clean, spoiled)} |",
            flush=True,
        )
    return missed


def tau_table(benches: Mapping[str, Bench]) -> None:
    """Print pooled τ of each pair, clean and with the faults that sit in the measuring code."""
    print(f"| τ | clean | {' | '.join(IN_THE_PATH)} |\n|{'---|' * (2 + len(IN_THE_PATH))}")
    for kind, bench in benches.items():
        values = [_tau(bench)]
        for place in IN_THE_PATH.values():
            with pytest.MonkeyPatch.context() as patch:
                mutate(patch, *place)
                values.append(_tau(bench))
        print(f"| {kind} | {' | '.join(f'{value:.2f}' for value in values)} |", flush=True)


def _tau(bench: Bench) -> float:
    return tau_pooled(replace(bench, memo={}).evidence().rounds)


def _value(check: Check) -> str:
    return f"{check.measured:.3g}" if isinstance(check.measured, float) else str(check.measured)


def _limit(clean: Check, spoiled: Check) -> str:
    limits = [f"{limit:.3g}" if isinstance(limit, float) else str(limit) for limit in (clean.limit, spoiled.limit)]
    return " / ".join(dict.fromkeys(limits))


if __name__ == "__main__":
    sys.exit(main())

"""What each check measures on a clean pair and on one with the fault it is there to find: the table of docs/checks.md.

    python -m benchmarks.checks_table [--dtype bfloat16] [--only gqa]

The faults are those of the tests (tests/dflash/checks/injections.py), the pairs the tiny trained ones. A minute on a
core; exit code 1 if a clean pair does not pass or a fault is not found.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from dflash.report import Check
from tests.dflash.checks.bench import tiny_bench
from tests.dflash.checks.injections import INJECTIONS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", help="checks whose name contains this")
    options = parser.parse_args()
    disable_progress_bar()
    missed = 0
    print(f"| fault | check | planted | clean | spoiled | limit |\n|{'---|' * 6}")
    with tempfile.TemporaryDirectory() as temporary:
        benches = {
            kind: tiny_bench(kind, Path(temporary), dtype=getattr(torch, options.dtype)) for kind in ("dense", "hybrid")
        }
        for one in INJECTIONS:
            if options.only and options.only not in one.check:
                continue
            clean, spoiled = one.clean(benches[one.pair]), one.spoiled(benches[one.pair])
            found = clean.status == "pass" and spoiled.status == "fail"
            missed += not found
            note = "" if found else f" **({clean.status}, {spoiled.status})**"
            print(
                f"| {one.fault or '–'} | {one.check} | {one.title} | {_value(clean)} | {_value(spoiled)}{note} | "
                f"{_limit(clean, spoiled)} |",
                flush=True,
            )
    return 1 if missed else 0


def _value(check: Check) -> str:
    return f"{check.measured:.3g}" if isinstance(check.measured, float) else str(check.measured)


def _limit(clean: Check, spoiled: Check) -> str:
    limits = [f"{limit:.3g}" if isinstance(limit, float) else str(limit) for limit in (clean.limit, spoiled.limit)]
    return " / ".join(dict.fromkeys(limits))


if __name__ == "__main__":
    sys.exit(main())

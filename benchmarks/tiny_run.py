"""How long ``configs/tiny.yaml`` takes from nothing to its last checkpoint, and the τ it reaches on held-out prompts.

    python benchmarks/tiny_run.py [--max-steps N] [--max-length N]

Both commands of the config's first lines, ``dflash data features`` and ``dflash train``, as processes of their own with
a fresh output, imports and all. The limit is three minutes on two cores, and a walk τ of 3.5 in blocks of 8.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import yaml

from dflash.training.metric_log import METRICS, read_metrics
from tasks.process import run

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--max-length", type=int)
    options = parser.parse_args()
    raw = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="tiny-run-") as folder:
        raw |= {"output": f"{folder}/run", "features": {"mode": "offline", "directory": f"{folder}/features"}}
        raw["optimizer"]["max_steps"] = options.max_steps or raw["optimizer"]["max_steps"]
        raw["data"]["max_length"] = options.max_length or raw["data"]["max_length"]
        config = Path(folder) / "run.yaml"
        config.write_text(yaml.safe_dump(raw), encoding="utf-8")
        seconds, processor = {}, os.times()
        for name in (("data", "features"), ("train",)):
            started = time.perf_counter()
            run([sys.executable, "-m", "dflash", *name, "--config", str(config)], cwd=ROOT, timeout=1800)
            seconds[name[-1]] = time.perf_counter() - started
        spent = os.times()
        measured = [line for line in read_metrics(Path(folder) / "run" / METRICS) if line["kind"] == "eval"]
    for line in measured:
        low, high = line["tau_low"], line["tau_high"]
        print(f"step {line['step']}: τ {line['tau']:.3f} [{low:.2f}, {high:.2f}] on {line['prompts']:.0f} prompts")
    told = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    children = spent.children_user + spent.children_system - processor.children_user - processor.children_system
    print(f"{told}; together {sum(seconds.values()):.1f} s, {children:.1f} s of processor time")


if __name__ == "__main__":
    main()

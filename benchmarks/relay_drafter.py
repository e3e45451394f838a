"""The drafter out of a training checkpoint against ``scp -3`` of the whole file: bytes moved, time to a loadable file.

    python benchmarks/relay_drafter.py [--runs 5] [--size 4.5GB] [--folder /dev/shm]

The checkpoint is what a trainer saves: the drafter in bfloat16, and of its optimizer a float32 master and two moments
for every weight, so that 1/7 of the file is the drafter's. Both start from a closed connection and end with a file that
the destination's programs can load; the relay's is loaded once and compared with what was saved. In turns, medians;
exit status 1 when more than 1.01 of the drafter's bytes leave the training host, or when it is not 5 times as fast.
The lab lives in ``--folder``, as in ``relay.py``, whose ``scp -3`` and limits these are.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.relay import SOURCE, Bench, on_the_lab
from dflash.errors import run_cli
from tasks.inventory import Location
from tasks.quantities import show_size, size
from tasks.relay import RelayResult, Settings, plan_relay, relay

FOLDER = "/root/eval/cache/drafter"
BYTES_A_WEIGHT = 14
"""Two of the weight, twelve of its optimizer."""
TENSOR = 16 << 20
"""Weights of one tensor."""
MOST_MOVED, FASTER = 1.01, 5.0


def save_checkpoint(file: Path, count: int) -> dict[str, Tensor]:
    """Write a checkpoint of about ``count`` bytes and return the drafter in it."""
    generator = torch.Generator().manual_seed(0)
    tensors = max(1, count // BYTES_A_WEIGHT // TENSOR)
    drafter, masters, moments = {}, {}, {}
    for layer in range(tensors):
        name = f"layers.{layer}.mlp.up_proj.weight"
        masters[name] = torch.empty(4096, TENSOR // 4096).normal_(generator=generator)
        drafter[name] = masters[name].bfloat16()
        moments[name] = {"exp_avg": masters[name] * 0.1, "exp_avg_sq": masters[name] ** 2}
    torch.save({"model_state_dict": drafter, "optimizer_state_dict": moments, "masters": masters, "step": 1}, file)
    return drafter


def relay_drafter(bench: Bench) -> RelayResult:
    """Relay the drafter under an approval of its own."""
    source = Location(bench.known.host("kpro6"), bench.lab.seen("kpro6", SOURCE))
    folder = Location(bench.known.host("ct129"), bench.lab.seen("ct129", FOLDER))
    plan = plan_relay([source], "the benchmark reads the drafter")
    assert plan is not None
    request = bench.store.request(plan)
    approval = bench.store.approve(request.id, reason="benchmark", ca_key=bench.lab.ca_key).read
    return relay(bench.connector, approval, source, folder, Settings(what="drafter"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--size", type=size, default=size("4.5GB"))
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    asked = options.parse_args()
    with on_the_lab(asked.folder, 1) as bench:
        print(f"writing a checkpoint of {show_size(asked.size)}", file=sys.stderr)
        drafter = save_checkpoint(bench.source, asked.size)
        whole, wanted = bench.source.stat().st_size, sum(tensor.nbytes for tensor in drafter.values())
        times: dict[str, list[float]] = {"relay": [], "scp -3": []}
        for number in range(asked.runs):
            folder = bench.lab.host_path("ct129", FOLDER)
            for left in folder.glob("*"):
                left.unlink()
            begun = time.monotonic()
            result = relay_drafter(bench)
            times["relay"].append(time.monotonic() - begun)
            begun = time.monotonic()
            bench.measure(bench.scp)
            times["scp -3"].append(time.monotonic() - begun)
            print(f"run {number + 1}: {times['relay'][-1]:.1f} s, {times['scp -3'][-1]:.1f} s", file=sys.stderr)
        made = load_file(folder / "model.safetensors")
        if made.keys() != drafter.keys() or not all(torch.equal(made[name], drafter[name]) for name in drafter):
            sys.exit("the drafter did not arrive as it was saved")
        left_host = max(entry["bytes"] for entry in bench.connector.audit.entries() if entry["event"] == "end")
    seconds = {way: statistics.median(each) for way, each in times.items()}
    ratio, share = seconds["scp -3"] / seconds["relay"], left_host / wanted
    print(f"checkpoint {show_size(whole)}, drafter {show_size(wanted)}, {asked.runs} runs in turns, medians")
    print(f"relay --what drafter  {seconds['relay']:6.2f} s, connects included; {result.bytes} bytes arrived")
    print(f"scp -3 of the whole   {seconds['scp -3']:6.2f} s, connects included")
    print(f"bytes that left the training host: {left_host}, {share:.4f} of the drafter's (at most {MOST_MOVED})")
    print(f"faster by {ratio:.2f} (at least {FASTER})")
    if share > MOST_MOVED or ratio < FASTER:
        sys.exit(1)


if __name__ == "__main__":
    run_cli(main)

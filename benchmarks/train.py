"""A training step beside speculators' ``DFlashDraftModel``: time, peak memory, and that both compute the same.

    make peers && python benchmarks/train.py [--vocabularies 32000,248320] [--losses ce,kl] [--turns 3] [--steps 5]

S 512, 64 anchors, B 8, hidden 256, 2 layers, 5 taps, float32 on the CPU. Both sides get the same taps, labels, anchors
and weights from one file and run in turns, each in a process of its own; a step is forward, loss, backward, clip and
AdamW. The losses and the gradients of ``fc`` at the first step are compared before anything is timed.

Peak memory is the process's high-water mark (VmHWM, reset by /proc/self/clear_refs) above what it held after its
imports, and, as "step", above what it held with model and batch loaded.

The peers' interpreter is .venv-peers/bin/python, or $PEERS_PYTHON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash.config import DrafterConfig
from tasks.process import run

ROOT = Path(__file__).parents[1]
PEERS = Path(os.environ.get("PEERS_PYTHON", ROOT / ".venv-peers" / "bin" / "python"))
WORKER = ROOT / "benchmarks" / "train_worker.py"
LENGTH, ANCHORS, BLOCK, HIDDEN, TAPS = 512, 64, 8, 256, 5
QWEN3 = {
    "vocab_size": 0,
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
}
CLOSE = 1e-4
"""Two correct implementations in float32 agree to this, relative."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", default="32000,248320")
    parser.add_argument("--losses", default="ce,kl")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--chunk-tokens", type=int, default=128, help="slots whose logits exist at once on our side")
    given = parser.parse_args()
    if not PEERS.exists():
        sys.exit(f"{PEERS} is not there; run make peers first")
    print(
        f"S {LENGTH}, {ANCHORS} anchors, B {BLOCK}, hidden {HIDDEN}, 2 layers, {TAPS} taps, float32, "
        f"{torch.get_num_threads()} threads, {given.turns} turns of {given.steps} steps, medians; "
        f"our chunk {given.chunk_tokens} slots"
    )
    print(f"{'vocabulary':>10} {'loss':>5} {'side':>12} {'s a step':>9} {'peak MiB':>9} {'step MiB':>9}")
    for vocabulary in map(int, given.vocabularies.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "batch.safetensors"
            write_batch(path, vocabulary, given.chunk_tokens)
            for loss in given.losses.split(","):
                compare(path, vocabulary, loss, given.turns, given.steps)


def compare(path: Path, vocabulary: int, loss: str, turns: int, steps: int) -> None:
    sides = {"ours": Path(sys.executable), "speculators": PEERS}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, python in sides.items():
            results[name].append(work(python, name, path, loss, steps))
    ours, theirs = results["ours"][0], results["speculators"][0]
    for name in ("loss", "fc_gradient"):
        if abs(ours[name] - theirs[name]) > CLOSE * abs(theirs[name]):
            sys.exit(f"the sides do not compute the same: {name} {ours[name]} here, {theirs[name]} in speculators")
    median: dict[str, dict[str, float]] = {}
    for name, runs in results.items():
        median[name] = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        one = median[name]
        print(
            f"{vocabulary:10} {loss:>5} {name:>12} {one['seconds']:9.3f} {one['peak_mib']:9.0f} "
            f"{one['working_mib']:9.0f}",
            flush=True,
        )
    ratio = {key: median["ours"][key] / median["speculators"][key] for key in median["ours"]}
    print(
        f"{'':10} {'':5} {'ours/theirs':>12} {ratio['seconds']:9.2f} {ratio['peak_mib']:9.2f} "
        f"{ratio['working_mib']:9.2f}   same loss to {abs(ratio['loss'] - 1):.0e}, "
        f"same gradient norm of fc to {abs(ratio['fc_gradient'] - 1):.0e}",
        flush=True,
    )


def work(python: Path, side: str, path: Path, loss: str, steps: int) -> dict[str, float]:
    arguments = [str(python), str(WORKER), side, str(path), "--loss", loss, "--steps", str(steps)]
    settings = {"HF_HUB_OFFLINE": "1"} | ({"PYTHONPATH": str(ROOT)} if side == "ours" else {})
    said = run(arguments, timeout=900, env=os.environ | settings).stdout
    line = next(line for line in said.splitlines() if line.startswith("result "))
    result: dict[str, float] = json.loads(line.removeprefix("result "))
    return result


def write_batch(path: Path, vocabulary: int, chunk_tokens: int) -> None:
    """One row, every token a label; last hidden states whose likeliest token is the next one, as of greedy text."""
    torch.manual_seed(0)
    config: dict[str, Any] = QWEN3 | {
        "vocab_size": vocabulary,
        "num_target_layers": 64,
        "layer_types": ["full_attention"] * QWEN3["num_hidden_layers"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": vocabulary - 1, "target_layer_ids": [1, 16, 31, 46, 61]},
    }
    shapes = DrafterConfig.from_dict(config, source="benchmark").tensor_shapes()
    weights = {
        f"drafter.{name}": torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape)
        for name, shape in shapes.items()
    }
    head = torch.randn(vocabulary, HIDDEN) / HIDDEN**0.5
    ids = torch.randint(vocabulary - 1, (1, LENGTH))
    following = head[ids.roll(-1, dims=1)]
    tensors: dict[str, Tensor] = weights | {
        "embedding": 0.05 * torch.randn(vocabulary, HIDDEN),
        "head": head,
        "ids": ids,
        "loss_mask": torch.ones(1, LENGTH, dtype=torch.uint8),
        "taps": torch.randn(1, LENGTH, TAPS * HIDDEN),
        "hidden": following / following.square().mean(-1, keepdim=True).sqrt(),
        "anchors": torch.randperm(LENGTH - BLOCK)[:ANCHORS].sort().values,
    }
    about = {"config": config, "qwen3": list(QWEN3), "gamma": 4.0, "chunk_tokens": chunk_tokens}
    save_file(tensors, path, metadata={"about": json.dumps(about)})


if __name__ == "__main__":
    main()

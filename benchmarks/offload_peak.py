"""Peak memory of layer streaming against what one layer and its activations need at the least.

    python benchmarks/offload_peak.py [--folder /tmp]

A dense and a hybrid target of random weights, with a head larger than a layer, are written to a folder of their own.
For each, two fresh processes on the CPU in float32 run the same texts in the same batches:

- *floor*: one layer, the largest, with random weights; the states of all texts go through it as often as there are
  layers up to the last tap, and room for the taps is there. Its peak is the largest layer + activations.
- *streamed*: :class:`dflash.offload.StreamedTaps` on the files.

Counted is the rise of the resident set over what the process had after its imports and a first tiny run of the same
kind, so neither the interpreter nor torch's own start is in it. The limit for the ratio is 1.3.
"""

import argparse
import ctypes
import shutil
import subprocess  # noqa: TID251 - a peak is that of a fresh process
import sys
import tempfile
from pathlib import Path

SIZES = {
    "vocab_size": 40_960,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
DELTA_NET = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
LAYERS = (1, 2, 4)
LENGTHS = [200, 180, 160, 90]
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where 0.7 GB can be written")
    parser.add_argument("--child", nargs=2, metavar=("HOW", "TARGET"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        how, target = arguments.child
        print(measure(how, Path(target)))
        return
    for name in ("dense", "hybrid"):
        folder = Path(tempfile.mkdtemp(prefix="offload-peak-", dir=arguments.folder))
        try:
            layer, head = write_target(folder, hybrid=name == "hybrid")
            floor, streamed = (child(how, folder) for how in ("floor", "streamed"))
        finally:
            shutil.rmtree(folder)
        print(f"{name}: largest layer {layer / MIB:.0f} MiB, head {head / MIB:.0f} MiB, {sum(LENGTHS)} tokens")
        print(f"  floor: one layer, activations  {floor / MIB:6.0f} MiB")
        print(f"  streamed: {max(LAYERS) + 1} of {SIZES['num_hidden_layers']} layers      {streamed / MIB:6.0f} MiB")
        print(f"ratio {name} {streamed / floor:.3f}")


def child(how: str, folder: Path) -> int:
    command = [sys.executable, __file__, "--child", how, str(folder)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write_target(folder: Path, *, hybrid: bool) -> tuple[int, int]:
    """Random weights; bytes of the largest layer and of the head."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

    from dflash.shards import Shards

    torch.manual_seed(0)
    hybrid_config, dense_config = Qwen3_5TextConfig(**SIZES, **DELTA_NET), Qwen3Config(**SIZES)
    model = Qwen3_5ForCausalLM(hybrid_config) if hybrid else Qwen3ForCausalLM(dense_config)
    model.save_pretrained(folder)
    head = model.get_submodule("lm_head").weight.nbytes
    return max(Shards.open(folder).layer_bytes(torch.float32)), head


def measure(how: str, target: Path) -> int:
    """Bytes that the resident set of this process rises by."""
    import torch

    from dflash.offload import StreamedTaps

    torch.manual_seed(0)
    torch.set_num_threads(1)
    ids = [torch.randint(0, SIZES["vocab_size"], (length,)).tolist() for length in LENGTHS]
    streamed = StreamedTaps.open(target)
    run = {"streamed": streamed_run, "floor": floor_run}[how]
    run(streamed, [[1, 2, 3]])
    ctypes.CDLL(None).malloc_trim(0)  # what the first run has freed is not there to be used again
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    run(streamed, ids)
    return status("VmHWM") - before


def streamed_run(streamed, ids) -> None:
    streamed.tap(ids, LAYERS)


def floor_run(streamed, ids) -> None:
    import torch

    from dflash.hidden_states import PASS_TOKENS, padded, passes
    from dflash.offload import _Caller

    shards = streamed.shards
    sizes = shards.layer_bytes(torch.float32)
    layer = sizes.index(max(sizes))
    names = shards.layer(layer)
    prefix = f"model.layers.{layer}."
    with torch.no_grad():
        weights = {
            name.removeprefix(prefix): torch.empty(shards.tensors[name].shape).normal_(std=0.02) for name in names
        }
        caller = _Caller(shards.skeleton(), torch.device("cpu"))
        block = caller.loaded(layer, weights)
        groups = list(passes([len(text) for text in ids], PASS_TOKENS))
        texts = [padded([ids[place] for place in group]) for group in groups]
        states = [torch.randn(*text.shape, SIZES["hidden_size"]) for text in texts]
        taps = [torch.zeros(len(text), len(LAYERS) * SIZES["hidden_size"]) for text in ids]
        for _ in range(max(LAYERS) + 1):
            for one in states:
                one.copy_(caller(block, layer, one).clamp(-5, 5))
        del taps


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()

"""Replay against transformers' own DFlash generation on the dense pair: the same rounds, how much sooner.

    python benchmarks/replay.py

Both sides get the prompts as token ids and loaded models; the replay gets the completions as well, as an evaluation
does from a server, and computes their hidden states and every figure of a report. They run in turns in one process;
figures are medians.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig, MuseGlimmerAssistantModel

from dflash.batch import Text
from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.export import export
from dflash.hidden_states import LoadedTaps
from dflash.metrics import DDTREE_NODES, SEED, summarize
from dflash.replay import replay
from dflash.target import Target
from tests.dflash.greedy import tiny_prompts
from tests.tiny import FIXTURES, PROMPTS, Pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()

    pair = Pair(FIXTURES / "tiny-dense", FIXTURES / "tiny-dense-dflash", PROMPTS)
    target = Target.load(pair.target)
    checkpoint = read_checkpoint(pair.drafter)
    drafter = build_drafter(checkpoint, device="cpu", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as directory:
        export(checkpoint, "transformers", Path(directory) / "assistant", dtype="float32")
        assistant = MuseGlimmerAssistantModel.from_pretrained(Path(directory) / "assistant", dtype=torch.float32).eval()
    prompts = tiny_prompts(pair, target, options.prompts)
    completions = target.generate_greedy(list(prompts.values()), options.tokens, ignore_eos=True)
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = None

    def ours(trees: tuple[int, ...]) -> Callable[[], float]:
        def run() -> float:
            ids = [prompt + own for prompt, own in zip(prompts.values(), completions, strict=True)]
            tapped = LoadedTaps(target).tap(ids, checkpoint.config.target_layer_ids)
            texts = [
                Text(id, tokens, len(prompt), one.taps)
                for (id, prompt), tokens, one in zip(prompts.items(), ids, tapped, strict=True)
            ]
            result = replay(
                drafter, target, texts, max_blocks=None, seed=SEED, progress=lambda done, total: None, trees=trees
            )
            return summarize(result.walk, result.random, result.trees, seed=SEED).tau.pooled

        return run

    def theirs() -> float:
        settings = GenerationConfig(
            max_new_tokens=options.tokens, do_sample=False, pad_token_id=0, speculation_type="dflash"
        )
        for prompt, own in zip(prompts.values(), completions, strict=True):
            with torch.inference_mode():
                written = target.model.generate(
                    torch.tensor([prompt]), generation_config=settings, assistant_model=assistant
                )
            assert written[0].tolist() == prompt + own, "the two sides wrote different completions"
        return 0.0

    sides: dict[str, Callable[[], float]] = {
        "replay, all figures": ours(DDTREE_NODES),
        "replay without trees": ours(()),
        "transformers' DFlash generate": theirs,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(options.runs + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            if run:  # the first warms caches and pools
                seconds[name].append(time.perf_counter() - started)
    peer = statistics.median(seconds["transformers' DFlash generate"])
    print(f"{options.prompts} prompts × {options.tokens} tokens, {options.runs} runs in turns, medians")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:32} {median:7.3f} s  ({min(values):.3f} to {max(values):.3f})  {peer / median:5.1f} ×")


if __name__ == "__main__":
    main()

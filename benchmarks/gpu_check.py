"""What only a GPU can show, in one run of a few minutes: fla's kernels, CUDA decoding, streaming into little memory.

    python benchmarks/gpu_check.py [--device cuda] [--output gpu_check.json]

Runs from a source checkout with torch ≥ 2.11 and transformers; flash-linear-attention and triton are used where they
are. Each line is one question with its answer; an answer that is an error does not end the run. With ``--device cpu``
the same questions are asked of the CPU, which shows that the script itself works.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 (from a source checkout)

from dflash.batch import Text  # noqa: E402
from dflash.checkpoints import build_drafter, read_checkpoint  # noqa: E402
from dflash.decode import decode  # noqa: E402
from dflash.drafter import Drafter  # noqa: E402
from dflash.hidden_states import LoadedTaps  # noqa: E402
from dflash.kernels import select_kernel  # noqa: E402
from dflash.lossless import lossless, read_again  # noqa: E402
from dflash.masks import block_mask_mod, dense_mask, layer_rules  # noqa: E402
from dflash.metrics import DDTREE_NODES, SEED, tau_pooled  # noqa: E402
from dflash.offload import StreamedTaps  # noqa: E402
from dflash.replay import replay  # noqa: E402
from dflash.sampling import make_sampler  # noqa: E402
from dflash.target import Target  # noqa: E402
from dflash.vocabulary import SlicedVocabulary  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
TOKENS = 96
MIB = 1 << 20


@dataclass
class Answers:
    """Prints each answer as it comes and keeps all of them."""

    found: dict[str, Any] = field(default_factory=dict)

    def ask(self, question: str, answer: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            value = answer()
        except Exception as error:  # the next question may still have an answer
            traceback.print_exc()
            value = f"failed: {type(error).__name__}: {error}"
        self.found[question] = value
        print(f"{question}: {value}  ({time.perf_counter() - started:.1f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="write the answers as JSON as well")
    options = parser.parse_args()
    device, answers = torch.device(options.device), Answers()
    answers.ask("device", lambda: torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    answers.ask("versions", versions)
    answers.ask("kernel that auto takes", lambda: select_kernel("auto", device=device))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        if device.type == "cuda":
            answers.ask(f"taps, fla against torch, {name}", lambda dtype=dtype: kernels_apart(device, dtype))
        for pair in ("dense", "hybrid"):
            answers.ask(f"decoding {pair}, {name}", lambda pair=pair, dtype=dtype: decoding(pair, device, dtype))
    answers.ask("rounds here and on the CPU, hybrid, float32", lambda: rounds_apart(device))
    answers.ask("flex attention against the dense mask, forward and backward", lambda: flex(device))
    if device.type == "cuda":
        answers.ask("streaming, peak MiB over largest layer + activations", lambda: streaming(device))
        answers.ask("head of 248320 rows, 2000 tokens: MiB above the weights", lambda: head(device))
    if options.output:
        options.output.write_text(json.dumps(answers.found, indent=1, default=str) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("torch", "transformers", "flash-linear-attention", "fla-core", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def load(
    pair: str, device: torch.device, dtype: torch.dtype, kernel: Literal["auto", "torch", "fla"] = "auto"
) -> tuple[Target, Drafter, list[tuple[str, list[int]]]]:
    """Target, drafter and the first prompts as token ids."""
    target = Target.load(FIXTURES / f"tiny-{pair}", device=device, dtype=dtype, kernel=kernel)
    checkpoint = read_checkpoint(FIXTURES / f"tiny-{pair}-dflash")
    lines = (ROOT / "prompts" / "tiny.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    prompts = [(one["id"], target.tokenizer(one["prompt"])["input_ids"]) for one in map(json.loads, lines)]
    return target, build_drafter(checkpoint, device=device, dtype=dtype), prompts


def kernels_apart(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative error of a tap between the two kernels, and the share of argmaxes that change."""
    taps, best = [], []
    for kernel in ("torch", "fla"):
        target, _, prompts = load("hybrid", device, dtype, kernel)
        ids = [tokens for _, tokens in prompts]
        found = LoadedTaps(target).tap(ids, (1, 3, 5, 6))
        taps.append([one.taps.float() for one in found])
        best.append(torch.cat([(one.shortfall == 0).cpu() for one in found if one.shortfall is not None]))
    errors = [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(*taps, strict=True)]
    return {"relative error": max(errors), "argmaxes that change": (best[0] != best[1]).float().mean().item()}


def decoding(pair: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Decode greedily: τ, whether it is lossless, and the times of a step, a draft and a verification."""
    target, drafter, prompts = load(pair, device, dtype)
    sampler = make_sampler("greedy", device=device)
    greedy = target.generate_greedy([tokens for _, tokens in prompts], TOKENS, ignore_eos=True)
    done = decode(
        drafter,
        target,
        prompts,
        max_new_tokens=TOKENS,
        end=frozenset(),
        sampler=sampler,
        max_blocks=None,
        progress=lambda done, total: None,
    )
    equal = lossless(done.texts, greedy, read_again(target), exact=dtype == torch.float32)
    return {
        "τ": round(tau_pooled(done.rounds), 3),
        "lossless": equal.check.status,
        "prompts as greedy": f"{equal.prompts} of {len(prompts)}, {len(equal.near_ties)} near-ties",
        "step, draft, verify in ms": [
            round(1000 * seconds, 2) for seconds in (done.times.step, done.times.draft, done.times.verify) if seconds
        ],
    }


def rounds_apart(device: torch.device) -> str:
    """Rounds of the replay that differ between this device and the CPU, over the CPU's completions."""
    found = []
    completions: list[list[int]] = []
    for place in ("cpu", device):
        target, drafter, prompts = load("hybrid", torch.device(place), torch.float32, "torch")
        completions = completions or target.generate_greedy([ids for _, ids in prompts], TOKENS, ignore_eos=True)
        ids = [prompt + own for (_, prompt), own in zip(prompts, completions, strict=True)]
        tapped = LoadedTaps(target).tap(ids, drafter.config.target_layer_ids)
        texts = [
            Text(id, tokens, len(prompt), one.taps)
            for (id, prompt), tokens, one in zip(prompts, ids, tapped, strict=True)
        ]
        walked = replay(
            drafter,
            target,
            texts,
            max_blocks=None,
            seed=SEED,
            progress=lambda done, total: None,
            trees=DDTREE_NODES,
        )
        found.append([(one.prompt, one.anchor, one.advance) for one in walked.walk])
    return f"{len(set(found[0]) ^ set(found[1]))} of {len(found[0])} differ"


def flex(device: torch.device) -> dict[str, float]:
    """Largest difference of output and gradient between flex attention and SDPA under the same predicate."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    config = read_checkpoint(FIXTURES / "tiny-hybrid-dflash").config
    rows, blocks, length = 2, 16, 512
    size = config.block_size
    anchors = torch.randint(1, length, (rows, blocks), device=device).sort(dim=1).values
    queries, keys = blocks * size, length + blocks * size
    worst = {"output": 0.0, "gradient": 0.0}
    for rule in set(layer_rules(config)):
        mask = create_block_mask(
            block_mask_mod(rule, anchors, size, length), rows, None, queries, keys, device=str(device)
        )
        dense = dense_mask(rule, anchors, size, length)
        q = torch.randn(rows, 4, queries, 32, device=device, requires_grad=device.type == "cuda")
        k, v = (torch.randn(rows, 2, keys, 32, device=device) for _ in range(2))
        attend = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
        ours = attend(q, k, v, block_mask=mask, enable_gqa=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
        worst["output"] = max(worst["output"], (ours - theirs).abs().max().item())
        if q.requires_grad:
            gradients = [torch.autograd.grad(one.square().sum(), q, retain_graph=True)[0] for one in (ours, theirs)]
            worst["gradient"] = max(worst["gradient"], (gradients[0] - gradients[1]).abs().max().item())
    return worst


def streaming(device: torch.device) -> float:
    """Peak of streamed taps of a random target of 8 layers of 200 MiB over its largest layer and the activations."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 64_000,
        "hidden_size": 2048,
        "intermediate_size": 12_288,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False)).bfloat16().save_pretrained(folder)
        streamed = StreamedTaps.open(folder, device=device, dtype=torch.bfloat16)
        ids = [torch.randint(0, 64_000, (length,)).tolist() for length in (900, 700, 700, 400)]
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        streamed.tap(ids, (1, 3, 5))
        peak = torch.cuda.max_memory_allocated(device) - before
        layer = max(streamed.shards.layer_bytes(torch.bfloat16))
    activations = 4 * 900 * (3 * sizes["intermediate_size"] + 4 * sizes["hidden_size"]) * 2
    print(f"  peak {peak / MIB:.0f} MiB, layer {layer / MIB:.0f} MiB, activations about {activations / MIB:.0f} MiB")
    return round(peak / (layer + activations), 3)


def head(device: torch.device) -> float:
    """Peak of greedy tokens, ranks and the 512 best of 2000 slots through a head of 248 320 × 5120 rows."""
    from dflash.batch import best_tokens

    weights = torch.randn(248_320, 5120, device=device, dtype=torch.bfloat16)
    empty = torch.empty(0, 5120, device=device, dtype=torch.bfloat16)
    vocabulary = SlicedVocabulary(device, weights, empty, torch.full((248_320,), -1, device=device))
    hidden = torch.randn(2000, 5120, device=device, dtype=torch.bfloat16)
    wanted = torch.randint(0, 248_320, (2000,), device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    best_tokens(vocabulary, hidden, wanted, keep=512)
    return round((torch.cuda.max_memory_allocated(device) - before) / MIB, 1)


if __name__ == "__main__":
    main()

"""What only a GPU can show, in one run of a few minutes: fla's kernels, CUDA decoding, flex attention's backward, a
training step of the real size, streaming into little memory, turns on a GPU that others use too.

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
import yaml  # noqa: E402

from dflash.batch import Text  # noqa: E402
from dflash.checkpoints import build_drafter, read_checkpoint  # noqa: E402
from dflash.config import DrafterConfig  # noqa: E402
from dflash.decode import decode  # noqa: E402
from dflash.drafter import Drafter  # noqa: E402
from dflash.evaluate import measure  # noqa: E402
from dflash.gpu_share import GpuBusyError, GpuMemoryError, Share, shared  # noqa: E402
from dflash.hidden_states import LoadedTaps  # noqa: E402
from dflash.kernels import select_kernel  # noqa: E402
from dflash.lossless import lossless, read_again  # noqa: E402
from dflash.masks import block_mask_mod, dense_mask, layer_rules  # noqa: E402
from dflash.memory import free_bytes  # noqa: E402
from dflash.metrics import DDTREE_NODES, SEED, tau_pooled  # noqa: E402
from dflash.offload import StreamedTaps  # noqa: E402
from dflash.progress import Phases  # noqa: E402
from dflash.recipes import paper  # noqa: E402
from dflash.replay import replay  # noqa: E402
from dflash.request import Request  # noqa: E402
from dflash.sampling import make_sampler  # noqa: E402
from dflash.target import Target  # noqa: E402
from dflash.training.batch import Features, Sample  # noqa: E402
from dflash.training.blocks import draw_blocks  # noqa: E402
from dflash.training.features import OnlineFeatures  # noqa: E402
from dflash.training.head_loss import head_loss  # noqa: E402
from dflash.training.objective import TrainingModel, block_embeddings  # noqa: E402
from dflash.training.optimizer import adamw  # noqa: E402
from dflash.training.run_config import RunConfig  # noqa: E402
from dflash.training.trainer import train  # noqa: E402
from dflash.vocabulary import SlicedVocabulary  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
TOKENS = 96
STEPS = 60
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
    for pair in ("dense", "hybrid") if device.type == "cuda" else ("dense",):
        answers.ask(
            f"documents of a packed row, each against itself alone, {pair}", lambda pair=pair: packed(pair, device)
        )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "run" / f"step_{STEPS}"
        answers.ask("training under the torch kernel", lambda: trained(device, checkpoint.parent))
        for kernel in ("torch", "fla") if device.type == "cuda" else ("torch",):
            answers.ask(
                f"its evaluation, kernel {kernel}", lambda kernel=kernel: evaluation(device, kernel, checkpoint)
            )
    answers.ask("flex attention against the dense mask, forward and backward", lambda: flex(device))
    answers.ask("the trainer's loss and gradients, flex against dense", lambda: trained_apart(device))
    sizes = "qwen3.6-27b" if device.type == "cuda" else "tiny"
    answers.ask(f"a training step of configs/{sizes}.yaml on random states", lambda: training_step(device, sizes))
    if device.type == "cuda":
        answers.ask("streaming, peak MiB over largest layer + activations", lambda: streaming(device))
        answers.ask("head of 248320 rows, 2000 tokens: MiB above the weights", lambda: head(device))
    answers.ask("a turn on the device, and its limits", lambda: sharing(device))
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


def packed(pair: str, device: torch.device) -> dict[str, float]:
    """Largest relative error of a document's taps in one packed row, against the document in a row of its own."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        target, drafter, prompts = load(pair, device, dtype)
        source = OnlineFeatures(target, drafter.config.target_layer_ids, soft=False)
        texts = [
            Sample(place, torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool))
            for place, (_, ids) in enumerate(prompts)
        ]
        lengths = [len(text.ids) for text in texts]
        together = source.features([texts]).taps[0, : sum(lengths)].float().split(lengths)
        alone = [source.features([[text]]).taps[0].float() for text in texts]
        errors = [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(together, alone, strict=True)]
        found[str(dtype).removeprefix("torch.")] = max(errors)
    return found


def trained(device: torch.device, output: Path) -> str:
    """A run of ``configs/tiny.yaml`` in bfloat16, online, cut short: preflight, steps, a checkpoint, τ."""
    path = ROOT / "configs" / "tiny.yaml"
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    raw |= {"output": str(output), "features": {"mode": "online"}}
    raw["target"] |= {"path": str(FIXTURES / "tiny-hybrid"), "dtype": "bfloat16", "device": str(device)}
    raw["drafter"] |= {"config": str(ROOT / raw["drafter"]["config"]), "dtype": "bfloat16"}
    raw["data"] |= {"files": [str(ROOT / name) for name in raw["data"]["files"]]}
    raw["optimizer"] |= {"max_steps": STEPS}
    raw["evaluation"] |= {"prompts": str(ROOT / raw["evaluation"]["prompts"]), "num_prompts": 16}
    return train(RunConfig.from_dict(raw, source=str(path))).headline()


def evaluation(device: torch.device, kernel: Literal["fla", "torch"], checkpoint: Path) -> dict[str, Any]:
    """``dflash evaluate`` in bfloat16: its headline, its time, and what every check between the kernels says."""
    request = Request(
        target=FIXTURES / "tiny-hybrid",
        checkpoint=checkpoint,
        prompts=ROOT / "prompts" / "tiny.jsonl",
        output=checkpoint.parent / f"report-{kernel}",
        num_prompts=16,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        device=str(device),
        dtype="bfloat16",
        kernel=kernel,
    )
    report, _ = measure(request, Phases(5))
    between = ("kernel", "hidden-state-fingerprint", "tap-statistics", "training-metric-replay", "reference-agreement")
    told = {one.name: f"{one.status}, {one.measured} of {one.limit}" for one in report.checks if one.name in between}
    failed = [one.name for one in report.checks if one.status == "fail"]
    seconds = round(sum(report.timings.values()), 1)
    return {"headline": report.headline(), "seconds": seconds, "between the kernels": told, "failed": failed}


def trained_apart(device: torch.device) -> dict[str, float]:
    """Relative difference of the trainer's loss and of its gradients between its two forms of the mask, float32.

    The flex backward exists on CUDA only: elsewhere the losses alone are compared.
    """
    config, features = random_features(device, "tiny", rows=4, length=256)
    drafter = build_drafter(read_checkpoint(FIXTURES / "tiny-hybrid-dflash"), device=device, dtype=torch.float32)
    vocabulary = random_vocabulary(config, device, torch.float32)
    losses, gradients = [], []
    for attention in ("dense", "flex"):
        model = TrainingModel(drafter, compute_dtype=torch.float32, attention=attention)
        backward = device.type == "cuda" or attention == "dense"
        drafter.requires_grad_(backward)
        loss = step_loss(model, features, vocabulary, num_anchors=32, chunk_tokens=512)
        losses.append(loss.item())
        if backward:
            [gradient] = torch.autograd.grad(loss, [drafter.fc.weight])
            gradients.append(gradient)
    found = {"loss": abs(losses[1] - losses[0]) / losses[0]}
    if len(gradients) == 2:
        found["gradient of fc"] = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    return found


def training_step(device: torch.device, name: str) -> dict[str, Any]:
    """Seconds of a step of one row (the second and third of three), and the peak memory with AdamW's states."""
    run = RunConfig.read(ROOT / "configs" / f"{name}.yaml")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config, features = random_features(device, name, rows=1, length=min(run.data.max_length, 3072), dtype=dtype)
    torch.manual_seed(0)
    drafter = Drafter(config).to(device)
    attention: Literal["flex", "dense"] = "flex" if device.type == "cuda" else "dense"
    model = TrainingModel(drafter, compute_dtype=dtype, attention=attention)
    vocabulary, optimizer = random_vocabulary(config, device, dtype), adamw(model, run.optimizer)
    objective, seconds = run.objective, []
    for _ in range(3):
        started = time.perf_counter()
        loss = step_loss(
            model, features, vocabulary, num_anchors=objective.num_anchors, chunk_tokens=objective.chunk_tokens
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(round(time.perf_counter() - started, 3))
    peak = round(torch.cuda.max_memory_allocated(device) / MIB) if device.type == "cuda" else "not measured"
    blocks = f"{objective.num_anchors} blocks of {config.block_size} over {features.ids.shape[1]} tokens"
    return {"blocks": blocks, "seconds": seconds[1:], "peak MiB": peak}


def random_features(
    device: torch.device, name: str, *, rows: int, length: int, dtype: torch.dtype = torch.float32
) -> tuple[DrafterConfig, Features]:
    """Rows of random tokens and states for the drafter of ``configs/<name>-drafter.json``."""
    path = ROOT / "configs" / f"{name}-drafter.json"
    config = DrafterConfig.from_dict(json.loads(path.read_text(encoding="utf-8")), source=str(path))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator).to(device)
    taps = torch.randn(rows, length, config.tap_width, generator=generator).to(device, dtype)
    samples = [[row] for row in range(rows)]
    return config, Features(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids), taps, samples)


def random_vocabulary(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> SlicedVocabulary:
    torch.manual_seed(0)
    weights = torch.randn(config.vocab_size, config.hidden_size, device=device, dtype=dtype) / config.hidden_size**0.5
    return SlicedVocabulary(device, weights, weights, torch.arange(config.vocab_size, device=device))


def step_loss(
    model: TrainingModel, features: Features, vocabulary: SlicedVocabulary, *, num_anchors: int, chunk_tokens: int
) -> torch.Tensor:
    config = model.drafter.config
    recipe = paper(config.block_size)
    assert recipe is not None
    blocks = draw_blocks(features, config, num_anchors=num_anchors, seed=0, epoch=0)
    embeddings = block_embeddings(vocabulary, blocks, features.ids, config)
    hidden = model(features.taps, blocks, features.starts, embeddings)
    sums = head_loss(hidden, blocks, recipe, vocabulary, teacher=None, chunk_tokens=chunk_tokens)
    return sums.numerator / sums.weight


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


def sharing(device: torch.device) -> dict[str, Any]:
    """A turn on the device: its lock, what torch may take, who else gets one, and what happens above the limit."""
    reserve = 1.0
    with tempfile.TemporaryDirectory() as folder:
        share = Share(reserve_gib=reserve, locks=Path(folder), patience=0.0)
        before = free_bytes(device)
        with shared(share, device, any_gpu=True, say=print) as chosen:
            found: dict[str, Any] = {"locks": sorted(path.name for path in Path(folder).iterdir())}
            found["free before, under the limit in MiB"] = [round(before / MIB), round(free_bytes(chosen) / MIB)]
            try:
                with shared(share, chosen, any_gpu=False, say=print):
                    found["a second turn at once"] = "given, which is wrong"
            except GpuBusyError as error:
                found["a second turn at once"] = error.state_name
        if device.type != "cuda":
            return found
        try:
            with shared(share, device, any_gpu=False, say=print):
                left, _ = torch.cuda.mem_get_info(device)
                torch.empty(left - round(reserve / 2 * (1 << 30)), dtype=torch.uint8, device=device)
            found["more than the limit"] = "allocated, which is wrong"
        except GpuMemoryError as error:
            found["more than the limit"] = error.state_name
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return found


if __name__ == "__main__":
    main()

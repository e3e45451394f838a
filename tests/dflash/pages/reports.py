"""Reports made from texts, for pages: what was drafted follows a rule, so that every kind of round occurs."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash.metrics import Round, by_prompt, judge, summarize
from dflash.report import Check, CheckpointInfo, PromptResult, Report, Settings, TargetInfo
from dflash.rounds_file import write_rounds

SIZE = 8
WRONG = 0
"""A token that no completion has."""


def walk(prompt: str, ids: Sequence[int], *, start: int = 10, better: int = 0) -> list[Round]:
    """Rounds over ``ids`` that accept 0, 3, 6, 1, 4, 7, 2, 5 drafts, one after the other, and ``better`` more."""
    rounds: list[Round] = []
    anchor, last = start, start + len(ids) - 1
    while anchor < last:
        following = ids[anchor - start + 1 : anchor - start + 1 + SIZE]
        right = following[: SIZE - 1]
        number = len(rounds)
        accepted = min(SIZE - 1, number * 3 % SIZE + better)
        drafted = [
            right[slot] if slot < min(accepted, len(right)) or (slot > accepted and slot < len(right)) else WRONG
            for slot in range(SIZE - 1)
        ]
        ranks = [0 if slot < accepted else 1 + (slot * 5 + number) % 90 for slot in range(SIZE - 1)]
        rounds.append(judge(prompt, anchor, drafted, ranks, following))
        anchor += rounds[-1].advance
    return rounds


def made(texts: Mapping[str, Sequence[str]], *, better: int = 0, **changes: Any) -> tuple[Report, list[Round]]:
    """A valid report over ``texts``, each a list of tokens, and its rounds; ``changes`` are of the report's fields."""
    known: dict[str, int] = {"<wrong>": WRONG}
    ids = {id: [known.setdefault(piece, len(known)) for piece in pieces] for id, pieces in texts.items()}
    rounds = [one for id, tokens in ids.items() for one in walk(id, tokens, better=better)]
    totals = by_prompt(rounds)
    report = Report(
        created=datetime(2026, 2, 6, tzinfo=UTC),
        valid=True,
        invalid_because=[],
        checkpoint=CheckpointInfo(path="runs/step_400", sha256="ab" * 32, format="zlab", step=400, config_source="key"),
        target=TargetInfo.model_validate(
            {"path": "t", "class": "C", "tensors": 3, "kernel": "torch", "dtype": "float32", "fingerprint": "11"}
        ),
        settings=Settings(
            mode="replay",
            max_new_tokens=96,
            ignore_eos=False,
            thinking=None,
            block_size=SIZE,
            mask_token_id=1,
            target_layer_ids=[1, 3],
            prompts="p.jsonl",
            prompts_sha256="22",
            num_prompts=len(texts),
            max_blocks=None,
            completions="target",
            completion_agreement=1.0,
            device="cpu",
            seed=0,
        ),
        versions={"torch": "2"},
        metrics=summarize(rounds, rounds[:1], {}, seed=0),
        prompts=[
            PromptResult(
                id=id,
                text="".join(pieces),
                tokens=len(pieces),
                rounds=totals[id][1],
                tau=totals[id][0] / totals[id][1],
                token_ids=ids[id],
            )
            for id, pieces in texts.items()
        ],
        token_texts={token: piece for piece, token in known.items()},
        checks=[Check(name="fc-shape", status="pass", measured=96, limit=96, explanation="fits")],
        timings={"blocks": 0.5},
    )
    return report.model_copy(update=changes), rounds


def words(count: int, start: int = 0) -> list[str]:
    """``count`` tokens, words with a space before them."""
    return [f" w{number % 50}" for number in range(start, start + count)]


def write(folder: Path, report: Report, rounds: Sequence[Round] | None = None) -> Path:
    """``report.json``, and ``rounds.jsonl`` where there are any, in ``folder``; returns the report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    if rounds is not None:
        write_rounds(folder / "rounds.jsonl", rounds)
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    return folder / "report.json"

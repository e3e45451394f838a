"""What keeps a watch even from beginning to look is its state in the ledger, and people hear of it."""

import time
from pathlib import Path

import pytest

from flows import watching
from flows.watching import Looks, Watching
from tasks.evaluation import Suite
from tasks.ledger import Ledger, Watch
from tests.flows.conftest import Operator


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Subject and body of what people are told."""
    heard: list[tuple[str, str]] = []
    monkeypatch.setattr(watching, "notify", lambda inventory, subject, body: heard.append((subject, body)))
    return heard


def stands(operator: Operator) -> Watch:
    (found,) = Ledger.open(operator.folder).watches()
    return found


def test_prompts_that_are_gone_are_the_state_of_the_watch_and_told_after_an_hour(
    operator: Operator, tmp_path: Path, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.checkpoint.unlink()
    source, prompts = f"kpro6:{operator.checkpoint.parent}", tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "def f():"}\n')
    looks = Looks(Watching(source, Suite(prompts, max_new_tokens=4), hosts=operator.hosts_file))
    assert looks.look() is not None
    before = stands(operator)
    assert before.state == "AwaitingApproval"
    told.clear()

    away = prompts.rename(tmp_path / "away")
    assert looks.look() is None
    found = stands(operator)
    assert (found.state, found.request, found.looked) == ("LookFailed", before.request, before.looked)
    assert str(prompts) in found.message
    assert told == []
    later = time.time() + watching.TOLD_AFTER + 60
    with monkeypatch.context() as patch:
        patch.setattr(watching.time, "time", lambda: later)
        assert [looks.look(), looks.look()] == [None, None]
    ((subject, body),) = told
    assert subject == f"LookFailed: {source} is not watched"
    assert str(prompts) in body

    away.rename(prompts)
    assert looks.look() is not None
    assert stands(operator).state == "AwaitingApproval"

"""What says that a drafter may be promoted, and what may not say it."""

import json
from pathlib import Path

import pytest

from dflash.prompts import default_prompts
from tasks.audit import Audit
from tasks.confirmation import (
    NoSuchStepError,
    NotConfirmedError,
    confirm,
    find_step,
    measured_on,
    promotion_suite,
    require_confirmed,
    require_unseen,
    served_checkpoint,
    weights_of,
)
from tasks.evaluation import Suite
from tasks.inventory import parse
from tasks.ledger import Ledger, Seen
from tasks.nights import SpentSuiteError
from tasks.promotion import Place, PromotionError, server_commands
from tests import nightly_reports
from tests.guard_state import GuardState


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path)


def prompts(folder: Path, *texts: str) -> Suite:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": str(place), "prompt": text}) + "\n" for place, text in enumerate(texts)))
    return Suite(prompts=file)


def see(ledger: Ledger, step: int, identity: str) -> Seen:
    seen = Seen("ct129", f"/c/{identity}", identity, step, 1.0, 1.0)
    ledger.see(seen)
    return seen


def test_the_shipped_promotion_prompts_share_nothing_with_those_that_choose(ledger: Ledger) -> None:
    suite = promotion_suite()
    assert require_unseen(suite, ledger)
    words = {
        name: {
            one["id"]: set(one["messages"][0]["content"].lower().split())
            for one in map(json.loads, default_prompts().with_name(name).read_text().splitlines())
        }
        for name in ("promotion.jsonl", "nightly.jsonl", "coding10.jsonl")
    }
    assert len(words["promotion.jsonl"]) == len(words["nightly.jsonl"]) == 128
    kinds = [sorted(id.partition("_")[0] for id in words[name]) for name in ("promotion.jsonl", "nightly.jsonl")]
    assert kinds[0] == kinds[1]
    others = words["nightly.jsonl"] | words["coding10.jsonl"]
    assert not words["promotion.jsonl"].keys() & others.keys()
    for id, mine in words["promotion.jsonl"].items():
        near = max(others, key=lambda other: len(mine & others[other]) / len(mine | others[other]))
        assert len(mine & others[near]) / len(mine | others[near]) < 0.4, (id, near)


def test_what_drafters_were_chosen_by_confirms_nothing(ledger: Ledger, tmp_path: Path) -> None:
    nightly = promotion_suite().prompts.with_name("nightly.jsonl")
    with pytest.raises(SpentSuiteError, match="chosen by every night"):
        require_unseen(Suite(prompts=nightly), ledger)
    text = json.loads(nightly.read_text().splitlines()[3])["messages"][0]["content"]
    with pytest.raises(SpentSuiteError, match=r"shares texts .* \(1\)"):
        require_unseen(prompts(tmp_path, "something else", f"Please: {text}"), ledger)


def test_prompts_of_any_night_confirm_nothing(ledger: Ledger, tmp_path: Path) -> None:
    suite = prompts(tmp_path, "a text of our own")
    sha256 = require_unseen(suite, ledger)
    see(ledger, 1, "id1")
    other = Suite(prompts=suite.prompts, max_new_tokens=7)
    ledger.begin("id1", other.digest())
    ledger.record_night("2027-01-31", other.digest(), {"prompts_sha256": sha256})
    with pytest.raises(SpentSuiteError, match="chosen by every night"):
        require_unseen(suite, ledger)


def test_a_step_is_one_checkpoint(ledger: Ledger) -> None:
    see(ledger, 100, "id100")
    see(ledger, 200, "ida")
    see(ledger, 200, "idb")
    assert find_step(ledger, 100).identity == "id100"
    assert find_step(ledger, 200, "idb").identity == "idb"
    with pytest.raises(NoSuchStepError, match="no checkpoint of step 300 was seen; the newest seen are of steps 200"):
        find_step(ledger, 300)
    with pytest.raises(NoSuchStepError, match=r"2 checkpoints are of step 200.*--identity"):
        find_step(ledger, 200)


def test_only_a_drafter_that_is_shown_to_be_better_is_confirmed() -> None:
    better, same, worse = (nightly_reports.report(step, level) for step, level in ((1, 1.1), (2, 1.0), (3, 0.9)))
    line, found = confirm(better, same)
    require_confirmed(line, found)
    assert line.startswith("against what is served now, better: τ +")
    for candidate in (same, worse):
        line, found = confirm(candidate, better)
        with pytest.raises(NotConfirmedError, match="--unconfirmed"):
            require_confirmed(line, found)
    assert NotConfirmedError.state_name == "NotConfirmed"


def test_the_first_promotion_is_against_the_reference() -> None:
    made = nightly_reports.report(1)
    with pytest.raises(PromotionError, match="no reference drafter"):
        confirm(made, None)
    compared = confirm(made, nightly_reports.report(2))[1].model_copy(update={"verdict": "better"})
    line, found = confirm(made.model_copy(update={"comparison": compared}), None)
    assert line.startswith("against the reference, better: τ ")
    require_confirmed(line, found)


def test_a_report_that_is_not_valid_confirms_nothing() -> None:
    with pytest.raises(PromotionError, match=r"not valid \(kernel\)"):
        confirm(nightly_reports.report(1, invalid="kernel"), None)


def test_only_a_report_of_that_host_is_of_use(ledger: Ledger, tmp_path: Path) -> None:
    host = GuardState(tmp_path / "guard").inventory.host("ct129")
    seen = see(ledger, 1, "id1")
    for number, on in enumerate(("elsewhere", "ct129"), start=1):
        attempt = ledger.advance(ledger.begin("id1", "suite"), on=on)
        folder = nightly_reports.write(nightly_reports.report(number), tmp_path / on)
        ledger.finish(attempt, "evaluated", report=str(folder))
    found = measured_on(ledger, seen, "suite", host)
    assert found is not None
    assert found.checkpoint.step == 2
    (tmp_path / "ct129" / "report.json").unlink()
    assert measured_on(ledger, seen, "suite", host) is None


def test_what_is_served_is_known_by_the_record_of_promotions(ledger: Ledger, tmp_path: Path) -> None:
    known = GuardState(tmp_path / "guard")
    host, audit = known.inventory.host("ct129"), Audit(tmp_path / "audit.jsonl")
    seen = see(ledger, 1, "id1")
    assert served_checkpoint(audit, ledger, host, "d1") is None
    audit.append("export", host="ct129", directory="d1", identity="id1", weights="w1")
    audit.append("promotion", host="ct129", directory="d1", identity="id1")
    assert served_checkpoint(audit, ledger, host, "d1") == seen
    assert served_checkpoint(audit, ledger, host, None) is None
    assert (weights_of(audit, host, "d1"), weights_of(audit, host, "d2")) == ("w1", None)


def test_the_command_starts_the_server_that_the_host_has(tmp_path: Path) -> None:
    text = GuardState(tmp_path / "guard").hosts_text()
    for kind, begins in (
        ("sglang", "python3 -m sglang.launch_server --model-path /m/T "),
        ("vllm", "vllm serve /m/T "),
    ):
        server = f"target: /m/T\n    reference: /m/D\n    server: {{kind: {kind}, url: 'http://localhost:30000'}}"
        host = parse(text.replace("user: root", f"user: root\n    {server}")).host("ct129")
        (command,) = server_commands(Place.of(host), 16)
        assert command.startswith(begins)
        assert "/m/D-promoted" in command
        assert command.endswith("--port 30000")
        assert ("num_speculative_tokens" in command) == (kind == "vllm")
    bare = parse(text.replace("user: root", "user: root\n    reference: /m/D")).host("ct129")
    assert len(server_commands(Place.of(bare), 16)) == 2

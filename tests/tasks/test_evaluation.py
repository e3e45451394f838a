"""What is asked of a host: the command from its entry in hosts.yaml, the job's name, the suite's digest."""

from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from dflash.errors import UsageError
from dflash.prompts import PromptFileError, default_prompts, read_prompts
from tasks import inventory
from tasks.evaluation import (
    ON_VARIABLE,
    EvaluationError,
    Suite,
    evaluation_launch,
    inference_host,
    job_id,
)
from tasks.evaluation_jobs import LineSplitter
from tasks.inventory import Gpu, Inventory

SHIPPED = Path(__file__).parents[2] / "hosts.yaml"
CHECKPOINT = PurePosixPath("/root/eval/cache/checkpoints/kpro6/step_100.pt/00ff")


@pytest.fixture(scope="module")
def shipped() -> Inventory:
    return inventory.load(SHIPPED)


def test_every_setting_of_the_hosts_entry_is_in_the_command(shipped: Inventory) -> None:
    host = shipped.host("ct129")
    suite = Suite(default_prompts(), max_new_tokens=64, num_prompts=8, ignore_eos=True, thinking="off")
    launch = evaluation_launch(host, CHECKPOINT, suite, "evaluate-step_100-00")
    prompts = f"/root/eval/cache/prompts/{read_prompts(default_prompts()).sha256}.jsonl"
    job = "/root/eval/jobs/evaluate-step_100-00"
    expected = f"""
        /root/eval/environments/current/bin/dflash evaluate
        --target /root/models/Qwen3.6-27B --checkpoint {CHECKPOINT} --prompts {prompts}
        --output {job}/report --failure {job}/failure.json --mode replay --max-new-tokens 64
        --reference /root/models/Qwen3.6-27B-DFlash --server http://localhost:30000
        --num-prompts 8 --ignore-eos --thinking off
        --device auto --dtype bfloat16 --kernel fla --reserve-gib 2 --gpu-locks /root/eval/cache/gpu-locks
        --cache /root/eval/cache/evaluations --offload-if-needed
    """
    assert list(launch.argv) == expected.split()
    assert (launch.jobs, launch.job) == ("/root/eval/jobs", "evaluate-step_100-00")
    assert [(file.path, file.sha256) for file in launch.requires] == [(prompts, prompts[-70:-6])]


@pytest.mark.parametrize(("offload", "flags"), [(True, ["--offload"]), (False, [])])
def test_offloading_is_as_the_entry_says(shipped: Inventory, offload: bool, flags: list[str]) -> None:
    host = shipped.host("ct129").model_copy(update={"gpu": Gpu(offload=offload, reserve_gib=0.5)})
    argv = evaluation_launch(host, CHECKPOINT, Suite(default_prompts()), "j").argv
    assert [word for word in argv if word.startswith("--offload")] == flags
    assert argv[argv.index("--reserve-gib") + 1] == "0.5"


@pytest.mark.parametrize("field", ["environments", "jobs", "cache", "target"])
def test_what_an_entry_lacks_is_named(shipped: Inventory, field: str) -> None:
    host = shipped.host("ct129").model_copy(update={field: None})
    with pytest.raises(EvaluationError, match=rf"hosts\.ct129\.{field} is missing"):
        evaluation_launch(host, CHECKPOINT, Suite(default_prompts()), "j")


def test_the_job_of_an_attempt_has_one_name_and_no_other_attempt_has_it() -> None:
    name = job_id("step_100", "identity", "suite", 1)
    assert name == job_id("step_100", "identity", "suite", 1)
    assert name.startswith("evaluate-step_100-")
    others = {
        job_id("step_100", "identity", "suite", 2),
        job_id("step_100", "identity", "other", 1),
        job_id("step_100", "other", "suite", 1),
        job_id("step_100", "identity", "suite1", 1),
    }
    assert len({name, *others}) == 5
    odd = job_id("-‮ step 1/../" + "x" * 500, "identity", "suite", 1)
    assert len(odd) <= 100
    assert odd.isascii()
    assert "/" not in odd


def test_a_suites_digest_is_of_the_prompts_content_and_of_every_setting(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(default_prompts().read_bytes())
    suite = Suite(default_prompts(), thinking="off")
    assert Suite(copy, thinking="off").digest() == suite.digest()
    changes = [{"max_new_tokens": 255}, {"num_prompts": 1}, {"ignore_eos": True}, {"thinking": "on"}]
    digests = {replace(suite, **change).digest() for change in changes}
    assert len({suite.digest(), *digests}) == 5
    copy.write_text('{"id": "a", "prompt": "b"}\n')
    assert Suite(copy, thinking="off").digest() != suite.digest()
    with pytest.raises(PromptFileError):
        Suite(tmp_path / "none.jsonl").digest()


def test_the_host_is_the_one_asked_for_else_the_workers_else_the_only_one(shipped: Inventory) -> None:
    assert inference_host(shipped, None, {}).name == "ct129"
    second = shipped.host("ct129").model_copy(update={"name": "ct130", "host_keys": (), "aliases": ()})
    two = shipped.model_copy(update={"hosts": {**shipped.hosts, "ct130": second}})
    assert inference_host(two, None, {ON_VARIABLE: "ct130"}).name == "ct130"
    assert inference_host(two, "ct129", {ON_VARIABLE: "ct130"}).name == "ct129"
    with pytest.raises(UsageError, match="2 inference hosts"):
        inference_host(two, None, {})
    with pytest.raises(UsageError, match="kpro6 is a training host"):
        inference_host(two, "kpro6", {})


def test_what_an_evaluation_prints_is_shown_line_by_line_and_escaped() -> None:
    lines: list[str] = []
    splitter = LineSplitter(lines.append)
    for piece in (b"[1/5] tok", b"enizer\n  1 of 2\r  2 of 2\n\x1b[2J", b"\xcf", b"\x84 gone"):
        splitter.write(piece)
    splitter.close()
    assert lines == ["[1/5] tokenizer", "  1 of 2", "  2 of 2", "\\x1b[2Jτ gone"]
    assert splitter.last == lines[-1]

"""When an evaluation waits for the model that is served beside it."""

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash import completions, evaluate, latency
from dflash.gpu_share import Share
from dflash.latency import Probes, ServedModelSlowError, Watch, p95, probing
from dflash.progress import Phases
from dflash.request import Request
from tests.dflash.pairs import write_drafter, write_prompts, write_target
from tests.dflash.servers import WireServer, servers, sglang, vllm


def test_p95_is_the_smallest_value_that_95_percent_do_not_exceed() -> None:
    assert p95([float(number) for number in range(1, 21)]) == 19.0
    assert p95([float(number) for number in range(1, 101)]) == 95.0
    assert p95([3.0]) == 3.0


def test_it_pauses_when_p95_rises_above_its_limit_and_goes_on_when_it_has_calmed() -> None:
    watch = Watch([1.0] * 20)
    assert watch.limit == 1.3
    for _ in range(40):
        watch.add(1.3)
    assert not watch.paused
    watch.add(1.31)  # one of twenty may be slow
    assert not watch.paused
    watch.add(1.31)
    assert watch.paused
    for _ in range(30):
        watch.add(1.31)
    assert watch.paused
    # slow ones of the last twenty must have passed before it is calm
    slow_left = 0
    while watch.paused:
        watch.add(1.0)
        slow_left += 1
    assert slow_left == 19


def test_there_is_no_verdict_of_few_probes_and_what_was_before_a_pause_does_not_end_it() -> None:
    watch = Watch([1.0] * 20)
    for _ in range(7):
        watch.add(9.0)
    assert not watch.paused
    assert watch.worst is None
    watch.add(9.0)
    assert watch.paused
    assert watch.worst == 9.0
    for _ in range(7):
        watch.add(1.0)
    assert watch.paused
    watch.add(1.0)
    assert not watch.paused
    # the slow ones of before are forgotten: it takes as many new ones to pause again
    for _ in range(7):
        watch.add(9.0)
    assert not watch.paused


def test_a_server_that_does_not_answer_is_endlessly_slow() -> None:
    watch = Watch([1.0] * 20)
    for _ in range(8):
        watch.add(math.inf)
    assert watch.paused


def test_work_waits_while_paused_and_the_report_says_how_long() -> None:
    probes = Probes("http://s", [0.1] * 20)
    said: list[str] = []
    probes.pause(said.append)
    assert said == []
    assert probes.check().status == "skipped"
    for _ in range(8):
        probes.add(0.2)
    calming = threading.Thread(target=lambda: [probes.add(0.1) for _ in range(8)])
    waiting = threading.Thread(target=probes.pause, args=(said.append,))
    waiting.start()
    while not said:
        time.sleep(0.005)
    assert waiting.is_alive()
    calming.start()
    waiting.join()
    calming.join()
    assert said == ["paused: p95 of http://s rose above 1.3 × the 100 ms of before", "goes on"]
    check = probes.check()
    assert (check.name, check.status, check.measured, check.limit) == ("served-latency", "warn", 2.0, 1.3)
    assert "paused 1 times" in check.explanation


def test_a_served_model_that_stays_slow_by_itself_ends_the_evaluation_by_name() -> None:
    probes = Probes("http://s", [0.1] * 20, patience=0.01)
    for _ in range(8):
        probes.add(1.0)
    with pytest.raises(ServedModelSlowError, match="though the evaluation was paused") as slow:
        probes.pause(lambda text: None)
    assert slow.value.state_name == "ServedModelSlow"


class Slow:
    """An SGLang whose answers take ``seconds``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.generate = sglang()["/generate"]

    def __call__(self, body: dict | None) -> object:
        assert body is not None
        time.sleep(self.seconds)
        if "text" in body:  # a probe
            return 200, {"text": "four, five", "output_ids": [1], "meta_info": {}}
        return self.generate(body)


@pytest.fixture
def slow() -> Iterator[tuple[Slow, WireServer]]:
    answering = Slow()
    with servers() as start:
        yield answering, start(sglang(generate=answering))


def test_a_running_server_is_probed_before_and_during(slow: tuple[Slow, WireServer]) -> None:
    answering, server = slow
    answering.seconds = 0.005
    with probing(completions.connect(server.url), every=0.01, before=8) as probes:
        asked = server.bodies("/generate")
        assert len(asked) >= 9
        assert asked[0]["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 8}
        answering.seconds = 0.1
        while not probes.pauses:
            time.sleep(0.01)
        answering.seconds = 0.0
        probes.pause(lambda text: None)
    ended = len(server.bodies("/generate"))
    time.sleep(0.1)
    assert len(server.bodies("/generate")) == ended


def test_a_vllm_is_asked_by_the_name_that_it_serves() -> None:
    with servers() as start:
        server = start(vllm(completions=lambda body: (200, {"choices": []})))
        with probing(completions.connect(server.url), every=5.0, before=2):
            (asked, *_) = server.bodies("/v1/completions")
    assert asked == {"model": "served", "prompt": latency.PROMPT, "max_tokens": 8, "temperature": 0.0}


def test_an_evaluation_beside_a_server_takes_its_turn_and_waits_in_every_phase(
    slow: tuple[Slow, WireServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, server = slow
    monkeypatch.setattr(latency, "BEFORE", 8)
    target, drafter, prompts = tmp_path / "target", tmp_path / "drafter", tmp_path / "prompts.jsonl"
    write_target(target)
    write_drafter(drafter)
    write_prompts(prompts)
    waits: list[str] = []
    monkeypatch.setattr(Probes, "pause", lambda probes, say: waits.append("work"))

    async def turn(probes: Probes, say: object) -> None:
        waits.append("prompt")

    monkeypatch.setattr(Probes, "turn", turn)
    request = Request(target, drafter, prompts, tmp_path / "report", server=server.url, max_new_tokens=8)
    request = replace(request, device="cpu", kernel="torch", share=Share(locks=tmp_path / "locks"))
    report = evaluate.evaluate(request, Phases(6))
    assert waits[:4] == ["prompt"] * 4
    assert set(waits[4:]) == {"work"}
    assert next(iter(report.timings)) == "share"
    assert report.settings.device == "cpu"
    assert [one.name for one in report.checks].count("served-latency") == 1
    # while others are served, one prompt at a time
    assert json.loads((tmp_path / "report" / "report.json").read_text())["timings"]["share"] >= 0
    assert "[1/6] turn on the GPU" in capsys.readouterr().err

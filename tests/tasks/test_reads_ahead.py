"""Reads that are asked for before their turn, of the gate behind a real sshd and of the same program elsewhere."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.channel import Channel, GateError, RequestFailed
from tasks.ends import ReadSource
from tasks.errors import Refused
from tasks.gate import MOST_ASKED, GateSession, Wanted, open_session
from tasks.inventory import Location
from tests.sshds import Operator
from tests.tasks.test_client_enforcement import client_operator

SIZE = 3 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "step.pt"
    made.write_bytes(os.urandom(SIZE))
    return made


Opened = Callable[..., GateSession]


@pytest.fixture(params=["host", "ordinary"])
def opened(request: pytest.FixtureRequest, operator: Operator, file: Path) -> Opened:
    def session(**changes: Any) -> GateSession:
        if request.param == "ordinary":
            return open_session(operator.connector, operator.infer, None)
        return open_session(operator.connector, operator.train, operator.approve(root=str(file.parent), **changes))

    return session


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens: ``ask`` for each request to read, ``answer`` for each answer that begins."""
    happened: list[str] = []
    send, reply = Channel.send, Channel.reply

    def sending(channel: Channel, line: bytes) -> None:
        if b'"verb":"read"' in line:
            happened.append("ask")
        send(channel, line)

    def replying(channel: Channel, **how: Any) -> dict[str, Any]:
        found = reply(channel, **how)
        if "length" in found:
            happened.append("answer")
        return found

    monkeypatch.setattr(Channel, "send", sending)
    monkeypatch.setattr(Channel, "reply", replying)
    return happened


def take(session: GateSession, wanted: Wanted) -> bytes:
    data = b""
    with session.read(*wanted) as stream:
        while len(data) < stream.length and (more := os.read(stream.fileno(), stream.length - len(data))):
            data += more
    return data


def small(file: Path, count: int) -> list[Wanted]:
    return [(str(file), 1000 * number, 300 + number) for number in range(count)]


def test_many_small_reads_wait_for_no_answer(opened: Opened, file: Path, asked: list[str]) -> None:
    content, wanted = file.read_bytes(), small(file, MOST_ASKED + 8)
    with opened() as session:
        session.ahead(wanted)
        assert [take(session, each) for each in wanted] == [content[o : o + n] for _, o, n in wanted]
        assert session.stat(str(file)).size == SIZE
    assert asked[:MOST_ASKED] == ["ask"] * MOST_ASKED
    assert asked.count("ask") == asked.count("answer") == len(wanted)


def test_large_reads_come_whole_one_behind_the_other(opened: Opened, file: Path) -> None:
    """The next answer lies in the same pipe, behind the last byte and the gate's word on it."""
    content, half = file.read_bytes(), SIZE // 2
    with opened() as session:
        for _ in range(2):
            session.ahead([(str(file), 0, half), (str(file), half, SIZE - half)])
            assert take(session, (str(file), 0, half)) + take(session, (str(file), half, SIZE - half)) == content


def test_read_that_was_not_announced_next_ends_the_session(opened: Opened, file: Path) -> None:
    with opened() as session:
        session.ahead(small(file, 3))
        with pytest.raises(GateError, match="another range than this was announced"):
            take(session, (str(file), 5, 5))


def test_read_that_fails_with_others_behind_it_ends_the_session(opened: Opened, file: Path) -> None:
    """Their answers would be taken for those of what comes after."""
    with opened() as session:
        session.ahead([(str(file), SIZE, 1), *small(file, 3)])
        with pytest.raises(RequestFailed, match="bytes; 1 from"):
            take(session, (str(file), SIZE, 1))
        with pytest.raises(GateError, match="has ended"):
            session.stat(str(file))


def test_reads_ahead_never_get_more_than_the_budget(operator: Operator, file: Path) -> None:
    approval = operator.approve(root=str(file.parent), bytes=1000)
    with open_session(operator.connector, operator.train, approval) as session:
        session.ahead((str(file), 0, 300) for _ in range(5))
        for _ in range(3):
            assert len(take(session, (str(file), 0, 300))) == 300
        with pytest.raises(Refused, match="300 bytes asked for, 100 approved ones left"):
            take(session, (str(file), 0, 300))


def test_budget_that_is_kept_here_is_asked_before_each_read(
    operator: Operator, file: Path, asked: list[str], tmp_path: Path
) -> None:
    client = client_operator(operator.site, tmp_path / "client")
    approval = client.approve(root=str(file.parent), bytes=1000)
    with open_session(client.connector, client.train, approval) as session:
        session.ahead(small(file, 2))
        assert [len(take(session, each)) for each in small(file, 2)] == [300, 301]
    assert asked == ["ask", "answer"] * 2


def test_a_checkpoint_is_planned_without_a_round_trip_for_every_range(
    opened: Opened, operator: Operator, file: Path, asked: list[str]
) -> None:
    with opened() as session:
        source = ReadSource(session, Location(operator.infer, str(file)))
        ranges = [(offset, length) for _, offset, length in small(file, 20)]
        assert source.read(file.name, ranges) == b"".join(file.read_bytes()[o : o + n] for o, n in ranges)
    assert asked[:20] == ["ask"] * 20

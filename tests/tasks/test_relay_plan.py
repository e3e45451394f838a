"""What a relay asks for, how many streams it takes, and in which ranges it cuts a file."""

import pytest

from dflash.errors import UsageError
from tasks.contents import LEAST_BYTES, RANGE_BYTES
from tasks.inventory import Location
from tasks.relay import is_file_name, plan_relay, spans_of, stream_count
from tests.sshds import Operator

CHECKPOINTS = "/data/checkpoints"


@pytest.mark.parametrize(
    ("paths", "root"),
    [
        (["/other/step_1"], "/other/step_1"),
        (["/other/step_1", "/other/step_2"], "/other"),
        (["/other/run", "/other/run/step_1"], "/other/run"),
        (["/other/step_1.pt", "/other/step_2"], "/other"),
        (["/data/checkpoints/a/step_1", "/data/checkpoints/b/c/step_2"], "/data/checkpoints"),
        (["/data/checkpoints/a/b/step_1", "/data/checkpoints/a/c/step_2"], "/data/checkpoints/a"),
    ],
)
def test_directories_are_asked_for_with_the_folder_that_holds_them(
    operator: Operator, paths: list[str], root: str
) -> None:
    train = operator.train.model_copy(update={"checkpoints": CHECKPOINTS})
    plan = plan_relay([Location(train, path) for path in paths], "they are read")
    assert plan is not None
    assert plan.grant is not None
    assert plan.grant.root == root


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("step_1.pt", True),
        ("model.SafeTensors", True),
        ("step_1", False),
        ("Qwen3.6-27B-DFlash", False),
        ("run.v2", False),
        ("step_1.5", False),
        (".pt", False),
    ],
)
def test_dot_in_the_name_of_a_model_makes_it_no_file(name: str, file: bool) -> None:
    assert is_file_name(f"/data/a.pt/{name}") is file


@pytest.mark.parametrize(
    "paths",
    [
        ["/a/step_1", "/b/step_2"],
        ["/step_1", "/step_2"],
        ["/data/a/step_1", "/data/b/step_2"],
        ["/data/checkpoints-old/step_1", "/data/checkpoints/step_2"],
        ["/data/checkpoints/step_1", "/a/step_1.pt"],
    ],
)
def test_directories_that_lie_far_apart_are_not_one_plan(operator: Operator, paths: list[str]) -> None:
    """A plan is never for more than was named because two things were named at once."""
    train = operator.train.model_copy(update={"checkpoints": CHECKPOINTS})
    with pytest.raises(UsageError, match="more than anybody should approve: name those of one folder"):
        plan_relay([Location(train, path) for path in paths], "they are read")


@pytest.mark.parametrize(
    ("round_trip", "rate", "cores", "sessions", "protected", "streams"),
    [
        (0.0003, 1_250_000_000, 16, 8, False, 1),
        (0.05, 100_000_000, 16, 8, False, 3),
        (0.05, 1_250_000_000, 16, 99, False, 8),
        (0.05, 1_250_000_000, 4, 99, False, 4),
        (0.05, 1_250_000_000, 16, 3, False, 3),
        (0.05, 1_250_000_000, 16, 99, True, 2),
        (0.0, 1, 1, 1, True, 1),
    ],
)
def test_streams_fill_the_link_within_what_there_is(
    round_trip: float, rate: int, cores: int, sessions: int, protected: bool, streams: int
) -> None:
    assert stream_count(round_trip, rate=rate, cores=cores, sessions=sessions, protected=protected) == streams


@pytest.mark.parametrize(
    ("size", "streams", "range_bytes"), [(1, 1, 10), (10, 3, 10), (101, 4, 10), (100, 1, 10), (10**9, 4, RANGE_BYTES)]
)
def test_ranges_cover_the_file_once_and_keep_every_stream_busy(size: int, streams: int, range_bytes: int) -> None:
    spans = spans_of(size, streams=streams, range_bytes=range_bytes)
    assert [offset for offset, _ in spans] == [sum(length for _, length in spans[:n]) for n in range(len(spans))]
    assert sum(length for _, length in spans) == size
    assert max(length for _, length in spans) <= range_bytes
    assert len(spans) >= min(streams, size)


def test_several_streams_get_ranges_in_turns_so_that_the_digest_can_follow() -> None:
    """With one range each, three of four are hashed when all of them have come."""
    lengths = [length for _, length in spans_of(10**9, streams=4)]
    assert len(lengths) >= 24
    assert min(lengths[:-1]) >= LEAST_BYTES
    assert len(spans_of(10**9, streams=1)) == 4

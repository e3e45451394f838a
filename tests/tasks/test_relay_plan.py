"""How many streams a relay takes, and in which ranges it cuts a file."""

import pytest

from tasks.relay import spans_of, stream_count


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


@pytest.mark.parametrize(("size", "streams", "range_bytes"), [(1, 1, 10), (10, 3, 10), (101, 4, 10), (100, 1, 10)])
def test_ranges_cover_the_file_once_and_keep_every_stream_busy(size: int, streams: int, range_bytes: int) -> None:
    spans = spans_of(size, streams=streams, range_bytes=range_bytes)
    assert [offset for offset, _ in spans] == [sum(length for _, length in spans[:n]) for n in range(len(spans))]
    assert sum(length for _, length in spans) == size
    assert max(length for _, length in spans) <= range_bytes
    assert len(spans) >= min(streams, size)

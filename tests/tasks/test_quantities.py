from collections.abc import Callable

import pytest

from tasks.quantities import QuantityError, duration, rate, show_duration, show_rate, show_size, size


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (size, "2TB", 2 * 10**12),
        (size, "1.5 GiB", 3 * 2**29),
        (size, "500kB", 500_000),
        (size, "0B", 0),
        (rate, "200MB/s", 200_000_000),
        (rate, "1 MiB/s", 2**20),
        (duration, "10m", 600),
        (duration, "1h30m", 5400),
        (duration, "30d", 30 * 86400),
    ],
)
def test_quantities_are_read(read: Callable[[str], int], text: str, value: int) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (size, "2"),
        (size, "GB"),
        (size, "-1GB"),
        (size, "2 parsecs"),
        (size, "1e3MB"),
        (size, "99999999TB"),
        (size, "9" * 400 + "TB"),
        (rate, "9" * 400 + "TB/s"),
        (duration, "9" * 5000 + "s"),
        (duration, "999999999d"),
        (rate, "200MB"),
        (rate, "0MB/s"),
        (rate, "fast"),
        (duration, "10"),
        (duration, "0m"),
        (duration, "10m 5"),
        (duration, "-1h"),
    ],
)
def test_other_texts_are_errors_that_show_how(read: Callable[[str], int], text: str) -> None:
    with pytest.raises(QuantityError, match=r"write|at least|longest"):
        read(text)


def test_quantities_are_shown() -> None:
    assert [show_size(count) for count in (0, 999, 1000, 17_234_567_890)] == ["0 B", "999 B", "1 kB", "17.23 GB"]
    assert show_rate(200_000_000) == "200 MB/s"
    assert [show_duration(count) for count in (0, 59.6, 3600, 5400, 2_591_999)] == [
        "0s",
        "1m",
        "1h",
        "1h 30m",
        "29d 23h",
    ]

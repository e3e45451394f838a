"""Which way a relay takes, and why."""

import pytest

from tasks.ways import Links, choose_way

MB = 1_000_000
CHUNK = 64 * MB
SIZE = 17_000 * MB


def test_store_is_taken_where_both_hosts_reach_it_faster_than_this_machine_reaches_them() -> None:
    links = Links(20 * MB, 10 * MB, source_to_store=100 * MB, here_to_store=5 * MB, store_to_destination=80 * MB)
    choice = choose_way(links, SIZE, chunk=CHUNK)
    assert choice.way == "s3"
    assert choice.seconds == SIZE / (80 * MB) + CHUNK / (80 * MB)
    assert choice.why == (
        "s3: 17 GB take 3m 34s (80 MB/s from the store to the destination); "
        "over ssh 17 GB take 28m 20s (10 MB/s from here to the destination)"
    )


def test_ssh_is_taken_where_the_store_is_not_clearly_faster() -> None:
    links = Links(90 * MB, 100 * MB, source_to_store=100 * MB, store_to_destination=100 * MB)
    choice = choose_way(links, SIZE, chunk=CHUNK)
    assert (choice.way, choice.seconds) == ("ssh", SIZE / (90 * MB))
    assert "by the store 17 GB take 2m 51s" in choice.why
    assert choice.why.endswith("which is not 1.2 times faster")


@pytest.mark.parametrize(
    "links",
    [
        Links(1 * MB, 1 * MB),
        Links(1 * MB, 1 * MB, source_to_store=500 * MB),
        Links(1 * MB, 1 * MB, store_to_destination=500 * MB),
    ],
    ids=["no store", "destination does not reach it", "nobody reaches it but the destination"],
)
def test_store_that_one_side_does_not_reach_is_no_way(links: Links) -> None:
    choice = choose_way(links, SIZE, chunk=CHUNK)
    assert choice.way == "ssh"
    assert choice.why.endswith("no object store can be used")


def test_source_that_may_not_upload_is_no_faster_than_its_link_to_here() -> None:
    """The bytes come here first; then the store only adds a leg, unless the one from here is bad."""
    fast = {"here_to_store": 500 * MB, "store_to_destination": 500 * MB}
    assert choose_way(Links(50 * MB, 50 * MB, **fast), SIZE, chunk=CHUNK).way == "ssh"
    assert choose_way(Links(50 * MB, 5 * MB, **fast), SIZE, chunk=CHUNK).way == "s3"


def test_limit_makes_both_ways_equal_so_it_is_ssh() -> None:
    links = Links(20 * MB, 20 * MB, source_to_store=900 * MB, store_to_destination=900 * MB)
    choice = choose_way(links, SIZE, chunk=CHUNK, limit=10 * MB)
    assert choice.way == "ssh"
    assert "10 MB/s the limit that was asked for" in choice.why


def test_one_chunk_gains_nothing_from_the_pipeline() -> None:
    links = Links(20 * MB, 20 * MB, source_to_store=30 * MB, store_to_destination=30 * MB)
    assert choose_way(links, SIZE, chunk=CHUNK).way == "s3"
    assert choose_way(links, CHUNK, chunk=CHUNK).way == "ssh"

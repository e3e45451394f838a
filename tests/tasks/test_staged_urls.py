"""A presigned URL is a secret: whoever lists the processes of a machine sees none."""

from pathlib import Path

import pytest

from tests.tasks.test_staging import Way, way

__all__ = ["way"]


@pytest.mark.slow
@pytest.mark.usefixtures("every_progress")
@pytest.mark.parametrize("by_host", [False, True], ids=["the operator uploads", "the host uploads"])
def test_no_command_line_holds_a_url(way: Way, by_host: bool) -> None:
    seen, looked = set[bytes](), []

    def look(done: int, total: int) -> None:
        if done < total:
            looked.append(done)
            seen.update(word for file in Path("/proc").glob("[0-9]*/cmdline") for word in _words(file))

    way.relay(look, uploads=way.approve_uploads() if by_host else None)
    assert way.whole()
    assert looked
    assert any(b"dflash-gate" in word or b"ssh" in word for word in seen)
    assert not [word for word in seen if b"X-Amz-" in word]


def _words(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().split(b"\0")
    except OSError:
        return []

"""Completions from ``transformers serve``, which gives text only, beside the target's own greedy tokens.

    python benchmarks/transformers_serve.py [--target DIR] [--prompts FILE] [--num-prompts 12] [--max-new-tokens 96]

Prints how many of the re-tokenised tokens are the target's, place by place up to the first that differs in a text.
``transformers serve`` needs the packages fastapi, uvicorn and openai.
"""

import argparse
import socket  # noqa: TID251 - to find a free port
import subprocess  # noqa: TID251 - the peer is a server that the project itself never starts
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dflash.completions import ServerError, complete, connect
from dflash.errors import DFlashError, run_cli
from dflash.prompts import read_prompts, tokenize
from dflash.target import Target

ROOT = Path(__file__).resolve().parents[1]
START = 180.0
"""Seconds within which a server must answer."""


class NoServerError(DFlashError):
    """The server that was started ended or did not answer."""


@contextmanager
def running(target: Path) -> Iterator[str]:
    """The URL of a ``transformers serve`` of ``target`` in float32 on the CPU, stopped in the end."""
    port = free_port()
    serve = [str(Path(sys.executable).parent / "transformers"), "serve", str(target), "--port", str(port)]
    with started([*serve, "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"], port) as url:
        yield url


@contextmanager
def started(command: Sequence[str], port: int, environment: dict[str, str] | None = None) -> Iterator[str]:
    """The URL of the server that ``command`` runs on ``port``, once it answers; it is stopped in the end."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + START
            while not _answers(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise NoServerError(f"{command[0]} did not come up on {url}:\n{log.read()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def agreement(url: str, target: Path, prompts: Path, *, num_prompts: int, max_new_tokens: int) -> tuple[int, int]:
    """How many tokens the server's completions have in common with the target's, and how many the target's have."""
    model = Target.load(target)
    ids = tokenize(read_prompts(prompts, limit=num_prompts).prompts, model.tokenizer, thinking=False)
    server = connect(url)
    written = complete(
        server,
        ids,
        max_new_tokens=max_new_tokens,
        ignore_eos=False,
        tokenizer=model.tokenizer,
        progress=lambda done, total: None,
    )
    own = model.generate_greedy(ids, max_new_tokens)
    return sum(common(one.ids, ours) for one, ours in zip(written, own, strict=True)), sum(map(len, own))


def common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (n for n, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), min(len(ids), len(others))
    )


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        connect(url)
    except ServerError:
        return False
    return True


def main() -> None:
    """Start the server, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "tests" / "fixtures" / "tiny-dense")
    parser.add_argument("--prompts", type=Path, default=ROOT / "prompts" / "tiny.jsonl")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    given = parser.parse_args()
    with running(given.target) as url:
        same, tokens = agreement(
            url, given.target, given.prompts, num_prompts=given.num_prompts, max_new_tokens=given.max_new_tokens
        )
    print(f"transformers serve: {same} of {tokens} tokens are the target's own ({same / tokens:.2%})")


if __name__ == "__main__":
    run_cli(main)

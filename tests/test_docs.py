"""What the documentation says exists: files it links to, headings, commands with their options, make's targets."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tasks import process

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/fixtures/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
ANY = re.compile(r"…|\.\.\.|[A-Z][A-Z0-9_]*|<.*>|\[.*\]?")
"""Words that stand for others in an example."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for target in (one or other for one, other in LINK.findall(page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (heading and heading not in headings(file)):
            missing.append(target)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist_with_their_options(page: Path) -> None:
    problems = [problem for line in commands(page.read_text(encoding="utf-8")) for problem in wrong(line)]
    assert not problems


def test_a_command_that_does_not_exist_is_found() -> None:
    block = "```\n$ dflash-ops relay a b --sideways   # no\nmake nothing\ndflash evaluate \\\n  --tarket x\nls\n```\n"
    text = block + "`dflash nope`"
    assert [problem for line in commands(text) for problem in wrong(line)] == [
        "dflash-ops relay a b --sideways: --sideways",
        "make nothing: nothing",
        "dflash evaluate --tarket x: --tarket",
        "dflash nope: nope",
    ]


def test_the_reference_pages_are_what_the_code_says() -> None:
    done = process.run([sys.executable, "docs/reference.py", "--check"], cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_architecture_page_says_where_each_module_of_the_tasks_belongs() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page[page.index("## Inside `tasks/`") : page.index("## Names of states")]
    named = re.findall(r"`(\w+)`", table)
    assert sorted(named) == sorted(file.stem for file in ROOT.glob("tasks/*.py") if file.stem != "__init__")


def headings(file: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(text: str) -> Iterator[str]:
    """Every line of a code block, and every inline code, that begins with one of our commands or make."""
    blocks = re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in [*lines, *inline]:
        line = re.sub(r"\s+#.*$", "", line).removeprefix("$ ").strip()
        # a variable or a program that starts ours may stand before it
        before = r"(?:\S+=\S+ |sudo |torchrun .* -m |\S*python3? -m |\S*bin/)?"
        if found := re.match(rf"{before}((?:dflash-ops|dflash|make)\s.*)", line):
            yield " ".join(found[1].split())


def wrong(line: str) -> Iterator[str]:
    """What of a command line does not exist."""
    for part in re.split(r"\s+(?:&&|\||;)\s+", line):
        words = shlex.split(part.split(" > ")[0], posix=True)
        if not words or words[0] not in ("dflash", "dflash-ops", "make"):
            continue
        if words[0] == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            yield from (f"{line}: {word}" for word in words[1:] if "=" not in word and word not in targets)
        else:
            yield from (f"{line}: {word}" for word in _unknown(_root(words[0]), words[1:]))


def _unknown(command: Any, words: list[str]) -> Iterator[str]:
    while (below := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
        alternatives = [one for one in words[0].split("|") if not ANY.fullmatch(one)]
        unknown = [one for one in alternatives if one not in below]
        yield from unknown
        if unknown or len(alternatives) != 1:
            return
        command, words = below[words[0]], words[1:]
    options = {text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word == "--":
            return
        option = word.strip("[]").partition("=")[0]
        if option.startswith("--") and option not in {*options, "--help"}:
            yield option


def _root(program: str) -> Any:
    if program == "dflash":
        from dflash.cli import app
    else:
        from flows.cli import app
    return typer.main.get_command(app)

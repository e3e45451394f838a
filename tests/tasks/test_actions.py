import hashlib
import io
import json
import unicodedata
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from tasks.actions import PathError, ReadGrant, Run, escape, normalise_path, said
from tasks.plans import Plan

KEYS = tuple("SHA256:" + letter * 43 for letter in "ABC")
characters = st.characters(exclude_categories=["Cs"], exclude_characters="/\0\n")
components = st.text(characters, min_size=1, max_size=8).filter(lambda text: text not in (".", ".."))
paths = st.lists(components, max_size=4).map(lambda parts: "/" + "/".join(parts))


@st.composite
def grants(draw: st.DrawFn) -> dict[str, Any]:
    place = draw(st.sampled_from(["paths", "root"]))
    return {
        "host": draw(st.sampled_from(["kpro6", "other"])),
        "host_keys": tuple(draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))),
        place: tuple(draw(st.lists(paths, min_size=1, max_size=3))) if place == "paths" else draw(paths),
        "verbs": tuple(draw(st.lists(st.sampled_from(["stat", "list", "read", "hash"]), min_size=1))),
        "sessions": draw(st.integers(1, 2**63 - 1)),
        "bytes": draw(st.integers(0, 2**63 - 1)),
        "rate": draw(st.integers(0, 2**63 - 1)),
    }


@given(grants(), grants())
def test_digests_are_equal_exactly_when_the_grants_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = ReadGrant(**one), ReadGrant(**other)
    assert (first == second) == (first.digest() == second.digest())
    assert first.digest() == ReadGrant(**one).digest()


@given(grants(), grants(), st.data())
def test_any_changed_field_changes_the_digest(one: dict[str, Any], other: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(one.keys() & other.keys())))
    changed = ReadGrant(**(one | {name: other[name]}))
    assume(getattr(changed, name) != getattr(ReadGrant(**one), name))
    assert changed.digest() != ReadGrant(**one).digest()


@given(grants())
def test_paths_and_root_are_different_rights(fields: dict[str, Any]) -> None:
    place = {"root": fields["paths"][0]} if "paths" in fields else {"paths": (fields["root"],)}
    swapped = {name: value for name, value in fields.items() if name not in ("paths", "root")} | place
    assert ReadGrant(**swapped).digest() != ReadGrant(**fields).digest()


@given(grants())
def test_canonical_form_is_one_ascii_line_and_the_whole_grant(fields: dict[str, Any]) -> None:
    grant = ReadGrant(**fields)
    line = grant.canonical()
    assert line.isascii()
    assert b"\n" not in line
    assert b"\r" not in line
    assert ReadGrant.model_validate_json(line) == grant


@given(grants(), paths, st.sampled_from(["NFC", "NFD"]))
def test_unicode_forms_of_one_path_are_one_grant(fields: dict[str, Any], path: str, form: Any) -> None:
    # only canonically equivalent forms: some characters never compose back
    assume(unicodedata.normalize("NFC", unicodedata.normalize(form, path)) == normalise_path(path))
    others = {name: value for name, value in fields.items() if name not in ("paths", "root")}
    for place, spelt in (("root", lambda text: text), ("paths", lambda text: (text,))):
        grant = ReadGrant(**others, **{place: spelt(path)})
        assert ReadGrant(**others, **{place: spelt(unicodedata.normalize(form, path))}).digest() == grant.digest()


@given(grants(), st.randoms())
def test_order_and_repetition_do_not_matter(fields: dict[str, Any], random: Any) -> None:
    shuffled = dict(fields)
    for name in {"verbs", "host_keys", "paths"} & fields.keys():
        values = list(fields[name]) * 2
        random.shuffle(values)
        shuffled[name] = tuple(values)
    assert ReadGrant(**shuffled).digest() == ReadGrant(**fields).digest()


def test_digest_is_the_sha256_of_the_json_written_by_hand() -> None:
    grant = ReadGrant(
        host="kpro6", host_keys=KEYS[:1], paths=("/ä",), verbs=("stat", "read"), sessions=2, bytes=5, rate=7
    )
    line = (
        '{"bytes":5,"host":"kpro6","host_keys":["' + KEYS[0] + '"],"kind":"read-grant","paths":["/\\u00e4"],"rate":7,'
        '"root":null,"sessions":2,"verbs":["read","stat"]}'
    )
    assert grant.canonical().decode() == line
    assert grant.digest() == hashlib.sha256(line.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"paths": ()},
        {"root": "/r"},
        {"verbs": ()},
        {"verbs": ("write",)},
        {"sessions": 0},
        {"bytes": -1},
        {"bytes": 1.5},
        {"bytes": True},
        {"rate": 2**63},
        {"host_keys": ()},
        {"host_keys": ("MD5:ab",)},
        {"paths": ("relative",)},
        {"colour": "red"},
    ],
)
def test_a_grant_outside_the_closed_form_is_not_made(change: dict[str, Any]) -> None:
    fields = {"host": "kpro6", "host_keys": KEYS, "paths": ("/p",), "verbs": ("read",), "sessions": 1, "bytes": 1}
    ReadGrant(**fields)
    with pytest.raises(ValidationError):
        ReadGrant(**(fields | change))


def test_a_grant_cannot_be_changed() -> None:
    grant = ReadGrant(host="kpro6", host_keys=KEYS, paths=("/p",), verbs=("read",), sessions=1, bytes=1)
    with pytest.raises(ValidationError):
        grant.bytes = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "path"),
    [("/", "/"), ("//a///b/", "/a/b"), ("/a/./b", "/a/b"), ("/a b", "/a b"), ("/e\u0301", "/\u00e9"), ("/..a", "/..a")],
)
def test_paths_have_one_spelling(text: str, path: str) -> None:
    assert normalise_path(text) == path
    assert normalise_path(path) == path


@pytest.mark.parametrize(
    "text", ["", "a", "./a", "~/a", "/a/../b", "/..", "/a\0b", "/a\nb", "/a\udcff", "/" + "a" * 4095]
)
def test_paths_that_cannot_stand_in_an_action(text: str) -> None:
    with pytest.raises(PathError, match="path '"):
        normalise_path(text)


@given(st.text())
def test_escaped_text_has_nothing_that_hides_or_reorders(text: str) -> None:
    shown = escape(text)
    assert shown.isprintable()
    assert not any(unicodedata.bidirectional(character) in BIDI_CONTROLS for character in shown)


BIDI_CONTROLS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@given(st.text(), st.text())
def test_escaping_keeps_different_texts_different(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/plain path/ä.pt", "/plain path/ä.pt"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        ("a\u200bb", "a\\u200bb"),
        ("a\\x1b", "a\\\\x1b"),
        ("a\u3164", "a\\u3164"),
        ("\U000e0101", "\\U000e0101"),
    ],
)
def test_escape(text: str, shown: str) -> None:
    assert escape(text) == shown


@pytest.mark.parametrize(
    ("change", "covered"),
    [
        ({"paths": ("/r/a",)}, True),
        ({"root": "/r"}, True),
        ({"root": "/r/deep"}, True),
        ({"paths": ("/root",)}, False),
        ({"root": "/"}, False),
        ({"paths": ("/r/a",), "host": "other"}, False),
        ({"paths": ("/r/a",), "host_keys": KEYS[:1]}, False),
        ({"paths": ("/r/a",), "verbs": ("read", "list")}, False),
        ({"paths": ("/r/a",), "sessions": 6}, False),
        ({"paths": ("/r/a",), "bytes": 101}, False),
        ({"paths": ("/r/a",), "rate": 10**9}, True),
    ],
)
def test_a_tree_covers_what_lies_below_it_within_its_budgets(change: dict[str, Any], covered: bool) -> None:
    fields = {"host": "kpro6", "host_keys": KEYS, "verbs": ("read", "stat"), "sessions": 5, "bytes": 100}
    assert ReadGrant(**fields, root="/r").covers(ReadGrant(**(fields | change))) is covered


def test_files_cover_themselves_only() -> None:
    fields = {"host": "kpro6", "host_keys": KEYS, "verbs": ("read",), "sessions": 1, "bytes": 1}
    grant = ReadGrant(**fields, paths=("/r/a",))
    assert grant.covers(grant)
    assert ReadGrant(**fields, paths=("/r/a", "/r/b")).covers(grant)
    assert not grant.covers(ReadGrant(**fields, paths=("/r/a", "/r/b")))
    assert not grant.covers(ReadGrant(**fields, paths=("/r/a/b",)))
    assert not grant.covers(ReadGrant(**fields, root="/r/a"))


def test_a_plan_shows_everything_escaped_within_80_columns() -> None:
    path = "/checkpoints/" + "deep/" * 40 + "[red]evil\u202etp.400_pets"
    grant = ReadGrant(host="kpro6", host_keys=KEYS, paths=(path,), verbs=("read",), sessions=3, bytes=17_200_000_000)
    console = Console(file=io.StringIO(), width=200)
    Plan(grant=grant, effect="read\x07 it").render(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80
    together = "".join("".join(shown.split()).split())
    for text in (escape(path), *KEYS, "17.2GB(17200000000)", "read\\x07it", grant.digest()):
        assert text in together


def rendered(*argv: str, width: int = 80) -> str:
    text = io.StringIO()
    run = Run(host="kpro6", host_keys=KEYS, argv=("/bin/rm", *argv), seconds=1)
    Plan(changes=(run,), effect="it runs").render(Console(file=text, width=width))
    return text.getvalue().replace(run.digest(), "")


@pytest.mark.parametrize("before", [*range(50, 70), 200])
def test_commands_that_differ_in_spaces_look_different(before: int) -> None:
    head, tail = "x" * before, "y" * 10
    variants = (
        head + tail,
        f"{head} {tail}",
        f"{head}  {tail}",
        head + " " * 99 + tail,
        f"{head}{tail} ",
        f" {head}{tail}",
    )
    assert len({rendered(one) for one in variants}) == len(variants)


def test_a_narrow_terminal_hides_nothing() -> None:
    assert "/data/x" in rendered("/data/x", width=10)


def test_the_effect_is_not_part_of_the_digest() -> None:
    grant = ReadGrant(host="kpro6", host_keys=KEYS, paths=("/p",), verbs=("read",), sessions=1, bytes=1)
    assert Plan(grant=grant, effect="a").digest() == Plan(grant=grant, effect="b").digest() == grant.digest()
    assert json.loads(grant.canonical()).keys() == ReadGrant.model_fields.keys()


def test_what_a_host_says_is_one_short_line() -> None:
    assert said("no\nsuch \x1b[31mfile") == "no\\x0asuch \\x1b[31mfile"
    assert said("\n" * 10**6) == "\\x0a" * 500 + "…"

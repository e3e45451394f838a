"""Writes docs/configuration.md from the models that read the files: python docs/configuration.py [--check].

Every key, its type, its default and what its docstring says. ``--check`` only tells whether the page is what would be
written; exit status 1 when it is not.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dflash.training.run_config import RunConfig
from tasks.inventory import Inventory

PAGE = Path(__file__).with_suffix(".md")
FILES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("hosts.yaml", "Which machines there are. Every `dflash-ops` command reads it.", Inventory),
    ("A training run", "What `dflash train --config FILE` and `dflash data features` read.", RunConfig),
)


def page() -> str:
    """The whole page as markdown."""
    parts = [
        "# Configuration reference",
        "Written from the models that read the files. They are read strictly: a key that is not here is an error.",
    ]
    for title, about, model in FILES:
        parts += [f"## {title}", about]
        parts += [_section(path, section) for path, section in _sections(model)]
    return "\n\n".join(parts) + "\n"


def _sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """``model`` and every model below it, each with the path of keys to it."""
    yield path, model
    for name, field in model.model_fields.items():
        for below, suffix in _models(field.annotation):
            yield from _sections(below, f"{path}.{name}{suffix}".lstrip("."))


def _models(annotation: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation, suffix
    elif get_origin(annotation) is dict:
        yield from _models(get_args(annotation)[1], ".NAME")
    elif get_origin(annotation) is tuple:
        yield from _models(get_args(annotation)[0], "[]")
    else:
        for inner in get_args(annotation):
            yield from _models(inner, suffix)


def _section(path: str, model: type[BaseModel]) -> str:
    said = _docstrings(model)
    rows = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    named = path.endswith(".NAME")
    for name, field in model.model_fields.items():
        if named and name == "name":
            continue
        cells = (f"`{name}`", _type(field.annotation), _default(field), said.get(name, ""))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    about = _plain(inspect.getdoc(model) or "")
    heading = [f"### `{path}`"] if path else []
    return "\n\n".join([*heading, about, "\n".join(rows)])


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """What stands below each field in the source."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = _plain(inspect.cleandoc(ast.literal_eval(text.value)))
    return found


def _plain(text: str) -> str:
    """A docstring as markdown on one line; roles of the documentation tool are only their names."""
    for role in (":attr:", ":class:", ":func:", ":data:", ":meth:"):
        text = text.replace(role, "")
    return " ".join(text.replace("``", "`").split())


def _type(annotation: Any) -> str:
    """The type as somebody who writes YAML would say it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join("nothing" if one is type(None) else _type(one) for one in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}" if inner else "empty list"
    if origin is dict:
        return f"mapping of names to {_type(inner[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


_NAMES: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Path: "path"}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its own"
    if value is None or value in ((), {}, ""):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{', '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def main() -> None:
    """Write the page, or with ``--check`` compare it."""
    written = page()
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text(encoding="utf-8") != written:
            sys.exit(f"{PAGE.name} is not what the models say: run python docs/{Path(__file__).name}")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()

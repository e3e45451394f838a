"""Writes the pages that say what the code says: python docs/reference.py [--check].

``configuration.md``: every key of every file that people write, its type, its default and what its docstring says, from
the models that read the files. ``states.md``: every state that a run can end in by a failure, from the errors.
``--check`` only tells whether the pages are what would be written; exit status 1 when one is not.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import flows
import tasks
from dflash.errors import DFlashError
from dflash.training.run_config import RunConfig
from tasks.inventory import Inventory
from tasks.run_file import Run

FILES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("hosts.yaml", "Which machines there are. Every `dflash-ops` command reads it.", Inventory),
    ("run.yaml", "One launch: what `dflash-ops launch --config FILE` reads.", Run),
    ("A training run", "What `dflash train --config FILE` and `dflash data features` read.", RunConfig),
)


def configuration() -> str:
    """The page of the files that people write."""
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


def states() -> str:
    """The page of the states that failures name."""
    named: dict[str, list[str]] = {}
    for error in sorted(_errors(), key=lambda one: (one.__module__, one.__name__)):
        if "state_name" in vars(error) and error.state_name != DFlashError.state_name:
            said = _plain(inspect.getdoc(error) or "").partition(". ")[0].rstrip(".") + "."
            named.setdefault(error.state_name, []).append(said)
    rows = [f"| `{name}` | {' '.join(dict.fromkeys(said))} |" for name, said in sorted(named.items())]
    return (
        "\n\n".join(
            [
                "# States that name what happened",
                "A run that ends by a failure on which somebody has to act ends in a state of that name. Its message "
                "is one sentence: what was found, what was expected, what to do. Filter Prefect's runs by it, or see "
                "`dflash-ops status`. Any other failure is `Failed`; `Cancelled` and `Crashed` are Prefect's own.",
                "\n".join(["| state | what happened |", "| --- | --- |", *rows]),
            ]
        )
        + "\n"
    )


def _errors(above: type[DFlashError] = DFlashError) -> Iterator[type[DFlashError]]:
    for package in (tasks, flows) if above is DFlashError else ():
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for error in above.__subclasses__():
        yield error
        yield from _errors(error)


PAGES = {"configuration.md": configuration, "states.md": states}


def main() -> None:
    """Write the pages, or with ``--check`` compare them."""
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    folder, script = Path(__file__).parent, Path(__file__).name
    for name, page in PAGES.items():
        written = page()
        if not sys.argv[1:]:
            (folder / name).write_text(written, encoding="utf-8")
        elif (folder / name).read_text(encoding="utf-8") != written:
            sys.exit(f"{name} is not what the code says: run python docs/{script}")


if __name__ == "__main__":
    main()

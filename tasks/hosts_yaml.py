"""``hosts.yaml`` as text: read without letting anything pass, with the line of every key."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from dflash.errors import UsageError
from tasks.actions import escape

KeyPath = tuple[str | int, ...]
TEXT_KEYS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class InventoryError(UsageError):
    """``hosts.yaml`` is missing or says something that cannot be."""


@dataclass(frozen=True)
class Lines:
    """Where every key stands in the file."""

    source: str
    lines: dict[KeyPath, int]

    def error(self, key: KeyPath, message: str) -> InventoryError:
        """What is wrong with ``key``, with the line of it or of the nearest key above it that is there."""
        known = next((key[:length] for length in range(len(key), 0, -1) if key[:length] in self.lines), None)
        line = f":{self.lines[known]}" if known is not None else ""
        return InventoryError(f"{self.source}{line}: {escape(_dotted(key))}: {message}")


def read(text: str, source: str) -> tuple[Any, Lines]:
    """``text`` as plain data; raises :class:`InventoryError` for what is not YAML or says a key twice."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, Lines(source, {})
        lines = dict(_lines(node, (), source))
        return loader.construct_document(node), Lines(source, lines)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InventoryError(f"{source}{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InventoryError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InventoryError(f"{source}: a YAML anchor contains itself; write the values out") from None
    except (ValueError, AttributeError):
        raise InventoryError(f"{source}: not YAML: a tagged value, a date or a number cannot be read") from None


def _lines(node: yaml.Node, key: KeyPath, source: str) -> Iterator[tuple[KeyPath, int]]:
    """The line of every key; raises for a key that stands twice, which YAML readers let pass."""
    yield key, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            word, line = str(name.value), name.start_mark.line + 1
            inner = (*key, word)
            if name.tag not in TEXT_KEYS:
                raise InventoryError(f"{source}:{line}: {escape(_dotted(inner))}: YAML reads no text here; quote it")
            if word in seen:
                first = f"also in line {seen[word]}"
                raise InventoryError(f"{source}:{line}: {escape(_dotted(inner))}: given twice ({first}); keep one")
            seen[word] = line
            yield from _lines(value, inner, source)
            yield inner, line
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*key, index), source)


def _dotted(key: KeyPath) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")

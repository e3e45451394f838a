"""YAML in which a key stands once: of two, YAML's own reading takes the last and says nothing. Imports no torch."""

from typing import Any

import yaml


class TwiceError(yaml.YAMLError):
    """A key stands twice in one mapping."""


def load(text: str) -> Any:
    """``text`` as plain data. Raises :class:`yaml.YAMLError`, for nesting without end as well."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Before merge keys are resolved: what a mapping says itself may well differ from what it takes over."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in seen:
                first = seen[key.tag, key.value]
                raise TwiceError(f"{key.value} stands in line {first} and again in line {line}; keep one of them")
            seen[key.tag, key.value] = line
        return node

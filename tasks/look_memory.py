"""What the looks into one folder remember from one to the next."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self


@dataclass
class Known:
    """What is remembered of one entry."""

    state: str
    """As its folder lists it."""
    kind: Literal["whole", "settling", "unfinished"]
    since: float
    """When it was found in this state; of an unfinished one, when it was looked into last."""
    inside: str = ""
    """The files of a directory, in their state."""
    tries: int = 0
    reason: str = ""
    sealed: bool = False
    identity: str = ""
    step: int | None = None
    written: float = 0.0


@dataclass
class Memory:
    """What one look knows for the next, by names below the folder; :meth:`dump` and :meth:`load` are JSON."""

    entries: dict[str, Known] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    """Folders in which nothing could be a checkpoint, in the state they were in."""
    rechecked: int = 0
    """Where among the known folders the next look goes on; not kept over a restart."""
    changed: bool = False
    """Whether there is something to keep that was not kept yet."""

    def whole(self) -> dict[str, str]:
        """Name → identity of every complete checkpoint."""
        return {name: known.identity for name, known in self.entries.items() if known.kind == "whole"}

    def dump(self) -> dict[str, Any]:
        return {"entries": {name: asdict(known) for name, known in self.entries.items()}, "plain": self.plain}

    @classmethod
    def load(cls, content: Mapping[str, Any]) -> Self:
        """What was dumped; of another version of this program nothing, which costs one longer look."""
        try:
            entries = {str(name): Known(**fields) for name, fields in content.get("entries", {}).items()}
            return cls(entries, {str(name): str(state) for name, state in content.get("plain", {}).items()})
        except (TypeError, AttributeError):
            return cls()

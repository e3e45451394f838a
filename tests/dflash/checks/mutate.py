"""A real function with a piece of its source replaced, so that a fault sits in the path that is measured."""

import inspect
import sys
import textwrap
from typing import Any

import pytest


def mutate(patch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Replace ``old`` by ``new`` in the source of ``owner.name``, a function of a module or a method of a class."""
    module = owner if inspect.ismodule(owner) else sys.modules[owner.__module__]
    source = textwrap.dedent(inspect.getsource(inspect.getattr_static(owner, name)))
    assert old in source, f"{name} has no {old!r} any more"
    scope: dict[str, Any] = dict(vars(module))
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), scope)
    patch.setattr(owner, name, scope[name])

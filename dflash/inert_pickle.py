"""Pickles read without running anything: the one reader of pickles here, with a closed list of names.

The standard unpickler calls what a pickle names. This one interprets the opcodes itself, so a pickle can make dicts,
lists, tuples, numbers and strings, and stand-ins for the names in a table of ours; any other name is an error that says
which. What a hostile pickle could still cost is bounded: steps, copies, and hashes of nested tuples.
"""

import pickletools
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from dflash.records import CheckpointError, DamagedError, UnsafePickleError

MOST_BYTES = 32 << 20
_MOST_STEPS = 4_000_000
_DEEPEST_KEY, _WIDEST_KEY = 2, 16
_Name = tuple[str, str]


class Opaque:
    """Something that was saved beside tensors and is not needed; nothing of it is kept."""

    __slots__ = ()


@dataclass(eq=False)
class Instance:
    """An object of class ``kind`` as the pickle describes it; ``state`` is what its ``__setstate__`` would get."""

    kind: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, eq=False)
class Call:
    """The stand-in for a name that is called; the result of ``function`` takes the place of the call's."""

    function: Callable[..., Any]


def instances(module: str, *names: str) -> dict[_Name, Call]:
    """A table in which each of ``names`` makes an :class:`Instance` of that kind."""
    return {(module, name): Call(_maker(name)) for name in names}


def _maker(kind: str) -> Callable[..., Instance]:
    return lambda *arguments: Instance(kind, arguments)


PLAIN: Mapping[_Name, Any] = {
    ("collections", "Counter"): Call(lambda items=(): {_key(key): value for key, value in dict(items).items()}),
    ("collections", "OrderedDict"): Call(lambda items=(): {_key(key): value for key, value in items}),
    **{
        (module, kind.__name__): Call(lambda items=(), kind=kind: kind(_key(item) for item in items))
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset)
    },
}
"""Names of the standard library that mean nothing but a container."""


def interpret(
    data: bytes, names: Mapping[_Name, Any], *, source: str, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """What the pickle ``data`` of ``source`` describes.

    ``names`` holds a :class:`Call` for what may be called and any other value for what is only named. ``persistent``
    makes the object of a persistent id. Raises :class:`UnsafePickleError` for a name outside of ``names`` or a pickle
    that costs too much, :class:`DamagedError` for one that is malformed.
    """
    if len(data) > MOST_BYTES:
        raise UnsafePickleError(
            f"{source} has {len(data)} bytes, over the {MOST_BYTES} that are read; tensors belong in their own records"
        )
    try:
        return _Machine(source, names, persistent).run(data)
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle can raise anything from the stack and the stand-ins
        raise DamagedError(f"{source} cannot be read ({type(error).__name__}: {error})") from None


class _Machine:
    """The pickle machine: a stack, the marks on it, and a memo."""

    def __init__(self, source: str, names: Mapping[_Name, Any], persistent: Callable[[Any], Any] | None) -> None:
        self._source, self._names, self._persistent = source, names, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._steps = 0

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            self._charge(1)
            self._step(opcode.name, argument, len(data))
        (result,) = self._stack
        return result

    def _step(self, opcode: str, argument: Any, length: int) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_SET":
                stack.append(set())
            case _ if opcode in _CONSTANTS:
                stack.append(argument)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(int(opcode[-1]))))
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "LIST":
                stack.append(self._pop_to_mark())
            case "DICT":
                stack.append(_paired(self._pop_to_mark()))
            case "FROZENSET":
                stack.append(frozenset(_key(item) for item in self._pop_to_mark()))
            case "APPEND":
                _extend(stack[-2], self._pop(1))
            case "APPENDS" | "ADDITEMS":
                items = self._pop_to_mark()
                _extend(stack[-1], items)
            case "SETITEM":
                _update(stack[-3], self._pop(2))
            case "SETITEMS":
                items = self._pop_to_mark()
                _update(stack[-1], items)
            case "BINPUT" | "LONG_BINPUT":
                if argument > length:
                    raise UnsafePickleError(f"{self._source} numbers its objects up to {argument}; refused")
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "POP":
                self._pop(1)
            case "POP_MARK":
                self._pop_to_mark()
            case "DUP":
                stack.append(stack[-1])
            case "GLOBAL":
                module, _, name = argument.partition(" ")
                stack.append(self._named(module, name))
            case "STACK_GLOBAL":
                stack.append(self._named(*self._pop(2)))
            case "REDUCE" | "NEWOBJ":
                called, arguments = self._pop(2)
                stack.append(self._call(called, arguments))
            case "BUILD":
                (state,) = self._pop(1)
                self._build(stack[-1], state)
            case "BINPERSID":
                (identifier,) = self._pop(1)
                if self._persistent is None:
                    raise ValueError("an object outside of the pickle")
                stack.append(self._persistent(identifier))
            case _:
                raise ValueError(f"opcode {opcode}, which torch does not write")

    def _charge(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise UnsafePickleError(f"{self._source} takes more than {_MOST_STEPS} steps to read; refused")

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) - (self._marks[-1] if self._marks else 0) < count:
            raise ValueError("it takes more from the stack than is there")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _pop_to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        taken = self._stack[mark:]
        del self._stack[mark:]
        return taken

    def _named(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is not text")
        if (module, name) not in self._names:
            raise UnsafePickleError(
                f"{self._source}: its pickle names {module}.{name}, which is not on the allow-list; nothing of it "
                f"was run; save plain tensors, numbers and strings only"
            )
        return self._names[module, name]

    def _call(self, called: Any, arguments: Any) -> Any:
        if not isinstance(called, Call) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is not a name")
        # each call may copy what it is given, and one list can be given to many
        self._charge(sum(len(argument) for argument in arguments if isinstance(argument, Sized)))
        return called.function(*arguments)

    def _build(self, built: Any, state: Any) -> None:
        if isinstance(built, Instance):
            built.state = state
        elif not isinstance(built, dict | Opaque):  # a state_dict carries its modules' versions as an attribute
            raise ValueError(f"it gives a state to a {type(built).__name__}")


_CONSTANTS = frozenset(
    {
        "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
        "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING",
        "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    }
)  # fmt: skip


def _extend(container: Any, items: list[Any]) -> None:
    if isinstance(container, list):
        container.extend(items)
    elif isinstance(container, set):
        container.update(_key(item) for item in items)
    elif not isinstance(container, Opaque):
        raise ValueError(f"it appends to a {type(container).__name__}")


def _update(container: Any, items: list[Any]) -> None:
    if isinstance(container, dict):
        container.update(_paired(items))
    elif not isinstance(container, Opaque):
        raise ValueError(f"it sets an item of a {type(container).__name__}")


def _paired(items: list[Any]) -> dict[Any, Any]:
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _key(value: Any, depth: int = _DEEPEST_KEY) -> Any:
    """``value`` if it can be hashed at a cost that was paid for: hashing tuples of tuples is exponential in depth."""
    if isinstance(value, str | bytes | int | float | Instance | Opaque) or value is None:
        return value
    if isinstance(value, tuple) and depth and len(value) <= _WIDEST_KEY:
        for item in value:
            _key(item, depth - 1)
        return value
    raise ValueError(f"a {type(value).__name__} is no key")

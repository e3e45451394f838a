"""HTML from Python values: whatever is no :class:`Html` is text, and text cannot become markup."""

import html
from typing import Self

from dflash.errors import one_line

NONE = "–"
"""What stands where a figure is missing."""


class Html(str):
    """Markup, ready to be put into a page. Only this module and literals make it."""

    __slots__ = ()

    def __add__(self, other: str) -> Self:
        return type(self)(str(self) + str(text(other)))


VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta"})


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """``<name attributes>children</name>``; children and values that are no :class:`Html` are escaped.

    A trailing underscore of an attribute is dropped and the others become hyphens. ``None`` and ``False`` leave an
    attribute out, ``True`` gives it no value. Children that are ``None`` are left out.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """The children one after the other."""
    return Html("".join(text(child) for child in children if child is not None))


def text(value: object) -> Html:
    """``value`` as text on a page: controls, line ends and characters that turn the direction are shown as escapes."""
    return value if isinstance(value, Html) else Html(html.escape(one_line(str(value))))


def visible(value: str) -> str:
    """``value`` with everything that does not print as escapes, but line ends and tabs, for a preformatted place."""
    return "".join(character if character in "\n\t" else one_line(character) for character in value)


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """A figure as people read it; a missing one, NaN or infinity is a dash."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return NONE
    return f"{value:{sign}.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as percent."""
    shown = number(None if value is None else 100 * value, digits)
    return shown if shown == NONE else f"{shown} %"


def interval(value: tuple[float, float] | None, sign: str = "") -> str:
    """A 95 % interval."""
    return NONE if value is None else f"{number(value[0], sign=sign)} to {number(value[1], sign=sign)}"


def table(head: list[object], rows: list[list[object]], *, caption: str, class_: str = "figures") -> Html:
    """A table whose first column heads its rows; it scrolls by itself where the page is narrower."""
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption, class_="unseen"),
            tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
            tag(
                "tbody",
                *(tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows),
            ),
            class_=class_,
        ),
        class_="wide",
        tabindex="0",
        role="region",
        aria_label=caption,
    )

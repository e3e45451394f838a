"""A list of prompts that is sorted, searched and opened: what the report's and the comparison's pages share."""

from collections.abc import Mapping, Sequence

from dflash.pages.markup import Html, number, tag


def prompt_tools(keys: Sequence[tuple[str, str]], count: int) -> Html:
    """The line above the list; ``keys`` are what it can be sorted by, with their words."""
    return tag(
        "div",
        tag(
            "label",
            "Sort by ",
            tag("select", *(tag("option", said, value=key) for key, said in keys), class_="sort"),
        ),
        tag("button", "↓ falling", type="button", class_="direction", aria_pressed="false"),
        tag("label", "Find ", tag("input", type="search", class_="find", placeholder="name or text")),
        tag("span", f"{count} prompts", class_="found", role="status"),
        class_="tools",
    )


def prompt_row(
    place: int,
    id: str,
    bars: Sequence[Html | None],
    figures: Sequence[Html],
    sorted_by: Mapping[str, float | None],
    *,
    list_: str = "walk",
) -> Html:
    """The ``place``-th prompt with its bars and figures, and the room that opens under it, ``<list_>-<place>``."""
    room = f"{list_}-{place}"
    return tag(
        "li",
        tag(
            "button",
            tag("span", id, class_="id"),
            tag("span", *bars, class_="track"),
            *figures,
            type="button",
            aria_expanded="false",
            aria_controls=room,
        ),
        tag("div", id=room, class_="walk", hidden=True),
        data_place=place,
        **{f"data_{key}": number(value, 9) for key, value in sorted_by.items()},
    )

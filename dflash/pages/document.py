"""The frame of every page: one file that carries its styles, its script and its data, and asks the network for nothing.

The content security policy names the digest of the page's own scripts, so that nothing else runs even where a text
should slip through the escaping, and allows no connection at all.
"""

import base64
import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from dflash.output import OutputError
from dflash.pages.markup import Html, join, tag


def document(title: str, body: Html, *, scripts: list[str], data: dict[str, Any]) -> str:
    """The whole page: ``body`` in the frame, with ``scripts`` of this package and one block of JSON for each ``data``.

    A block has its key as element id; it is inert text until a script reads it.
    """
    code = [_asset(name) for name in scripts]
    digests = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in code)
    policy = (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        f"form-action 'none'"
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href=_ICON),
        tag("title", title),
        tag("style", Html(_asset("page.css"))),
    )
    blocks = (tag("script", Html(_json(value)), type="application/json", id=key) for key, value in data.items())
    page = tag(
        "html",
        tag("head", head),
        tag("body", body, *blocks, *(tag("script", Html(one)) for one in code)),
        lang="en",
        dir="ltr",
    )
    return f"<!doctype html>\n{page}\n"


def write_page(path: Path, page: str) -> None:
    """Put ``page`` at ``path``, whole or not at all; an older one is replaced.

    Raises :class:`~dflash.output.OutputError` where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(page, encoding="utf-8")
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(
            f"{path} could not be written ({error.strerror or error}); make room, or name another place"
        ) from None


def masthead(kind: str, name: str, sections: list[tuple[str, str]]) -> Html:
    """The line that stays on top: what the page is, of what, its sections, and the switch of light and dark."""
    return join(
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag(
            "header",
            tag("div", tag("span", kind, class_="kind"), tag("span", name, class_="of", title=name), class_="named"),
            tag("nav", *(tag("a", title, href=f"#{id}") for id, title in sections), aria_label="Sections"),
            tag("button", "◐", type="button", id="theme", title="light or dark", aria_label="Light or dark"),
            class_="masthead",
        ),
        tag(
            "noscript",
            tag(
                "p",
                "Charts and the view of each token need JavaScript; every figure is in the tables as well.",
                class_="note",
            ),
        ),
    )


def section(id: str, title: str, *children: object, lead: object = None) -> Html:
    """A part of the page that its masthead can name."""
    heading = tag("h2", title, id=f"{id}-title")
    return tag(
        "section",
        heading,
        None if lead is None else tag("p", lead, class_="lead"),
        *children,
        id=id,
        aria_labelledby=f"{id}-title",
    )


def chart(id: str, title: str, table: Html | None, *, note: object = None, height: int = 260) -> Html:
    """A place in which the script draws ``id``, above the same figures as a table, unless one stands elsewhere."""
    return tag(
        "figure",
        tag("figcaption", tag("strong", title), None if note is None else tag("span", note)),
        tag("div", class_="chart", id=id, data_height=height),
        None if table is None else tag("details", tag("summary", "as a table"), table),
        class_="panel",
    )


_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='3' fill='%230b62b0'/%3E%3Cpath d='M3 11h2V5H3zM7 11h2V7H7zM11 11h2V9h-2z' fill='white'/%3E%3C/svg%3E"
)


def _json(value: Any) -> str:
    r"""``value`` as JSON that no HTML parser finds an end in; NaN and infinity become null."""
    try:
        written = _compact(value)
    except ValueError:
        written = _compact(_finite(value))
    return written.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _asset(name: str) -> str:
    return (resources.files("dflash.pages") / name).read_text(encoding="utf-8")

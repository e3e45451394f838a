"""Text from elsewhere within the markdown of an artifact."""

import re


def fenced(text: str) -> str:
    """``text`` as a code block of its own, which nothing in ``text`` can end: the fence is longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}\n"

"""Names and commands of a user in Markdown: they stay text, whatever they contain."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_PIPE = re.compile(r"(\\*)\|")


def escaped(text: object) -> str:
    """Return text in one line, in which no HTML tag begins and no column of a table ends."""
    return _PIPE.sub(r"\1\1\\|", _TAG.sub("&lt;", " ".join(str(text).split())))


def code_span(text: object) -> str:
    """Return text in one line as code, fenced by more backticks than it has in a row."""
    line = " ".join(str(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " * (len(fence) > 1)
    return f"{fence}{space}{line}{space}{fence}"

"""Escaping of names, commands and other external text in Markdown."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_PIPE = re.compile(r"(\\*)\|")
# Start of a link, an image, or a link definition.
_LINK = re.compile(r"(?<=\])(?=\()|(?<=!)(?=\[)|^(?=\[.*\](?::|$))")


def one_line(text: object) -> str:
    """Return text in one line with HTML tags, links and images escaped.

    The function is idempotent.
    """
    return _LINK.sub(r"\\", _TAG.sub("&lt;", " ".join(str(text).split())))


def escaped(text: object) -> str:
    """Return `one_line` with the column separators of tables escaped."""
    return _PIPE.sub(r"\1\1\\|", one_line(text))


def code_span(text: object) -> str:
    """Return text in one line as code, fenced by more backticks than it contains."""
    line = " ".join(str(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " * (len(fence) > 1)
    return f"{fence}{space}{line}{space}{fence}"

"""Names, commands and facts of others in Markdown: they stay text, whatever they contain."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_PIPE = re.compile(r"(\\*)\|")
# Where a link, a picture, or the definition of a link's name would begin.
_LINK = re.compile(r"(?<=\])(?=\()|(?<=!)(?=\[)|^(?=\[.*\](?::|$))")


def one_line(text: object) -> str:
    """Return text in one line, in which no HTML tag, link or picture begins.

    The same again changes nothing.
    """
    return _LINK.sub(r"\\", _TAG.sub("&lt;", " ".join(str(text).split())))


def escaped(text: object) -> str:
    """Return `one_line` in which no column of a table ends either."""
    return _PIPE.sub(r"\1\1\\|", one_line(text))


def code_span(text: object) -> str:
    """Return text in one line as code, fenced by more backticks than it has in a row."""
    line = " ".join(str(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " * (len(fence) > 1)
    return f"{fence}{space}{line}{space}{fence}"

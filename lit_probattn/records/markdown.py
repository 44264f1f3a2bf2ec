"""Names, commands and facts of others in Markdown: they stay text, whatever they contain."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_PIPE = re.compile(r"(\\*)\|")
# Where a link, a picture, or the definition of a link's name would begin.
_LINK = re.compile(r"(?<=\])(?=\()|(?<=!)(?=\[)|^(?=\[.*\](?::|$))")

_ESCAPE = re.compile(r"\\([\[(|])")


def one_line(text: object) -> str:
    """Return text in one line, in which no HTML tag, link or picture begins.

    The same again changes nothing.
    """
    return _LINK.sub(r"\\", _TAG.sub("&lt;", " ".join(str(text).split())))


def escaped(text: object) -> str:
    """Return `one_line` in which no column of a table ends either."""
    return _PIPE.sub(r"\1\1\\|", one_line(text))


def unescaped(text: str) -> str:
    """Return what `one_line` or `escaped` was given."""
    return _ESCAPE.sub(r"\1", text.replace("&lt;", "<"))


def code_span(text: object) -> str:
    """Return text in one line as code, fenced by more backticks than it has in a row."""
    line = " ".join(str(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " * (len(fence) > 1)
    return f"{fence}{space}{line}{space}{fence}"


def head_lines(made: Mapping[str, str]) -> list[str]:
    """Return the lines that open a report, from its `facts`."""
    return [
        f"- Command: {code_span(made['command'])}",
        f"- Hardware: {one_line(made['device'])}",
        one_line(f"- Versions: {made['versions']}; revision {made['git_revision']}"),
    ]

"""Self-contained HTML pages: nothing is read from elsewhere, neither fonts nor scripts."""

from __future__ import annotations

import base64
import html
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import GENERATOR
from lit_probattn.records.markdown import unescaped

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .6rem 0; font-size: .85rem; display: block;
        overflow-x: auto; }
td, th { border: 1px solid #ddd; padding: .2rem .6rem; text-align: left; }
th { background: #f4f4f4; } tr:nth-child(even) td { background: #fafafa; }
img { max-width: 100%; border: 1px solid #eee; } code { background: #f4f4f4; padding: 0 .2rem; }
"""
_PICTURE = re.compile(r'<img src="([^"]*)"')
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 10_000_000  # of a report, or of one of its pictures


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole page.

    Args:
        title: plain text.
        body: HTML.
        style: CSS that is added to `STYLE`.
        script: JavaScript that runs once the body is there.
    """
    code = f"<script>{script}</script>\n" if script else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}{style}</style></head><body>\n{body}\n{code}</body></html>\n"
    )


def markdown_body(text: str) -> str:
    """Return Markdown as HTML; HTML inside it stays text."""
    rendered: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return rendered


def picture(content: bytes) -> str:
    """Return a PNG as the address of an image that carries its own bytes."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@dataclass(frozen=True)
class ReportPage:
    """A report in Markdown, the same in HTML with its pictures inside, and the pictures."""

    text: str
    body: str
    pictures: tuple[bytes, ...]


def read_report(path: Path) -> ReportPage:
    """Read a report and its pictures: PNG files in its folder or below.

    A page is passed on, so it carries nothing else, wherever an address or a link leads.

    Raises:
        ConfigError: the report or a picture is not such a file, or is too large.
    """
    try:
        text = _content(path, path.parent).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {_told(error)}") from error
    pictures = []

    def carried(found: re.Match[str]) -> str:
        name = unquote(html.unescape(found[1]))
        try:
            content = _content(path.parent / name, path.parent)
            if not content.startswith(_PNG):
                raise ValueError("not a PNG file")
        except (OSError, ValueError) as error:
            reason = f"picture {name!r}: {_told(error)}"
            raise ConfigError(f"{path}: {reason}; expected a PNG file in its folder") from error
        pictures.append(content)
        return f'<img src="{picture(content)}"'

    return ReportPage(text, _PICTURE.sub(carried, markdown_body(text)), tuple(pictures))


def _content(path: Path, folder: Path) -> bytes:
    """Return what a regular file below a folder holds.

    Raises:
        OSError, ValueError: there is no such file there.
    """
    try:
        real = path.resolve()
    except RuntimeError as error:  # links that lead to each other
        raise ValueError("a link to itself") from error
    if not real.is_relative_to(folder.resolve()):
        raise ValueError("outside the folder of the report")
    # Opening a pipe would wait for a writer.
    handle = os.open(real, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("not a regular file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES / 1e6:.0f} MB")
    return content


def _told(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def title_of(text: str) -> str:
    """Return the heading that Markdown begins with, as plain text."""
    return unescaped(text.split("\n", 1)[0].lstrip("# ").replace("`", ""))

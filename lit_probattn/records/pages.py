"""Self-contained HTML pages: nothing is read from elsewhere, neither fonts nor scripts."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

from markdown_it import MarkdownIt

from lit_probattn.records.provenance import GENERATOR

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
_PICTURE = re.compile(r'<img src="([^":]*)"')


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


def picture(path: Path) -> str:
    """Return a PNG as the address of an image that carries its own bytes."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def with_pictures(body: str, folder: Path) -> str:
    """Return HTML with the PNG files that it shows, named from `folder`, inside it."""
    return _PICTURE.sub(lambda found: f'<img src="{picture(folder / found[1])}"', body)


def title_of(text: str) -> str:
    """Return the heading that Markdown begins with, as plain text."""
    return text.split("\n", 1)[0].lstrip("# ").replace("`", "")

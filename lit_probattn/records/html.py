"""Self-contained HTML pages without external fonts or scripts."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from pathlib import PurePosixPath

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import GENERATOR

_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
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


def page(title: str, body: str, *, style: str = "") -> str:
    """Return a whole page.

    Args:
        title: plain text.
        body: HTML.
        style: CSS in addition to `STYLE`.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}{style}</style></head><body>\n{body}\n</body></html>\n"
    )


def body_of(text: str, figures: Mapping[str, bytes] | None = None) -> str:
    """Convert Markdown to HTML; HTML inside it is escaped.

    Args:
        text: Markdown.
        figures: PNG and SVG files by their address in the text, which are embedded.

    Raises:
        ConfigError: markdown-it-py is not installed.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError as error:
        raise ConfigError(
            "HTML pages need markdown-it-py: pip install 'lit-probattn[html]'"
        ) from error
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for token in (inner for outer in tokens for inner in outer.children or ()):
        address = str(token.attrs.get("src", ""))
        if token.type == "image" and (content := (figures or {}).get(address)):
            encoded = base64.b64encode(content).decode()
            token.attrs["src"] = f"data:{_TYPES[PurePosixPath(address).suffix]};base64,{encoded}"
    rendered: str = parser.renderer.render(tokens, parser.options, {})
    return rendered

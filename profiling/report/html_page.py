"""One self-contained page of a report: text, tables and figures in a single file."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .6rem 0; font-size: .85rem; display: block;
        overflow-x: auto; }
td, th { border: 1px solid #ddd; padding: .2rem .6rem; text-align: left; }
th { background: #f4f4f4; } tr:nth-child(even) td { background: #fafafa; }
img { max-width: 100%; border: 1px solid #eee; } code { background: #f4f4f4; padding: 0 .2rem; }
"""


def write_page(folder: Path) -> Path:
    """Turn report.md and its figures into report.html in the same folder."""
    text = (folder / "report.md").read_text(encoding="utf-8")
    body = "\n".join(_blocks(text, folder))
    title = html.escape(text.splitlines()[0].lstrip("# "))
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _blocks(text: str, folder: Path) -> list[str]:
    """Turn the Markdown that reports use (headings, lists, tables, images) into HTML."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        heading = re.match(r"(#+) (.*)", lines[0])
        image = re.match(r"!\[(.*)\]\((.*)\)", lines[0])
        if heading:
            level = len(heading[1])
            out.append(f"<h{level}>{_inline(heading[2])}</h{level}>")
        elif image:
            data = base64.b64encode((folder / image[2]).read_bytes()).decode()
            alt = html.escape(image[1])
            out.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
        elif lines[0].startswith("|"):
            out.append(_table(lines))
        elif lines[0].startswith("- "):
            items = "".join(f"<li>{_inline(line[2:])}</li>" for line in lines)
            out.append(f"<ul>{items}</ul>")
        else:
            out.append(f"<p>{_inline(' '.join(lines))}</p>")
    return out


def _table(lines: list[str]) -> str:
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines if "---" not in line]
    head = "".join(f"<th>{_inline(c)}</th>" for c in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{_inline(c)}</td>" for c in row) + "</tr>" for row in rows[1:]
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    escaped = re.sub(r"`([^`]*)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", escaped)

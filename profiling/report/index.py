"""`python -m profiling report --index`: every report in a sentence, with a page of its own."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from PIL import Image

from lit_probattn.configs import ConfigError
from lit_probattn.records.pages import markdown_body, page, title_of, with_pictures
from lit_probattn.records.provenance import replace_text
from profiling.report.findings import Summary, summary_of

OUT = Path("build/reports")
NAME = "report.md"
_THUMBNAIL = 420  # pixels
_STYLE = """
body { max-width: 80rem; }
nav { position: sticky; top: 0; background: #fff; padding: .6rem 0; border-bottom: 1px solid #ddd; }
nav label { margin-right: 1.2rem; } nav select { font: inherit; max-width: 16rem; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1.2rem;
       margin-top: 1rem; }
article { border: 1px solid #ddd; border-radius: 6px; padding: .8rem 1rem; }
article h2 { font-size: 1rem; margin: 0 0 .4rem; } article p { margin: .4rem 0; }
article img { border: 0; } article small { color: #666; } [hidden] { display: none !important; }
"""
_SCRIPT = """
const selects = [...document.querySelectorAll("select")];
const cards = [...document.querySelectorAll("article")];
function choose() {
  for (const card of cards)
    card.hidden = !selects.every(s => !s.value || card.dataset[s.id].split("|").includes(s.value));
  const shown = cards.filter(card => !card.hidden).length;
  document.querySelector("output").textContent = `${shown} of ${cards.length} reports`;
}
for (const part of new URLSearchParams(location.search))
  for (const select of selects) if (select.id === part[0]) select.value = part[1];
for (const select of selects) select.addEventListener("change", choose);
choose();
"""
_BACK = '<p><a href="{}">All reports</a></p>\n'


def write_index(*folders: Path, out: Path = OUT) -> list[Path]:
    """Write index.html, and a page for every report.md below folders; return the files.

    Raises:
        ConfigError: there is no report, or one names a picture that is not there.
    """
    reports = [(path, folder) for folder in folders for path in sorted(folder.rglob(NAME))]
    if not reports:
        raise ConfigError(f"--index {' '.join(map(str, folders))}: no {NAME} in it or below")
    cards, written = [], []
    for path, folder in reports:
        place = path.parent.relative_to(folder)
        name = place.as_posix() if place.parts else folder.absolute().name
        if len(folders) > 1:  # else two of one name would be one page
            name = f"{folder.name}/{name}"
        try:
            text = path.read_text(encoding="utf-8")
            body = with_pictures(markdown_body(text), path.parent)
            thumbnail = _first_picture(text, path.parent)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        file = out / name / "index.html"
        back = _BACK.format(os.path.relpath(out / "index.html", file.parent))
        replace_text(file, page(title_of(text), back + body))
        cards.append(_card(f"{name}/index.html", summary_of(text), thumbnail))
        written.append(file)
    summaries = [summary for _, summary in cards]
    body = "\n".join(
        [
            "<h1>Reports</h1>",
            _filters(summaries),
            "<main>",
            *(card for card, _ in cards),
            "</main>",
        ]
    )
    replace_text(out / "index.html", page("Reports", body, style=_STYLE, script=_SCRIPT))
    return [out / "index.html", *written]


def _filters(summaries: Sequence[Summary]) -> str:
    kinds: dict[str, Iterable[str]] = {
        "variant": {name for summary in summaries for name in summary.variants},
        "paper": {name for summary in summaries for name in summary.papers},
        "hardware": {summary.hardware for summary in summaries},
    }
    parts = []
    for kind, names in kinds.items():
        options = "".join(f"<option>{escape(name)}</option>" for name in sorted(names))
        select = f'<select id="{kind}"><option value="">all</option>{options}</select>'
        parts.append(f"<label>{kind} {select}</label>")
    return f"<nav>{''.join(parts)}<output>{len(summaries)} reports</output></nav>"


def _card(address: str, summary: Summary, thumbnail: str | None) -> tuple[str, Summary]:
    data = {
        "variant": "|".join(summary.variants),
        "paper": "|".join(summary.papers),
        "hardware": summary.hardware,
    }
    attributes = "".join(f' data-{kind}="{escape(value)}"' for kind, value in data.items())
    link = f'<a href="{escape(address)}">'
    shown = "" if thumbnail is None else f'{link}<img alt="" src="{thumbnail}"></a>'
    made = ", ".join([*summary.papers, summary.hardware])
    return (
        f"<article{attributes}><h2>{link}{escape(summary.title)}</a></h2>"
        f"<p>{escape(summary.finding)}</p>{shown}<p><small>{escape(made)}</small></p></article>",
        summary,
    )


def _first_picture(text: str, folder: Path) -> str | None:
    """Return the first picture of a report, small, as an address that carries its bytes."""
    found = re.search(r"!\[[^\]]*\]\(([^)]+\.png)\)", text)
    if found is None:
        return None
    buffer = io.BytesIO()
    with Image.open(folder / found[1]) as whole:
        small = whole.convert("RGB")
        small.thumbnail((_THUMBNAIL, _THUMBNAIL))
        small.quantize(64).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

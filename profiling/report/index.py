"""`python -m profiling report --index`: every report in a sentence, with a page of its own."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from PIL import Image

from lit_probattn.base.config_files import output_folder
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import refuse_to_replace, replace_text
from lit_probattn.records.pages import page, picture, read_report, title_of
from profiling.report.findings import Summary, summary_of

OUT = Path("build/reports")
NAME = "report.md"
_THUMBNAIL = 420  # pixels
_MOST_PIXELS = 50_000_000
_BAD_PICTURE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
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
        ConfigError: there is no report, one names a picture that is none of its folder, or a page
            cannot be written.
    """
    reports = [(path, folder) for folder in folders for path in sorted(folder.rglob(NAME))]
    if not reports:
        raise ConfigError(f"--index {' '.join(map(str, folders))}: no {NAME} in it or below")
    names = [_name_of(path, folder, len(folders) > 1) for path, folder in reports]
    refuse_to_replace(out / name / "index.html" for name in ("", *names))
    cards, written = [], []
    for (path, _), name in zip(reports, names, strict=True):
        report = read_report(path)
        try:
            thumbnail = _small(report.pictures[0]) if report.pictures else None
        except _BAD_PICTURE as error:
            raise ConfigError(f"{path}: its first picture cannot be read: {error}") from error
        file = out / name / "index.html"
        back = _BACK.format(os.path.relpath(out / "index.html", file.parent))
        _write(file, page(title_of(report.text), back + report.body))
        cards.append(_card(f"{name}/index.html", summary_of(report.text), thumbnail))
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
    _write(out / "index.html", page("Reports", body, style=_STYLE, script=_SCRIPT))
    return [out / "index.html", *written]


def _name_of(path: Path, folder: Path, several: bool) -> str:
    """Return the name of a report's page: its place, below the folder's name if there are more."""
    place = path.parent.relative_to(folder)
    name = place.as_posix() if place.parts else folder.absolute().name
    return f"{folder.name}/{name}" if several else name


def _write(file: Path, text: str) -> None:
    output_folder(file.parent)
    replace_text(file, text)


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


def _small(content: bytes) -> str:
    """Return a picture, small, as an address that carries its bytes."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(content), formats=["PNG"]) as whole:
        if whole.width * whole.height > _MOST_PIXELS:
            raise ValueError(f"{whole.width} x {whole.height} pixels, at most {_MOST_PIXELS:,}")
        small = whole.convert("RGB")
        small.thumbnail((_THUMBNAIL, _THUMBNAIL))
        small.quantize(64).save(buffer, "PNG", optimize=True)
    return picture(buffer.getvalue())

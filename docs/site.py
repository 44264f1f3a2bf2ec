"""Write the pages of the site, so that any generator of Markdown can build them: `make docs`.

    python docs/site.py [FOLDER]    # default: build/pages

Copies `docs/` and the reports with their figures, includes the files that pages name, draws
equations, and writes the tutorial notebook as a page. `mkdocs.yml` reads the folder.
"""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOK = "examples/tutorial.ipynb"
INCLUDED = re.compile(r"^--8<--\n(.+)\n--8<--$", re.MULTILINE)
EQUATION = re.compile(r"^```math\n(.+?)\n```$", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"\]\(\.\./(reports/[^)]+)\)")
_NOT_DRAWN = re.compile(r"<(metadata|style)\b.*?</\1>", re.DOTALL)  # a style applies to the page
_FIGURES = (".png", ".svg")


def drawn(equation: str) -> str:
    """Return an equation as SVG in the colour of the surrounding text.

    Raises:
        ValueError: mathtext does not support the LaTeX.
    """
    from matplotlib import rc_context
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    out = io.StringIO()
    styles = {"mathtext.fontset": "cm", "savefig.transparent": True, "svg.fonttype": "path"}
    with rc_context(styles):
        math_to_image(f"${equation}$", out, prop=FontProperties(size=14), format="svg")
    figure = out.getvalue()
    figure = _NOT_DRAWN.sub("", figure[figure.index("<svg") :])
    name = html.escape(equation, quote=True)
    figure = figure.replace("<svg", f'<svg fill="currentColor" role="img" aria-label="{name}"', 1)
    return f'<div class="equation">{" ".join(figure.split())}</div>'


def page(text: str) -> str:
    """Return a page of `docs/` with includes and equations for the site."""
    text = INCLUDED.sub(lambda found: (ROOT / found[1]).read_text("utf-8").rstrip(), text)
    text = _FIGURE.sub(r"](\1)", text)
    return EQUATION.sub(lambda found: drawn(found[1]), text)


def notebook_page(path: Path) -> str:
    """Return the cells of a notebook as Markdown, without outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts) + "\n"


def write(folder: Path) -> int:
    """Write all pages and figures into an emptied folder; return the number of pages."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted((ROOT / "docs").iterdir()):
        if path.suffix == ".md":
            text = page(path.read_text(encoding="utf-8"))
            (folder / path.name).write_text(text, encoding="utf-8")
        elif path.suffix in _FIGURES:
            shutil.copyfile(path, folder / path.name)
    (folder / "tutorial.md").write_text(notebook_page(ROOT / NOTEBOOK), encoding="utf-8")
    for path in sorted((ROOT / "reports").rglob("*")):
        if path.suffix in (".md", *_FIGURES):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return sum(1 for _ in folder.rglob("*.md"))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build/pages"
    print(f"{target}: {write(target)} pages")

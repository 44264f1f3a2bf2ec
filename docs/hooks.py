"""What `mkdocs build` adds to the pages of this folder: the reports, their pictures, equations.

Pages name pictures as one finds them in the repository (`../reports/NAME/figures/X.png`), so that
they show there too; in the site they lie in `reports/`. A block of `math` is an equation in LaTeX,
one line of what matplotlib's mathtext knows; it becomes a drawing in the page, without a script.
"""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_PICTURE = re.compile(r"\]\((?:\.\./)+(reports/[^)]+\.png)\)")
_NOT_DRAWN = re.compile(r"<(metadata|style)\b.*?</\1>", re.DOTALL)  # a style is the whole page's
_EQUATION = re.compile(r"^```math\n(.+?)\n```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the reports as pages, and the pictures that pages name."""
    own = list(files.documentation_pages())
    for path in sorted((ROOT / "reports").rglob("*")):
        if path.suffix in (".md", ".png"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for page in own:
        for name in _PICTURE.findall(Path(page.abs_src_path or "").read_text(encoding="utf-8")):
            if files.get_file_from_path(name) is None:
                source = str(ROOT / name)
                files.append(File.generated(config, name, abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point pictures of the repository to their place in the site; draw equations."""
    up = "../" * page.file.src_uri.count("/")
    markdown = _PICTURE.sub(lambda found: f"]({up}{found[1]})", markdown)
    return _EQUATION.sub(lambda found: drawn(found[1]), markdown)


def drawn(equation: str) -> str:
    """Return an equation as SVG in the colour of the text around it.

    Raises:
        ValueError: mathtext does not know the LaTeX.
    """
    from matplotlib import rc_context
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    out = io.StringIO()
    styles = {"mathtext.fontset": "cm", "savefig.transparent": True, "svg.fonttype": "path"}
    with rc_context(styles):
        math_to_image(f"${equation}$", out, prop=FontProperties(size=14), format="svg")
    picture = out.getvalue()
    picture = re.sub(
        r"<(metadata|style)\b.*?</\1>", "", picture[picture.index("<svg") :], flags=re.S
    )
    name = html.escape(equation, quote=True)
    picture = picture.replace("<svg", f'<svg fill="currentColor" role="img" aria-label="{name}"', 1)
    return f'<div class="equation">{" ".join(picture.split())}</div>'

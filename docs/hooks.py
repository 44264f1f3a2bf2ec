"""What `mkdocs build` adds to the pages of this folder: the reports, and their pictures.

Pages name pictures as one finds them in the repository (`../reports/NAME/figures/X.png`), so that
they show there too; in the site they lie in `reports/`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_PICTURE = re.compile(r"\]\((?:\.\./)+(reports/[^)]+\.png)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the front page of the reports with all that it links to, and pictures that pages name."""
    from profiling.report.index import write_index

    out = ROOT / "build/reports"
    for path in write_index(ROOT / "reports", out):
        place = f"reports/{path.relative_to(out).as_posix()}"
        files.append(File.generated(config, place, abs_src_path=str(path)))
    for page in list(files.documentation_pages()):
        for name in _PICTURE.findall(Path(page.abs_src_path or "").read_text(encoding="utf-8")):
            if files.get_file_from_path(name) is None:
                source = str(ROOT / name)
                files.append(File.generated(config, name, abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point pictures of the repository to their place in the site."""
    up = "../" * page.file.src_uri.count("/")
    return _PICTURE.sub(lambda found: f"]({up}{found[1]})", markdown)

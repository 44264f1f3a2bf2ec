"""The documentation is a site whose links and pages hold."""

from __future__ import annotations

import html
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import lit_probattn
from tests.pages.blocks import SNIPPET
from tests.support.paths import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PAGES = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
EQUATION = re.compile(r"^```math\n(.+?)\n```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def addresses(part) -> list[str]:
    """Return what the navigation names, from any depth."""
    if isinstance(part, str):
        return [part]
    inside = part.values() if isinstance(part, dict) else part
    return [address for item in inside for address in addresses(item)]


def test_the_navigation_names_pages_that_exist():
    named = addresses(yaml.safe_load(CONFIG)["nav"])
    assert len(set(named)) == len(named)
    assert set(named) - PAGES == {"reports/README.md"}  # added by docs/hooks.py


@pytest.mark.parametrize("page", sorted(PAGES))
def test_pictures_show_in_the_repository_too(page):
    path = ROOT / "docs" / page
    for picture in PICTURE.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / picture).is_file(), picture


def test_every_family_has_equation_picture_and_a_line_that_runs():
    for path in sorted((ROOT / "docs/variants").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert "attn_weights" in text
        assert EQUATION.search(text)
        assert PICTURE.search(text)
        lines = re.findall(r"^layer = (lit_probattn\.create\(.*\))$", text, re.MULTILINE)
        assert lines
        for line in lines:
            assert eval(line, {"lit_probattn": lit_probattn}).embed_dim == 256


def test_equations_are_drawn(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    hooks = importlib.import_module("hooks")
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for equation in EQUATION.findall(path.read_text(encoding="utf-8")):
            drawing = ElementTree.fromstring(hooks.drawn(equation))
            (picture,) = drawing
            assert picture.get("aria-label") == equation
            assert (
                len(drawing.findall(".//{*}use")) >= len(re.sub(r"\\[a-z]+|\W", "", equation)) / 2
            )
    with pytest.raises(ValueError, match="no_such_symbol"):
        hooks.drawn(r"a \no_such_symbol b")


def test_every_example_is_on_a_page_as_it_is():
    """By the line of the site that includes a file, which a formatter once took for a product."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    shown = {name for text in pages for name in SNIPPET.findall(text)}
    named = {path.name for path in (ROOT / "examples").glob("*.py")}
    others = {name for name in named if any(f"`examples/{name}`" in text for text in pages)}
    assert {name.removeprefix("examples/") for name in shown} <= named == others
    assert len(shown) >= 4


def test_every_variant_is_named_on_a_page_of_its_family():
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/variants").glob("*.md")]
    names = [name for name in lit_probattn.list_attention() if "/" not in name]
    assert [name for name in names if not any(f"`{name}`" in text for text in pages)] == []


@pytest.mark.slow
def test_the_site_is_built_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    api = (site / "api.html").read_text(encoding="utf-8")
    assert "num_components" in api
    assert (site / "reports/index.html").is_file()
    examples = html.unescape(re.sub(r"<[^>]+>", "", (site / "examples.html").read_text("utf-8")))
    for name in SNIPPET.findall((ROOT / "docs/examples.md").read_text(encoding="utf-8")):
        first = (ROOT / name).read_text(encoding="utf-8").splitlines()[0]
        assert first in examples
    for path in sorted(site.glob("variants/*.html")):
        text = path.read_text("utf-8")
        source = (ROOT / f"docs/variants/{path.stem}.md").read_text(encoding="utf-8")
        assert text.count('<div class="equation"><svg') == len(EQUATION.findall(source)) > 0
    outside = r"(?:src|href)=\"(https?://[^\"]+)\""
    for path in [site / "index.html", *sorted(site.glob("variants/*.html"))]:
        loaded = re.findall(rf"<(?:script|link|img)[^>]*{outside}", Path(path).read_text("utf-8"))
        assert loaded == []

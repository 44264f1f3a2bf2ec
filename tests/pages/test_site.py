"""The documentation is a site whose links and pages hold."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from xml.etree import ElementTree

import pytest
import yaml

import lit_probattn
from lit_probattn.__main__ import COMMANDS, RUN
from tests.pages.blocks import SNIPPET
from tests.support.paths import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PAGES = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
EQUATION = re.compile(r"^```math\n(.+?)\n```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^):#]+)(?:#[^)]*)?\)")
FIGURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def addresses(part) -> list[str]:
    """Return what the navigation names, from any depth."""
    if isinstance(part, str):
        return [part]
    inside = part.values() if isinstance(part, dict) else part
    return [address for item in inside for address in addresses(item)]


@cache
def site():
    """Return the program that writes the pages of the site."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_names_every_page():
    named = addresses(yaml.safe_load(CONFIG)["nav"])
    assert len(set(named)) == len(named)
    assert set(named) == PAGES | {"reports/README.md", "tutorial.md"}  # written by docs/site.py


def test_there_are_at_most_22_pages():
    assert len(PAGES) <= 22


@pytest.mark.parametrize("page", sorted(PAGES))
def test_figures_and_links_hold_in_the_repository(page):
    path = ROOT / "docs" / page
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).is_file(), target


def test_every_family_has_equation_figure_and_a_line_that_runs():
    text = (ROOT / "docs/variants.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    families = [section for section in sections if "```" in section]
    assert len(families) == 5
    for family in families:
        assert EQUATION.search(family), family
        lines = re.findall(r"^layer = (lit_probattn\.create\(.*\))$", family, re.MULTILINE)
        assert lines, family
        for line in lines:
            assert eval(line, {"lit_probattn": lit_probattn}).embed_dim == 256
    assert len(FIGURE.findall(text)) >= 4


def test_equations_are_drawn():
    count = 0
    for path in sorted((ROOT / "docs").glob("*.md")):
        for equation in EQUATION.findall(path.read_text(encoding="utf-8")):
            count += 1
            drawing = ElementTree.fromstring(site().drawn(equation))
            (figure,) = drawing
            assert figure.get("aria-label") == equation
            assert (
                len(drawing.findall(".//{*}use")) >= len(re.sub(r"\\[a-z]+|\W", "", equation)) / 2
            )
    assert count >= 10
    with pytest.raises(ValueError, match="no_such_symbol"):
        site().drawn(r"a \no_such_symbol b")


def test_every_example_is_on_a_page_as_it_is():
    """By the line of the site that includes a file, which a formatter once took for a product."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    shown = {name for text in pages for name in SNIPPET.findall(text)}
    named = {path.name for path in (ROOT / "examples").glob("*.py")}
    others = {name for name in named if any(f"`examples/{name}`" in text for text in pages)}
    scripts = {name.removeprefix("examples/") for name in shown if name.startswith("examples/")}
    assert scripts <= named == others
    assert len(scripts) >= 4


def test_every_variant_is_named_on_the_page():
    text = (ROOT / "docs/variants.md").read_text(encoding="utf-8")
    names = [name for name in lit_probattn.list_attention() if "/" not in name]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_command_is_on_the_page_with_its_help():
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert [name for name in [*RUN, *COMMANDS] if f"`{name}`" not in text] == []
    assert len({*RUN, *COMMANDS}) <= 17


def test_pages_of_the_site_include_files_and_figures(tmp_path):
    """Nothing is left for a generator: no inclusion, no equation in LaTeX, no figure outside."""
    count = site().write(tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert count == len(written)
    assert written >= PAGES | {"reports/README.md", "tutorial.md"}
    for name in PAGES | {"tutorial.md"}:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "--8<--" not in text
        assert "```math" not in text
        for figure in FIGURE.findall(text):
            assert (tmp_path / figure).is_file(), (name, figure)
    plain = (ROOT / "examples/plain_torch.py").read_text(encoding="utf-8").splitlines()[0]
    assert plain in (tmp_path / "quick_start.md").read_text(encoding="utf-8")


GENERATORS = {"mkdocs": ["mkdocs", "material", "mkdocstrings"], "zensical": ["zensical"]}


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_the_site_is_built_strictly(generator, tmp_path):
    for module in GENERATORS[generator]:
        pytest.importorskip(module)
    site().write(tmp_path / "build/pages")
    (tmp_path / "mkdocs.yml").write_text(CONFIG.replace("paths: [.]", f"paths: [{ROOT}]"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", generator, "build", "--strict"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = tmp_path / "build/docs"
    api = (built / "api.html").read_text(encoding="utf-8")
    assert "num_components" in api
    assert (built / "reports/index.html").is_file()
    pages = {name.removesuffix(".md") for name in PAGES | {"tutorial.md"}}
    assert {path.stem for path in built.glob("*.html")} >= pages
    start = html.unescape(re.sub(r"<[^>]+>", "", (built / "quick_start.html").read_text("utf-8")))
    example = (ROOT / "examples/plain_torch.py").read_text(encoding="utf-8")
    assert example.splitlines()[0] in start
    variants = (built / "variants.html").read_text("utf-8")
    source = (ROOT / "docs/variants.md").read_text(encoding="utf-8")
    assert variants.count('<div class="equation"><svg') == len(EQUATION.findall(source)) > 0
    outside = r"(?:src|href)=\"(https?://[^\"]+)\""
    for text in ((built / "index.html").read_text("utf-8"), variants):
        assert re.findall(rf"<(?:script|link|img)[^>]*{outside}", text) == []

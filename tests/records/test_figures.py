"""Figures of reports: colours of variants, files and their metadata, sizes of panels."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import combinations
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from lit_probattn import list_attention
from lit_probattn.records.figures import (
    COLOURS,
    LEAST_PANEL,
    MAX_BYTES,
    OTHERS,
    ReportFigure,
    colour_of,
    palette_of,
    panel_pixels,
    panels,
    readable,
    save_figure,
)
from tests.support.paths import ROOT
from tests.support.slow import mostly_slow

matplotlib.use("Agg")
NOTE = ("how it was made " * 9).strip()
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"  # of an SVG file's metadata


SKETCHED = {
    "_drawn": lambda figure, dpi: Image.new("RGB", (9, 9)),
    "_svg_bytes": lambda *_: b"<svg/>",
}


def lines():
    figure, [[axis]] = panels(1, 1, 5, 3)
    axis.plot([0, 1], [0, 1])
    figure.supxlabel("keys")
    return figure


def words_of(path: Path) -> str:
    return " ".join("".join(ElementTree.parse(path).getroot().itertext()).split())


def test_a_figure_is_a_png_and_an_svg_file_with_its_note_as_metadata(tmp_path):
    figure = lines()
    files = save_figure(figure, tmp_path / "new" / "a.png", NOTE, "a claim")
    assert [path.name for path in files] == ["a.png", "a.svg"]
    assert all(0 < path.stat().st_size <= MAX_BYTES for path in files)
    image = Image.open(files[0])
    assert (image.text["Title"], image.text["Description"]) == ("a claim", NOTE)
    assert image.size == (600, 360), "the note is in the file, not in the drawing"
    assert "a claim" in words_of(files[1])
    assert NOTE in words_of(files[1])
    again = save_figure(lines(), tmp_path / "b.png", NOTE, "a claim")
    assert again[1].read_bytes() == files[1].read_bytes(), "equal rows give equal files"


def test_images_have_no_grid(tmp_path, monkeypatch):
    for drawing, sketch in SKETCHED.items():
        monkeypatch.setattr(f"lit_probattn.records.figures.{drawing}", sketch)
    figure, [[image, curve]] = panels(1, 2, 3, 3)
    image.imshow(np.eye(3))
    curve.plot([0, 1])
    save_figure(figure, tmp_path / "a.png", "a note")
    shown = [any(line.get_visible() for line in a.get_xgridlines()) for a in (image, curve)]
    assert shown == [False, True]


def test_a_large_figure_is_reduced_and_has_no_svg_file(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_probattn.records.figures.MAX_BYTES", 40_000)
    figure, [[axis]] = panels(1, 1, 2.5, 2.5)
    (tmp_path / "a.svg").write_text("an earlier one")
    noise = np.random.default_rng(0).random((250, 250))
    axis.imshow(noise, interpolation="nearest")
    (path,) = save_figure(figure, tmp_path / "a.png", "a note")
    assert path.stat().st_size <= 40_000
    assert not (tmp_path / "a.svg").exists()


@pytest.mark.parametrize(
    ("rows", "columns"), mostly_slow([(1, 1), (1, 2), (1, 3), (2, 5)], [(1, 2)])
)
def test_panels_have_at_least_200_pixels(rows, columns, tmp_path, monkeypatch):
    for drawing, sketch in SKETCHED.items():
        monkeypatch.setattr(f"lit_probattn.records.figures.{drawing}", sketch)
    figure, axes = panels(rows, columns, 0.9, 0.8)
    for axis in (axis for line in axes for axis in line):
        axis.set(xlabel="a long name of an axis", ylabel="another long name")
    assert min(min(size) for size in panel_pixels(figure)) < LEAST_PANEL
    save_figure(figure, tmp_path / "a.png", "a note")
    assert min(min(size) for size in panel_pixels(figure)) >= LEAST_PANEL


def test_every_variant_of_the_readme_has_a_colour_of_its_own():
    """By the name of the preset, the name in the README and the name in a sweep."""
    table = re.findall(
        r"^\| (`[a-z_`,; ]+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    presets = [name for line in table for name in re.findall(r"`([a-z_]+)`", line)]
    assert len(presets) >= 15
    colours = {name: colour_of(name) for name in presets}
    assert set(colours.values()) <= set(COLOURS.values()), "declared, not by a digest"
    assert [c for c, count in Counter(colours.values()).items() if count > 1] == []
    assert len(set(COLOURS.values())) == len(COLOURS)
    for one, other in (
        ("sMGK, 4 heads", "smgk4"),
        ("Hard FiSH, 8 heads from 2 score maps", "hard_fish2"),
        ("MGK with hard E-step, 4 heads", "mgk_hard_e"),
        ("Softmax, 8 heads", "softmax8"),
        ("FiSH (fish_4)", "fish"),
    ):
        assert colour_of(one) == colour_of(other)


def test_variants_without_a_declared_colour_keep_theirs():
    assert colour_of("mine, 4 heads") == colour_of("mine")
    assert colour_of("mine") not in COLOURS.values()


def test_every_preset_has_a_declared_colour_with_and_without_options():
    presets = [name for name in list_attention() if "/" not in name]
    assert len(presets) > 30
    for name in presets:
        assert colour_of(name) in COLOURS.values(), name
        assert colour_of(f"{name} dropout=0, 4 heads") == colour_of(name)


def lab(colour):
    """CIE L*a*b* of an sRGB colour (IEC 61966-2-1, white D65)."""
    given = np.array(to_rgb(colour))
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(matrix @ linear / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def least_distance(colours):
    return min(float(np.linalg.norm(lab(a) - lab(b))) for a, b in combinations(colours, 2))


def test_sixteen_variants_of_a_chart_have_different_colours():
    """Of presets, and of a user's variants, whose names have colliding digests."""
    assert least_distance([*COLOURS.values(), *OTHERS]) > 15
    own = [f"mine{'abcdefghijklmnop'[n]} alpha=0.5, 4 heads" for n in range(16)]
    assert len({colour_of(name) for name in own}) < 16
    found = palette_of([*own, "MGK, 4 heads", "softmax"])
    assert len(set(found.values())) == 18
    assert found["MGK, 4 heads"] == colour_of("MGK")


def test_series_repeat_neither_colour_nor_line():
    figure, [[axis]] = panels(1, 1, 5, 3)
    lines = [axis.plot([0, n])[0] for n in range(40)]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 40
    assert {line.get_linestyle() for line in lines[:17]} == {"-"}
    plt.close(figure)


def test_settings_of_one_variant_are_shades_of_its_colour():
    found = palette_of(["GFiSH, 8 heads from 2 score maps", "GFiSH, 8 heads", "MGK, 4 heads"])
    assert next(iter(found)) == "GFiSH, 8 heads from 2 score maps"
    assert len(set(found.values())) == 3
    assert found["MGK, 4 heads"] == colour_of("MGK")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("Softmax, 8 heads", "softmax, 8 heads"),
        ("GFiSH, 4 of 8 heads", "GFiSH, 8 heads from 4 score maps"),
        ("Hard FiSH, 4/8 heads", "Hard FiSH, 8 heads from 4 score maps"),
        ("hard_gfish_4", "Hard GFiSH (hard_gfish_4)"),
        ("talking_heads, 4 heads", "talking heads, 4 heads"),
        ("smgk model.init_args.lr=0.001, 4 heads", "sMGK model.init_args.lr=0.001, 4 heads"),
        ("a variant of mine, 3 heads", "a variant of mine, 3 heads"),
    ],
)
def test_rows_are_named_as_in_the_readme(label, name):
    assert readable(label) == name


def test_the_claim_is_the_title():
    figure = ReportFigure("it costs 0.50 of it", "a caption", lines).drawn()
    assert figure.get_suptitle() == "it costs 0.50 of it"


def test_committed_figures():
    """At most two per report, as SVG files with a claim, a caption and their origin."""
    seen = 0
    for folder in sorted((ROOT / "reports").rglob("figures")):
        files = list(folder.glob("*.svg"))
        assert 1 <= len({path.stem for path in files}) <= 2, folder
        if folder.parent.name.startswith("kernels_cpu"):
            continue  # drawn when the benchmark runs, and shown as PNG
        text = (folder.parent / "report.md").read_text(encoding="utf-8")
        for path in files:
            root = ElementTree.parse(path).getroot()
            title, told = (root.findtext(f".//{DUBLIN_CORE}{n}") for n in ("title", "description"))
            assert title.replace("|", "") in text.replace("|", "")
            assert "python -m" in told
            assert path.stat().st_size <= MAX_BYTES
            assert f"(figures/{path.stem}.svg)" in text
            seen += 1
    assert seen >= 15

"""The demo: what its page shows, and what it does when interrupted or misused."""

from __future__ import annotations

import io
import re
import shlex
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from datamodules import expressions
from lit_probattn.__main__ import COMMANDS, RUN
from lit_probattn.commands.demo import command, cost, display, training
from lit_probattn.commands.demo.cost import Quantity
from lit_probattn.commands.demo.drawing import attention_map, curves
from lit_probattn.commands.demo.page import NEXT, summary
from tests.support.helpers import error_of
from tests.support.pages import Page, needs_browser, screenshot

NAMES = list(training.VARIANTS)


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expressions, "_NUM_CHUNKS", 3)
        patch.setattr(expressions, "NUM_TEST", 100)
        patch.setattr(cost, "LONG", 128)
        patch.setattr(cost, "_ROUNDS", 2)
        yield


@pytest.fixture(scope="module")
def data(small):
    """Few test expressions: they are evaluated after every step."""
    train, test = expressions.draw(0)
    return train, test.take(slice(40))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A very short demo: its folder and its page."""
    folder = tmp_path_factory.mktemp("demo")
    assert command.main(["--steps", "4", "--out", str(folder), "--no-open"]) == 0
    return folder, (folder / "demo.html").read_text(encoding="utf-8")


def value_of(words: list[str]) -> int:
    """Evaluate an expression as Python does."""
    calls = {"[MIN": "min([", "[MAX": "max([", "]": "]),"}
    return eval("".join(calls.get(word, f"{word},") for word in words))[0]


def test_the_page_is_one_file_that_loads_nothing(demo):
    folder, text = demo
    assert [path.name for path in folder.iterdir()] == ["demo.html"]
    assert Page(text).addresses() == []
    assert "http" not in text
    assert "@import" not in text


def test_the_page_shows_curves_costs_a_sample_and_what_is_next(demo):
    page = Page(demo[1])
    assert page.attributes("svg", "class") == ["curves"] + ["map"] * 2 * (4 + 2)
    assert page.texts["th"] == ["", *NAMES, "ratio", ""]
    (sample,) = [text for text in page.texts["p"] if re.fullmatch(r"\[M.* = \d", text)]
    *words, _, value = sample.split()
    assert value_of(words) == int(value)
    cells = len(words) ** 2
    told = [text for text in page.texts["title"] if "→" in text]
    assert len(told) == 12 * cells
    guesses = [text for text in page.texts["p"] if " predicts " in text]
    assert [text.split(" predicts ")[0] for text in guesses] == NAMES
    assert [name for name, _ in NEXT] == [
        text.removesuffix(":") for text in page.texts["p"] if text.removesuffix(":") in dict(NEXT)
    ]
    assert page.texts["code"] == [how for _, how in NEXT]


def test_costs_are_those_of_the_models(demo):
    page = Page(demo[1])
    rows = np.array(page.texts["td"]).reshape(-1, 5)
    counted = {row[0]: [int(text.replace(",", "")) for text in row[1:3]] for row in rows[:2]}
    sides = training.make_sides(0)
    whole = [sum(p.numel() for p in side.model.parameters()) for side in sides]
    assert counted["parameters, whole model"] == whole
    assert all(float(row[3]) > 0 for row in rows)
    assert [row[4] for row in rows] == ["counted"] * 4 + ["measured"] * 2 + [
        "predicted to the byte"
    ]


def test_the_next_commands_exist():
    for _, how in NEXT:
        first, second, *_ = shlex.split(how)
        assert first == "python" or second in {**RUN, **COMMANDS}


def test_the_summary_says_what_is_dearer():
    costs = [Quantity(name, (1, r), r, 0, "") for name, r in (("a", 0.5), ("b", 1.2), ("c", 1.0))]
    assert (
        summary(costs, "x", "y") == "y needs less than x in: a. y needs not less than x in: b; c."
    )
    assert summary(costs[:1], "x", "y") == "y needs less than x in: a."


def test_a_cell_of_a_map_says_its_row_and_column():
    weights = torch.tensor([[0.25, 0.75], [0.0, 1.0]])
    found = Page(attention_map(weights, ["<a", "b"], "layer 1", "#000"))
    assert found.texts["title"] == [
        *("<a (position 1) → <a (position 1): 0.250", "<a (position 1) → b (position 2): 0.750"),
        *("b (position 2) → <a (position 1): 0.000", "b (position 2) → b (position 2): 1.000"),
    ]
    assert found.attributes("rect", "fill-opacity") == ["0.25", "0.75", "0.00", "1.00"]


def test_points_of_curves_rise_with_their_value():
    found = Page(curves({"a": [(0, 10.0), (7, 90.0)]}, "accuracy"))
    (low, high), (left, right) = (
        [float(x) for x in found.attributes("circle", name)] for name in ("cy", "cx")
    )
    assert high < low
    assert left < right


@needs_browser
def test_the_page_is_drawn(demo, tmp_path):
    folder, _ = demo
    pixels = screenshot(folder / "demo.html", tmp_path / "demo.png").reshape(-1, 3).astype(int)
    for colour in ((0x44, 0x77, 0xAA), (0xCC, 0x66, 0x77)):  # a curve of each side
        assert (abs(pixels - colour).sum(1) < 12).sum() > 100


def test_expressions_have_their_values_and_none_is_in_both_splits():
    train, test = expressions.draw(3)
    assert len(test.values) == expressions.NUM_TEST
    for data in (train, test):
        for index in range(0, 100):
            assert value_of(data.words(index)) == data.values[index]
    words = [{tuple(data.words(i)) for i in range(len(data.values))} for data in (train, test)]
    assert words[0] & words[1] == set()


def test_steps_repeat_to_the_bit(data):
    losses = []
    for _ in range(2):
        sides = training.make_sides(5)
        training.train(sides, data, seed=5, steps=2, seconds=1.0, show=lambda done: None)
        losses.append([side.losses for side in sides])
    assert losses[0] == losses[1]
    assert [len(found) for found in losses[0]] == [2, 2]


def test_both_learn(data):
    sides = training.make_sides(0)
    training.train(sides, data, seed=0, steps=20, seconds=1.0, show=lambda done: None)
    for side in sides:
        assert side.accuracy[0][1] < 0.2
        assert side.accuracy[-1][0] == 20
        assert side.accuracy[-1][1] > 0.3


@pytest.mark.parametrize("step", [1, 2])
def test_an_interruption_leaves_both_with_the_same_steps(step, data, monkeypatch):
    """It comes in the second step of the first side, or of the second side."""
    sides = training.make_sides(0)
    real, calls = sides[step - 1].step, []

    def interrupted(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(batch)

    monkeypatch.setattr(sides[step - 1], "step", interrupted)
    settings = {"seed": 0, "steps": 9, "seconds": 1.0, "show": lambda done: None}
    assert not training.train(sides, data, **settings)
    assert len(sides[0].losses) == len(sides[1].losses) == step


def test_interrupted_it_writes_the_page_from_what_there_is(tmp_path, monkeypatch, capsys):
    """Also where the last evaluation was some steps ago."""
    step, calls = training.Side.step, []

    def stop(self, batch):
        calls.append(batch)
        if len(calls) == 8:  # the second side's fourth
            raise KeyboardInterrupt
        step(self, batch)

    opened = []
    monkeypatch.setattr(training.Side, "step", stop)
    monkeypatch.setattr(cost, "_peak", lambda attention: 1 << 20)
    monkeypatch.setattr(command, "open_page", opened.append)
    assert command.main(["--steps", "40", "--out", str(tmp_path), "--no-open"]) == 130
    text = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert "4 steps of 64 expressions each" in text
    assert "Training was interrupted" in text
    assert "step 4:" in " ".join(Page(text).texts["title"])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "demo.html")
    assert opened == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], "--seconds must be above 0, received 0"),
        (["--seconds", "nan"], "--seconds must be above 0, received nan"),
        (["--seed", "-1"], "--seed must be at least 0 and below 2^63, received -1"),
        (
            ["--seed", str(2**70)],
            f"--seed must be at least 0 and below 2^63, received {2**70}",
        ),
        (["--out", "FILE"], "--out FILE is a file: expected a folder"),
        (["--out", "FILE/inside"], "--out FILE/inside: Not a directory"),
    ],
)
def test_bad_flags_are_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    assert command.main(words) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_steps_of_a_run_are_at_least_one():
    line = "argument --steps: must be at least 1, received 0"
    assert line in error_of(["--steps", "0"], command.main)


def test_steps_and_seconds_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--steps", "1", "--seconds", "9", "--out", str(tmp_path), "--no-open"])
    assert "--seconds: not allowed with argument --steps" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [True, False])
def test_a_browser_opens_only_where_there_is_a_display(shown, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(command, "has_display", lambda: shown)
    monkeypatch.setattr("webbrowser.open", opened.append)
    command.open_page(tmp_path / "demo.html")
    assert opened == ([(tmp_path / "demo.html").as_uri()] if shown else [])


def trained_sides() -> list[training.Side]:
    sides = training.make_sides(0)
    for side in sides:
        side.losses, side.accuracy = [2.0] * 20, [(0, 0.1), (20, 0.555)]
    return sides


def shown_by(console_is_terminal: bool, encoding: str = "utf-8") -> str:
    sides = trained_sides()
    kept = io.BytesIO()
    file = io.TextIOWrapper(kept, encoding=encoding, newline="")
    show = display.Display(sides, file)
    show.console = Console(file=file, force_terminal=console_is_terminal, width=100)
    with show:
        show(0.5)
    file.flush()
    return kept.getvalue().decode(encoding)


def test_off_a_terminal_and_without_rich_there_are_plain_lines(monkeypatch, capsys):
    expected = f"step 20  {NAMES[0]}: 55.5 % right   {NAMES[1]}: 55.5 % right\n"
    assert shown_by(False) == expected
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with display.Display(trained_sides()) as show:
        show(0.5)
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("encoding", "parts"),
    [
        ("utf-8", ("\x1b[", "▁▄", "Ctrl-C")),
        *((name, (".=", "####")) for name in ("ascii", "cp1252", "latin-1")),
    ],
)
def test_a_terminal_has_bars_that_it_can_show(encoding, parts):
    text = shown_by(True, encoding)
    for part in (*NAMES, "55.5 %", "50 %", *parts):
        assert part in text


def test_a_long_curve_is_thinned_and_ends_with_the_newest():
    assert display.spark([0.0, 1.0]) == " █"
    long = display.spark([0.0] * 99 + [1.0])
    assert len(long) == 40
    assert long.endswith(" █")

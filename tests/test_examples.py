"""The scripts of examples/ run as they stand, and are short."""

from __future__ import annotations

import functools
import os
import re
import sys

import pytest
import timm

from tests.support.forks import Forked, print_utf8
from tests.support.fresh import fresh_python
from tests.support.paths import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 40


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["short", "whole"])
def short(request) -> bool:
    """Whether the script trains for three steps only; it then learns nothing."""
    return request.param


def run(script: str, folder, prepare=lambda: None, short: bool = False) -> str:
    """Run a script in an empty folder, in a forked process; return what it prints.

    `prepare` is called there before.
    """
    path = ROOT / "examples" / script
    code = path.read_text(encoding="utf-8")
    if short:
        code, count = re.subn(r"(for step in range\(|max_steps=)\d+", r"\g<1>3", code)
        assert count == 1

    def work() -> int:
        print_utf8()
        prepare()
        os.chdir(folder)
        sys.argv = [script]
        exec(compile(code, str(path), "exec"), {"__name__": "__main__"})
        return 0

    log = folder / "printed.log"
    status = Forked(work, os.environ, log).wait()
    shown = log.read_text(encoding="utf-8")
    assert status == 0, shown
    return shown


def test_a_forked_process_has_the_environment_it_is_given(tmp_path):
    log = tmp_path / "log"
    for environment in (os.environ, {"GIVEN": "1"}):
        expected = dict(environment)
        work = lambda expected=expected: int(dict(os.environ) != expected)  # noqa: E731
        assert Forked(work, environment, log).wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_examples_import_what_they_need(script, tmp_path):
    """A forked process has what other tests imported; this one has nothing."""
    fresh_python(script, cwd=tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_examples_are_short_and_tested(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    assert f"test_{script.stem}" in globals()


def test_swap_timm(short, tmp_path):
    """With as many layers as the model has by its name, or with fewer."""
    depth = 2 if short else 12

    def prepare():
        timm.create_model = functools.partial(timm.create_model, depth=depth)

    shown = run("swap_timm.py", tmp_path, prepare, short)
    assert f"{depth} of {depth} attention layers are now mgk" in shown
    errors = [float(found) for found in re.findall(r"squared error ([0-9.]+)", shown)]
    assert len(errors) == (1 if short else 3)
    assert short or errors[2] < errors[1] < errors[0] / 2
    assert shown.endswith("loaded again, equal: True\n")


def test_plain_torch(short, tmp_path):
    shown = run("plain_torch.py", tmp_path, short=short)
    right = [int(found) for found in re.findall(r"(\d+) % right", shown)]
    assert len(right) == (1 if short else 5)
    assert right[0] < 45  # four colours
    assert short or right[-1] > 95
    assert shown.endswith("maps: (64, 2, 16, 16)\n")


def test_hugging_face(short, tmp_path):
    pytest.importorskip("transformers")
    shown = run("hugging_face.py", tmp_path, short=short)
    assert "2 of 2 attention layers are now mgk" in shown
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+)", shown)]
    assert short or losses[-1] < losses[0] / 2
    assert shown.endswith("generated: 8 equal without the cache: True\n")


def test_generation(short, tmp_path):
    shown = run("generation.py", tmp_path, short=short)
    learned = "temperature 0.0: the quick brown fox jumps over the lazy do\n" in shown
    assert short or learned
    assert re.search(r"temperature 0.8: the quick \S", shown)


def test_own_variant(tmp_path):
    shown = run("own_variant.py", tmp_path)
    error = re.search(r"^blockwise differs from the reference by (\S+)$", shown, re.M)
    assert error
    assert float(error[1]) < 1e-5
    assert shown.endswith("multiply-adds for 600 tokens: 55,910,400\n")


def test_after_the_scores(tmp_path):
    shown = run("studies/after_the_scores.py", tmp_path)
    errors = re.findall(r"^(\w+): blockwise differs from the reference by (\S+)$", shown, re.M)
    assert [name for name, _ in errors] == ["MultiToken", "Interleaved"]
    assert all(float(error) < 1e-5 for _, error in errors)


def test_own_data(short, tmp_path):
    path = tmp_path / "reviews.csv"
    rows = [
        f"{'a fine' if number % 2 else 'a dull'} film {number},{number % 2}" for number in range(99)
    ]
    if short:  # the user's table
        path.write_text("\n".join(["review,sentiment", *rows]), encoding="utf-8")
    shown = run("own_data.py", tmp_path, short=short)
    assert len(path.read_text(encoding="utf-8").splitlines()) == (100 if short else 301)
    assert "reviews.csv: texts from column 'review', labels from 'sentiment'" in shown
    accuracy = re.search(r"^accuracy on the test split: (\S+)$", shown, re.M)
    assert accuracy
    assert short or float(accuracy[1]) > 0.9

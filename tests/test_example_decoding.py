"""The study of decoding: what is timed translates alike, ratios, refusals."""

from __future__ import annotations

import argparse
import csv

import pytest
import torch

from examples.studies import decoding
from lit_probattn.models.search import Hypothesis, sample
from profiling import study
from tests.support.forks import program
from tests.support.helpers import error_of
from tests.support.paths import ROOT

SMALL = ["--lengths", "2", "5", "--tokens", "4", "--source", "6", "--batch", "2"]
SMALL += ["--train_batch", "2", "--embed_dim", "16", "--layers", "1", "--vocab", "23"]
SIZES = {"lengths": [5], "tokens": 4, "source": 6, "embed_dim": 16, "layers": 1, "vocab": 23}


@pytest.mark.parametrize("name", decoding.VARIANTS)
def test_both_ways_of_decoding_give_one_translation(name):
    options = argparse.Namespace(**SIZES, seed=0, device="cpu")
    model = decoding.build(name, options).double().eval()
    source = decoding.sentences(options, 3, 6)
    found = sample(model, source, beam=decoding.of_length(5))
    other = decoding.without_caches(model, source, 5)
    assert [one.tokens for one in found] == [one.tokens for one in other]
    assert {len(one.tokens) for one in found} == {5}
    assert [one.score for one in found] == pytest.approx([one.score for one in other])
    decoding.require_same(name, found, other)


def test_other_translations_are_not_timed():
    one, other = (Hypothesis([word], score, [score]) for word, score in ((5, -1.0), (6, -1.1)))
    tie = Hypothesis([6], -1.0001, [-1.0001])
    decoding.require_same("softmax 4", [one], [tie])
    with pytest.raises(RuntimeError, match="translations by caches and full passes differ"):
        decoding.require_same("softmax 4", [one], [other])


def test_command_writes_all_parts(tmp_path, capsys, monkeypatch, sketches):
    """Ratios are over the side that the part names, within a round."""

    def time_sides(sides, **limits):
        seconds = {}
        for number, (side, run) in enumerate(sides.items()):
            run()
            seconds[side] = [1.0 + number, 2.0 + 2 * number]
        return seconds

    monkeypatch.setattr(study, "time_sides", time_sides)
    few = {name: decoding.VARIANTS[name] for name in ("softmax 4", "MGK 2", "sMGK 2")}
    monkeypatch.setattr(decoding, "VARIANTS", few)
    assert decoding.main([*SMALL, "--variants", "sMGK 2", "--out", str(tmp_path)]) == 0
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    parts = {
        name: [row for row in rows if row["part"] == name] for name in ("cache", "beam", "step")
    }
    assert [len(part) for part in parts.values()] == [4, 2, 3]
    ratios = [float(row["time_over_caches"]) for row in parts["cache"]]
    assert ratios == pytest.approx([1.0, 2.0, 1.0, 4.0 / 3.0])
    assert [float(row["time_over_greedy"]) for row in parts["beam"]] == [1.0, 2.0]
    assert float(parts["cache"][1]["tokens_per_s"]) == pytest.approx(2 * 3 / 3.0)
    steps = [float(row["time_over_softmax"]) for row in parts["step"]]
    assert steps == pytest.approx(range(1, 4))
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (
        "Finding: greedy decoding of 5 tokens is 1.3 times as fast from caches as by full passes; "
        "a beam of 5 takes 2.0 times as long as greedy decoding; a training step takes 2.00 "
        "(MGK 2) to 3.00 (sMGK 2) times that of softmax 4"
    ) in report
    assert (tmp_path / "figures" / "speed.png").is_file()
    assert "error" not in capsys.readouterr().err


def test_unknown_variants_are_refused():
    line = error_of(["--variants", "softmax 5"], decoding.main, 1)
    assert "unknown variant 'softmax 5'; expected some of softmax 4, MGK 2" in line


def test_every_translation_is_as_long_as_asked():
    beam = decoding.of_length(7, 3)
    assert beam.limits(torch.tensor([1, 90]), 64).tolist() == [7, 7]
    assert (beam.size, beam.min_length) == (3, 7)


def test_the_script_is_a_program():
    path = str(ROOT / "examples/studies/decoding.py")
    told = program(f"import runpy; runpy.run_path({path!r}, run_name='__main__')", ROOT, "--help")
    assert "usage: python -m examples.studies.decoding" in told[0]

"""What all studies share: flags, reports, refusals."""

from __future__ import annotations

import math
from importlib import import_module

import pandas as pd
import pytest
import torch

from examples.studies import ddp_overhead, fish_memory, layouts, step_ratio
from lit_probattn.base.arguments import at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import read_yaml
from profiling import study
from profiling.study import Report, add_timing, command, measure_sides, shown
from tests.support.helpers import error_of
from tests.support.paths import CONFIGS, ROOT

# Modules of `examples/studies` that print no report.
PLAIN = {"after_the_scores"}
STUDIES = sorted({path.stem for path in (ROOT / "examples/studies").glob("*.py")} - PLAIN)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_help(name, capsys):
    module = import_module(f"examples.studies.{name}")
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: python -m examples.studies.{name}" in printed
    assert "--out" in printed
    assert module.__doc__.splitlines()[0] in printed


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        (fish_memory, ["--seq", "8"], "unrecognized arguments: --seq 8"),
        (fish_memory, ["--variants", "softmax"], "invalid choice: 'softmax'"),
        (step_ratio, ["--repeats", "many"], "argument --repeats: invalid"),
    ],
)
def test_wrong_words_are_one_line(module, words, expected):
    assert expected in error_of(words, module.main)


def test_the_schedule_of_the_recipe_fits_into_the_least_steps(capsys):
    recipe = read_yaml(CONFIGS / "tasks/tiny/lra_listops.yaml")["model"]["init_args"]
    for measurement in (layouts, ddp_overhead):
        with pytest.raises(SystemExit):
            measurement.main(["--steps", str(recipe["warmup_steps"])])
        assert f"--steps: must be at least {recipe['warmup_steps'] + 1}" in capsys.readouterr().err


def test_a_study_runs_with_its_options(capsys):
    seen = []

    def add_options(parser):
        add_timing(parser)
        parser.add_argument("--count", type=at_least(2), default=3, help="of it")
        parser.set_defaults(repeats=7)

    made = Report("A", pd.DataFrame({"x": [1]}), {})
    main = command("a", "text", lambda options: seen.append(options) or made, add_options)
    assert main(["--count", "2"]) == 0
    assert main([]) == 0
    assert [(options.count, options.repeats) for options in seen] == [(2, 7), (3, 7)]
    for words in (["--count", "1"], ["--repeats", "0"], ["--warmup", "-1"]):
        least = int(words[1]) + 1
        assert f"argument {words[0]}: must be at least {least}" in error_of(words, main)
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "of it; default: 3" in shown
    assert "timed rounds; default: 7" in shown


def test_what_cannot_be_measured_is_one_line(monkeypatch):
    def fail(options):
        raise ConfigError("no such file")

    main = command("a", "text", fail, add_timing)
    assert error_of([], main, 1) == "error: no such file"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = error_of(["--device", "cuda:1"], main, 1)
    assert "--device cuda:1: no CUDA device is available" in line


def test_ratios_are_taken_within_a_round(monkeypatch):
    """A side that is twice as slow in every round has the ratio 2, however the rounds differ."""
    times = {"a": [2.0, 20.0, 200.0], "b": [1.0, 10.0, 100.0]}
    monkeypatch.setattr(study, "time_sides", lambda sides, **limits: times)
    monkeypatch.setattr(study, "peak_bytes", lambda side, device: side() << 20)
    options = type("Options", (), {"device": "cpu", "warmup": 1, "repeats": 3, "max_seconds": 9})
    sides = {"a": lambda: 12, "b": lambda: 3}
    rows = measure_sides(sides, options, lambda name: {"b": "b"})
    assert rows["a"]["time_over_b"] == rows["a"]["time_over_b_p80"] == 2.0
    assert (rows["a"]["memory_over_b"], rows["b"]["memory_over_b"]) == (4.0, 1.0)
    assert (rows["a"]["time_median_s"], rows["b"]["time_p20_s"]) == (20.0, 4.6)
    table = shown(pd.DataFrame([{"side": name, **row} for name, row in rows.items()]), "side")
    assert table["time / b [p20, p80]"].tolist() == [f"{n:.3f} [{n:.3f}, {n:.3f}]" for n in (2, 1)]
    assert table["peak memory, MiB"].tolist() == ["12.0", "3.0"]
    assert table["memory / b"].tolist() == ["4.000", "1.000"]


def test_a_side_that_runs_out_of_memory_leaves_the_others(monkeypatch):
    """Its calls would end the run of all sides; ratios to it are not known."""
    calls = []

    def large():
        calls.append("large")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90 GiB")

    monkeypatch.setattr(study, "peak_bytes", lambda side, device: side())
    options = type("Options", (), {"device": "cpu", "warmup": 2, "repeats": 3, "max_seconds": 9})
    sides = {"small": lambda: calls.append("small") or 12, "large": large}
    rows = measure_sides(sides, options, lambda name: {"large": "large", "small": "small"})
    assert calls.count("large") == 1
    assert calls.count("small") == 2 + 3 + 1, "the first call is a warm-up"
    assert rows["large"]["failed"] == "out of memory"
    assert math.isnan(rows["large"]["time_median_s"])
    assert math.isnan(rows["small"]["time_over_large"])
    assert math.isnan(rows["small"]["memory_over_large"])
    assert rows["small"]["time_over_small"] == rows["small"]["memory_over_small"] == 1.0
    assert "failed" not in rows["small"]
    table = shown(pd.DataFrame([{"side": name, **row} for name, row in rows.items()]), "side")
    assert table["time / large [p20, p80]"].tolist() == ["–", "–"]
    assert table["peak memory, MiB"].tolist() == ["0.0", "–"]


def test_fish_memory_judges_by_its_ratio(tmp_path, capsys):
    words = ["--seq_len", "64", "--variants", "hard_fish", "--out", str(tmp_path)]
    assert fish_memory.main([*words, "--max_ratio", "9"]) == 0
    assert fish_memory.main([*words, "--max_ratio", "1e-6"]) == 1
    row = pd.read_csv(tmp_path / "rows.csv").iloc[0]
    assert row["memory_over_reference"] == row["blockwise_bytes"] / row["reference_bytes"]
    assert row["command"].startswith("python -m examples.studies.fish_memory --seq_len 64")
    assert "| hard_fish |" in capsys.readouterr().out

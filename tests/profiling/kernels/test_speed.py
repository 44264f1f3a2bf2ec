"""The side-by-side benchmark: ratios only behind green parity tests."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.configs import ConfigError
from profiling.kernels.config import KernelsConfig, load_kernels, narrowed, points
from profiling.kernels.speed import measure, run_kernels
from profiling.measure.memory import cpu_peak_bytes
from profiling.measure.timing import quantile, summarise, time_sides
from tests.profiling.helpers import MGK


def config(tests, **changes):
    mixture = {"class_path": MGK, "init_args": {"num_heads": 2, "dropout": 0.0}}
    content = {
        "batch_size": 1,
        "seq_len": 64,
        "head_dim": 8,
        "warmup": 0,
        "repeats": 2,
        "sides": {
            "fused": {"attention": mixture, "backend": "sdpa"},
            "plain": {"attention": mixture, "backend": "reference"},
            "torch": {"torch_sdpa": {"num_heads": 4}},
        },
        "comparisons": [
            {"name": "a", "side": "fused", "against": "plain", "max_memory_ratio": 0.9},
            {"name": "b", "side": "fused", "against": "torch", "max_time_ratio": 1e-6},
        ],
        "parity_tests": tests,
    }
    return KernelsConfig.model_validate({**content, **changes})


def parity_file(folder, passes):
    (folder / "test_parity.py").write_text(f"def test_it():\n    assert {passes}\n")
    return ["test_parity.py"]


def test_green_tests_give_ratios_and_verdicts(tmp_path):
    text, passed = run_kernels(config(parity_file(tmp_path, True)), tmp_path)
    assert "Parity tests: passed" in text
    assert not passed
    verdicts = [line.split("|")[-2].strip() for line in text.splitlines()[-2:]]
    assert verdicts == ["yes", "NO"]


@pytest.mark.parametrize("tests", ["red", "absent", "none"])
def test_red_tests_give_no_ratio(tmp_path, tests):
    names = {"red": parity_file(tmp_path, False), "absent": ["gone.py"], "none": []}[tests]
    text, passed = run_kernels(config(names), tmp_path)
    assert not passed
    assert "FAILED" in text
    assert "ratio |" not in text
    assert "No ratios" in text


def test_measured_points_are_kept_and_not_measured_again(tmp_path, monkeypatch):
    grid = {"tokens": 64, "seq_lens": [32, 64], "head_dims": [8], "num_threads": [1, 2]}
    some = config(parity_file(tmp_path, True), grid=grid, repeats=1)
    some.sides["plain"].max_seq_len = 32
    before, measured = torch.get_num_threads(), []

    def count(point):
        measured.append((point.seq_len, point.num_threads, torch.get_num_threads()))
        return measure(point)

    monkeypatch.setattr("profiling.kernels.speed.measure", count)
    first, _ = run_kernels(narrowed(some, seq_lens=[32]), tmp_path, tmp_path / "out")
    assert measured == [(32, 1, 1), (32, 2, 2)]
    assert torch.get_num_threads() == before
    second, _ = run_kernels(some, tmp_path, tmp_path / "out")
    assert measured[2:] == [(64, 1, 1), (64, 2, 2)]
    sections = first.split("\n## ")[1:]
    assert len(sections) == 2
    assert all(section in second for section in sections)
    assert second.count("plain did not run: left out beyond 32 tokens") == 2
    run_kernels(narrowed(some, cases="b"), tmp_path, tmp_path / "out")  # other sides
    assert len(measured) == 8


def test_flags_narrow_a_file():
    some = config([], grid={"tokens": 64, "seq_lens": [32], "head_dims": [8]})
    small = narrowed(some, seq_lens=[7], head_dims=[5], num_threads=[3], cases="a")
    (point,) = points(small)
    assert (point.seq_len, point.head_dim, point.num_threads, point.batch_size) == (7, 5, 3, 9)
    assert sorted(small.sides) == ["fused", "plain"]
    assert [c.name for c in small.comparisons] == ["a"]
    assert narrowed(some) == some
    with pytest.raises(ConfigError, match="no comparison has 'c' in its name; there are: a; b"):
        narrowed(some, cases="c")
    with pytest.raises(ConfigError, match="seq_lens: the file has no grid"):
        narrowed(config([]), seq_lens=[7])


def test_missing_device_and_backend(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="not available"):
        run_kernels(config([], device="cuda"), tmp_path)
    sides = {
        "x": {"attention": {"class_path": MGK, "init_args": {"num_heads": 2}}, "backend": "no"}
    }
    with pytest.raises(ConfigError, match="no backend 'no'"):
        run_kernels(config([], sides=sides, comparisons=[]), tmp_path)


def test_wrong_kernels_file(tmp_path):
    path = tmp_path / "k.yaml"
    path.write_text(
        "batch_size: 1\nseq_len: 8\nhead_dim: 4\nsides: {}\ncomparisons: []\nrepeat: 3\n"
    )
    with pytest.raises(ConfigError, match="unknown key"):
        load_kernels(path)


def test_sides_take_turns():
    calls = []
    names = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = time_sides(names, device=torch.device("cpu"), warmup=1, repeats=3)
    assert calls == ["a", "b", *"ababab"]
    assert {k: len(v) for k, v in times.items()} == {"a": 3, "b": 3}


def test_quantiles():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.2) == 2.0
    assert summarise([4.0, 1.0, 2.0, 3.0]).median_s == 2.5
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_peak_memory_is_exact():
    def function():
        first = torch.ones(1000)  # 4000 bytes
        second = torch.ones(500, dtype=torch.float64)  # 4000 bytes
        del first
        return second, torch.ones(250)

    assert cpu_peak_bytes(function) == 8000

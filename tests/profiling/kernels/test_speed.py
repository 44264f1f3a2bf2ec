"""The side-by-side benchmark: ratios only behind green parity tests."""

from __future__ import annotations

import io
import itertools
import re

import pandas as pd
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from lit_probattn.base.errors import ConfigError, UnsupportedError
from lit_probattn.measure.timing import (
    captured,
    quantile,
    time_columns,
    time_sides,
)
from profiling.kernels import ahead, figure, speed
from profiling.kernels.config import KernelsConfig, Side, load_kernels, narrowed, points
from profiling.kernels.parity import Compared
from profiling.kernels.speed import (
    Checked,
    SideResult,
    _compare,
    _side_row,
    checked,
    measure,
    measured_rows,
    open_store,
    place_name,
    run_kernels,
    side_function,
    speed_report,
)
from tests.profiling.helpers import MGK
from tests.support.patching import check_figures
from tests.support.paths import ROOT
from tests.support.slow import mostly_slow


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


@pytest.fixture
def made_up(monkeypatch):
    """Spare the measuring, where something else is asked: no two sides have the same seconds.

    Returns length, threads and threads of this process for each point that is measured.
    """
    seconds, points_seen = itertools.count(1), []

    def measure(point):
        points_seen.append((point.seq_len, point.num_threads, torch.get_num_threads()))
        times = {name: [1e-3 * next(seconds)] * point.repeats for name in point.sides}
        return {name: SideResult(own, None, 1000, 10**9) for name, own in times.items()}, {}

    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(speed, "product_rate", lambda *given: 1e12)
    return points_seen


@pytest.fixture
def parity_passes(monkeypatch):
    """Spare the process that runs the parity tests, where something else is asked."""
    passed = Checked(True, "1 passed")
    monkeypatch.setattr("profiling.kernels.speed.parity", lambda *given: passed)


def test_green_tests_give_ratios_and_verdicts(tmp_path):
    page, passed = run_kernels(config(parity_file(tmp_path, True)), tmp_path)
    text = page.text()
    assert "Parity tests: passed" in text
    assert not passed
    verdicts = [line.split("|")[-2].strip() for line in text.splitlines()[-2:]]
    assert verdicts == ["yes", "NO"]


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("tests", mostly_slow(["red", "absent", "none"], ["red", "none"]))
def test_red_tests_give_no_ratio(tmp_path, tests):
    names = {"red": parity_file(tmp_path, False), "absent": ["gone.py"], "none": []}[tests]
    page, passed = run_kernels(config(names), tmp_path)
    text = page.text()
    assert not passed
    assert "FAILED" in text
    assert "ratio |" not in text
    assert "No ratios" in text


def test_a_family_that_failed_is_not_compared(monkeypatch):
    """In its dtype; its blocks, other families and PyTorch are."""
    entry = {"class_path": MGK, "init_args": {"num_heads": 2}}
    kernel = Side.model_validate({"attention": entry, "backend": "triton"})
    blocks = Side.model_validate({"attention": entry, "backend": "blockwise"})
    torch_side = Side.model_validate({"torch_sdpa": {"num_heads": 2}})
    rows = [
        {"label": "mgk", "family": "dense/mgk", "dtype": "float16", "head_dim": 4, "rows": []},
        {"label": "fish", "family": "fish/fish", "dtype": "float32", "head_dim": 4, "rows": []},
    ]
    result = checked([{**row, "passed": False, "problem": "failed its self-test"} for row in rows])
    assert not result.passed
    assert "mgk: failed its self-test" in result.summary
    low, high = config([], dtype="float16"), config([], dtype="float32")
    assert [result.trusts(side, low) for side in (kernel, blocks, torch_side)] == [
        False,
        True,
        True,
    ]
    assert result.trusts(kernel, high)


def test_comparisons_are_kept_and_failed_ones_repeated(tmp_path, monkeypatch):
    cases = {"cases": "mgk hard,mlk", "head_dims": {"float32": [4]}}
    given = config([], parity=cases)
    asked, bad = [], {"mlk, float32, 4"}

    def compare_all(tasks, jobs):
        asked.append([task.label for task in tasks])
        return [
            Compared(task.label, "dense/mgk", "float32", 4, [], "failed" * (task.label in bad))
            for task in tasks
        ]

    monkeypatch.setattr(speed, "compare_all", compare_all)
    monkeypatch.setattr("lit_probattn.kernels.runtime.interpreted", lambda: True)
    results = []
    for _ in range(3):
        store = open_store(given, tmp_path, "parity.jsonl", "label")
        results.append(speed.parity(given, tmp_path, 1, store).passed)
        bad.clear()
    assert len(asked[0]) > 2
    assert asked[1:] == [["mlk, float32, 4"], []]
    assert results == [False, True, True]


@pytest.mark.usefixtures("made_up")
def test_points_without_ratios_are_measured_again_when_the_kernels_agree(tmp_path, monkeypatch):
    ratios = []
    for result in (Checked(False, "1 failed", None), Checked(True, "1 passed")):
        monkeypatch.setattr(speed, "parity", lambda *given, result=result: result)
        page, _ = run_kernels(config([]), tmp_path, tmp_path / "out")
        ratios.append("time ratio |" in page.text())
    assert ratios == [False, True]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parity": {"head_dims": {"float32": [4]}}}, "exclude each other"),
        ({"sides": {"a": {"torch_sdpa": {"num_heads": 2}, "sdpa": "cudnn"}}}, "backend: sdpa"),
    ],
)
def test_settings_without_effect_are_refused(change, named):
    with pytest.raises(ValidationError, match=named):
        config(["test_parity.py"], comparisons=[], **change)


def test_jobs_without_effect_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="jobs has no effect"):
        run_kernels(config([]), tmp_path, jobs=4)


def test_kernels_are_compiled_once_for_all_lengths(monkeypatch):
    entry = {"class_path": MGK, "init_args": {"num_heads": 2}}
    sides = {
        "kernel": {"attention": entry, "backend": "triton"},
        "flex": {"attention": entry, "backend": "flex"},
        "blocks": {"attention": entry, "backend": "blockwise"},
        "torch": {"torch_sdpa": {"num_heads": 2}},
    }
    grid = [{"tokens": 8192, "seq_lens": [2048, 4096], "head_dims": [4, 8]}]
    given = []
    monkeypatch.setattr(ahead, "in_processes", lambda run, tasks, jobs: given.extend(tasks) or [])
    assert ahead.compile_ahead(points(config([], sides=sides, comparisons=[], grid=grid)), 3) == []
    found = [(side.backend, place.seq_len, place.head_dim) for side, place in given]
    flex = [("flex", n, e) for e in (4, 8) for n in (2048, 4096)]
    assert sorted(found[:4]) == sorted(flex), "the longest first"
    assert found[4:] == [("triton", 1024, 4), ("triton", 1024, 8)]


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
        "batch_size: 1\nseq_len: 8\nhead_dim: 4\nsides: {}\ncomparisons: []\nparity_test: []\n"
    )
    with pytest.raises(ConfigError, match=r"unknown key; did you mean .*parity_tests"):
        load_kernels(path)


def gpu_results(point, graph, eager=None):
    """What a GPU would give: seconds of graphs and calls by side."""
    flops = 10**9
    return {
        name: SideResult(
            (eager or graph)[name], graph.get(name), 1000, flops, "" if name in graph else "draws"
        )
        for name in point.sides
    }


def gated(gate, **changes):
    comparison = {"name": "a", "side": "fused", "against": "plain", "gates": [gate]}
    return points(config([], device="cuda", comparisons=[comparison], **changes))[0]


def compared(point, graph, eager=None):
    return _compare(point.comparisons[0], point, gpu_results(point, graph, eager))


def test_gates_ask_where_they_apply():
    gate = {"max_time_ratio": 0.5, "head_dim": 8, "mode": "train", "min_seq_len": 64}
    seconds = {"fused": [1.0, 1.0, 1.0], "plain": [2.0, 1.0, 1.9], "torch": [1.0] * 3}
    row = compared(gated(gate), seconds)
    assert row["required"] == "time ≤ 0.5"
    assert row["time_ratio"] == pytest.approx(1 / 1.9)
    assert row["holds"] is False
    assert compared(gated({**gate, "max_time_ratio": 0.53}), seconds)["holds"] is True
    for other in ({"head_dim": 16}, {"mode": "eval"}, {"min_seq_len": 65}, {"dtype": "float16"}):
        row = compared(gated({**gate, **other}), seconds)
        assert (row["required"], row["holds"]) == ("", None)
    assert compared(gated(gate, is_causal=True), seconds)["holds"] is None


def test_gates_of_speed_and_of_ratios_from_below():
    seconds = {name: [1e-3] * 3 for name in ("fused", "plain", "torch")}  # 1 TFLOP/s
    assert compared(gated({"min_tflops": 1.0}), seconds)["holds"] is True
    assert compared(gated({"min_tflops": 1.01}), seconds)["holds"] is False
    assert compared(gated({"min_time_ratio": 1.01}), seconds)["holds"] is False
    with pytest.raises(ValidationError, match="a gate needs one of"):
        gated({"head_dim": 8})


def test_graphs_are_compared_with_graphs_only():
    """Python's own time must not decide a bound on kernels."""
    gate = {"max_time_ratio": 0.5}
    eager = {"fused": [5.0] * 3, "plain": [5.0] * 3, "torch": [5.0] * 3}
    graph = {"fused": [1.0] * 3, "plain": [4.0] * 3, "torch": [1.0] * 3}
    row = compared(gated(gate), graph, eager)
    assert (row["timed"], row["time_ratio"], row["holds"]) == ("graph", 0.25, True)
    row = compared(gated(gate), {"fused": graph["fused"]}, eager)
    assert (row["timed"], row["time_ratio"], row["holds"]) == ("eager", 1.0, None)


def test_a_report_begins_with_what_is_missed_and_what_is_dearer():
    point = gated({"max_time_ratio": 0.5})
    graph = {"fused": [3.0] * 3, "plain": [2.0] * 3, "torch": [1.0] * 3}
    place = {"place": place_name(point)}
    results = gpu_results(point, graph)
    rows = [{**place, "side": name, **_side_row(results[name], 1e12)} for name in results]
    rows.append({**place, "comparison": "a", **compared(point, graph)})
    head, table = speed_report(point, rows, "passed", "a GPU").text().split("\n## ")
    assert "Bounds: 0 of 1 hold" in head
    assert "MISSED: a at N = 64" in head
    assert "Above 1: a at 1 of 1 point, at most" in head
    assert "| graph (ms) | eager (ms) |" in table


def test_sides_run_where_they_are_asked_to():
    sides = {name: dict(side) for name, side in config([]).model_dump()["sides"].items()}
    sides["plain"]["seq_lens"] = [16]
    grid = [
        {"tokens": 64, "seq_lens": [32], "head_dims": [4]},
        {"tokens": 64, "seq_lens": [16], "head_dims": [4], "dtypes": ["float64"]},
    ]
    first, second = points(config([], sides=sides, grid=grid))
    assert [*first.sides] == ["fused", "torch"]
    assert [c.name for c in first.comparisons] == ["b"]
    assert [*second.sides] == ["fused", "plain", "torch"]
    assert (second.dtype, second.batch_size, second.grid) == ("float64", 4, None)
    assert measured_rows(first, 1e12, Checked(True, ""))[0]["place"] == place_name(first)


@pytest.mark.usefixtures("made_up", "parity_passes")
def test_the_ceiling_has_the_dtype_and_the_threads_of_the_point(tmp_path, monkeypatch):
    def product_rate(device, dtype, size):
        return torch.get_num_threads() * 1e11 * (2 if dtype == torch.bfloat16 else 1)

    monkeypatch.setattr(speed, "product_rate", product_rate)
    grid = {"tokens": 64, "seq_lens": [32], "head_dims": [8], "num_threads": [1, 2]}
    page, _ = run_kernels(config([], grid={**grid, "dtypes": ["float32", "bfloat16"]}), tmp_path)
    rows = pd.read_csv(io.StringIO(page.tables["rows"])).dropna(subset="side")
    found = (rows["flops_per_s"] / rows["of_ceiling"]).groupby(rows["place"]).mean()
    rates = {", ".join(place.split(", ")[i] for i in (3, 5)): rate for place, rate in found.items()}
    assert rates == pytest.approx(
        {
            **{"float32, 1 thread": 1e11, "float32, 2 threads": 2e11},
            **{"bfloat16, 1 thread": 2e11, "bfloat16, 2 threads": 4e11},
        }
    )
    assert "reaches 0.1 to 0.4 TFLOP/s" in page.text()


def test_without_a_gpu_there_is_no_graph():
    with pytest.raises(UnsupportedError, match="no CUDA graphs on cpu"):
        captured(lambda: None, torch.device("cpu"))
    results, failed = measure(config([]))
    assert not failed
    assert all(r.graph is None and "no CUDA graphs" in r.note for r in results.values())


LOST = "CUDA error: an illegal memory access was encountered"


def test_a_side_that_cannot_run_leaves_the_others_and_a_lost_gpu_ends_the_point(monkeypatch):
    """After such an error every later side would fail, too, and be kept as measured."""

    def failing(text):
        def make(side, point):
            if side.attention is not None and side.backend == "reference":
                raise RuntimeError(text)
            return side_function(side, point)

        return make

    monkeypatch.setattr(speed, "side_function", failing("no kernel takes these sizes"))
    results, failed = measure(config([]))
    assert sorted(results) == ["fused", "torch"]
    assert failed == {"plain": "no kernel takes these sizes"}
    monkeypatch.setattr(speed, "side_function", failing(LOST))
    with pytest.raises(RuntimeError, match=f"^plain: {LOST}"):
        measure(config([]))


@pytest.mark.gpu
def test_a_replay_computes_what_the_call_does():
    device = torch.device("cuda")
    x = torch.ones(1000, device=device)
    total = torch.zeros(1000, device=device)
    replay = captured(lambda: total.add_(x), device)
    before = total.clone()
    replay()
    torch.cuda.synchronize()
    assert torch.equal(total, before + 1)


def test_the_gates_of_the_kernels_are_in_the_file():
    found = {}
    for comparison in load_kernels(ROOT / "configs/profiling/kernels_cuda.yaml").comparisons:
        for gate in comparison.gates:
            asked = gate.min_tflops or gate.max_time_ratio or gate.max_memory_ratio
            found.setdefault(comparison.name, []).append((gate.head_dim, gate.mode, asked))
    assert found == {
        "MGK / softmax, both with stored maps (the paper: 0.78)": [(None, "train", 0.86)],
        "MGK / softmax": [(64, "train", 0.92), (128, "train", 0.88)],
        "MGK hard / softmax": [(64, "train", 0.78), (128, "train", 0.80)],
        "sMGK / softmax": [(64, "train", 0.78), (128, "train", 0.70)],
        "MGK / flash": [(None, "train", 1.2), (64, "eval", 0.80)],
        "MGK hard / flash": [(None, "train", 1.2)],
        "sMGK / flash": [(None, "train", 1.2)],
        "MGK / softmax with stored maps": [(64, "train", 0.35), (128, "train", 0.55)],
        "softmax / flash": [(None, "train", 1.2), (64, "eval", 350), (128, "eval", 380)],
        "Hard FiSH 2 of 8 / softmax": [(64, "train", 0.95)],
    }


def test_sides_are_named_by_their_layer_or_their_kernel():
    sides = load_kernels(ROOT / "configs/profiling/kernels_cuda.yaml")
    names = {name: figure.side_words(sides, name) for name in ("softmax8_triton", "softmax8_flash")}
    assert names == {
        "softmax8_triton": "softmax, 8 heads, backend triton",
        "softmax8_flash": "PyTorch's softmax attention by flash, 8 heads",
    }


def test_sides_take_turns():
    calls = []
    names = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = time_sides(names, device=torch.device("cpu"), warmup=1, repeats=3)
    assert calls == ["a", "b", *"ababab"]
    assert {k: len(v) for k, v in times.items()} == {"a": 3, "b": 3}


def test_quantiles():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.2) == 2.0
    columns = time_columns([4.0, 1.0, 2.0, 3.0])
    assert (columns["time_median_s"], columns["time_repeats"]) == (2.5, 4)
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


@pytest.mark.usefixtures("sketches")
def test_measured_points_are_kept_and_not_measured_again(tmp_path, made_up, parity_passes):
    grid = {"tokens": 64, "seq_lens": [32, 64], "head_dims": [8], "num_threads": [1, 2]}
    some = config(["test_parity.py"], grid=grid, repeats=1)
    some.sides["plain"].seq_lens = [32]
    before, measured = torch.get_num_threads(), made_up
    first, _ = run_kernels(narrowed(some, seq_lens=[32]), tmp_path, tmp_path / "out")
    assert measured == [(32, 1, 1), (32, 2, 2)]
    assert torch.get_num_threads() == before
    second, _ = run_kernels(some, tmp_path, tmp_path / "out")
    assert measured[2:] == [(64, 1, 1), (64, 2, 2)]
    sections = first.text().split("\n## ")[1:]
    assert len(sections) == 2
    assert all(section.strip() in second.text() for section in sections)
    run_kernels(narrowed(some, cases="b"), tmp_path, tmp_path / "out")  # other comparisons
    assert len(measured) == 8


def test_flags_narrow_a_file():
    some = config([], grid={"tokens": 64, "seq_lens": [32], "head_dims": [8]})
    small = narrowed(some, seq_lens=[7], head_dims=[5], num_threads=[3], cases="a")
    (point,) = points(small)
    assert (point.seq_len, point.head_dim, point.num_threads, point.batch_size) == (7, 5, 3, 9)
    assert sorted(small.sides) == ["fused", "plain"]
    assert [c.name for c in small.comparisons] == ["a"]
    assert narrowed(some) == some
    with pytest.raises(ConfigError, match="no comparison name contains 'c'; comparisons: a; b"):
        narrowed(some, cases="c")
    with pytest.raises(ConfigError, match="seq_lens: the file has no grid"):
        narrowed(config([]), seq_lens=[7])


def test_dtypes_keep_the_points_that_have_them():
    grid = [
        {"tokens": 64, "seq_lens": [32], "head_dims": [8]},
        {"tokens": 64, "seq_lens": [32], "head_dims": [8], "dtypes": ["bfloat16", "float16"]},
    ]
    some = config([], grid=grid)
    assert [p.dtype for p in points(narrowed(some, dtypes=["float32"]))] == ["float32"]
    assert [p.dtype for p in points(narrowed(some, dtypes=["float16", "float64"]))] == ["float16"]
    with pytest.raises(ConfigError, match="float64"):
        narrowed(some, dtypes=["float64"])


def test_flags_narrow_every_grid_and_no_point_is_there_twice():
    grid = [
        {"tokens": 64, "seq_lens": [32], "head_dims": [8]},
        {"tokens": 64, "seq_lens": [16, 64], "head_dims": [8], "scopes": ["attention", "layer"]},
    ]
    found = points(narrowed(config([], grid=grid), seq_lens=[7]))
    assert [(p.seq_len, p.scope) for p in found] == [(7, "attention"), (7, "layer")]


@pytest.mark.usefixtures("made_up", "parity_passes")
def test_the_figure_shows_the_comparisons_that_are_named(tmp_path, monkeypatch):
    check_figures(monkeypatch)
    rows = {"MGK": {"reference": "a"}, "other": {"torch": "b"}}
    made = config(["test_parity.py"], figure=rows)
    report, _ = run_kernels(made, tmp_path, tmp_path / "out")
    assert re.search(
        r"\n\nFinding: time .* plain or torch, at 1 point: a [\d.]+ to .*, b ", report.text()
    )
    report.write(tmp_path / "out")
    with Image.open(tmp_path / "out/figures/time_ratio.png") as shown:
        assert shown.size > (400, 200)
        assert "lit-probattn" in shown.text["Description"]
    with pytest.raises(ValidationError, match="figure names comparison 'aa'; did you mean 'a'"):
        config([], figure={"MGK": {"reference": "aa"}})


@pytest.mark.usefixtures("made_up", "parity_passes", "sketches")
def test_the_finding_and_the_figure_have_the_mode_of_the_file(tmp_path):
    grid = {"tokens": 16, "seq_lens": [8, 16], "head_dims": [4], "modes": ["eval", "train"]}
    made = config(["test_parity.py"], figure={"MGK": {"reference": "a"}}, grid=grid)
    report, _ = run_kernels(made, tmp_path, tmp_path / "out")
    assert "at 2 points" in report.text()
    assert "at 2 of 2 points" in report.figures["time_ratio"].caption


@pytest.mark.usefixtures("made_up")
def test_there_is_no_figure_without_ratios(tmp_path):
    made = config([], figure={"MGK": {"reference": "a"}})
    page, _ = run_kernels(made, tmp_path, tmp_path / "out")
    assert not page.figures
    assert "![" not in page.text()


def test_every_point_of_the_figure_lies_inside():
    made = config([], figure={"MGK": {"reference": "a"}})
    spread = {"time_ratio": 1.0, "time_ratio_p20": 0.9, "time_ratio_p80": 1.1}
    far = {name: 4 * value for name, value in spread.items()}
    rows = [
        {"place": place, "comparison": "a", **numbers}
        for place, numbers in (("near", spread), ("far", far))
    ]
    for axis in figure.time_figure(made, rows).drawn().axes:
        assert axis.get_xlim()[0] == 0
        assert axis.get_xlim()[1] > 4.4

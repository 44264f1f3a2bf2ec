"""Sweeps: every point once, whatever happens to the process, the worker or the device."""

from __future__ import annotations

import contextlib
import functools
import itertools
from unittest import mock

import pytest

from lit_probattn.base.errors import ChildError, ConfigError, UnsupportedError
from lit_probattn.base.locks import claim
from lit_probattn.base.processes import Worker
from lit_probattn.cli.shards import parse_shard
from lit_probattn.experiments import runner
from profiling.report.page import load_results
from profiling.sweep import points
from profiling.sweep.config import load_sweep
from profiling.sweep.plan import Point, make_plan, shard
from profiling.sweep.points import failed_rows
from profiling.sweep.run import describe_plan, run_sweep
from tests.profiling.helpers import MGK, SOFTMAX, attention, fork_workers, sweep
from tests.support.paths import ROOT
from tests.support.runs import write_attention

HERE = "tests.profiling.helpers."


def quiet(_):
    """Take progress lines and drop them."""


def run(config, folder, **options):
    return run_sweep(config, folder, ROOT, stream=quiet, **options)


def reasons(rows):
    return {row.variant: (row.status, row.reason) for row in rows if row.source == "measured"}


def test_every_point_once_and_again_nothing(tmp_path):
    config = sweep(grid={"embed_dim": [8], "seq_len": [8, 16]})
    rows = run(config, tmp_path)
    assert len({row.point_id for row in rows}) == len(make_plan(config, ROOT)) == 4
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert run(config, tmp_path) == rows
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert (tmp_path / "rows.parquet").exists()


@pytest.mark.parametrize("start", ["forked", pytest.param("new", marks=pytest.mark.slow)])
def test_memory_and_time_come_from_a_worker(start, tmp_path, monkeypatch):
    if start == "forked":
        fork_workers(monkeypatch)
    config = sweep(
        measure=["memory", "time"],
        grid={"embed_dim": [8], "seq_len": [16], "mode": ["train"]},
    )
    rows = run(config, tmp_path)
    assert {row.status for row in rows} == {"ok"}, reasons(rows)
    memory = {(r.variant, r.source): r.peak_memory_bytes for r in rows if r.quantity == "memory"}
    for variant in ("softmax", "mgk"):
        assert abs(memory[variant, "measured"] - memory[variant, "predicted"]) <= 64
    times = [row for row in rows if row.quantity == "time"]
    assert all(r.time_p20_s <= r.time_median_s <= r.time_p80_s for r in times)
    assert all(r.time_repeats == 2 and r.energy_j is None for r in times)


@pytest.mark.parametrize("replays", [True, False])
def test_a_gpu_times_calls_from_python_and_the_replayed_graph(replays, monkeypatch):
    def graph(step, device):
        if replays:
            return "replay"
        raise UnsupportedError("the call waits for the device")

    @contextlib.contextmanager
    def alone(device):
        calls.append("alone")
        yield
        calls.append("done")

    def energy(device):
        calls.append("energy")
        return float(len(calls))

    for name, value in {
        "make_step": lambda point, device: (step, None),
        "captured": graph,
        "alone_on": alone,
        "nvml_energy_j": energy,
        "time_sides": lambda sides, **_: {"step": [2.0 if sides["step"] == "replay" else 5.0]},
    }.items():
        monkeypatch.setattr(points, name, value)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: calls.append("waited"))
    calls = []
    step = functools.partial(calls.append, "call")
    config = sweep(measure=["time"], device="cuda", grid={"embed_dim": [8], "seq_len": [16]})
    (row,) = points.measure_point(make_plan(config, ROOT)[0])
    energies = ["alone", "waited", "energy", "energy", "done"]
    assert calls == ["call"] * config.timing.warmup + energies
    assert (row.status, row.time_median_s, row.energy_j) == ("ok", 5.0, 1.0)
    expected = (2.0, None) if replays else (None, "no CUDA graph: the call waits for the device")
    assert (row.graph_median_s, row.reason) == expected


def test_a_dead_worker_is_replaced_and_its_point_is_a_row(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    config = sweep(
        variants={
            "softmax": attention(),
            "deadly": attention(HERE + "Deadly"),
            "greedy": attention(HERE + "Greedy"),
            "mgk": attention(MGK),
        },
        grid={"embed_dim": [8], "seq_len": [8]},
        measure=["time"],
        memory_limit_bytes=16 << 30,
    )
    found = reasons(run(config, tmp_path))
    assert found["softmax"] == found["mgk"] == ("ok", None)
    assert found["deadly"][0] == found["greedy"][0] == "failed"
    assert "signal 9" in found["deadly"][1]
    assert "memory" in found["greedy"][1]


def test_what_cannot_fit_is_skipped_with_its_prediction(tmp_path):
    config = sweep(
        grid={"embed_dim": [8], "seq_len": [512]}, measure=["memory"], memory_limit_bytes=1 << 20
    )
    rows = run(config, tmp_path)
    measured = [row for row in rows if row.source == "measured"]
    predicted = [row for row in rows if row.source == "predicted"]
    assert {row.status for row in measured} == {"skipped"}
    assert "exceeds" in measured[0].reason
    assert all(row.peak_memory_bytes > 1 << 20 for row in predicted)
    assert "2 skipped" in describe_plan(config, ROOT, 0, 1)


def test_width_that_the_head_rule_cannot_divide(tmp_path):
    config = sweep(
        model={"kind": "attention", "head_dim_divisor": 8},
        grid={"embed_dim": [12, 16], "seq_len": [8]},
    )
    rows = run(config, tmp_path)
    bad = {row.reason for row in rows if row.status == "failed"}
    assert bad == {"embed_dim 12 is not divisible by head_dim_divisor 8"}
    assert {row.embed_dim for row in rows if row.status == "ok"} == {16}


def test_heads_that_do_not_divide(tmp_path):
    variants = {"softmax": attention(), "mgk": {**attention(MGK), "heads_divisor": 2}}
    grid = {"embed_dim": [8], "seq_len": [8], "num_heads": [3]}
    rows = run(sweep(variants=variants, grid=grid), tmp_path)
    assert reasons(rows)["mgk"] == ("failed", "num_heads 3 is not divisible by heads_divisor 2")


def test_variant_without_formulas_is_still_counted(tmp_path):
    config = sweep(
        variants={"softmax": attention(), "plain": attention(HERE + "WithoutFormula")},
        grid={"embed_dim": [8], "seq_len": [8]},
    )
    rows = {(r.variant, r.source): r for r in run(config, tmp_path)}
    assert ("plain", "analytic") not in rows
    assert rows["plain", "measured"].macs == rows["softmax", "measured"].macs
    assert "WithoutFormula has no cost formula" in rows["plain", "measured"].reason


def test_attention_that_cannot_be_built(tmp_path):
    config = sweep(
        variants={"softmax": attention(), "typo": attention(SOFTMAX, num_head=3)},
        grid={"embed_dim": [8], "seq_len": [8]},
    )
    status, reason = reasons(run(config, tmp_path))["typo"]
    assert status == "failed"
    assert "num_head" in reason


def test_a_device_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = sweep(device="cuda", measure=["cost", "time"], grid={"embed_dim": [8], "seq_len": [8]})
    with pytest.raises(ConfigError, match=r"device cuda is not available: .*: run .* on another"):
        run(config, tmp_path)
    counted = sweep(device="cuda", grid={"embed_dim": [8], "seq_len": [8]})
    assert {row.status for row in run(counted, tmp_path / "counted")} == {"ok"}


def test_points_that_failed_are_tried_again(tmp_path, monkeypatch):
    config = sweep(measure=["time"], grid={"embed_dim": [8], "seq_len": [8]})
    calls = []

    class Tried(Worker):
        def ask(self, request, limit_s):
            self.point = Point(**request["point"])
            calls.append(self.point.point_id)

        def poll(self, seconds=0.0):
            return 0

        def answer(self):
            if len(calls) == 1:
                raise ChildError("the worker was killed")
            return [row.model_dump() for row in failed_rows(self.point, "made up", status="ok")]

    monkeypatch.setattr("profiling.sweep.run.make_worker", lambda *settings: Tried("none"))
    first = run(config, tmp_path)
    assert sorted(row.status for row in first) == ["failed", *["ok"] * (len(first) - 1)]
    for _ in range(2):
        assert {row.status for row in run(config, tmp_path)} == {"ok"}
        assert len(load_results(tmp_path)) == len(first)
        assert calls[len(first) :] == calls[:1], "only what failed, once"


@pytest.mark.usefixtures("uncounted")
def test_shards_cover_the_plan_once(tmp_path):
    config, plan = sweep(), make_plan(sweep(), ROOT)
    for index, whole in enumerate((2, 4, 8)):
        rows = run(config, tmp_path, index=index, count=3)
        assert len(rows) == len({row.point_id for row in rows}) == whole
        assert (tmp_path / "rows.csv").exists() == (whole == len(plan))
    assert sorted({row.point_id for row in rows}) == sorted(point.point_id for point in plan)


def test_a_variant_and_its_baseline_are_in_one_shard():
    """Shards can run on different machines, whose times have no ratio."""
    own = {**attention(), "backend": "auto"}
    config = sweep(
        variants={"softmax": attention(), "mgk": attention(MGK), "own": own},
        grid={"embed_dim": [8], "seq_len": [8, 32], "backend": ["reference", "blockwise"]},
        measure=["cost", "time"],
    )
    parts = [shard(make_plan(config, ROOT), index, 2) for index in range(2)]
    places = [{(point.quantity, point.seq_len) for point in part} for part in parts]
    assert places[0] & places[1] == set()
    assert [{point.variant for point in part} for part in parts] == [set(config.variants)] * 2
    assert len(parts[0]) == len(parts[1]) == 10


@pytest.mark.parametrize("count", [2, 3])
def test_no_shard_has_all_long_sequences(count):
    """As many shards as lengths."""
    lengths = [8, 16, 32][:count]
    grid = {"embed_dim": [8, 16], "seq_len": lengths}
    points = make_plan(sweep(grid=grid, measure=["time"]), ROOT)
    parts = [shard(points, index, count) for index in range(count)]
    tokens = [sum(point.seq_len for point in part) for part in parts]
    assert sorted(p.point_id for part in parts for p in part) == sorted(p.point_id for p in points)
    assert max(tokens) <= 1.25 * min(tokens)


@pytest.mark.usefixtures("uncounted")
def test_points_are_claimed_and_progress_is_said(tmp_path):
    config, lines = sweep(), []
    first, *others = make_plan(config, ROOT)
    with (
        claim(tmp_path / f"locks/{first.point_id}.lock") as lock,
        mock.patch.object(runner, "GRACE_SECONDS", 0.0),
    ):
        assert lock is not None
        run_sweep(config, tmp_path, ROOT, stream=lines.append)
    assert lines.pop(0) == f"[1/8] {first.label}: running in another process"
    assert [line.partition(" points")[0] for line in lines] == [f"{i} of 8" for i in range(1, 8)]
    assert all("; cost " in line for line in lines)
    run_sweep(config, tmp_path, ROOT, stream=lines.append)
    told = [
        "7 of 8 points already finished",
        f"8 of 8 points finished; {first.label}",
    ]
    assert lines[7:] == told
    assert {row.point_id for row in load_results(tmp_path)} == {
        point.point_id for point in (first, *others)
    }
    assert not [*tmp_path.glob("locks/*")]
    run_sweep(config, tmp_path, ROOT, stream=lines.append)
    assert lines[9:] == ["8 of 8 points already finished"]


@pytest.mark.parametrize("text", ["1", "a/b", "3/3", "-1/2"])
def test_bad_shards(text):
    with pytest.raises(ConfigError, match="--shard: expected"):
        parse_shard(text)


@pytest.mark.usefixtures("uncounted")
def test_folder_of_another_sweep_is_refused(tmp_path):
    run(sweep(), tmp_path)
    with pytest.raises(ConfigError, match="another sweep"):
        run(sweep(seed=1), tmp_path)


@pytest.mark.usefixtures("uncounted")
def test_other_arguments_in_an_attention_file_are_another_sweep(tmp_path):
    """Rows of both arguments in one folder would share their names and their places."""
    folder = tmp_path / "out"

    def rows_of(num_kv_heads):
        file = write_attention(tmp_path, "SoftmaxAttention", num_kv_heads=num_kv_heads)
        variants = {"softmax": attention(), "own": {"attention": {"config": str(file)}}}
        return run(sweep(variants=variants), folder)

    first = rows_of(1)
    with pytest.raises(ConfigError, match="other attention files"):
        rows_of(2)
    assert rows_of(1) == first


def test_three_sweeps_share_the_plane_of_width_and_length():
    names = ("lm_cuda", "lm_long_cuda", "lm_wide_cuda")
    places = [
        {
            (p.embed_dim, p.seq_len)
            for p in make_plan(load_sweep(ROOT / f"configs/profiling/{name}.yaml"), ROOT)
        }
        for name in names
    ]
    widths, lengths = (256, 512, 1024, 2048, 4096), (128, 256, 512, 1024, 2048, 4096, 8192)
    assert sum(map(len, places)) == len(widths) * len(lengths)
    assert set().union(*places) == set(itertools.product(widths, lengths))

"""Numbers that are made on the CPU before a sweep runs on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lit_probattn.configs import ConfigError
from profiling.cli import main
from profiling.measure.rows import Quantity
from profiling.sweep.config import load_sweep
from profiling.sweep.plan import make_plan
from profiling.sweep.prepared import (
    Predictions,
    Prepared,
    load_predictions,
    place_of,
    prepare,
    prepare_place,
)
from profiling.sweep.run import cannot_fit, describe_plan, run_sweep
from tests.profiling.helpers import MGK, attention, fork_workers, sweep
from tests.support.paths import ROOT
from tests.support.slow import every_nth

CUDA = sorted(
    path
    for path in (ROOT / "configs/profiling").glob("*_cuda.yaml")
    if not path.name.startswith("kernels_")
)


def write(folder, **changes):
    path = folder / "small.yaml"
    content = sweep(**changes).model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump(content))
    return path


def no_prediction(*args):
    raise AssertionError("predicted while nothing should be")


@pytest.mark.parametrize("path", CUDA, ids=lambda path: path.stem)
def test_every_place_of_a_shipped_cuda_sweep_is_prepared(path, monkeypatch):
    monkeypatch.setattr("profiling.sweep.prepared.predict", no_prediction)
    config = load_sweep(path)
    assert config.device == "cuda"
    predictions = load_predictions(path, config.device)
    text = describe_plan(config, ROOT, 0, 1, predictions)
    points = make_plan(config, ROOT)
    assert f"{len(points)} points on cuda" in text
    assert "not prepared" not in text
    assert "FAILS" not in text
    assert {place_of(p) for p in points} == set(predictions.known)
    for point in points:
        known = predictions.of(point)
        assert known.macs > 0
        assert (known.memory is None) == (point.backend == "triton")


@pytest.mark.parametrize(
    ("path", "mode"),
    every_nth(4, [pytest.param(p, m, id=f"{p.stem}-{m}") for p in CUDA for m in ("train", "eval")]),
)
def test_shipped_numbers_are_what_the_code_says_today(path, mode):
    """If this fails after a change of the models: sweep --config … --prepare, and commit.

    For every variant and backend the cheapest place at half of the longest length or more: short
    ones may take another path.
    """
    config = load_sweep(path)
    predictions = load_predictions(path, config.device)
    points = [p for p in make_plan(config, ROOT) if p.mode == mode and p.backend != "triton"]
    longest = max((p.seq_len for p in points), default=0)
    chosen = {}
    for point in sorted(points, key=lambda p: predictions.of(p).macs):
        if 2 * point.seq_len >= longest:
            chosen.setdefault((point.variant, point.backend), point)
    for point in chosen.values():
        assert prepare_place(point) == predictions.of(point), point.label


def test_memory_and_time_of_a_place_are_predicted_once(monkeypatch):
    seen = []

    def predict(point):
        seen.append(place_of(point))
        return 5, 7

    monkeypatch.setattr("profiling.sweep.prepared.predict", predict)
    config = sweep(measure=["memory", "time"], memory_limit_bytes=1 << 30)
    text = describe_plan(config, Path.cwd(), 0, 1)
    assert "16 points" in text
    assert len(seen) == len(set(seen)) == 8


def test_prepared_numbers_are_read_and_go_beside_the_measured(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    grid = {"embed_dim": [8], "seq_len": [8, 16]}
    path = write(tmp_path, grid=grid, measure=["memory", "time"])
    lines = []
    made = prepare(path, Path.cwd(), stream=lines.append)
    assert made == tmp_path / "prepared" / "small.json"
    assert lines[-1].startswith("4 of 4 places finished")
    monkeypatch.setattr("profiling.sweep.prepared.predict", no_prediction)
    config = load_sweep(path)
    predictions = load_predictions(path, "cpu")
    rows = run_sweep(config, tmp_path / "out", Path.cwd(), stream=str, predictions=predictions)
    memory = [row for row in rows if row.quantity == "memory"]
    for measured, predicted in zip(memory[::2], memory[1::2], strict=True):
        assert (measured.source, predicted.source) == ("measured", "predicted")
        assert measured.peak_memory_bytes == predicted.peak_memory_bytes > 0


def test_an_interrupted_preparation_goes_on(tmp_path, monkeypatch):
    path = write(tmp_path, measure=["time"])
    places = [place_of(p) for p in make_plan(load_sweep(path), Path.cwd())]
    real, calls = prepare_place, []

    def stops(point):
        calls.append(place_of(point))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(point)

    monkeypatch.setattr("profiling.sweep.prepared.prepare_place", stops)
    with pytest.raises(KeyboardInterrupt):
        prepare(path, Path.cwd(), stream=str)
    prepare(path, Path.cwd(), stream=str)
    assert sorted(calls) == sorted([*places, calls[3]]), "only the interrupted one again"
    assert set(load_predictions(path, "cpu").known) == set(places)
    assert sorted(p.name for p in (tmp_path / "prepared").iterdir()) == ["small.json"]


def test_a_gpu_never_waits_for_a_prediction(monkeypatch):
    monkeypatch.setattr("profiling.sweep.prepared.predict", no_prediction)
    config = sweep(device="cuda", measure=["memory"], grid={"embed_dim": [8], "seq_len": [8]})
    text = describe_plan(config, Path.cwd(), 0, 1)
    assert "2 points are not prepared" in text
    (first, *_) = make_plan(config, Path.cwd())
    known = Predictions({place_of(first): Prepared(3, 4)}, live=False)
    assert known.of(first).memory == (3, 4)


def test_kernels_of_a_gpu_have_no_prediction_but_a_count():
    config = sweep(grid={"embed_dim": [8], "seq_len": [8], "backend": ["triton"]}, measure=["time"])
    found = prepare_place(make_plan(config, Path.cwd())[0])
    assert (found.memory, found.problem) == (None, None)
    assert found.macs > 0


def test_predicting_a_kernel_on_fake_tensors_does_not_touch_their_memory():
    """The C library's self-test once read fake tensors when a prediction was its first caller."""
    from lit_probattn.base.torch_internals import FakeTensorMode
    from lit_probattn.kernels.cpu import selftest

    selftest.failure.cache_clear()
    with FakeTensorMode():
        inside = selftest.failure()
    selftest.failure.cache_clear()
    assert inside == selftest.failure()


def test_places_do_not_depend_on_what_is_measured_there():
    kinds: list[Quantity] = ["memory", "time"]
    points = make_plan(sweep(measure=kinds), Path.cwd())
    assert len({place_of(p) for p in points}) == len(points) / 2
    renamed = sweep(name="other", device="cuda", measure=["time"], seed=5)
    assert {place_of(p) for p in make_plan(renamed, Path.cwd())} == {place_of(p) for p in points}
    wider = sweep(variants={"softmax": attention(), "mgk": attention(MGK, num_heads=2)})
    assert not {place_of(p) for p in make_plan(wider, Path.cwd()) if p.variant == "mgk"} & {
        place_of(p) for p in points
    }


def test_what_cannot_fit_is_known_from_the_file():
    config = sweep(measure=["memory"], memory_limit_bytes=100)
    point = make_plan(config, Path.cwd())[0]
    assert cannot_fit(point, (60, 40)) == []
    rows = cannot_fit(point, (61, 40))
    assert rows[0].status == "skipped"
    assert (rows[1].source, rows[1].peak_memory_bytes) == ("predicted", 61)
    assert cannot_fit(point, None) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"columns": ["x"], "places": {}}'])
def test_a_damaged_file_is_one_line(tmp_path, capsys, text):
    path = write(tmp_path, measure=["time"])
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "small.json").write_text(text)
    assert main(["sweep", "--config", str(path), "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "is not a file of prepared numbers" in err
    assert "--prepare" in err
    assert err.count("\n") == 1
    with pytest.raises(ConfigError):
        load_predictions(path, "cpu")


def test_the_command_prepares(tmp_path, capsys):
    path = write(tmp_path, measure=["time"], grid={"embed_dim": [8], "seq_len": [8]})
    assert main(["sweep", "--config", str(path), "--prepare", "--jobs", "2"]) == 0
    content = json.loads((tmp_path / "prepared" / "small.json").read_text())
    assert len(content["places"]) == 2
    assert "torch" in content["about"]
    assert main(["sweep", "--config", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "Predictions were made beforehand: python" in out
    assert "G multiply-adds" in out

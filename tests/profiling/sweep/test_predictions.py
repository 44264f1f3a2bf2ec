"""Memory that is predicted before a sweep measures it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lit_probattn.base.memory import predicted_bytes
from profiling.sweep.config import load_sweep
from profiling.sweep.models import make_step
from profiling.sweep.plan import make_plan
from profiling.sweep.predictions import Predictions, predict
from profiling.sweep.run import cannot_fit, describe_plan
from tests.profiling.helpers import sweep
from tests.support.paths import ROOT


def no_prediction(*args):
    raise AssertionError("predicted while nothing should be")


def test_memory_and_time_of_a_model_are_predicted_once(monkeypatch):
    seen = []

    def predict(point):
        seen.append((point.variant, point.embed_dim, point.seq_len))
        return 5, 7

    monkeypatch.setattr("profiling.sweep.predictions.predict", predict)
    config = sweep(measure=["memory", "time"], memory_limit_bytes=1 << 30)
    text = describe_plan(config, Path.cwd(), 0, 1)
    assert "16 points" in text
    assert len(seen) == len(set(seen)) == 8


def test_a_gpu_never_waits_for_a_prediction(monkeypatch):
    monkeypatch.setattr("profiling.sweep.predictions.predict", no_prediction)
    config = sweep(device="cuda", measure=["memory"], grid={"embed_dim": [8], "seq_len": [8]})
    text = describe_plan(config, Path.cwd(), 0, 1)
    assert "2 points on a GPU have no prediction" in text
    (first, *_) = make_plan(config, Path.cwd())
    assert Predictions("cuda").of(first) is None


def test_predicting_a_kernel_on_fake_tensors_does_not_touch_their_memory():
    """The C library's self-test once read fake tensors when a prediction was its first caller."""
    from lit_probattn.base.torch_internals import FakeTensorMode
    from lit_probattn.kernels.cpu import selftest

    selftest.failure.cache_clear()
    with FakeTensorMode():
        inside = selftest.failure()
    selftest.failure.cache_clear()
    assert inside == selftest.failure()


@pytest.mark.parametrize("layers", [1, 3, 4, 7])
def test_deeper_models_are_extrapolated_from_two_and_three_layers(layers, monkeypatch):
    """One layer alone is not on the line."""
    seen = []

    def whole(point):
        number = point.sizes["num_layers"]
        seen.append(number)
        return (5 if number == 1 else 7 + 3 * number), 2 + 11 * number

    monkeypatch.setattr("profiling.sweep.predictions._predict_whole", whole)
    point = make_plan(sweep(measure=["memory"]), Path.cwd())[0]
    found = predict(replace(point, sizes={**point.sizes, "num_layers": layers}))
    assert found == (5 if layers == 1 else 7 + 3 * layers, 2 + 11 * layers)
    assert seen == ([layers] if layers <= 3 else [2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fish_figure8", "fish_figure4", "mgk_figure3"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_memory_is_linear_in_the_layers(name, mode):
    """Language models and encoder-decoders: what is extrapolated is what the whole model has."""
    points = make_plan(load_sweep(name), ROOT)
    for variant in {point.variant: point for point in points}.values():
        sizes = {**variant.sizes, "num_layers": 4, "vocab_size": 50, "mlp_dim": 128}
        point = replace(variant, mode=mode, quantity="memory", embed_dim=64, seq_len=32)
        point = replace(point, sizes=sizes, backend="reference")
        whole = predicted_bytes(partial(make_step, point, torch.device("cpu")))
        assert predict(point) == whole, variant.variant


def test_what_cannot_fit_is_known_from_the_file():
    config = sweep(measure=["memory"], memory_limit_bytes=100)
    point = make_plan(config, Path.cwd())[0]
    assert cannot_fit(point, (60, 40)) == []
    rows = cannot_fit(point, (61, 40))
    assert rows[0].status == "skipped"
    assert (rows[1].source, rows[1].peak_memory_bytes) == ("predicted", 61)
    assert cannot_fit(point, None) == []

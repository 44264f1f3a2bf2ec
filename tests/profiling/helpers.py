"""Small sweeps for the tests, and variants that fail in one way each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pandas as pd
import pytest
import torch
from torch import Tensor

from lit_probattn.attention import Attention, Cost, SoftmaxAttention
from lit_probattn.base.files import append_lines
from lit_probattn.measure.counters import torch_macs
from profiling.sweep.config import SweepConfig
from profiling.sweep.count import Entry, count_costs
from profiling.sweep.plan import Point
from profiling.sweep.worker import run_worker
from tests.support.forks import fork_module

SOFTMAX = "lit_probattn.attention.SoftmaxAttention"
MGK = "lit_probattn.attention.MGKAttention"


class WithoutFormula(SoftmaxAttention):
    """A variant that does not say what it costs."""

    def cost(self, seq_len: int) -> Cost:
        raise NotImplementedError


class Deadly(SoftmaxAttention):
    """A variant that ends its process, but only on real tensors."""

    def forward(self, query: Tensor, *args, **kwargs) -> Tensor:
        if type(query) is Tensor and query.device.type == "cpu":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(query, *args, **kwargs)


class Greedy(SoftmaxAttention):
    """A variant that allocates 64 GiB, which no prediction sees coming."""

    def forward(self, query: Tensor, *args, **kwargs) -> Tensor:
        if type(query) is Tensor and query.device.type == "cpu":
            torch.ones(1 << 33, dtype=torch.float64)
        return super().forward(query, *args, **kwargs)


_COUNTED: dict[str, tuple[Attention, list[Entry]]] = {}


def count_once(monkeypatch) -> None:
    """Count each model once per process: sweeps of different tests have the same points."""

    def counted(point: Point) -> tuple[Attention, list[Entry]]:
        fields = ("class_path", "init_args", "model", "sizes", "embed_dim", "seq_len")
        fields += ("batch_size", "mode", "backend", "dtype")
        key = repr([getattr(point, name) for name in fields])
        if key not in _COUNTED:
            _COUNTED[key] = count_costs(point)
        return _COUNTED[key]

    monkeypatch.setattr("profiling.sweep.points.count_costs", counted)


def count_by_torch_alone(monkeypatch) -> None:
    """Spare fvcore's tracing, two thirds of a count, where its number is not asked.

    Without normalisations both counts are equal, as the tests in `tests/profiling/cost` show.
    """
    monkeypatch.setattr("profiling.sweep.count.fvcore_macs", torch_macs)


@pytest.fixture(autouse=True, scope="package")
def counted_by_torch_alone() -> Iterator[None]:
    """Fvcore's counts are the subject of other tests than those of folders that import this."""
    with pytest.MonkeyPatch.context() as patch:
        count_by_torch_alone(patch)
        yield


def fork_workers(monkeypatch) -> None:
    """Have the workers of sweeps forked from this process, which has imported everything."""

    def run(words: list[str]) -> int:
        run_worker(*map(int, words))
        return 0

    fork_module(monkeypatch, "profiling.sweep.worker", run)


def ratio_rows(ratios, **columns) -> pd.DataFrame:
    """Return ratios {(D, N): value} of one variant as a report has them; `columns` replace some."""
    base = {"metric": "macs", "variant": "v", "baseline": "b", "scope": "attention", "mode": "eval"}
    base |= {"backend": "x", "dtype": "y", "device_name": "d", "grid_heads": 8, "batch_size": 1}
    base |= {"ratio_analytic": None, "ratio_predicted": None} | columns
    rows = [
        {**base, "embed_dim": d, "seq_len": n, "ratio_measured": ratio}
        for (d, n), ratio in ratios.items()
    ]
    return pd.DataFrame(rows).astype({"ratio_analytic": float, "ratio_predicted": float})


def append_rows(path, rows) -> None:
    """Append rows as they are, whole points or not."""
    append_lines(path, [row.model_dump_json() for row in rows])


def attention(class_path=SOFTMAX, **init_args):
    return {"attention": {"class_path": class_path, "init_args": {"num_heads": 2, **init_args}}}


def sweep(**changes) -> SweepConfig:
    """A sweep of two variants on a small grid; `changes` replace top-level keys."""
    content = {
        "name": "small",
        "model": {"kind": "attention", "head_dim": 4},
        "baseline": "softmax",
        "variants": {"softmax": attention(), "mgk": attention(MGK, num_heads=1)},
        "grid": {"embed_dim": [8, 16], "seq_len": [8, 16]},
        "measure": ["cost"],
        "timing": {"warmup": 0, "repeats": 2},
    }
    return SweepConfig.model_validate({**content, **changes})

"""Predicted against measured peak memory on the CPU."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_probattn.base import torch_internals
from lit_probattn.base.memory import predicted_bytes, resident_bytes
from lit_probattn.measure.memory import cpu_peak_bytes, measured_cpu_bytes
from profiling.sweep.models import make_step
from profiling.sweep.plan import make_plan
from profiling.sweep.points import measure_memory
from tests.profiling.helpers import MGK, attention, sweep
from tests.support.slow import mostly_slow


class FusedBlock(nn.Module):
    """A plain transformer block on PyTorch's fused attention, with a wide MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)
        )

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mlp(self.norms[1](x))


def build(train):
    model = nn.Sequential(*(FusedBlock(64, 2) for _ in range(2)))
    x = torch.randn(2, 128, 64)

    def step():
        with torch.set_grad_enabled(train):
            loss = model(x).square().sum()
        if train:
            loss.backward()
            model.zero_grad(set_to_none=True)

    return step, (model, x)


def test_training_step_of_two_blocks_is_equal_to_the_byte():
    """With a wide MLP the peak lies outside the fused kernel: nothing hides from fake tensors."""
    assert predicted_bytes(partial(build, True)) == measured_cpu_bytes(partial(build, True))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_attention_is_equal_to_the_byte_but_for_numbers_that_autograd_saves(mode):
    backends = ["reference", "blockwise"]
    grid = {"embed_dim": [16], "seq_len": [96], "batch_size": [2], "backend": backends}
    variants = {"softmax": attention(), "mgk": attention(MGK)}
    config = sweep(grid={**grid, "mode": [mode]}, variants=variants, measure=["memory"])
    for point in make_plan(config, Path.cwd()):
        measured, predicted = (row.peak_memory_bytes for row in measure_memory(point))
        assert 0 <= measured - predicted <= (128 if mode == "train" else 0)


def bytes_by_mem_tracker(make):
    """The oracle: PyTorch's own tracker, which goes over all modules at every operation."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with torch_internals.FakeTensorMode():
        step, resident = make()
        tracker = MemTracker()
        tracker.track_external(*resident)
        with tracker:
            step()
        held = resident_bytes(resident)
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]) - held, held


@pytest.mark.parametrize(
    ("backend", "mode"),
    mostly_slow(
        itertools.product(["reference", "sdpa", "blockwise"], ["train", "eval"]),
        [("sdpa", "train")],
    ),
)
def test_predictions_are_those_of_mem_tracker(backend, mode):
    config = sweep(
        model={"kind": "language_model", "num_layers": 1, "head_dim": 4, "mlp_dim": 24}
        | {"vocab_size": 211, "include_output_layer": False},
        grid={"embed_dim": [12], "seq_len": [37], "mode": [mode], "backend": [backend]},
        measure=["memory"],
        variants={"mgk": attention(MGK, num_heads=1)},
        baseline="mgk",
    )
    (point,) = make_plan(config, Path.cwd())
    make = partial(make_step, point, torch.device("cpu"))
    predicted = predicted_bytes(make)
    assert predicted == bytes_by_mem_tracker(make)
    assert min(predicted) > 0


def test_storages_that_grow_and_end_are_followed():
    def make():
        x = torch.empty(7)

        def step():
            grown = torch.empty(3)
            grown.resize_(1000)
            del grown
            return [torch.empty(11) + x[:1] for _ in range(5)]

        return step, [x]

    assert predicted_bytes(make) == (4000, 28)


def test_shared_storage_counts_once():
    """A view is another object on the same storage, and holds all of that."""
    linear = nn.Linear(4, 4, bias=False)
    assert resident_bytes([linear, linear.weight, torch.zeros(3)]) == 4 * 16 + 12
    assert resident_bytes([linear, linear.weight.detach(), linear.weight.T]) == 4 * 16
    assert resident_bytes([torch.zeros(5, 7)[1:3]]) == 4 * 35


def test_what_was_left_before_is_not_freed_in_the_measurement():
    class Left:
        def __init__(self):
            self.itself, self.tensor = self, torch.zeros(100_000)

    def step():
        gc.collect()
        return torch.zeros(2000)

    assert cpu_peak_bytes(lambda: Left() and None) == 400_000
    assert cpu_peak_bytes(step) == 8000


def test_what_libraries_allocate_at_first_use_does_not_count():
    """The first step allocates 400 kB, as a self-test does; every step allocates 8 kB."""
    calls = []

    def step():
        calls.append(torch.zeros(2000).sum() if calls else torch.zeros(100_000).sum())

    assert measured_cpu_bytes(lambda: (step, [torch.zeros(5)])) == (8004, 20)

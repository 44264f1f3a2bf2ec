"""Counted work of attention, and the bound on time that follows from it."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention.masks import Masks
from lit_probattn.kernels.cpu import selftest
from profiling.kernels import speed
from profiling.kernels.bound import Rates, Work, measured_rates, visible_pairs
from profiling.kernels.config import KernelsConfig, Side
from profiling.kernels.sides import side_work
from profiling.kernels.speed import Checked, measured_rows, speed_report

SIZE, LENGTH = 32, 10
FISH = {"num_heads": 8, "num_global_heads": 2, "noise": "none"}
# Products of heads (multiply-adds of E), exponentials, other multiply-adds and normals of a pair,
# all heads, forward and backward: `heads (maps + 1)` products, then `heads (3 maps + 2)`.
COUNTS = [
    ("SoftmaxAttention", {"num_heads": 8}, (16 + 40, 16, 0, 0)),
    ("MGKAttention", {"num_heads": 4}, (12 + 32, 16, 0, 0)),
    ("MGKAttention", {"num_heads": 4, "e_step": "hard"}, (12 + 32, 8, 0, 0)),
    ("MGKAttention", {"num_heads": 4, "shifted_keys": True}, (8 + 20, 8, 32, 0)),
    ("FiSHAttention", FISH, (10 + 22, 16, 16 + 48, 0)),
    ("FiSHAttention", {**FISH, "mixer": "shared"}, (10 + 22, 2, 2 + 6, 0)),
    ("FiSHAttention", {**FISH, "noise": "global"}, (10 + 22, 16, 64, 4)),
    ("FiSHAttention", {**FISH, "noise": "local"}, (10 + 22, 16, 64, 16)),
    ("FiSHAttention", {**FISH, "mixer": "mlp"}, (10 + 22, 16, 80 + 240, 0)),
    ("FiSHAttention", {**FISH, "mixer": "mlp", "noise": "local"}, (10 + 22, 16, 80 + 240, 16)),
]


def point(**changes):
    given = {"batch_size": 2, "seq_len": LENGTH, "head_dim": SIZE, "num_threads": 1}
    given |= {"warmup": 0, "repeats": 1, "sides": {}, "comparisons": []}
    return KernelsConfig.model_validate({**given, **changes})


def own(name, options, backend="native"):
    attention = {"class_path": f"lit_probattn.attention.{name}", "init_args": options}
    return Side.model_validate({"attention": attention, "backend": backend})


@pytest.mark.parametrize(("name", "options", "counts"), COUNTS)
def test_counts_are_those_of_the_equations(name, options, counts):
    products, exponentials, mixing, normals = (2 * LENGTH**2 * count for count in counts)
    expected = Work(products * SIZE, exponentials, mixing, normals)
    assert side_work(own(name, options), point()) == expected


@pytest.mark.parametrize("mode", ["train", "eval", "decode"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorch_and_our_softmax_have_the_same_work(mode, is_causal):
    torch_side = Side.model_validate({"torch_sdpa": {"num_heads": 8}})
    ours = own("SoftmaxAttention", {"num_heads": 8})
    config = point(mode=mode, is_causal=is_causal)
    assert side_work(torch_side, config) == side_work(ours, config)


def test_forward_and_one_query_need_less():
    side = own("MGKAttention", {"num_heads": 4})
    assert side_work(side, point(mode="eval")).products == 2 * LENGTH**2 * 12 * SIZE
    assert side_work(side, point(mode="decode")).products == 2 * LENGTH * 12 * SIZE


@pytest.mark.parametrize("mode", ["eval", "decode"])
def test_evaluation_draws_no_noise(mode):
    side = own("FiSHAttention", {**FISH, "noise": "local"})
    assert side_work(side, point(mode=mode)).normals == 0


def test_what_has_no_normal_form_has_no_bound():
    assert side_work(own("LinearAttention", {"num_heads": 2}), point()) is None
    assert side_work(own("FiSHAttention", {**FISH, "mixer": "relu_sum"}), point()) is None


@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (5, 5), (3, 8), (6, 4)])
def test_visible_pairs(rows, cols):
    causal = Masks(rows, cols, is_causal=True)
    allowed = causal.allowed(range(rows), range(cols), torch.device("cpu"))
    assert visible_pairs(causal) == (rows * cols if allowed is None else int(allowed.sum()))
    assert visible_pairs(Masks(rows, cols)) == rows * cols


def test_work_becomes_seconds_by_rates(monkeypatch):
    monkeypatch.setattr("profiling.kernels.bound.measured_rates", lambda: Rates(8.0, 5.0, 2.0))
    assert Work(10, 20, 2, 6).seconds() == 2 * 12 / 8 + 20 / 5 + 6 / 2
    assert Work(10, 20, 2, 6).seconds(2) == (3 + 4 + 3) / 2
    monkeypatch.setattr("profiling.kernels.bound.mm_rate", lambda dtype: 20.0)
    found = Work(10, 20, 2, 6).seconds(dtype=torch.bfloat16)
    assert found == 2 * (10 / 20 + 2 / 8) + 20 / 5 + 6 / 2


@pytest.mark.skipif(selftest.failure() is not None, reason="no C library")
def test_rates_are_measured_and_bound_attention(monkeypatch):
    monkeypatch.setattr("profiling.kernels.bound._SECONDS", 0.005)
    rates = measured_rates()
    assert rates.products > rates.exponentials > 1e6
    assert rates.products > 1e8
    assert rates.normals > 1e5
    sides = {
        "torch": {"torch_sdpa": {"num_heads": 8}},
        "ours": own("SoftmaxAttention", {"num_heads": 8}),
    }
    rows = measured_rows(point(sides=sides, seq_len=64), 1e12, Checked(True, ""))
    assert all(row["of_bound"] > 1 for row in rows)
    assert rows[0]["bound_s"] == rows[1]["bound_s"]
    report = speed_report(point(), rows, "passed", "a CPU").text()
    assert "- Bound: counted products" in report
    assert "| time / bound |" in report


@pytest.mark.parametrize("changes", [{"scope": "layer"}, {"dtype": "float64"}])
def test_layers_and_other_dtypes_have_no_bound(changes):
    sides = {"torch": {"torch_sdpa": {"num_heads": 8}}}
    (row,) = measured_rows(point(sides=sides, **changes), 1e12, Checked(True, ""))
    assert row["of_bound"] is row["bound_s"] is None
    assert "Bound" not in speed_report(point(), [row], "passed", "a CPU").text()


def test_without_the_library_there_is_no_bound(monkeypatch):
    monkeypatch.setattr(selftest, "failure", lambda: "cannot be compiled")
    sides = {"torch": {"torch_sdpa": {"num_heads": 8}}}
    (row,) = speed.measured_rows(point(sides=sides), 1e12, Checked(True, ""))
    assert row["of_bound"] is None

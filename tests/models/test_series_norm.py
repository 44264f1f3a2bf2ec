"""Batch norm of padded, unequal series: against torch's, against padding, over two processes.

And how the encoder of series starts: projections, fixed positions.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.models.series.encoder import SeriesEmbedding, init_attention
from lit_probattn.models.series.norm import SeriesBatchNorm, SeriesLayerNorm, make_norm
from lit_probattn.tasks.distributed import sum_with_gradients
from tests.support.runs import in_ranks

LENGTHS = (7, 3, 1, 5)
WIDTH = 11


def unequal(extra: int = 0, junk: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Series of LENGTHS, padded to the longest plus `extra` steps that hold `junk`."""
    generator = torch.Generator().manual_seed(3)
    steps = max(LENGTHS) + extra
    mask = torch.arange(steps) < torch.tensor(LENGTHS)[:, None]
    x = torch.full((len(LENGTHS), steps, WIDTH), junk, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        x[row, :length] = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
    return x, mask


def norm_of(positions="real") -> SeriesBatchNorm:
    norm = SeriesBatchNorm(WIDTH, positions).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, WIDTH))
        norm.bias.copy_(torch.linspace(-1.0, 1.0, WIDTH))
    return norm


def test_real_steps_are_normalised_as_if_there_were_no_padding():
    """torch's own batch norm over the real steps, put side by side, as the oracle."""
    x, mask = unequal()
    norm, oracle = norm_of(), nn.BatchNorm1d(WIDTH).double()
    oracle.load_state_dict(norm.state_dict(), strict=False)
    x.requires_grad_()
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(int(mask.sum()), WIDTH, dtype=torch.float64)
    for _ in range(2):  # twice, so that the running averages move twice
        out, expected = norm(x, mask)[mask], oracle(y[mask])
    torch.testing.assert_close(out, expected)
    for result in (out, expected):
        (result * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(norm.weight.grad, oracle.weight.grad)
    torch.testing.assert_close(norm.bias.grad, oracle.bias.grad)
    torch.testing.assert_close(norm.running_mean, oracle.running_mean)
    torch.testing.assert_close(norm.running_var, oracle.running_var)
    norm.eval(), oracle.eval()
    torch.testing.assert_close(norm(x, mask)[mask], oracle(y[mask]))


@pytest.mark.parametrize("junk", [0.0, 1e6, float("nan")])
def test_padding_changes_nothing(junk):
    x, mask = unequal()
    wide, wide_mask = unequal(extra=13, junk=junk)
    norm, other = norm_of(), norm_of()
    torch.testing.assert_close(other(wide, wide_mask)[wide_mask], norm(x, mask)[mask])
    torch.testing.assert_close(other.running_mean, norm.running_mean)
    torch.testing.assert_close(other.running_var, norm.running_var)


def test_all_positions_are_those_of_the_source():
    x, mask = unequal(extra=2)
    norm, oracle = norm_of("all"), nn.BatchNorm1d(WIDTH).double()
    oracle.load_state_dict(norm.state_dict(), strict=False)
    expected = oracle(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(norm(x, mask), expected)


def test_one_step_alone_gives_the_bias_and_finite_averages():
    norm = norm_of()
    out = norm(torch.ones(1, 1, WIDTH, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(out[0, 0], norm.bias)
    assert norm.running_var.isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), 1e200])  # the variance alone is not finite
def test_values_that_are_not_finite_leave_the_averages_alone(value):
    """A loss scaler skips such a step; the averages must not remember it."""
    x, mask = unequal()
    norm = norm_of()
    norm(x, mask)
    before = norm.running_mean.clone(), norm.running_var.clone()
    x[0, 0, 4] = value
    norm(x, mask)
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])


def test_half_precision_sums_in_float32():
    x, mask = unequal()
    norm = norm_of().float()
    half = norm(x.to(torch.bfloat16), mask)
    assert half.dtype == torch.bfloat16
    exact = norm_of().float()(x.to(torch.bfloat16).float(), mask)
    torch.testing.assert_close(half[mask].float(), exact[mask], rtol=2**-7, atol=2**-7)


def test_layer_norm_has_the_same_call():
    x, mask = unequal()
    norm = make_norm(WIDTH, "layer", "real").double()
    assert isinstance(norm, SeriesLayerNorm)
    torch.testing.assert_close(norm(x, mask), nn.functional.layer_norm(x, (WIDTH,)))


def test_two_processes_see_the_statistics_of_one(tmp_path):
    def work() -> int:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        x, mask = unequal()
        rows = slice(0, 1) if rank == 0 else slice(1, None)  # 7 steps on one rank, 9 on the other
        norm = norm_of()
        norm.sum_over_ranks = sum_with_gradients
        mine = x[rows].clone().requires_grad_()
        loss = (norm(mine, mask[rows]) ** 3 * mask[rows][..., None]).sum()
        loss.backward()
        facts = (mine.grad, norm.weight.grad, norm.running_mean, norm.running_var, loss.detach())
        torch.save(facts, tmp_path / f"{rank}.pt")
        return 0

    assert in_ranks(work) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    x, mask = unequal()
    x.requires_grad_()
    norm = norm_of()
    loss = (norm(x, mask) ** 3 * mask[..., None]).sum()
    loss.backward()
    torch.testing.assert_close(torch.cat([first[0], second[0]]), x.grad)
    torch.testing.assert_close(first[1] + second[1], norm.weight.grad)
    for part in (first, second):
        torch.testing.assert_close(part[2], norm.running_mean)
        torch.testing.assert_close(part[3], norm.running_var)
    torch.testing.assert_close(first[4] + second[4], loss.detach())


@pytest.mark.parametrize("heads", [2, 3])
def test_projections_start_within_the_bound_of_one_joint_matrix(heads):
    """Xavier's of (3 C, C), for any number of heads; the standard deviation of its numbers."""
    layer = SoftmaxAttention(64, heads, head_dim=21)
    nn.init.ones_(layer.query_proj.bias)
    init_attention(layer)
    bound = (6 / (64 + 3 * 64)) ** 0.5
    for projection in (layer.query_proj, layer.key_proj, layer.value_proj):
        weight = projection.weight.detach()
        assert 0.98 * bound < float(weight.abs().max()) <= bound
        assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not projection.bias.any()


def test_fixed_positions_are_exact_in_every_type():
    """A conversion from float32 would keep its errors."""
    made = SeriesEmbedding(num_features=3, max_seq_len=29, embed_dim=6, positions="fixed")
    made = made.double()
    expected = torch.tensor(
        [
            [f(n / 10000 ** (2 * pair / 6)) for pair in range(3) for f in (math.sin, math.cos)]
            for n in range(29)
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(made.positions.table, expected, rtol=0, atol=1e-12)

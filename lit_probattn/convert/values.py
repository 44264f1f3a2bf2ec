"""Weights of heads as blocks, and the value and output maps of new heads."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.convert.algebra import low_rank_regression
from lit_probattn.convert.inputs import LayerInputs, sample_maps


def augment(x: Tensor, layer: SoftmaxAttention) -> Tensor:
    """Add the coordinate that biases act on: (…, C) -> (…, C + 1); unchanged without biases."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1) if layer.use_bias else x


def head_rows(proj: torch.nn.Linear, num_heads: int) -> Tensor:
    """Return a projection by heads, bias as last column: (H, rows, C [+ 1])."""
    weight = proj.weight
    if proj.bias is not None:
        weight = torch.cat([weight, proj.bias[:, None]], 1)
    return weight.unflatten(0, (num_heads, -1))


def set_head_rows(proj: torch.nn.Linear, index: int, rows: Tensor) -> None:
    """Write one head's rows, bias as last column."""
    span = slice(index * rows.shape[0], (index + 1) * rows.shape[0])
    if proj.bias is not None:
        proj.bias[span] = rows[:, -1]
        rows = rows[:, :-1]
    proj.weight[span] = rows


def set_values(
    old: SoftmaxAttention, new: MGKAttention, groups: list[list[int]], fit: LayerInputs | None
) -> None:
    """Write value and output maps of every new head; the output's bias stays."""
    values = head_rows(old.value_proj, old.num_heads)  # (H, E_v, C [+ 1])
    outs = old.out_proj.weight.unflatten(1, (old.num_heads, -1)).transpose(0, 1)  # (H, C, E_v)
    maps = (outs @ values).mT  # (H, C [+ 1], C): gathered inputs -> outputs
    statistics = None if fit is None else _regression_statistics(old, new, maps, groups, fit)
    columns = []
    for index, group in enumerate(groups):
        if statistics is None:
            gram = torch.eye(maps.shape[1]).to(maps)
            cross = maps[group].sum(0)
        else:
            gram, cross = statistics[0][index], statistics[1][index]
        into, out = low_rank_regression(gram, cross, new.value_head_dim)
        set_head_rows(new.value_proj, index, into)
        columns.append(out)
    new.out_proj.weight.copy_(torch.cat(columns, 1))
    if old.out_proj.bias is not None:
        new.out_proj.bias.copy_(old.out_proj.bias)


def _regression_statistics(
    old: SoftmaxAttention,
    new: MGKAttention,
    maps: Tensor,
    groups: list[list[int]],
    fit: LayerInputs,
) -> tuple[Tensor, Tensor]:
    """Return Σ gᵀg and Σ gᵀy per group: g gathered by the new map, y the group's old output."""
    width, out = maps.shape[1], maps.shape[2]
    gram = torch.zeros(len(groups), width, width).to(maps)
    cross = torch.zeros(len(groups), width, out).to(maps)
    for sample in range(fit.x.shape[0]):
        one = fit.part(slice(sample, sample + 1))
        real, x = one.real[0], augment(one.x, old)[0]
        before = sample_maps(old, one) @ x  # (H, N, C [+ 1])
        gathered = (sample_maps(new, one) @ x)[:, real]
        outputs = (before @ maps)[:, real]
        target = torch.stack([outputs[group].sum(0) for group in groups])
        gram += gathered.mT @ gathered
        cross += gathered.mT @ target
    return gram, cross

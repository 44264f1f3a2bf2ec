"""Norms of padded series: batch norm over real steps, and layer norm with the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.numerics import autocast_off
from lit_probattn.base.arguments import Count, checks_arguments

Norm = Literal["batch", "layer"]
NormPositions = Literal["real", "all"]
Reduce = Callable[[Tensor], Tensor]
EPS = 1e-5
MOMENTUM = 0.1  # weight of a new value in the running averages


def _alone(values: Tensor) -> Tensor:
    return values


class SeriesBatchNorm(nn.Module):
    """Batch norm over channels; statistics over all samples and real steps.

        y = γ (x − μ) / √(σ² + ε) + β

    In training μ and σ² are mean and biased variance of the real steps of all samples of the
    micro-batch, over all ranks; in evaluation the running averages, whose variance is unbiased.
    Departs from the source: there, padded steps are included (`positions=all`).

    Args:
        positions: steps to include: `real`, or `all`, which depends on the padded length.

    Attributes:
        sum_over_ranks: sums a tensor over the processes of a run, with gradients; set by the task.
    """

    running_mean: Tensor
    running_var: Tensor

    @checks_arguments
    def __init__(self, embed_dim: Count, positions: NormPositions = "real") -> None:
        super().__init__()
        self.positions = positions
        self.weight = nn.Parameter(torch.ones(embed_dim))
        self.bias = nn.Parameter(torch.zeros(embed_dim))
        self.register_buffer("running_mean", torch.zeros(embed_dim))
        self.register_buffer("running_var", torch.ones(embed_dim))
        self.sum_over_ranks: Reduce = _alone

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Normalise (B, N, C); padded steps of the result are finite but meaningless."""
        with autocast_off(x):
            values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
            if self.training:
                mean, var = self._statistics(values, key_mask)
            else:
                mean, var = self.running_mean, self.running_var
            scale = self.weight * torch.rsqrt(var + EPS)
            return ((values - mean) * scale + self.bias).to(x.dtype)

    def _statistics(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance per channel, (C,) each; updates the running averages."""
        if key_mask is None or self.positions == "all":
            real = x.new_ones(x.shape[:2])
        else:
            real = key_mask.to(x.dtype)
        # Select instead of multiplying: the content of padded steps must not matter, even if NaN.
        kept = torch.where(real[..., None] > 0, x, 0.0)
        sums = self.sum_over_ranks(torch.cat([kept.sum((0, 1)), real.sum()[None]]))
        count = sums[-1].detach().clamp_min(1.0)
        mean = sums[:-1] / count
        deviations = torch.where(real[..., None] > 0, x - mean, 0.0)
        var = self.sum_over_ranks(deviations.square().sum((0, 1))) / count
        self._average(mean.detach(), var.detach() * count / (count - 1).clamp_min(1.0))
        return mean, var

    @torch.no_grad()
    def _average(self, mean: Tensor, var: Tensor) -> None:
        """Update the running averages, except with non-finite values (a skipped step)."""
        finite = mean.isfinite().all() & var.isfinite().all()
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            moved = torch.lerp(running, new.to(running.dtype), MOMENTUM)
            running.copy_(torch.where(finite, moved, running))

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{len(self.weight)}, positions={self.positions!r}"


class SeriesLayerNorm(nn.LayerNorm):
    """Layer norm with the call signature of the batch norm."""

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Normalise each step of (B, N, C)."""
        return super().forward(x)


def make_norm(embed_dim: int, norm: Norm, positions: NormPositions) -> nn.Module:
    """Create a norm of C channels."""
    if norm == "layer":
        return SeriesLayerNorm(embed_dim)
    return SeriesBatchNorm(embed_dim, positions)

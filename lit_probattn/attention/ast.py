"""Adaptively sparse attention (AST): α-entmax instead of the softmax, α learned per head.

The package `entmax` computes the mapping (`pip install 'lit-probattn[entmax]'`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core, ParameterTable
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.cost.mgk import softmax_like
from lit_probattn.attention.engines.loop import num_iterations
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.numerics import compute_dtype, repeat_heads
from lit_probattn.attention.variant import Normaliser, Scores, Variant
from lit_probattn.base.arguments import Options, by_name
from lit_probattn.base.graphs import is_transformed, written

# Range of α: 1 is the softmax, which the formula reaches only in the limit.
ALPHA_RANGE = (1.01, 2.0)
_BISECTIONS = 50


def entmax(scores: Tensor, allowed: Tensor | None, alpha: Tensor) -> Tensor:
    """Return α-entmax of each row over allowed keys; fully masked rows are zero.

    Source: Peters et al., 2019, Eq. (10):
        p_j = [(α − 1) s_j − τ]₊^(1 / (α − 1)),  τ such that Σ_j p_j = 1
    Departs from the source: nothing; the package `entmax` finds τ in 50 bisections. Exported
    programs and transforms of `torch.func` use the same mapping in PyTorch operations.

    Args:
        scores: (B, H, N, L); entries may be -inf.
        allowed: bool, broadcastable to `scores`. None means all.
        alpha: α in (1, 2], (H,).

    Returns:
        (B, H, N, L).
    """
    if scores.shape[-1] == 0:
        return scores
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True)
    empty = highest == float("-inf")
    # τ is at most 1 below the highest score, a difference that large scores cannot represent.
    seen = (scores - highest).masked_fill(empty, 0.0)
    alpha = alpha[None, :, None, None].to(scores.dtype)
    if written() == "exported" or is_transformed():
        weights = entmax_in_operations(seen, alpha)
    elif written() == "compiled":
        weights = _entmax_operator(seen, alpha)
    else:
        weights = _Entmax.apply(seen, alpha)
    return weights.masked_fill(empty, 0.0)


def _bisected(scores: Tensor, alpha: Tensor) -> Tensor:
    from entmax import entmax_bisect

    weights: Tensor = entmax_bisect(scores, alpha, -1, num_iterations(_BISECTIONS, scores))
    return weights


def _entmax_gradients(
    weights: Tensor, alpha: Tensor, grad: Tensor, needs_alpha: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of scores and α, which are differentiable again.

    Source: Correia et al., 2019, Eq. (10) and Proposition 1; r_j = p_j^(2 − α) where p_j > 0:
        ds = r ∘ (g − Σ_j r_j g_j / Σ_j r_j)
        dα = Σ_j g_j [(p_j − q_j) / (α − 1)² − (h_j − q_j Σ h) / (α − 1)],  q = r / Σ r, h = p log p
    """
    outside = weights == 0
    inner = weights.masked_fill(outside, 1.0)
    slope = (inner ** (2.0 - alpha)).masked_fill(outside, 0.0)
    total = slope.sum(-1, keepdim=True)
    flow = grad * slope
    of_scores = flow - flow.sum(-1, keepdim=True) / total * slope
    if not needs_alpha:
        return of_scores, None
    share, entropy = slope / total, weights * inner.log()
    order = alpha - 1.0
    change = (weights - share) / order.square()
    change = change - (entropy - share * entropy.sum(-1, keepdim=True)) / order
    return of_scores, (grad * change).sum_to_size(alpha.shape)


class _Entmax(torch.autograd.Function):
    """The package's bisection, with second derivatives in scores and α."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: Tensor) -> Tensor:
        weights = _bisected(scores, alpha)
        ctx.save_for_backward(weights, alpha)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        weights, alpha = ctx.saved_tensors
        return _entmax_gradients(weights, alpha, grad, ctx.needs_input_grad[1])


@torch.library.custom_op("lit_probattn::entmax", mutates_args=())
def _entmax_operator(scores: Tensor, alpha: Tensor) -> Tensor:
    return _bisected(scores, alpha)


@_entmax_operator.register_fake
def _(scores: Tensor, alpha: Tensor) -> Tensor:
    return torch.empty_like(scores)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


_entmax_operator.register_autograd(_Entmax.backward, setup_context=_save)


def entmax_in_operations(scores: Tensor, alpha: Tensor) -> Tensor:
    """Return α-entmax of each row in PyTorch operations only, for graphs and `torch.func`.

    τ is bisected without gradients; each of the two Newton steps after it adds one derivative.

    Args:
        scores: (B, H, N, L); entries may be -inf, but not a whole row.
        alpha: α in (1, 2], broadcastable to (B, H, N, 1).
    """
    hidden, order = scores == float("-inf"), alpha - 1.0
    scaled, power = scores.masked_fill(hidden, 0.0) * order, 1.0 / order
    top = scaled.masked_fill(hidden, float("-inf")).detach().amax(-1, keepdim=True)
    with torch.no_grad():  # Σ_j p_j is at least 1 at top - 1, and 0 at top
        tau, step = top - 1.0, torch.ones_like(top)
        for _ in range(_BISECTIONS):
            step = step / 2.0
            middle = tau + step
            powers = (scaled - middle).masked_fill(hidden, 0.0).clamp_min(0.0) ** power
            tau = torch.where(powers.sum(-1, keepdim=True) >= 1.0, middle, tau)
    for _ in range(2):
        inner, outside = _inner(scaled, tau, hidden)
        total = (inner**power).masked_fill(outside, 0.0).sum(-1, keepdim=True)
        slope = (power * inner ** (power - 1.0)).masked_fill(outside, 0.0).sum(-1, keepdim=True)
        tau = tau + (total - 1.0) / slope
    inner, outside = _inner(scaled, tau, hidden)
    weights = (inner**power).masked_fill(outside, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def _inner(scaled: Tensor, tau: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bases of the powers, 1 for zero weights, and the mask of zero weights."""
    outside = hidden | (scaled <= tau)
    return (scaled - tau).masked_fill(outside, 1.0), outside


@dataclass(frozen=True)
class AST(Variant):
    """Adaptively sparse attention.

    Args:
        alpha: α in (1, 2], (H,).
    """

    name = "ast"
    score_maps = 4  # bisection stores about four tensors of the scores' size

    alpha: Tensor

    def scores(self, call: HeadCall) -> Tensor:
        """Return query · key / √E, (B, H, N, L), independent of α."""
        query, key = call.query, repeat_heads(call.key, call.query.shape[1])
        return query @ key.mT / (query.shape[-1] ** 0.5 / call.scale_ratio())

    def normalise(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """Return α-entmax of the scores."""
        return entmax(scores, allowed, self.alpha)

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return the scores of softmax attention, normalised by α-entmax."""
        scale = call.query.shape[-1] ** -0.5 * call.scale_ratio()
        normaliser = Normaliser(entmax, (self.alpha,), self.score_maps)
        return Scores(call.query, call.key[:, :, None], scale, normaliser=normaliser)

    def needs(self) -> dict[str, str]:
        """Return the feature that α-entmax requires."""
        return {"normaliser": "entmax"}


@dataclass(frozen=True, kw_only=True)
class ASTOptions(Options):
    """Options of adaptively sparse attention.

    Args:
        alpha: `learned` per head, with initial a ~ N(0, 1), or a number in [1.01, 2] for all heads:
            1.5, or 2 for sparsemax.
    """

    alpha: Literal["learned"] | float = "learned"


@dataclass(frozen=True, kw_only=True)
class ASTArguments(ASTOptions, LayerOptions):
    """Arguments of `ASTAttention`."""


class ASTCore(Core):
    """α of every head; see `ASTAttention`."""

    makes = AST
    options_class = ASTOptions

    def make_parameters(self, options: ASTOptions) -> None:
        """Create α of every head, if it is learned."""
        layout, alpha = self.layout, options.alpha
        _require_entmax()
        self.pre_alpha: nn.Parameter | None = None
        self.fixed_alpha = 0.0
        if alpha == "learned":
            self.pre_alpha = nn.Parameter(torch.randn(layout.out))
        else:
            self.fixed_alpha = check_alpha(alpha)

    def alphas(self, like: Tensor) -> Tensor:
        """Return α of every head, (H,), on the device of `like`."""
        if self.pre_alpha is None:
            return torch.full(
                (self.layout.out,), self.fixed_alpha, dtype=compute_dtype(like), device=like.device
            )
        raw = self.pre_alpha.to(compute_dtype(like))  # near 1, bfloat16 has steps of 1/128
        return (1.0 + torch.sigmoid(raw)).clamp(*ALPHA_RANGE)

    def variant(self, call: HeadCall) -> AST:
        """Return the variant with α of every head."""
        return AST(self.alphas(call.query))

    def learned(self) -> dict[str, ParameterTable]:
        """Return α of every head."""
        if self.pre_alpha is None:
            return {}
        return {"alpha": ParameterTable(self.alphas(self.pre_alpha)[:, None], "α of entmax", "α")}

    def extra_repr(self) -> str:
        """Return α for `repr`."""
        return f"alpha={'learned' if self.pre_alpha is not None else f'{self.fixed_alpha:g}'}"


class ASTAttention(Attention):
    """Adaptively sparse attention, a baseline of FiSH.

    Source: FiSH, NeurIPS 2022, section 3.6, by Correia et al., 2019 (AST):
        attn_weights[i] = α-entmax(query[i] · key / √E),  α = 1 + sigmoid(a), a per head and layer
    Departs from the source: α is at least 1.01, as in the code of AST's authors, because its
    gradient is undetermined at 1; below 1.01, a gets no gradient. FiSH does not state the α of its
    comparison; AST learns it.

    The arguments are the fields of `ASTOptions` and `LayerOptions`.

    Raises:
        ValueError: α is out of range, or the package `entmax` is not installed; see also
            `Attention`.
    """

    core_class = ASTCore

    @by_name(ASTArguments)
    def __init__(self, options: ASTArguments) -> None:
        self.build(options)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of softmax attention (MGK appendix B).

        Neither paper counts the bisection, which has no matrix products.
        """
        return softmax_like(self.sizes(seq_len))


def check_alpha(alpha: str | float) -> float:
    """Return a fixed α; raise a ValueError if it is out of range or entmax is missing."""
    _require_entmax()
    low, high = ALPHA_RANGE
    if isinstance(alpha, str) or not low <= alpha <= high:
        raise ValueError(
            f"alpha must be learned or a number from {low} to {high:g}, received {alpha!r}; "
            "the softmax (1) is SoftmaxAttention"
        )
    return float(alpha)


def _require_entmax() -> None:
    try:
        import entmax  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "ASTAttention needs the package entmax: pip install 'lit-probattn[entmax]'"
        ) from error

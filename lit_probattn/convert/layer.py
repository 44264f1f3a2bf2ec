"""Convert trained softmax heads to heads with a mixture of keys, layer by layer.

A group of K softmax heads becomes one head with K key components and one value:

    logits    A_r = W̃_q,rᵀ W̃_k,r of each old head (biases as an additional input coordinate); the
              stack [A_1 | … | A_K] is truncated to rank E: one query map, K key maps. With the
              second moment C of the layer's inputs as weight (C^½ A_r C^½), truncation minimises
              the mean squared error of the logits of independent tokens.
    priors    π_r ∝ exp(−mean_i log Z_ir): all components start with equal mass.
    values    the group's old output is regressed on the output of the new map, at rank E_v.

With shifted keys (sMGK), the mean of the group's forms is truncated instead, to one query and one
key map, and each shift is the difference between the mean input's key in the old head and in the
new one. Gaussian scores start at the dot products if the key norms are restored
(`attention/mgk/annealing.py`).

The result is a starting point for fine-tuning; the errors of the conversion are returned.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention import Attention, MGKAttention, SoftmaxAttention
from lit_probattn.attention.mgk.annealing import NormOptions
from lit_probattn.attention.mgk.functions import MGK, Score, component_scores
from lit_probattn.attention.mgk.options import KeyOptions
from lit_probattn.base.arguments import NotNegative
from lit_probattn.convert.files import require_no_hooks
from lit_probattn.interop.algebra import (
    best_groups,
    cosine_distances,
    form_products,
    jensen_shannon_distances,
    low_rank_product,
    low_rank_regression,
    second_moment,
    shared_query_factors,
    shifted_key_factors,
)
from lit_probattn.interop.weights import head_rows

# Query rows used for distances and normalisers, evenly spaced over a sample.
_ROWS = 256
# Weight of the old value maps in the regression: without it, directions in which the gathered
# inputs hardly vary get weights so large that the first training steps destroy the model.
_RIDGE = 1e-2


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer (S, N, C), and the mask of real tokens, (S, N) bool; None means all."""

    x: Tensor
    key_mask: Tensor | None
    is_causal: bool

    def part(self, samples: slice | Tensor) -> LayerInputs:
        """Return the given samples: a slice, or (S,) bool."""
        mask = None if self.key_mask is None else self.key_mask[samples]
        return LayerInputs(self.x[samples], mask, self.is_causal)

    def each(self) -> Iterator[LayerInputs]:
        """Yield the samples one at a time."""
        for sample in range(len(self.x)):
            yield self.part(slice(sample, sample + 1))

    @property
    def real(self) -> Tensor:
        """Real tokens, (S, N) bool."""
        if self.key_mask is None:
            return torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        return self.key_mask


@dataclass(frozen=True)
class LayerErrors:
    """Relative root-mean-square errors of a converted layer."""

    groups: list[list[int]]  # old heads of each new head
    logit_error: float  # of the bilinear forms, from the discarded singular values
    output_error: float | None  # of the layer's output without its bias; None without inputs
    held_out: bool  # whether output_error is on inputs excluded from the fit, if there are enough

    def line(self) -> str:
        """Return a one-line summary."""
        pairs = " ".join("+".join(map(str, group)) for group in self.groups)
        output = "not measured (no inputs)"
        if self.output_error is not None:
            output = f"{100 * self.output_error:.1f} %"
            output += " on held-out inputs" if self.held_out else " on the fitted inputs"
        return f"heads {pairs}: logit error {100 * self.logit_error:.1f} %, output error {output}"


@dataclass(frozen=True, kw_only=True)
class Mixture(NormOptions, KeyOptions):
    """Options of the mixtures of a converted layer, and how they are initialised.

    Args:
        old_heads: old heads per new head. None means K, the only choice without shifts.
        score: None means `dot`, which starts at the old logits, or `gaussian` with shifted keys,
            whose shifts cancel in dot products. Gaussian scores drop the key norms at once and
            start further from the old layer, unless the key norms are restored.
        spread: standard deviation of the noise added to shifts, in units of the keys' standard
            deviation; identical components would never separate.
        seed: seed of the noise.

    Raises:
        ValueError: incompatible options.
    """

    old_heads: int | None = None
    score: Score | None = None
    spread: NotNegative = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shifted_keys and self.score == "dot":
            raise ValueError(
                "score=dot with shifted keys is ordinary softmax attention: use score=gaussian"
            )
        if not self.shifted_keys and self.old_heads not in (None, self.num_components):
            raise ValueError(
                f"old_heads={self.old_heads} requires as many components, received "
                f"num_components={self.num_components}: remove old_heads, or use shifted keys "
                "(smgk)"
            )

    @property
    def group_size(self) -> int:
        """Old heads per new head."""
        return self.num_components if self.old_heads is None else self.old_heads

    @property
    def form(self) -> Score:
        """Resolved score."""
        return self.score or ("gaussian" if self.shifted_keys else "dot")

    def shared(self) -> dict[str, Any]:
        """Return the options shared with the new layer."""
        kept = (*fields(NormOptions), *fields(KeyOptions))
        return {field.name: getattr(self, field.name) for field in kept}


@torch.no_grad()
def convert_layer(
    old: SoftmaxAttention,
    mixture: Mixture = Mixture(),
    *,
    inputs: LayerInputs | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
) -> tuple[MGKAttention, LayerErrors]:
    """Convert a softmax layer of H heads to one of H/K heads with K key components.

    Args:
        old: the trained layer, with dot-product scores and as many key/value heads as query heads.
        mixture: options of the new heads; old heads per new head must divide H.
        inputs: inputs of the layer. None converts from the weights alone: identity second moment,
            heads grouped by their bilinear forms, equal priors, truncated sums of value-output
            maps.
        head_dim: size of a new head. None uses E; with K·E the logits are exact.
        value_head_dim: size of a new value head. None uses the old size.

    Returns:
        The new layer (computed in float64, with the dtype and mode of the old one) and its errors.

    Raises:
        ValueError: K does not divide H, the layer is not plain multi-head softmax attention, or
            the inputs have no real token.
    """
    check_layer(old)
    _check_groups(old.num_heads, mixture)
    dtype = old.query_proj.weight.dtype
    mode, old = old.training, copy.deepcopy(old).to(torch.float64).eval()
    fit, test, held_out = split(inputs)
    moment = None if fit is None else second_moment(augment(fit.x[fit.real], old))
    query, key = head_forms(old)
    groups = best_groups(_distances(old, query, key, fit), mixture.group_size)
    new = MGKAttention(
        old.embed_dim,
        len(groups),
        head_dim=old.head_dim if head_dim is None else head_dim,
        value_head_dim=old.value_head_dim if value_head_dim is None else value_head_dim,
        key_embed_dim=old.key_embed_dim,
        bias=old.use_bias,
        dropout=old.dropout,
        backend=old.backend,
        score=mixture.form,
        prior_param="softmax",
        **mixture.shared(),
    ).to(old.query_proj.weight)
    kept = total = 0.0
    generator = torch.Generator().manual_seed(mixture.seed)
    centre = None if fit is None else augment(fit.x[fit.real], old).mean(0)
    for index, group in enumerate(groups):
        # Old logits are forms / √E, new ones products / √E'.
        scale = (new.head_dim / old.head_dim) ** 0.5
        given = scale * query[group], key[group], new.head_dim, moment
        if new.core.key_shift is None:
            factors = shared_query_factors(*given)
        else:
            if centre is None:  # assume zero-mean inputs
                centre = torch.zeros(query.shape[-1]).to(query)
                centre[old.embed_dim :] = 1.0
            factors, shifts = shifted_key_factors(*given, centre)
            places = torch.arange(mixture.num_components) % len(group)
            noise = torch.randn(len(places), new.head_dim, generator=generator, dtype=query.dtype)
            size = _deviation(factors.keys[0], moment, centre)
            new.core.key_shift[index] = shifts[places] + mixture.spread * size * noise.to(shifts)
        set_head_rows(new.query_proj, index, factors.query)
        set_head_rows(new.key_proj, index, factors.keys.flatten(0, 1))
        kept, total = kept + factors.kept, total + factors.total
    if fit is not None:
        _set_priors(new, fit)
    set_values(old, new, groups, fit)
    errors = LayerErrors(
        groups=groups,
        logit_error=max(0.0, 1.0 - kept / total) ** 0.5 if total > 0 else 0.0,
        output_error=None if test is None else output_error(old, new, test),
        held_out=held_out,
    )
    return new.to(dtype).train(mode), errors


def _deviation(key: Tensor, moment: Tensor | None, centre: Tensor) -> Tensor:
    """Return the root-mean-square deviation of key entries from their mean over inputs, ()."""
    eye = torch.eye(len(centre)).to(key)
    spread = (eye if moment is None else moment) - torch.outer(centre, centre)
    return ((key @ spread) * key).sum(-1).clamp_min(0.0).mean().sqrt()


def check_layer(old: Attention) -> None:
    """Raise a ValueError unless the layer is plain softmax self-attention."""
    require_no_hooks(old)
    if not isinstance(old, SoftmaxAttention):
        raise ValueError(f"only SoftmaxAttention can be converted, received {type(old).__name__}")
    if old.core.score != "dot" or old.num_kv_heads != old.num_heads or old.rotary is not None:
        raise ValueError(
            "only softmax layers with score=dot, num_kv_heads=num_heads and no rotary positions "
            f"can be converted, received score={old.core.score}, "
            f"num_kv_heads={old.num_kv_heads} of {old.num_heads}, rotary={old.rotary}"
        )
    if old.key_embed_dim != old.embed_dim:
        raise ValueError(
            f"only self-attention can be converted, received key_embed_dim={old.key_embed_dim} "
            f"with embed_dim={old.embed_dim}"
        )


def _check_groups(num_heads: int, mixture: Mixture) -> None:
    size, name = mixture.group_size, "num_components" if mixture.old_heads is None else "old_heads"
    if size < 1 or num_heads % size:
        raise ValueError(f"{name} must divide num_heads={num_heads}, received {size}")
    if mixture.num_components < size:
        raise ValueError(
            f"old_heads={size} requires as many components, received "
            f"num_components={mixture.num_components}"
        )


def split(inputs: LayerInputs | None) -> tuple[LayerInputs | None, LayerInputs | None, bool]:
    """Return the inputs to fit, the inputs to test on, and whether they are disjoint.

    Samples without real tokens are omitted.

    Raises:
        ValueError: no sample has a real token.
    """
    if inputs is None:
        return None, None, False
    inputs = inputs.part(inputs.real.any(1))
    if not len(inputs.x):
        raise ValueError("the inputs have no real token: pass others, or None to use the weights")
    inputs = replace(inputs, x=inputs.x.to(torch.float64))
    count = len(inputs.x)
    if count < 4:
        return inputs, inputs, False
    cut = count - count // 4
    return inputs.part(slice(0, cut)), inputs.part(slice(cut, count)), True


def sample_maps(layer: Attention, one: LayerInputs) -> Tensor:
    """Return the attention maps of a sample, (H, N, N)."""
    return layer.weights(one.x, key_mask=one.key_mask, is_causal=one.is_causal)[0]


def query_rows(one: LayerInputs) -> Tensor:
    """Return up to `_ROWS` real positions of a sample, evenly spaced."""
    places = one.real[0].nonzero()[:, 0]
    if len(places) <= _ROWS:
        return places
    return places[torch.linspace(0, len(places) - 1, _ROWS).long()]


def augment(x: Tensor, layer: SoftmaxAttention) -> Tensor:
    """Append the coordinate for biases: (…, C) -> (…, C + 1); a no-op without biases."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1) if layer.use_bias else x


def head_forms(old: SoftmaxAttention) -> tuple[Tensor, Tensor]:
    """Return the query and key maps of each head, with biases as last column; (H, E, C [+ 1])."""
    query, key = (_head_rows(proj, old.num_heads) for proj in (old.query_proj, old.key_proj))
    return query, key


def _head_rows(proj: torch.nn.Linear, num_heads: int) -> Tensor:
    return head_rows(proj.weight, proj.bias, num_heads)


def set_head_rows(proj: torch.nn.Linear, index: int, rows: Tensor) -> None:
    """Set one head's rows, with the bias as last column."""
    span = slice(index * rows.shape[0], (index + 1) * rows.shape[0])
    if proj.bias is not None:
        proj.bias[span] = rows[:, -1]
        rows = rows[:, :-1]
    proj.weight[span] = rows


def set_values(
    old: SoftmaxAttention, new: Attention, groups: list[list[int]], fit: LayerInputs | None
) -> None:
    """Set the value and output maps of each new head; the output bias is copied."""
    values = _head_rows(old.value_proj, old.num_heads)  # (H, E_v, C [+ 1])
    outs = old.out_proj.weight.unflatten(1, (old.num_heads, -1)).transpose(0, 1)  # (H, C, E_v)
    columns = []
    if fit is None:
        for index, group in enumerate(groups):
            left = torch.cat([*outs[group]], 1)
            out, into, _ = low_rank_product(left, values[group].flatten(0, 1), new.value_head_dim)
            set_head_rows(new.value_proj, index, into)
            columns.append(out)
    else:
        maps = (outs @ values).mT  # (H, C [+ 1], C): gathered inputs -> outputs
        statistics = _regression_statistics(old, new, maps, groups, fit)
        for index, moments in enumerate(zip(*statistics, strict=True)):
            before = maps[groups[index]].sum(0)
            into, out = low_rank_regression(
                *moments, new.value_head_dim, toward=before, ridge=_RIDGE
            )
            set_head_rows(new.value_proj, index, into)
            columns.append(out)
    new.out_proj.weight.copy_(torch.cat(columns, 1))
    if old.out_proj.bias is not None:
        new.out_proj.bias.copy_(old.out_proj.bias)


def _regression_statistics(
    old: SoftmaxAttention,
    new: Attention,
    maps: Tensor,
    groups: list[list[int]],
    fit: LayerInputs,
) -> tuple[Tensor, Tensor]:
    """Return Σ gᵀg and Σ gᵀy per group: g the new map's output, y the group's old output."""
    width, out = maps.shape[1], maps.shape[2]
    gram = torch.zeros(len(groups), width, width).to(maps)
    cross = torch.zeros(len(groups), width, out).to(maps)
    for one in fit.each():
        real, x = one.real[0], augment(one.x, old)[0]
        before = sample_maps(old, one) @ x  # (H, N, C [+ 1])
        gathered = (sample_maps(new, one) @ x)[:, real]
        outputs = (before @ maps)[:, real]
        target = torch.stack([outputs[group].sum(0) for group in groups])
        gram += gathered.mT @ gathered
        cross += gathered.mT @ target
    return gram, cross


def _distances(
    old: SoftmaxAttention, query: Tensor, key: Tensor, fit: LayerInputs | None
) -> Tensor:
    """Return the pairwise distances of the old heads, (H, H)."""
    if fit is None:
        return cosine_distances(form_products(query[None], key))
    total = torch.zeros(old.num_heads, old.num_heads, dtype=torch.float64)
    for one in fit.each():
        total += jensen_shannon_distances(sample_maps(old, one)[:, query_rows(one)]).cpu()
    return total / fit.x.shape[0]


def _set_priors(new: MGKAttention, fit: LayerInputs) -> None:
    """Initialise priors so that all components have equal mass: c_r = −mean_i log Z_ir."""
    assert new.core.prior is not None
    new.core.prior.value.zero_()
    total = torch.zeros(new.num_heads, new.num_components, dtype=torch.float64)
    count = 0
    for one in fit.each():
        rows = query_rows(one)
        scores = scores_of_components(new, one.x, rows)  # (H', K, n, N)
        hidden = ~one.real[0].expand(len(rows), -1)
        if one.is_causal:
            places = torch.arange(one.x.shape[1], device=rows.device)
            hidden = hidden | (places > rows[:, None])
        normalisers = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
        total += normalisers.sum(-1).cpu()
        count += len(rows)
    logits = -total / max(1, count)
    new.core.prior.value.copy_(logits - logits.mean(1, keepdim=True))


def scores_of_components(new: MGKAttention, x: Tensor, rows: Tensor) -> Tensor:
    """Return the scores of each component without priors, for some queries of a sample."""
    call, core = new.call(x), new.core
    arguments = MGK(None, core.variance(), core.score, norm_weight=core.key_norm_weight)
    return component_scores(call.query[:, :, rows], new.core.components(call.key), arguments)[0]


def output_error(old: SoftmaxAttention, new: Attention, test: LayerInputs) -> float:
    """Return ‖new − old‖ / ‖old‖ over outputs of real tokens, without the output bias."""
    before, after = (
        layer(test.x, key_mask=test.key_mask, is_causal=test.is_causal)[test.real]
        for layer in (old, new.eval())
    )
    bias = 0.0 if old.out_proj.bias is None else old.out_proj.bias
    return float((after - before).norm() / (before - bias).norm())

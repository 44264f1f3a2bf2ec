"""Engines: each computes attention from scores in normal form, whatever the variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_probattn.attention.backends import (
    LACKS_OF_BLOCKS,
    LACKS_OF_OPERATORS,
    Engine,
    kernel_refusal,
    native_refusal,
    pair_arguments,
)
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.engines.blockwise import Axis, Block, blockwise_attention
from lit_probattn.attention.engines.scores import MapFunction, Scores
from lit_probattn.attention.engines.sdpa import fused_attention
from lit_probattn.attention.functional import reference_output, repeat_heads
from lit_probattn.attention.rowpass.attention import row_attention
from lit_probattn.base.memory import device_type

# Widest value head of PyTorch's kernels on CUDA, and of ours: values of heads that share a map are
# split to fit.
WIDEST_VALUE, WIDEST_IN_KERNEL = 256, 128


def by_equation(call: HeadCall, variant: Any) -> Tensor:
    """The scores by the variant's equation, stored; softmax, dropout, values."""
    call = call.precise()
    return reference_output(
        variant.scores(call), call.value, call.masks, call.dropout, variant.normalise
    )


def by_sdpa(call: HeadCall, scores: Scores) -> Tensor:
    """One softmax over K·L keys, by PyTorch's fused attention.

    Exact for the sum over components: Σ_r exp(t_ijr) v_j is a sum over the pairs (j, r), each with
    its own key and the value of its position.
    """
    query, key = scores.as_dots()
    components, value = key.shape[2], call.value
    if components > 1:
        value = repeat_heads(value, key.shape[1]).repeat_interleave(components, 2)
    return fused_attention(
        *(query, key.transpose(2, 3).flatten(2, 3), value),
        masks=call.masks,
        scale=scores.scale,
        keys_per_position=components,
    )


def by_blocks(call: HeadCall, scores: Scores, native: bool = False) -> Tensor:
    """Block by block, gradients of the scores by autograd, O(N · block) memory.

    Weights of a block come from the C library if `native`.
    """
    reduce, noise = scores.reduce, scores.noise
    named: dict[str, tuple[Tensor | None, Axis]] = {
        "query": (scores.query * scores.scale, "row"),
        "key": (scores.key.flatten(1, 2), "col"),
        "coef": (scores.coef, "shared"),
        "row": (scores.row, "row"),
        "col": (None if scores.col is None else scores.col[..., None, :], "pair"),
        "noise": (None if noise is None else noise.scale, "shared"),
    }
    function = reduce if isinstance(reduce, MapFunction) else None
    further = () if function is None else function.tensors
    names = [name for name, (tensor, _) in named.items() if tensor is not None]
    products = scores.key.shape[2]
    heads = call.value.shape[1]  # of a sum; else the queries', or more local heads of a function
    heads = heads if reduce == "sum" else max(heads, scores.query.shape[1])

    def block_scores(block: Block, *parts: Tensor) -> Tensor:
        found: dict[str, Any] = dict(zip(names, parts[: len(names)], strict=True))
        found["key"] = found["key"].unflatten(1, (-1, products))
        if "col" in found:
            found["col"] = found["col"].squeeze(-2)
        if noise is not None:
            found["noise"] = replace(noise, scale=found["noise"])
        found["reduce"] = reduce
        if function is not None:
            found["reduce"] = replace(function, tensors=parts[len(names) :])
        return Scores(**found).reduced(block).expand(-1, heads, -1, -1)

    axes: list[Axis] = [named[name][1] for name in names]
    axes += ["shared"] * len(further)
    tensors = (named[name][0] for name in names)
    inputs = [*(tensor for tensor in tensors if tensor is not None), *further]
    return blockwise_attention(
        block_scores,
        inputs,
        axes,
        call.value,
        call.masks,
        call.dropout,
        num_heads=heads,
        native=native,
        normaliser=scores.normaliser,
    )


def by_rows(call: HeadCall, scores: Scores) -> Tensor:
    """Block by block, gradients by hand, the rows of a block in C."""
    noise = scores.noise
    if isinstance(scores.reduce, MapFunction) or (noise is not None and noise.per_head):
        return by_blocks(call, scores, native=True)
    heads = call.value.shape[1] if scores.shares_maps else scores.query.shape[1]
    coef, col = scores.coef, scores.col
    return row_attention(
        *(scores.query * scores.scale, scores.key, call.value, call.masks, call.dropout),
        coef=None if coef is None else repeat_heads(coef[None], heads)[0],
        row=scores.row,
        col=None if col is None else repeat_heads(col, heads),
        reduction=scores.reduce,
        noise_scale=None if noise is None else noise.scale,
        draws=None if noise is None else noise.draws,
    )


def by_kernels(call: HeadCall, scores: Scores) -> Tensor:
    """Fused, forward and backward, O(N) memory.

    Raises:
        NotImplementedError: heads share their maps, and a bias that needs a gradient is broadcast
            over queries or keys.
    """
    if scores.shares_maps:
        return _by_map_kernels(call, scores)
    from lit_probattn.kernels.dense.operators import MixtureInputs
    from lit_probattn.kernels.dense.operators import mixture_attention as fused

    out, _ = fused(
        *MixtureInputs(
            query=scores.query,
            key=scores.key,
            value=call.value,
            scales=scores.coef,
            row_bias=None if scores.row is None else scores.row.transpose(2, 3),
            key_bias=scores.col,
            scale=scores.scale,
            hard=scores.reduce == "hard",
            equal_scales=scores.coef is None,
            **pair_arguments(call),
        )
    )
    return out


def _by_map_kernels(call: HeadCall, scores: Scores) -> Tensor:
    """The same where heads mix maps; weights and noise scales are float32 in the kernels."""
    from lit_probattn.kernels.fish.operators import fish_attention

    bias, pairs = call.masks.bias, (call.masks.num_queries, call.masks.num_keys)
    if call.bias_needs_grad and bias is not None and bias.shape[2:] != pairs:
        raise NotImplementedError(
            f"fish: backend 'triton' cannot give a gradient to a bias of shape "
            f"{tuple(bias.shape)}, broadcast over queries or keys: expected (…, {pairs[0]}, "
            f"{pairs[1]}); expand it, or use backend 'blockwise'"
        )
    heads, noise, layers = call.value.shape[1], scores.noise, None
    if isinstance(scores.reduce, MapFunction):
        layers = scores.reduce.layers
        assert layers is not None
        noise = layers.noise
    first = scores.coef if layers is None else layers.first
    assert first is not None
    scale = None if noise is None else noise.scale
    if len(first) == 1:  # all heads alike
        first = first.expand(heads, -1)
        if scale is not None and noise is not None and noise.per_head:
            scale = scale.expand(heads)
    return fish_attention(
        *(scores.query, scores.key[:, :, 0], call.value),
        first=first,
        first_bias=None if layers is None else layers.bias,
        second=None if layers is None else layers.second,
        noise_scale=scale,
        noise_per_head=noise is not None and noise.per_head,
        noise_draw=None if noise is None else noise.draws.words(scores.query),
        first_row=0 if noise is None else noise.draws.first_row,
        on_global=scores.scale,
        **pair_arguments(call),
    )


# ---- heads that share one map share one softmax -------------------------------------------------


def wide_heads(scores: Scores, call: HeadCall, widest: int | None = None) -> int:
    """Return how many heads may share one map and one softmax: 1 unless all are alike.

    Their values side by side are at most `widest` wide; None means what PyTorch's kernels take.
    """
    own_maps = not scores.heads_are_alike or call.dropout is not None
    for pairs in (call.masks.bias, call.masks.attn_mask):
        own_maps = own_maps or (pairs is not None and pairs.shape[1] > 1)
    if own_maps:
        return 1
    heads, head_dim = call.value.shape[1], call.value.shape[3]
    if widest is None and device_type(call.value.device) == "cpu":
        return heads
    widest = WIDEST_VALUE if widest is None else widest
    fitting = [g for g in range(1, heads + 1) if heads % g == 0 and g * head_dim <= widest]
    return fitting[-1] if fitting else 1


def merge_values(value: Tensor, wide: int) -> Tensor:
    """(B, H, L, E_v) -> (B, H/wide, L, wide·E_v)."""
    if wide == 1:
        return value
    return value.unflatten(1, (-1, wide)).transpose(2, 3).flatten(3)


def split_values(out: Tensor, wide: int) -> Tensor:
    """(B, H/wide, N, wide·E_v) -> (B, H, N, E_v)."""
    if wide == 1:
        return out
    return out.unflatten(-1, (wide, -1)).transpose(2, 3).flatten(1, 2)


def lowered(
    compute: Callable[[HeadCall, Scores], Tensor],
    *,
    precise: bool = False,
    own_keys: bool = False,
    widest: int | None = None,
) -> Callable[[HeadCall, Any], Tensor]:
    """Return an engine's `compute` from a function of what a variant lowers to.

    Args:
        compute: attends by scores in normal form.
        precise: heads come in the dtype of scores and sums.
        own_keys: every component has its key, and there are no coefficients.
        widest: see `wide_heads`.
    """

    def engine(call: HeadCall, variant: Any) -> Tensor:
        call = call.precise() if precise else call
        scores = variant.lower(call, own_keys=own_keys)
        wide = wide_heads(scores, call, widest)
        out = compute(replace(call, value=merge_values(call.value, wide)), scores)
        return split_values(out, wide)

    return engine


def _native_missing(call: HeadCall, variant: Any) -> str | None:
    """Where the rows of blocks that PyTorch scores are in C, no operator of a graph holds them."""
    if call.graph == "compiled" and variant.needs().keys() & {"function", "head noise"}:
        return "cannot be compiled: its scores are no operator of a graph"
    return native_refusal(call.device)


_ROW_EPS = "cannot add row_eps to the sums of rows"
_NORMALISER = "cannot normalise rows by another function than the softmax ({})"

# Every variant whose scores have the normal form has all of these.
NORMAL_FORM: Mapping[str, Engine] = {
    "reference": Engine(by_equation),
    "sdpa": Engine(
        lowered(by_sdpa, own_keys=True),
        lacks={
            "transform": LACKS_OF_BLOCKS["transform"],
            "dropout": "cannot draw the counter-based attention dropout",
            "bias gradient": "cannot give a gradient to the additive bias without storing all "
            "scores",
            "maximum": "cannot take the maximum over components ({})",
            "function": "cannot take a function of several maps ({})",
            "map noise": "cannot add noise to the scores ({})",
            "head noise": "cannot add noise to the scores ({})",
            "row_eps": _ROW_EPS,
            "normaliser": _NORMALISER,
        },
    ),
    "blockwise": Engine(
        lowered(by_blocks, precise=True), lacks={**LACKS_OF_BLOCKS, "row_eps": _ROW_EPS}
    ),
    "native": Engine(
        lowered(by_rows, precise=True),
        lacks={**LACKS_OF_OPERATORS, "row_eps": _ROW_EPS, "normaliser": _NORMALISER},
        missing=_native_missing,
    ),
    "triton": Engine(
        lowered(by_kernels, widest=WIDEST_IN_KERNEL),
        lacks={
            **LACKS_OF_OPERATORS,
            "function without layers": "cannot take this function of several maps ({})",
            "row_eps": _ROW_EPS,
            "normaliser": _NORMALISER,
        },
        # Score tiles of all maps, and all hidden units, are written out in a program; queries of a
        # tile stay in shared memory.
        limits={
            "layers of the mixing": 2,
            "global maps": 16,
            "entries of all global maps": 1024,
            "hidden units": 32,
        },
        missing=kernel_refusal,
    ),
}

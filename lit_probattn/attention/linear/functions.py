"""Linear attention as pure functions, shared by the baseline and its mixtures.

Attention dropout cannot act on pairs. All engines drop whole values instead, with one keep decision
per (sample, key/value head, key) for all queries, so that they agree and need O(N) memory:

    out_i = Σ_j attn_weights[i, j] keep_j value_j / (1 − p)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_probattn.attention.cache import Cache, LinearState
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.engines.kernels import kernel_refusal
from lit_probattn.attention.engines.native import native_refusal
from lit_probattn.attention.engines.table import LACKS_OF_BLOCKS, LACKS_OF_OPERATORS
from lit_probattn.attention.linear.chunkwise import causal_product
from lit_probattn.attention.linear.features import FeatureMap
from lit_probattn.attention.masks import Masks, span
from lit_probattn.attention.numerics import component_keys, compute_dtype, repeat_heads, repeat_rows
from lit_probattn.attention.variant import Engine, Variant
from lit_probattn.randomness import AttentionDropout

Mix = Literal["after", "before"]

Denominator = Literal["sum", "sqrt_len"]

OutputScale = Literal["one", "inv_sqrt_head_dim"]


@dataclass(frozen=True)
class LinearForm:
    """Options in which papers and released codes differ.

    Args:
        features: feature map and its normalisation.
        mix: whether components of a key are mixed after the feature map (MLK) or before it.
        denominator: divide by the sum over keys, or by √N (released Long Range Arena code).
        eps: added to the sum over keys.
        output_scale: factor on the output, 1 or 1/√E (released language-modelling code).
        padded_len: N of `sqrt_len`; None means the geometric mean of the numbers of queries and
            keys of the call.
    """

    features: FeatureMap
    mix: Mix = "after"
    denominator: Denominator = "sum"
    eps: float = 0.0
    output_scale: OutputScale = "one"
    padded_len: int | None = None

    @property
    def divides(self) -> bool:
        """Whether the output is divided by the sum over keys."""
        return self.denominator == "sum"

    def factor(self, head_dim: int, masks: Masks) -> float:
        """Return the factor on the output, with 1/√N of `sqrt_len`."""
        factor = 1.0 if self.output_scale == "one" else head_dim**-0.5
        if self.divides:
            return factor
        if self.padded_len is not None:
            return factor / self.padded_len**0.5
        return factor / (float((masks.num_queries * masks.num_keys) ** 0.25) or 1.0)


class StateVariant(Variant):
    """Base of variants without scores, which sum keys and values to states in O(N)."""

    kind = "chunks"
    has_scores = False
    takes_scale = False
    # The decoding cache; name of the variant, and an alternative to a bias, for messages.
    state_class: ClassVar[type[LinearState]] = LinearState
    title: ClassVar[str]
    advice: ClassVar[str] = "pass attn_mask to hide pairs, or use a softmax variant"

    form: LinearForm

    @classmethod
    def refuse(
        cls, form: LinearForm, bias: Tensor | None, cache: Cache | None, scale: float | None = None
    ) -> None:
        """Raise if a call has a bias, a scale, or a cache without states or an unknown length.

        Raises:
            ValueError: one is not supported.
        """
        name = cls.title
        if bias is not None:
            raise ValueError(
                f"{name} has no scores before a softmax to add a bias to; {cls.advice}"
            )
        if scale is not None:
            raise ValueError(f"{name} has no scores that scale={scale} could multiply")
        if cache is not None and not isinstance(cache, cls.state_class):
            raise ValueError(
                f"{name} decodes from a {cls.state_class.__name__}, received "
                f"{type(cache).__name__}: create it with layer.new_cache()"
            )
        if cache is not None and not form.divides and form.padded_len is None:
            raise ValueError(
                "decoding with denominator=sqrt_len needs padded_len, received None: √N is "
                "unknown until the last token"
            )

    def check(self, call: HeadCall) -> None:
        """Raise if the call has a bias, a scale, or a cache without states."""
        self.refuse(self.form, call.masks.bias, call.cache, call.scale)


@dataclass(frozen=True)
class Linear(StateVariant):
    """Linear attention of keys or of mixtures of keys.

    Args:
        form: options.
        projection: random features, (F, E). None unless `favor`.
        prior: π of the keys, (H_kv, K, 1 or L). None means no mixture.
        key_shift: b, (H_kv, K, E), if keys (B, H_kv, L, E) are not shifted yet; None otherwise.
        state: sums over earlier positions, to which the new keys are added.
    """

    name = "linear"
    title = "linear attention"
    kernels = ("linear/linear",)
    stated_backend = "blockwise"  # the O(N) form; the reference stores the weights

    form: LinearForm
    projection: Tensor | None = None
    prior: Tensor | None = None
    key_shift: Tensor | None = None
    state: LinearState | None = None

    def needs(self) -> dict[str, str]:
        """Return the feature that √N requires: one length, which is unknown while decoding."""
        scaled = not self.form.divides and self.form.padded_len is None
        return {"one length": "denominator=sqrt_len"} if scaled else {}

    @property
    def score_maps(self) -> int:  # type: ignore[override]
        """K."""
        return 1 if self.prior is None else self.prior.shape[1]

    def components(self, key: Tensor) -> Tensor:
        """Return all components' keys, (B, H_kv, K, L, E), if mixed; in float32 if shifted."""
        if self.prior is None and self.key_shift is None:
            return key
        return component_keys(key, self.score_maps, self.key_shift)

    def scores(self, call: HeadCall) -> Tensor:
        """Return `linear_kernel`: the weights before division, not scores before a softmax."""
        dtype = call.query.dtype
        projection, prior = (
            None if x is None else x.to(dtype) for x in (self.projection, self.prior)
        )
        exact = replace(self, projection=projection, prior=prior)
        return linear_kernel(call.query, self.components(call.key).to(dtype), exact)

    def weights(self, call: HeadCall) -> Tensor:
        """Return kernel[i, j] / Σ_j kernel[i, j], (B, H, N, L), for every denominator."""
        kernel = masked_kernel(self.scores(call.precise()), call.masks)
        total = kernel.sum(-1, keepdim=True)
        return kernel / total.masked_fill(total == 0, 1.0)

    def sizes(self, call: HeadCall) -> dict[str, int]:
        """Return K."""
        return {"components": self.score_maps}

    def num_features(self, call: HeadCall) -> int:
        """Return F."""
        return self.form.features.num_features(call.query.shape[-1], self.projection)


class MLK(Linear):
    """Linear attention whose keys are mixtures."""

    name = "mlk"
    title = "mlk attention"
    kernels = ("linear/mlk",)


def mix_keys(key: Tensor, prior: Tensor) -> Tensor:
    """Return Σ_r π_jr k_jr: (B, H, K, L, F) and (H, K, 1 or L) -> (B, H, L, F)."""
    total: Tensor | None = None
    for component, share in zip(key.unbind(2), prior.unbind(1), strict=True):
        term = component * share[None, ..., None].to(key.dtype)
        total = term if total is None else total + term
    assert total is not None
    return total


def linear_kernel(query: Tensor, key: Tensor, arguments: Linear) -> Tensor:
    """Return the unnormalised weights of linear attention and its mixtures.

    Source: Katharopoulos et al., 2020, Eq. (4); MGK, ICML 2022, section 2.4 (MLK):
        kernel[i, j] = φ(query[i]) · φ(key[j])                 no mixture
        kernel[i, j] = Σ_r π_jr φ(query[i]) · φ(key[j, r])     mix = after
        kernel[i, j] = φ(query[i]) · φ(Σ_r π_jr key[j, r])     mix = before
    Departs from the source: `before` is the released Long Range Arena code.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E), or (B, H_kv, K, L, E) with a prior.
        arguments: options, random features, priors.

    Returns:
        (B, H, N, L).
    """
    heads, form = query.shape[1], arguments.form
    features, projection, prior = form.features, arguments.projection, arguments.prior
    if prior is not None and form.mix == "before":
        key, prior = mix_keys(key, prior), None
    rows = features.query(query, projection)
    cols = repeat_heads(features.key(key, projection)[0], heads)  # (B, H, [K,] L, F)
    if prior is None:
        return rows @ cols.mT
    shares = repeat_rows(prior, heads)
    return ((rows[:, :, None] @ cols.mT) * shares[None, :, :, None]).sum(2)


def linear_reference(given: HeadCall, arguments: Linear) -> Tensor:
    """Return linear attention by the equation, storing the weights.

        attn_weights[i, j] = kernel[i, j] / (Σ_j kernel[i, j] + eps)     denominator = sum
        attn_weights[i, j] = kernel[i, j] / √N                           denominator = sqrt_len

    The sums run over allowed pairs. Rows whose sum is zero give zeros.
    """
    given = given.precise()
    query, _, value, masks, dropout = given.heads
    kernel = masked_kernel(arguments.scores(given), masks)
    numerator = kernel @ repeat_heads(drop_values(value, dropout), kernel.shape[1])
    total = kernel.sum(-1, keepdim=True)
    return finish(numerator, total, query.shape[-1], arguments.form, masks)


def masked_kernel(kernel: Tensor, masks: Masks) -> Tensor:
    """Set masked pairs to zero."""
    allowed = masks.allowed(masks.all_rows, masks.all_cols, kernel.device)
    return kernel if allowed is None else kernel.masked_fill(~allowed, 0.0)


def real_keys(cols: Tensor, masks: Masks) -> Tensor:
    """Set the features of masked keys, (B, H_kv, L, F), to zero."""
    hidden = masks.key_mask
    return cols if hidden is None else cols.masked_fill(~hidden[:, None, :, None], 0.0)


def mixed_features(given: HeadCall, arguments: Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return features of queries and of (mixed) keys, and the log of the keys' divisor.

    They are at least float32; with a state, its divisor and the keys' are made equal.
    """
    dtype, features = compute_dtype(given.query), arguments.form.features
    projection = None if arguments.projection is None else arguments.projection.to(dtype)
    key, prior = arguments.components(given.key.to(dtype)), arguments.prior
    if prior is not None and arguments.form.mix == "before":
        key, prior = mix_keys(key, prior), None
    cols, scale = features.key(key, projection, given.masks.key_mask, arguments.state)
    cols = cols if prior is None else mix_keys(cols, prior)
    return features.query(given.query.to(dtype), projection), cols, scale


def linear_blockwise(given: HeadCall, arguments: Linear) -> Tensor:
    """Return linear attention with O(N) work and memory; causal over chunks.

    A mixture is single-key linear attention with key features Σ_r π_jr φ(k_jr) (exact: the sum over
    components commutes with the sum over keys). Sums and states are at least float32.
    """
    given = given.precise()
    query, _, value, masks, dropout = given.heads
    form, state = arguments.form, arguments.state
    rows, cols, scale = mixed_features(given, arguments)
    cols, value = real_keys(cols, masks), drop_values(value, dropout)
    if form.divides:
        value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    before = None if state is None else state.sums
    if masks.is_causal and masks.num_queries > 1:  # a single query attends to all keys
        product, after = causal_product(rows, cols, value, state=before)
    else:
        after = cols.mT @ value
        after = after if before is None else after + before
        grouped = rows.unflatten(1, (cols.shape[1], rows.shape[1] // cols.shape[1]))
        product = (grouped @ after[:, :, None]).flatten(1, 2)
    if state is not None:
        state.replace(after, scale)
    if form.divides:
        numerator, total = product[..., :-1], product[..., -1:]
    else:
        numerator, total = product, None
    return finish(numerator, total, query.shape[-1], form, masks)


def drop_values(value: Tensor, dropout: AttentionDropout | None) -> Tensor:
    """Drop whole values (B, H_kv, L, E_v): one decision per sample, head and key."""
    keep = kept_values(value, dropout, value.dtype)
    return value if keep is None else value * keep[..., None]


def kept_values(
    value: Tensor, dropout: AttentionDropout | None, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """Return the factors of `drop_values`, (B, H_kv, L)."""
    if dropout is None:
        return None
    batch, heads, length, _ = value.shape
    keep = keep_pairs(dropout, batch, heads, range(1), span(0, length), value.device)
    return keep[:, :, 0].to(dtype) * dropout.scale


def finish(
    numerator: Tensor, total: Tensor | None, head_dim: int, form: LinearForm, masks: Masks
) -> Tensor:
    """Divide numerators by the denominator and apply the output factor."""
    factor = form.factor(head_dim, masks)
    if total is None or not form.divides:
        return numerator * factor
    total = total + form.eps
    least = torch.finfo(total.dtype).tiny
    # The gradient divides by the square of a sum, which underflows first: no gradient then.
    faint = total.abs() < least**0.5
    total = torch.where(faint, total.detach(), total)
    empty = total.abs() < least
    # Features and priors are not negative: if their sum is zero, so is the numerator.
    inverse = (factor / total.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
    if not torch.is_grad_enabled():
        return numerator * inverse
    constant = inverse.detach().masked_fill(~faint, 0.0)
    return torch.addcmul(numerator * inverse.masked_fill(faint, 0.0), numerator.detach(), constant)


def linear_triton(given: HeadCall, arguments: Linear) -> Tensor:
    """Return `linear_blockwise` by fused kernels, (B, H, N, E_v) in the dtype of `query`.

    Features and their mixtures are computed in float32 and rounded to the dtype of `query`, in
    which the products within chunks are computed; sums and states are float32. `dpfp` and `favor`
    are computed outside the kernels.
    """
    from lit_probattn.kernels.linear.operators import linear_attention

    form, masks = arguments.form, given.masks
    out, _ = linear_attention(
        **fused_features(given, arguments),
        value=given.value,
        key_mask=masks.key_mask,
        keep=kept_values(given.value, given.dropout),
        has_totals=form.divides,
        divides=form.divides,
        eps=form.eps,
        factor=form.factor(given.query.shape[-1], masks),
        is_causal=masks.is_causal,
    )
    return out


def fused_features(given: HeadCall, arguments: Linear) -> dict[str, Any]:
    """Return vectors, φ and mixture for the kernels, or features if they do not support φ."""
    features, prior, shift = arguments.form.features, arguments.prior, arguments.key_shift
    if features.name in ("elu", "relu"):
        key = given.key if shift is not None else arguments.components(given.key)
        if prior is None and key.dim() == 5:
            raise ValueError(f"keys of {key.shape[2]} components need a prior, received None")
        return {
            **{"query": given.query, "key": key, "features": features.name},
            **{"normed": features.norm == "sum", "prior": prior, "shift": shift},
            **{"mix_before": arguments.form.mix == "before"},
        }
    rows, cols, _ = mixed_features(given, replace(arguments, state=None))
    dtype = given.query.dtype
    return {"query": rows.to(dtype), "key": cols.to(dtype)}


def linear_native(given: HeadCall, arguments: Linear) -> Tensor:
    """Return `linear_blockwise` by the C library, (B, H, N, E_v), in at least float32.

    `dpfp`, `favor`, normalised features, and the mixing of keys before φ are computed outside.
    """
    from lit_probattn.kernels.cpu.linear import MAPS, LinearInputs, linear_by_chunks

    given = given.precise()
    query, key, value, masks, dropout = given.heads
    form, prior = arguments.form, arguments.prior
    row_map = col_map = "none"
    if form.features.norm == "none" and form.features.name in ("elu", "relu"):
        row_map, key = form.features.name, arguments.components(key)
        if prior is not None and form.mix == "before":
            key, prior = mix_keys(key, prior), None
        col_map = row_map
    else:
        (query, key, _), prior = mixed_features(given, arguments), None
    return linear_by_chunks(
        LinearInputs(
            query=query,
            key=key[:, :, None] if key.dim() == 4 else key,
            value=value,
            prior=None if prior is None else prior.to(query.dtype),
            key_mask=masks.key_mask,
            keep=kept_values(value, dropout, query.dtype),
            row_map=MAPS.index(row_map),
            col_map=MAPS.index(col_map),
            divides=form.divides,
            is_causal=masks.is_causal,
            eps=form.eps,
            factor=form.factor(given.query.shape[-1], masks),
        )
    )


def missing_chunks(call: HeadCall, variant: Variant) -> str | None:
    """Return why the library does not support a call: device, compiler, or the causal mask."""
    refusal, masks = native_refusal(call.device), call.masks
    if refusal is None and masks.is_causal and masks.num_queries != masks.num_keys:
        return (
            "supports a causal mask only for as many keys as queries, received "
            f"{masks.num_queries} queries and {masks.num_keys} keys"
        )
    return refusal


def missing_states(call: HeadCall, variant: Linear) -> str | None:
    """Return why the Triton kernels do not support a call: the size of states, or the device."""
    features = variant.num_features(call)
    if features > _MOST_FEATURES:
        return f"supports at most {_MOST_FEATURES} features of a state, received {features}"
    return kernel_refusal(call, variant, features)


# F of a state that fits into the registers of a program.
_MOST_FEATURES = 128
LACKS_OF_CHUNKS = {"transform": LACKS_OF_BLOCKS["transform"]}
LACKS_OF_STATE_KERNELS = {**LACKS_OF_OPERATORS, "state": "cannot continue from a state"}
_NO_PAIRS = "cannot apply attn_mask, because it forms no pairs"
Linear.own_engines = {
    "reference": Engine(linear_reference, lacks={"state": "cannot continue from a state"}),
    "blockwise": Engine(linear_blockwise, lacks={**LACKS_OF_CHUNKS, "pair mask": _NO_PAIRS}),
    "native": Engine(
        linear_native,
        lacks={**LACKS_OF_STATE_KERNELS, "pair mask": _NO_PAIRS},
        limits={"components": 16},
        missing=missing_chunks,
    ),
    "triton": Engine(
        linear_triton,
        lacks={**LACKS_OF_STATE_KERNELS, "pair mask": _NO_PAIRS},
        missing=missing_states,
    ),
}

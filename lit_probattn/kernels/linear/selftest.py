"""Self-test of linear attention over chunks: outputs and all gradients against float64 sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_probattn.kernels.linear.operators import Features, linear_attention
from lit_probattn.kernels.selftest import HeadDims, beside, in_float64, random_tensor

_BATCH, _HEADS, _SOURCES, _ROWS, _KEYS = 2, 4, 2, 149, 167


class Kind(NamedTuple):
    """Options of a call of linear attention.

    Args:
        components: components of a key; 0 means no prior.
        shifted: whether components are shifts of one key.
        weighted: whether heads mix all sources, with an initial state, instead of sharing them.
        masked: whether keys are masked and values dropped.
        divides: whether the output is divided; otherwise it is a numerator.
    """

    features: Features = "elu"
    normed: bool = False
    components: int = 0
    shifted: bool = False
    prior_rows: bool = False
    mix_before: bool = False
    weighted: bool = False
    masked: bool = False
    divides: bool = True


_KINDS = {
    "linear": Kind(),
    "mlk": Kind(components=2, masked=True),
    "linear_fish": Kind(weighted=True, masked=True),
}
Tensors = dict[str, Tensor]


def _phi(x: Tensor, kind: Kind) -> Tensor:
    if kind.features == "elu":
        x = F.elu(x) + 1.0
    elif kind.features == "relu":
        x = x.relu()
    return x / x.sum(-1, keepdim=True).clamp_min(1e-300) if kind.normed else x


def plain_attention(
    given: Tensors, seen: Tensor, keep: Tensor, kind: Kind, eps: float, factor: float
) -> Tensor:
    """Compute `linear_attention` by the equation, storing all pairs.

    Args:
        seen: allowed pairs, broadcastable to (B, H, N, L).
        keep: factor of every value, broadcastable to (B, S, L).
    """
    rows, key, prior = _phi(given["query"], kind), given["key"], given.get("prior")
    if prior is None:
        cols = _phi(key, kind)
    else:
        if kind.shifted:
            key = key[:, :, None] + given["shift"][:, :, None]
        share = prior[..., None]
        if kind.mix_before:
            cols = _phi((share * key).sum(2), kind)
        else:
            cols = (share * _phi(key, kind)).sum(2)
    value = given["value"] * keep[..., None]
    heads, sources = rows.shape[1], cols.shape[1]
    shared = torch.arange(heads, device=rows.device) // (heads // sources)
    one = F.one_hot(shared, sources).to(rows.dtype)
    pairs = torch.einsum("bhie,bsje->bhsij", rows, cols) * seen[:, :, None]
    num = torch.einsum("hs,bhsij,bsjd->bhid", given.get("weight", one), pairs, value)
    if kind.weighted:
        start = torch.einsum("hs,bsed->bhed", given["weight"], given["state"])
        num = num + rows @ start
    if not kind.divides:
        return num * factor
    den = torch.einsum("hs,bhsij->bhi", given.get("norm_weight", one), pairs)[..., None]
    return (num * factor / (den + eps + (den == 0))).masked_fill(den == 0, 0.0)


def self_test(
    family: str, device: torch.device, dtype: torch.dtype, head_dims: HeadDims
) -> list[tuple[Tensor, Tensor]]:
    """Return causal outputs and gradients of a family."""
    return compare(_KINDS[family], True, device, dtype, head_dims, (_ROWS, _KEYS))


def compare(
    kind: Kind,
    is_causal: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: HeadDims,
    sizes: tuple[int, int],
    batch: int = _BATCH,
) -> list[tuple[Tensor, Tensor]]:
    """Return (found, float64) of the output and of all gradients."""
    (rows, keys), (head_dim, value_dim) = sizes, head_dims
    given = _draw(kind, batch, rows, keys, head_dim, value_dim, device, dtype)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    seen = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device)
    keep = torch.ones(1, 1, keys, device=device)
    masks: dict[str, Any] = {}
    if kind.masked:
        coin = random_tensor(batch, keys, seed=11, device=device, dtype=torch.float32) > -0.8
        keep = random_tensor(batch, _SOURCES, keys, seed=12, device=device, dtype=torch.float32).gt(
            -0.5
        ) * torch.ones((), device=device).mul(1.25)
        masks = {"key_mask": coin, "keep": keep}
        seen = seen & coin[:, None, None]
    if is_causal:
        seen = seen.tril(keys - rows)
    eps, factor = (0.01, 0.7) if kind.normed else (0.0, 1.0)
    out, _ = linear_attention(
        **leaves,
        **masks,
        features=kind.features,
        normed=kind.normed,
        mix_before=kind.mix_before,
        has_totals=kind.divides,
        divides=kind.divides,
        eps=eps,
        factor=factor,
        is_causal=is_causal,
    )
    exact = dict(zip(given, in_float64(list(given.values())), strict=True))
    truth = plain_attention(exact, seen, keep.double(), kind, eps, factor)
    cotangent = random_tensor(*truth.shape, seed=7, device=device, dtype=out.dtype)
    if not kind.divides:  # the numerator does not depend on these
        for found in (leaves, exact):
            found.pop("norm_weight", None)
    return beside([out], [truth], list(leaves.values()), list(exact.values()), [cotangent])


def _draw(
    kind: Kind,
    batch: int,
    rows: int,
    keys: int,
    head_dim: int,
    value_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensors:
    """Return the tensors of a call; features are made positive if there is no φ."""
    parts = (kind.components,) if kind.components and not kind.shifted else ()
    shapes = {
        "query": (batch, _HEADS, rows, head_dim),
        "key": (batch, _SOURCES, *parts, keys, head_dim),
        "value": (batch, _SOURCES, keys, value_dim),
    }
    if kind.components:
        shapes["prior"] = (_SOURCES, kind.components, keys if kind.prior_rows else 1)
    if kind.shifted:
        shapes["shift"] = (_SOURCES, kind.components, head_dim)
    if kind.weighted:
        shapes["weight"] = shapes["norm_weight"] = (_HEADS, _SOURCES)
        shapes["state"] = (batch, _SOURCES, head_dim, value_dim)
    found = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        kept = dtype if name in ("query", "key", "value") else torch.float32
        x = random_tensor(*shape, seed=seed, device=device, dtype=kept)
        if name in ("prior", "norm_weight"):
            x = x.abs()
        if kind.features == "none" and name in ("query", "key"):
            x = x.abs()
        found[name] = x
    return found

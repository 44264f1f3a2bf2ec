"""Sides of `profiling kernels --config`: heads or a layer, in training, inference or decoding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_probattn.attention import Attention, HeadCall, KVCache
from lit_probattn.attention.layer import split_heads
from lit_probattn.attention.masks import Masks, make_masks
from lit_probattn.configs import build_attention
from lit_probattn.randomness import AttentionDropout, RandomKey
from profiling.kernels.bound import Work, softmax_work, visible_pairs, work
from profiling.kernels.cases import draw_heads
from profiling.kernels.config import (
    LAYER_HEADS,
    KernelsConfig,
    SdpaBackend,
    Side,
    TorchLayer,
    TorchSdpa,
)
from profiling.kernels.parity import kernel_family, run_heads
from profiling.kernels.products import linear_products

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
Make = Callable[..., Tensor]


@dataclass(frozen=True)
class _Prepared:
    """A forward pass without arguments, and the tensors that receive gradients."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]


def side_function(side: Side, config: KernelsConfig) -> Callable[[], list[Tensor]]:
    """Return a function that runs a side once, forward or forward and backward.

    Scope `attention` excludes the projections, but includes shifts and priors of keys and the
    gradients of parameters, as in the layer. Scope `layer` is self-attention of a layer of width
    8 · `head_dim`. Backend `auto` selects as a layer does. In mode `decode` one query
    attends to `seq_len` keys; a layer appends it to a cache with the others. An attention layer
    that cannot be built raises a ConfigError.

    Args:
        side: the side.
        config: the point.
    """
    rng = RandomKey(config.seed)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    generator = torch.Generator(device).manual_seed(config.seed)
    train = config.mode == "train"

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    if side.torch_products is not None:
        return linear_products(side.torch_products, config, make)
    if side.torch_layer is not None:
        made = _multihead_attention(side.torch_layer, config, make)
    elif side.torch_sdpa is not None:
        prepare = _projected_heads if config.scope == "layer" else _torch_heads
        made = prepare(side.torch_sdpa, config, make)
    else:
        layer = _layer(side, config).to(device=device, dtype=dtype).train(train)
        prepare_own = _own_layer if config.scope == "layer" else _own_heads
        made = prepare_own(layer, side, config, make, rng)

    def forward() -> Tensor:
        with _only(side.sdpa):
            return made.forward()

    with torch.set_grad_enabled(train):  # as in `run`, so that a compiler has one graph
        grad_out = make(*forward().shape)

    def run() -> list[Tensor]:
        if not train:
            with torch.no_grad():
                return [forward()]
        out = forward()
        return [out, *torch.autograd.grad(out, made.leaves, grad_out.to(out.dtype))]

    return run


def side_family(side: Side, config: KernelsConfig) -> str:
    """Return folder and name of the kernels of a side with an attention layer."""
    return kernel_family(_layer(side, config))


def _layer(side: Side, config: KernelsConfig) -> Attention:
    assert side.attention is not None
    class_path, init_args = side.attention.resolve(Path.cwd())
    if config.scope == "attention":
        return build_attention(class_path, init_args, config.head_dim, config.head_dim)
    init_args = {**init_args, "backend": side.backend}
    width = LAYER_HEADS * config.head_dim
    return build_attention(class_path, init_args, width, config.head_dim)


# ---- attention without projections ---------------------------------------------------------------


def _num_queries(config: KernelsConfig) -> int:
    return 1 if config.mode == "decode" else config.seq_len


def _torch_heads(sdpa: TorchSdpa, config: KernelsConfig, make: Make) -> _Prepared:
    sizes = (_num_queries(config), config.seq_len, config.seq_len)
    shapes = [(config.batch_size, sdpa.num_heads, n, config.head_dim) for n in sizes]
    query, key, value = inputs = [make(*shape).requires_grad_() for shape in shapes]
    is_causal = config.is_causal and config.mode != "decode"  # PyTorch's mask is aligned top left
    return _Prepared(partial(_sdpa, sdpa, query, key, value, is_causal), inputs)


def _sdpa(sdpa: TorchSdpa, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    with _only(sdpa.backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _only(backend: SdpaBackend) -> AbstractContextManager[Any]:
    """Let PyTorch's attention use one implementation."""
    chosen = _SDPA.get(backend)
    return nullcontext() if chosen is None else sdpa_kernel([chosen])


def heads_call(layer: Attention, config: KernelsConfig, make: Make, rng: RandomKey) -> HeadCall:
    """Return a call with random heads that require gradients."""
    rows, cols = _num_queries(config), config.seq_len
    found = draw_heads(layer, config.batch_size, rows, cols, make)
    query, key, value = (x.contiguous().requires_grad_() for x in found)
    dropout = None
    if layer.dropout and config.mode == "train":
        dropout = AttentionDropout(layer.dropout, rng)
    sizes = (config.batch_size, layer.num_heads, rows, cols)
    masks = make_masks(*sizes, is_causal=config.is_causal)
    return HeadCall(query, key, value, masks, dropout=dropout, rng=rng)


def _own_heads(
    layer: Attention, side: Side, config: KernelsConfig, make: Make, rng: RandomKey
) -> _Prepared:
    call = heads_call(layer, config, make, rng)
    chosen = layer.core.pick(call) if side.backend == "auto" else side.backend
    leaves = [call.query, call.key, call.value, *layer.core.parameters()]
    return _Prepared(partial(run_heads, layer, chosen, call), leaves)


# ---- layers --------------------------------------------------------------------------------------


def _inner(tokens: Tensor) -> Tensor:
    """Return tokens as a non-leaf tensor: FLOP counters add a hook to the inputs of modules."""
    return tokens.view_as(tokens) if torch.is_grad_enabled() else tokens.detach()


def _multihead_attention(given: TorchLayer, config: KernelsConfig, make: Make) -> _Prepared:
    """PyTorch's layer, whose head size is its width divided by the number of heads."""
    width = LAYER_HEADS * config.head_dim
    layer = nn.MultiheadAttention(width, given.num_heads, batch_first=True)
    tokens = make(config.batch_size, config.seq_len, width).requires_grad_()
    layer.to(tokens).train(config.mode == "train")
    size = config.seq_len
    hidden = nn.Transformer.generate_square_subsequent_mask(size).to(tokens)

    def forward() -> Tensor:
        x = _inner(tokens)
        masks = {"attn_mask": hidden, "is_causal": True} if config.is_causal else {}
        out: Tensor = layer(x, x, x, need_weights=False, **masks)[0]
        return out

    return _Prepared(forward, [tokens, *layer.parameters()])


def _projected_heads(sdpa: TorchSdpa, config: KernelsConfig, make: Make) -> _Prepared:
    """Input projections by one matrix product, PyTorch's attention, output projection."""
    width, inner = LAYER_HEADS * config.head_dim, sdpa.num_heads * config.head_dim
    tokens = make(config.batch_size, _num_queries(config), width).requires_grad_()
    into, out_of = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
    into.to(tokens), out_of.to(tokens)
    cached = (config.batch_size, sdpa.num_heads, config.seq_len, config.head_dim)
    stored = [make(*cached) for _ in range(2)] if config.mode == "decode" else []

    def forward() -> Tensor:
        found = into(_inner(tokens)).chunk(3, -1)
        query, key, value = (split_heads(x, sdpa.num_heads) for x in found)
        if stored:
            stored[0][:, :, -1:], stored[1][:, :, -1:] = key, value
            key, value = stored
        is_causal = config.is_causal and not stored
        heads = _sdpa(sdpa, query, key, value, is_causal)
        return out_of(heads.transpose(1, 2).flatten(2))

    return _Prepared(forward, [tokens, *into.parameters(), *out_of.parameters()])


def _own_layer(
    layer: Attention, side: Side, config: KernelsConfig, make: Make, rng: RandomKey
) -> _Prepared:
    width = LAYER_HEADS * config.head_dim
    tokens = make(config.batch_size, _num_queries(config), width).requires_grad_()
    cache, before = None, config.seq_len - 1
    if config.mode == "decode":
        cache = layer.new_cache(config.seq_len)
        with torch.no_grad():
            layer(make(config.batch_size, before, width), cache=cache, is_causal=True, rng=rng)

    def forward() -> Tensor:
        if cache is not None:
            # Every call appends the same token; a state of fixed size adds it repeatedly.
            if isinstance(cache, KVCache):
                cache.truncate(before)
            else:
                cache.length = before
        return layer(_inner(tokens), is_causal=config.is_causal, cache=cache, rng=rng)

    return _Prepared(forward, [tokens, *layer.parameters()])


# ---- bound of a side -----------------------------------------------------------------------------


def side_work(side: Side, config: KernelsConfig) -> Work | None:
    """Return the counted work of a side with scope attention; None without a count."""
    if side.torch_products is not None or side.torch_layer is not None:
        return None
    train, device = config.mode == "train", torch.device("meta")
    rows, cols = _num_queries(config), config.seq_len
    if side.torch_sdpa is not None:
        pairs = config.batch_size * visible_pairs(Masks(rows, cols, is_causal=config.is_causal))
        return softmax_work(side.torch_sdpa.num_heads, config.head_dim, pairs, train=train)
    layer = _layer(side, config).to(device).train(train)
    call = heads_call(layer, config, partial(torch.empty, device=device), RandomKey(0))
    variant = layer.core.variant(call)
    try:
        return work(call, variant.lower(call), train=train)
    except NotImplementedError:  # no normal form, or a function without a count
        return None

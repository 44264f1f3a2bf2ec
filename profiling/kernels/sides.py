"""What a side of the benchmark runs: attention alone, on random heads, by one implementation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_probattn.attention import Attention, MGKAttention
from lit_probattn.attention.masks import make_masks
from lit_probattn.randomness import AttentionDropout, RandomKey
from profiling.builders import ConfigError, build_attention
from profiling.kernels.config import KernelsConfig, Side, TorchSdpa


def heads_of(
    layer: Attention, batch: int, seq_len: int, make: Callable[..., Tensor]
) -> list[Tensor]:
    """Return random query, stored keys and value of a layer, as its projections would give."""

    def split(width: int, num_heads: int) -> Tensor:
        return make(batch, seq_len, width).unflatten(-1, (num_heads, -1)).transpose(1, 2)

    query = split(layer.num_query_heads * layer.head_dim, layer.num_query_heads)
    key = layer.split_keys(make(batch, seq_len, layer.key_width))
    value = split(layer.num_value_heads * layer.value_head_dim, layer.num_value_heads)
    return [x.contiguous().requires_grad_() for x in (query, key, value)]


def side_function(side: Side, config: KernelsConfig) -> Callable[[], list[Tensor]]:
    """Return a function that runs a side once, forward or forward and backward.

    Only attention itself is inside: no projections. Keys are shifted, expanded and combined with
    priors inside, as in the layer, and parameters get their gradients.

    Raises:
        ConfigError: the attention cannot be built.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    generator = torch.Generator(device).manual_seed(config.seed)
    train = config.mode == "train"

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    if side.torch_sdpa is not None:
        shape = (config.batch_size, side.torch_sdpa.num_heads, config.seq_len, config.head_dim)
        inputs = [make(*shape).requires_grad_() for _ in range(3)]
        parameters: list[Tensor] = []

        forward = _sdpa_call(side.torch_sdpa, inputs, config)
    else:
        assert side.attention is not None
        class_path, init_args = side.attention.resolve(Path.cwd())
        layer = build_attention(class_path, init_args, config.head_dim, config.head_dim)
        layer.to(device=device, dtype=dtype).train(train)
        inputs = heads_of(layer, config.batch_size, config.seq_len, make)
        projections = {
            id(p) for m in layer.children() if "Linear" in type(m).__name__ for p in m.parameters()
        }
        parameters = [p for p in layer.parameters() if id(p) not in projections]
        forward = _attention_call(layer, side.backend, inputs, config)
    with torch.no_grad():
        grad_out = make(*forward().shape)

    def run() -> list[Tensor]:
        if not train:
            with torch.no_grad():
                return [forward()]
        out = forward()
        return [out, *torch.autograd.grad(out, [*inputs, *parameters], grad_out.to(out.dtype))]

    return run


_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def _sdpa_call(
    sdpa: TorchSdpa, inputs: list[Tensor], config: KernelsConfig
) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        chosen = _SDPA.get(sdpa.backend)
        with nullcontext() if chosen is None else sdpa_kernel([chosen]):
            return F.scaled_dot_product_attention(
                inputs[0], inputs[1], inputs[2], is_causal=config.is_causal
            )

    return forward


def _attention_call(
    layer: Attention, backend: str, inputs: list[Tensor], config: KernelsConfig
) -> Callable[[], Tensor]:
    if backend == "flex":
        return _flex_call(layer, inputs, config)
    if backend not in layer.backends:
        raise ConfigError(
            f"{layer.variant} has no backend {backend!r}; expected one of "
            f"{', '.join(layer.backends)}"
        )
    dropout = None
    if layer.dropout and config.mode == "train":
        dropout = AttentionDropout(layer.dropout, RandomKey(config.seed))
    query, key, value = inputs
    batch, heads, length = query.shape[:3]
    masks = make_masks(batch, heads, length, value.shape[2], is_causal=config.is_causal)

    def forward() -> Tensor:
        arguments = layer.score_arguments(length)
        arguments.update(layer.random_arguments(RandomKey(config.seed), 0))
        keys = layer.keys_for(backend, key)
        return layer.run(
            *(backend, query, keys, value),
            masks=masks,
            dropout=dropout,
            arguments=arguments,
            cache=None,
        )

    return forward


def _flex_call(
    layer: Attention, inputs: list[Tensor], config: KernelsConfig
) -> Callable[[], Tensor]:
    """FlexAttention over the expanded keys; for comparison only, layers have no such backend."""
    from profiling.kernels.flex import mgk_flex

    if not isinstance(layer, MGKAttention) or layer.e_step == "hard":
        raise ConfigError(f"flex serves soft MGK only, received {layer.variant}")
    query, key, value = inputs

    def forward() -> Tensor:
        arguments = layer.score_arguments(key.shape[-2])
        return mgk_flex(
            *(query, layer.expand_keys(key), value),
            precision=1.0 / layer.variance(),
            offset=arguments["log_prior"],
            gaussian=layer.score == "gaussian",
            equal_precision=layer.variance.is_equal,
            is_causal=config.is_causal,
        )

    return forward

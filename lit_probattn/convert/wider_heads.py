"""Widen the heads of softmax attention without changing its function.

    lit-probattn convert wider_heads runs/NAME/0 wide.ckpt --head_dim 64

Writes an equivalent checkpoint with larger heads and `wide.yaml`, a file to add after the run's
configuration (`--config wide.yaml`).

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., 2020), theorem 2
(the inclusion):

    V_v = [W_v; 0],  V_o = [W_o, 0],  V_q = c [W_q; 0],  V_k = c [W_k; 0],  c = (d_p / s)^¼

for head sizes s and d_p ≥ s: the logits agree, because c² / √d_p = 1 / √s.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from lit_probattn.attention import Attention, SoftmaxAttention
from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.convert.files import (
    attention_file,
    check_output,
    configured_layers,
    find_layers,
    put_layers,
    require_no_hooks,
    restore_layer,
    write,
)
from lit_probattn.training.checkpoints import find_file, load_checkpoint


def pad_heads(weight: Tensor, num_heads: int, head_size: int, *, axis: int = 0) -> Tensor:
    """Zero-pad every head of a projection to `head_size` rows (or columns).

    The heads of `weight`, (H · s, …), are contiguous along `axis`.
    """
    heads = weight.movedim(axis, 0).unflatten(0, (num_heads, -1))  # (H, s, …)
    extra = heads.new_zeros(num_heads, head_size - heads.shape[1], *heads.shape[2:])
    return torch.cat([heads, extra], 1).flatten(0, 1).movedim(0, axis).contiguous()


def embed_into_head_size(
    layer: SoftmaxAttention, head_dim: int, *, padding_std: float = 0.0, seed: int = 0
) -> SoftmaxAttention:
    """Return a layer with heads of size `head_dim` that computes the same function.

    Source: low-rank bottleneck paper, theorem 2 (the inclusion).
    Departs from the source: biases are padded like the weights; grouped heads are kept.

    With all padding zero, training cannot change it: the gradient of a padded query row requires a
    non-zero key row, and that of a padded value row a non-zero output column. `padding_std` fills
    the padding of keys and values with noise; queries and output stay zero there, which keeps the
    function and lets all of them learn.

    Args:
        layer: dot-product softmax attention.
        head_dim: d_p, at least the layer's head size, for queries, keys and values.
        padding_std: standard deviation of the padding of keys and values.
        seed: seed of the padding noise.

    Raises:
        ValueError: other scores or rotary positions, or `head_dim` is too small.
    """
    _check(layer)
    smallest = max(layer.head_dim, layer.value_head_dim)
    if head_dim < smallest:
        raise ValueError(f"head_dim must be at least {smallest}, received {head_dim}")
    wide = SoftmaxAttention(
        layer.embed_dim,
        layer.num_heads,
        head_dim=head_dim,
        num_kv_heads=layer.num_kv_heads,
        key_embed_dim=layer.key_embed_dim,
        bias=layer.use_bias,
        dropout=layer.dropout,
        backend=layer.backend,
    ).to(layer.query_proj.weight)
    factor = (head_dim / layer.head_dim) ** 0.25
    sides = {  # heads, factor, standard deviation of the padding
        "query_proj": (layer.num_heads, factor, 0.0),
        "key_proj": (layer.num_kv_heads, factor, padding_std),
        "value_proj": (layer.num_kv_heads, 1.0, padding_std),
    }
    state = {}
    generator = torch.Generator().manual_seed(seed)
    for name, value in layer.state_dict().items():
        part, _, kind = name.partition(".")
        if part in sides:
            heads, scale, std = sides[part]
            state[name] = scale * pad_heads(value, heads, head_dim)
            if std and kind == "weight":
                padding = state[name].unflatten(0, (heads, head_dim))[:, len(value) // heads :]
                noise = torch.randn(padding.shape, generator=generator, dtype=torch.float64)
                padding.copy_(std * noise)
        elif kind == "weight":
            state[name] = pad_heads(value, layer.num_heads, head_dim, axis=1)
        else:
            state[name] = value
    wide.load_state_dict(state)
    return wide.train(layer.training)


def _check(layer: Attention) -> None:
    """Raise a ValueError unless the layer is softmax attention that can be widened."""
    require_no_hooks(layer)
    if not isinstance(layer, SoftmaxAttention):
        raise ValueError(f"only SoftmaxAttention can be widened, received {type(layer).__name__}")
    if layer.core.score != "dot" or layer.rotary is not None:
        raise ValueError(
            "only dot-product softmax attention without rotary positions can be widened, received "
            f"score={layer.core.score}, rotary {'on' if layer.rotary is not None else 'off'}"
        )


# ---- command -----------------------------------------------------------------------------------


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `run`."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="checkpoint with softmax attention, or its run folder")
    add("output", type=Path, help="checkpoint to write, NAME.ckpt")
    add("--head_dim", type=int, required=True, help="new head size")
    add("--padding_std", type=float, default=0.0, help="standard deviation of padding noise")
    add_flag(parser)


def run(options: argparse.Namespace) -> list[str]:
    """Write a checkpoint with larger heads; return the lines to print.

    Raises:
        ConfigError: the checkpoint or the options are invalid.
        CheckpointError: a file cannot be read or written.
    """
    check_output(options.output)
    path = find_file(options.checkpoint)
    checkpoint = load_checkpoint(path)
    head_dim = checkpoint.get("hyper_parameters", {}).get("head_dim")
    if head_dim is None:
        raise ConfigError(f"{options.checkpoint}: the checkpoint stores no head_dim")
    state, size, std = checkpoint.get("state_dict", {}), options.head_dim, options.padding_std
    config_file = attention_file(path)
    with prefixed("", ValueError):
        for layer in [] if config_file is None else configured_layers(config_file, state, head_dim):
            _check(layer)  # other attention has the same parameters
        layers = {
            name: embed_into_head_size(
                restore_layer(state, name, head_dim), size, padding_std=std, seed=number
            )
            for number, name in enumerate(find_layers(state))
        }
    config = {"model": {"init_args": {"head_dim": size}}}
    done = write(options.output, checkpoint, config, state_dict=put_layers(state, layers))
    return [f"{len(layers)} layers: head size {head_dim} -> {size}", done]

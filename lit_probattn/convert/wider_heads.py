"""A narrow-headed layer as a layer with larger heads that computes the same: theorem 2, inclusion.

    V_v = [W_v; 0],  V_o = [W_o, 0],  V_q = c [W_q; 0],  V_k = c [W_k; 0],  c = (d_p / s)^¼

for head sizes s and d_p ≥ s: the logits agree, because c² / √d_p = 1 / √s.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import yaml
from torch import Tensor

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.convert.to_mgk import ConversionError, find_layers, restore_layer
from lit_probattn.training.checkpoints import load_checkpoint, save_checkpoint

# What belongs to the run that wrote the checkpoint and not to the new weights.
_DROPPED = ("loops", "callbacks", "MixedPrecision", "training", "optimizer_states", "lr_schedulers")


def pad_heads(weight: Tensor, num_heads: int, head_size: int, *, axis: int = 0) -> Tensor:
    """Give every head of a projection `head_size` rows (or columns), new ones zero.

    Args:
        weight: (H · s, …), heads one after the other along `axis`.
        num_heads: H.
        head_size: new size.
        axis: where the heads are.
    """
    moved = weight.movedim(axis, 0)
    heads = moved.unflatten(0, (num_heads, -1))  # (H, s, …)
    extra = heads.new_zeros(num_heads, head_size - heads.shape[1], *heads.shape[2:])
    return torch.cat([heads, extra], 1).flatten(0, 1).movedim(0, axis).contiguous()


def embed_into_head_size(
    layer: SoftmaxAttention, head_dim: int, *, padding_std: float = 0.0, seed: int = 0
) -> SoftmaxAttention:
    """Return a layer with heads of `head_dim` that computes the same function.

    Source: low-rank bottleneck paper, theorem 2 (the inclusion); specification d.2.
    Departs from the source: biases are padded like the weights; grouped heads are kept.

    With all padding zero, training cannot leave it: the gradient of a padded row of queries needs
    the keys' row to be non-zero, and that of values the output's columns. `padding_std` fills the
    padding of keys and values with small numbers; queries and output stay zero there, so that the
    function stays equal and both can learn.

    Args:
        layer: softmax attention with dot products.
        head_dim: d_p, at least the layer's head size, for queries, keys and values.
        padding_std: standard deviation of the padding of keys and values.
        seed: of that padding.

    Raises:
        ValueError: the layer has other scores or rotary positions, or `head_dim` is smaller.
    """
    if layer.core.score != "dot" or layer.rotary is not None:
        raise ValueError(
            "only dot-product softmax attention without rotary positions can be embedded, received "
            f"score={layer.core.score}, rotary {'on' if layer.rotary is not None else 'off'}"
        )
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
    sides = {
        "query_proj": (layer.num_heads, factor),
        "key_proj": (layer.num_kv_heads, factor),
        "value_proj": (layer.num_kv_heads, 1.0),
    }
    state = {}
    for name, value in layer.state_dict().items():
        part, _, kind = name.partition(".")
        if part in sides:
            heads, scale = sides[part]
            state[name] = scale * pad_heads(value, heads, head_dim)
        elif kind == "weight":
            state[name] = pad_heads(value, layer.num_heads, head_dim, axis=1)
        else:
            state[name] = value
    if padding_std:
        _fill_padding(state, layer, head_dim, padding_std, seed)
    wide.load_state_dict(state)
    return wide.train(layer.training)


def _fill_padding(
    state: dict[str, Tensor], layer: SoftmaxAttention, head_dim: int, std: float, seed: int
) -> None:
    """Put normal numbers into the padded rows of keys and values."""
    generator = torch.Generator().manual_seed(seed)
    for name, size in (
        ("key_proj.weight", layer.head_dim),
        ("value_proj.weight", layer.value_head_dim),
    ):
        weight = state[name].unflatten(0, (layer.num_kv_heads, head_dim)).clone()
        shape = weight[:, size:].shape
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight[:, size:] = (std * noise).to(weight)
        state[name] = weight.flatten(0, 1)


# ---- enlarging heads ---------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python -m lit_probattn.head_size embed`."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint with softmax attention")
    add("output", type=Path, help="the checkpoint to write, NAME.ckpt")
    add("--head_dim", type=int, required=True, help="new head size")
    add("--from_head_dim", type=int, help="head size, where no hyper-parameter says")
    add("--padding_std", type=float, default=0.0, help="small numbers where training can begin")


def run(options: argparse.Namespace) -> None:
    """Write a checkpoint whose softmax layers have larger heads and compute the same.

    Raises:
        ConversionError: the checkpoint or the sizes do not fit.
    """
    config_file = options.output.with_suffix(".yaml")
    for path in (options.output, config_file):
        if path.exists():
            raise ConversionError(f"{path} exists: choose another name or remove it")
    checkpoint = load_checkpoint(options.checkpoint)
    parameters = dict(checkpoint.get("hyper_parameters", {}))
    head_dim = options.from_head_dim or parameters.get("head_dim")
    if head_dim is None:
        raise ConversionError("the head size is not known: give --from_head_dim")
    state = dict(checkpoint.get("state_dict", {}))
    try:
        names = find_layers(state)
        for number, name in enumerate(names):
            layer = restore_layer(state, name, head_dim)
            wide = embed_into_head_size(
                layer, options.head_dim, padding_std=options.padding_std, seed=number
            )
            prefix = f"{name}." if name else ""
            state.update({f"{prefix}{k}": v.clone() for k, v in wide.state_dict().items()})
    except ValueError as error:
        raise ConversionError(str(error)) from error
    kept = {k: v for k, v in checkpoint.items() if k not in _DROPPED}
    parameters["head_dim"] = options.head_dim
    new = {**kept, "state_dict": state, "hyper_parameters": parameters, "global_step": 0}
    save_checkpoint(
        {**new, "epoch": 0, "optimizer_states": [], "lr_schedulers": []}, options.output
    )
    config = {"model": {"init_args": {"head_dim": options.head_dim}}}
    config_file.write_text(yaml.safe_dump(config))
    print(f"{len(names)} layers: head size {head_dim} -> {options.head_dim}")
    print(f"wrote {options.output} and {config_file}")


def same_function(layer: SoftmaxAttention, wide: SoftmaxAttention, x: torch.Tensor) -> float:
    """Return the relative difference of two layers' outputs on inputs (B, N, C)."""
    with torch.no_grad():
        exact = layer(x)
        return float((wide(x) - exact).norm() / exact.norm())

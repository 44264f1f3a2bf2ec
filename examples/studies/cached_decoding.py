"""Decoding with caches: tokens/s and cache size by length, compared with softmax attention.

One layer decodes one token at a time after a number of cached tokens, as in generation with a
language model. MGK, sMGK and MLK have half the heads, FiSH half as many global heads; head sizes
are equal. The cache of MLK is a state of fixed size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lit_probattn.attention import (
    Attention,
    Cache,
    FiSHAttention,
    KVCache,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)
from lit_probattn.base.arguments import at_least
from profiling.study import Report, add_timing, command, measure_sides

BASELINE = "softmax"
# Class, share of the heads, further options.
VARIANTS: Mapping[str, tuple[type[Attention], float, Mapping[str, Any]]] = {
    BASELINE: (SoftmaxAttention, 1.0, {}),
    "MGK": (MGKAttention, 0.5, {}),
    "sMGK": (MGKAttention, 0.5, {"shifted_keys": True}),
    "FiSH": (FiSHAttention, 1.0, {"head_ratio": 2.0, "noise": "none"}),
    "MLK": (MLKAttention, 0.5, {}),
}


def build(name: str, options: argparse.Namespace) -> Attention:
    """Return the layer of a variant, in eval mode."""
    cls, share, given = VARIANTS[name]
    heads = max(1, int(options.num_heads * share))
    torch.manual_seed(options.seed)
    layer = cls(options.embed_dim, heads, head_dim=options.embed_dim // options.num_heads, **given)
    return layer.eval().to(options.device)


def filled(layer: Attention, x: Tensor, spare: int) -> Cache:
    """Return the cache of a layer after tokens (B, N, C), with capacity for `spare` more."""
    cache = layer.new_cache(x.shape[1] + spare)
    with torch.no_grad():
        layer(x, is_causal=True, cache=cache)
    return cache


def decode(layer: Attention, cache: Cache, length: int, tokens: Tensor) -> None:
    """Decode tokens one by one after `length` cached tokens; MLK updates its state in place."""
    if isinstance(cache, KVCache):
        cache.truncate(length)
    with torch.no_grad():
        for token in tokens.split(1, 1):
            layer(token, is_causal=True, cache=cache)


def run(options: argparse.Namespace) -> Report:
    """Measure all variants at every length."""
    rows = []
    for length in options.lengths:
        shape = options.batch, length, options.embed_dim
        prompt = torch.randn(shape, device=options.device)
        tokens = torch.randn(
            options.batch, options.tokens, options.embed_dim, device=options.device
        )
        made = {name: build(name, options) for name in VARIANTS}
        caches = {name: filled(layer, prompt, options.tokens) for name, layer in made.items()}
        sides: dict[str, Callable[[], object]] = {}
        for name, layer in made.items():
            sides[name] = partial(decode, layer, caches[name], length, tokens)
        times = measure_sides(sides, options, lambda _: {"softmax": BASELINE})
        for name, layer in made.items():
            time, cache = times[name], caches[name]
            if isinstance(cache, KVCache):
                cache.truncate(length)  # stored terms of the keys are kept
            case = {"tokens": length, "variant": name, "heads": layer.num_heads}
            speed = options.batch * options.tokens / time["time_median_s"]
            found = {"tokens_per_s": round(speed, 1), "cache_bytes": cache.num_bytes}
            rows.append({**case, **found, **time})
    table = pd.DataFrame(rows)
    of_softmax = table[table["variant"] == BASELINE].set_index("tokens")["cache_bytes"]
    table["cache_over_softmax"] = table["cache_bytes"] / table["tokens"].map(of_softmax)
    shown = ["tokens", "variant", "heads", "tokens_per_s", "time_over_softmax", "cache_bytes"]
    last = table[(table["tokens"] == max(options.lengths)) & (table["variant"] != BASELINE)]
    told = ", ".join(
        f"{row.variant} {row.time_over_softmax:.2f} ({row.cache_over_softmax:.2f})"
        for row in last.itertuples()
    )
    return Report(
        "Decoding from caches",
        table,
        {"One layer, one new token at a time": table[[*shown, "cache_over_softmax"]].round(3)},
        [
            f"width {options.embed_dim}, {options.num_heads} heads of softmax, batch "
            f"{options.batch}, {options.tokens} new tokens, float32"
        ],
        finding=(
            f"after {max(options.lengths)} tokens, time per token (and cache bytes) relative to "
            f"softmax: {told}"
        ),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser)
    add = parser.add_argument
    add("--embed_dim", type=at_least(1), default=256, help="width")
    add("--num_heads", type=at_least(2), default=8, help="heads of softmax attention")
    add("--batch", type=at_least(1), default=1, help="sequences")
    add("--tokens", type=at_least(1), default=32, help="new tokens")
    add("--lengths", type=at_least(1), nargs="+", default=[128, 512, 2048], help="cached tokens")


main = command(__name__, __doc__, run, _add_options)

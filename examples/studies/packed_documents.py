"""Time and memory of an encoder's forward and backward pass with padded and packed documents.

A case D x N has D documents with lengths drawn uniformly from N · shortest to N; the longest has N.
Padded documents are a batch (D, N) with a mask of keys, and of queries unless every query is
computed. Packed documents are one row without padding, regrouped by length in each layer. The model
is a Transformer with bidirectional self-attention, by default with the sizes of the ListOps task.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from lit_probattn import create
from lit_probattn.attention.layer import Attention
from lit_probattn.attention.packing import Packing
from lit_probattn.base.arguments import at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.models.transformer import Transformer
from profiling.study import Report, add_timing, backend_of, command, measure_sides, shown

PADDED, EVERY_QUERY, PACKED = "padded", "padded, every query", "packed"


def lengths_of(case: str, shortest: float) -> Tensor:
    """Return the lengths of the documents of a case `DxN`, (D,), in descending order.

    Raises:
        ConfigError: the case has another form.
    """
    count, _, longest = case.partition("x")
    if not (count.isdecimal() and longest.isdecimal() and int(count) and int(longest)):
        raise ConfigError(f"--cases: expected DOCUMENTSxLONGEST, such as 16x256, received {case!r}")
    least = max(1, round(shortest * int(longest)))
    lengths = torch.randint(least, int(longest) + 1, (int(count),))
    lengths[0] = int(longest)
    return lengths.sort(descending=True).values


def made(variant: str, options: argparse.Namespace) -> Transformer:
    """Return the encoder."""

    def attention(width: int, head_dim: int) -> Attention:
        return create(variant, width, options.num_heads, head_dim=head_dim, dropout=0.0)

    sizes = {name: getattr(options, name) for name in ("embed_dim", "num_layers", "mlp_dim")}
    return Transformer(attention, head_dim=options.head_dim, **sizes)


def step(
    model: Transformer,
    x: Tensor,
    *,
    mask: Tensor | None = None,
    every_query: bool = False,
    bounds: Tensor | None = None,
) -> None:
    """Run forward and backward; padding has no gradient."""
    packing = None if bounds is None else Packing(bounds)
    out = model(x, key_mask=mask, query_mask=None if every_query else mask, cu_seqlens=packing)
    (out if mask is None else out[mask]).square().sum().backward()
    model.zero_grad(set_to_none=True)


def largest_difference(model: Transformer, x: Tensor, mask: Tensor, bounds: Tensor) -> float:
    """Return the largest difference between packed and padded outputs at real tokens."""
    with torch.no_grad():
        packed = model(x[mask][None], cu_seqlens=Packing(bounds))[0]
        return float((packed - model(x, key_mask=mask)[mask]).abs().max())


def run(options: argparse.Namespace) -> Report:
    """Time padded and packed documents for all cases and variants."""
    rows, worst = [], 0.0
    for case in options.cases:
        lengths = lengths_of(case, options.shortest)
        mask = torch.arange(int(lengths[0])) < lengths[:, None]
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        x = torch.randn(*mask.shape, options.embed_dim, device=options.device)
        mask = mask.to(x.device)
        for variant in options.variants:
            model = made(variant, options).to(x.device).eval()
            worst = max(worst, largest_difference(model, x, mask, bounds))
            sides: dict[str, Callable[[], object]] = {
                PADDED: partial(step, model, x, mask=mask),
                EVERY_QUERY: partial(step, model, x, mask=mask, every_query=True),
                PACKED: partial(step, model, x[mask][None], bounds=bounds),
            }
            backends = {name: backend_of(side) for name, side in sides.items()}
            times = measure_sides(sides, options, lambda _: {"padded": PADDED})
            for name, found in times.items():
                padding = 1 - float(lengths.sum()) / mask.numel()
                facts = {"documents": case, "padding": f"{100 * padding:.0f} %"}
                facts |= {"variant": variant, "form": name, "backend": backends[name]}
                rows.append({**facts, **found})
    table = pd.DataFrame(rows)
    ratios = table[table["form"] == PACKED]["time_over_padded"]
    return Report(
        "Packed documents",
        table,
        {
            "Forward and backward": shown(
                table, "documents", "padding", "variant", "form", "backend"
            )
        },
        [
            f"{options.num_layers} blocks of width {options.embed_dim}, {options.num_heads} "
            f"heads of {options.head_dim}, float32; outputs of both implementations differ by at "
            f"most {worst:.0e}"
        ],
        finding=f"packed takes {ratios.min():.2f} to {ratios.max():.2f} times the padded time",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser)
    add = parser.add_argument
    text = "documents x longest"
    add("--cases", nargs="+", default=["16x256", "512x8", "1x4096", "8x2000"], help=text)
    add(
        "--shortest", type=float, default=0.25, help="shortest length, as a fraction of the longest"
    )
    text = "names of attention"
    add("--variants", nargs="+", default=["softmax", "smgk", "hard_fish", "linear"], help=text)
    add("--embed_dim", type=at_least(1), default=64, help="width")
    add("--head_dim", type=at_least(1), default=32, help="size of a head")
    add("--num_heads", type=at_least(1), default=2, help="heads")
    add("--num_layers", type=at_least(1), default=2, help="blocks")
    add("--mlp_dim", type=at_least(1), default=128, help="width of the MLPs")


main = command(__name__, __doc__, run, _add_options)

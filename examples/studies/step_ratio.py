"""Ratios of one training step of this package to the plain formula with stored maps.

    python -m examples.studies.step_ratio --length 2000 --batch 2 --out reports/step_ratio_cpu

The ListOps model of the Long Range Arena (width 64, head size 32, 2 layers, dropout 0.1 outside
attention) with softmax attention (8 heads), MGK and sMGK (4 heads). `package` uses the backend that
the package selects; `plain` is attention as in released code (`PlainAttention`), which stores every
N x N map, with the same weights. Float32; forward and backward, or forward with `--mode eval`. All
sides run in turns in one process after a warm-up; ratios are medians of the ratios within rounds,
with 20 % and 80 % quantiles. Before timing, both must compute the same logits.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial, reduce
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_probattn.attention import Attention, MGKAttention, SoftmaxAttention
from lit_probattn.attention.layer import split_heads
from lit_probattn.base.arguments import at_least
from lit_probattn.configs import attention_entry, attention_factory
from lit_probattn.models.classifiers import Classifier
from lit_probattn.randomness import RandomKey
from lit_probattn.records.tables import counted, span
from profiling.study import Report, add_timing, backend_of, command, measure_sides, shown

VARIANTS = {
    "softmax, 8 heads": ("softmax", 8),
    "MGK, 4 heads": ("mgk", 4),
    "sMGK, 4 heads": ("smgk", 4),
}
BASELINE = "softmax, 8 heads"
PACKAGE, PLAIN = "package", "plain"
TOLERANCE = 1e-4  # of logits of order 0.1, float32, before training


class PlainAttention(nn.Module):
    """Self-attention by the plain formula with the weights of a layer.

    Raises:
        NotImplementedError: the layer is neither softmax nor soft MGK, or has grouped heads or
            rotary positions.
    """

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        supported = type(layer) is SoftmaxAttention and layer.core.score == "dot"
        if isinstance(layer, MGKAttention):
            supported = layer.core.score == "gaussian" and layer.core.e_step != "hard"
        if not supported or layer.num_kv_heads != layer.num_heads or layer.rotary is not None:
            raise NotImplementedError(
                f"no plain formula of {type(layer).__name__} with these options: use its reference"
            )
        self.layer = layer

    def forward(self, inputs: Tensor, *, key_mask: Tensor | None = None, **ignored: Any) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        layer = self.layer
        sizes = (layer.num_heads, layer.head_dim)
        query, value = (
            proj(inputs).unflatten(-1, sizes).transpose(1, 2)
            for proj in (layer.query_proj, layer.value_proj)
        )  # (B, H, N, E)
        key = split_heads(layer.key_proj(inputs), layer.layout.key, layer.layout.keys_per_head)
        maps = self._mixture if isinstance(layer, MGKAttention) else self._softmax
        weights = F.dropout(maps(query, key, key_mask), layer.dropout, self.training)
        out: Tensor = layer.out_proj((weights @ value).transpose(1, 2).flatten(2))
        return out

    def _softmax(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
        """softmax(q · k / √E), (B, H, N, N)."""
        scores = query @ key.transpose(-2, -1) / self.layer.head_dim**0.5
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None], float("-inf"))
        return scores.softmax(dim=-1)

    def _mixture(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
        """Σ_r π_r exp(−‖q − k_r‖² / 2σ_r²) divided by its row sum, (B, H, N, N)."""
        layer = self.layer
        assert isinstance(layer, MGKAttention)
        core = layer.core
        assert core.prior is not None
        if core.key_shift is not None:
            key = key[:, :, None] + core.key_shift[None, :, :, None]  # (B, H, K, N, E)
        prior, variance = core.prior.value.clamp(0.0, 1.0), core.variance()
        parts = []
        for r in range(layer.num_components):
            one = key[:, :, r]
            distance = query.square().sum(-1, keepdim=True) - 2 * query @ one.transpose(-2, -1)
            distance = (distance + one.square().sum(-1)[:, :, None]).clamp_min(0.0)
            scale = variance[..., r].reshape(-1, 1, 1).to(query.dtype)
            parts.append(prior[..., r].reshape(-1, 1, 1) * torch.exp(-distance / (2 * scale)))
        density = reduce(torch.add, parts)
        if key_mask is not None:
            density = density * key_mask[:, None, None]
        return density / density.sum(-1, keepdim=True)


def materialise(model: nn.Module) -> nn.Module:
    """Replace each attention layer of a model by `PlainAttention` with the same weights."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Attention):
                setattr(module, name, PlainAttention(child))
    return model


def build(config: str, heads: int, length: int, dropout: float) -> Classifier:
    """Build the ListOps model of a variant from a common seed."""
    entry = attention_entry(f"configs/attention/{config}.yaml")
    options = {**entry["init_args"], "num_heads": heads, "dropout": dropout}
    sizes = {"embed_dim": 64, "head_dim": 32, "num_layers": 2, "mlp_dim": 128}
    counts = {"vocab_size": 32, "num_classes": 10, "max_seq_len": length}
    torch.manual_seed(0)
    attention = attention_factory(entry["class_path"], options)
    return Classifier(attention, dropout=0.1, **counts, **sizes)


def build_sides(
    length: int, dropout: float, device: torch.device
) -> dict[tuple[str, str], nn.Module]:
    """Return models by (variant, package or plain); both have the same weights."""
    sides: dict[tuple[str, str], nn.Module] = {}
    for name, (config, heads) in VARIANTS.items():
        model = build(config, heads, length, dropout).to(device)
        sides[name, PLAIN] = materialise(copy.deepcopy(model))
        sides[name, PACKAGE] = model
    return sides


def largest_difference(sides: dict[tuple[str, str], nn.Module], tokens: torch.Tensor) -> float:
    """Return the largest difference of logits between both forms; RuntimeError above rounding."""
    found = 0.0
    for name in VARIANTS:
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[0, -tokens.shape[1] // 5 :] = False
        with torch.no_grad():
            logits = [sides[name, form].eval()(tokens, key_mask=mask) for form in (PLAIN, PACKAGE)]
        found = max(found, float((logits[0] - logits[1]).abs().max()))
        for form in (PLAIN, PACKAGE):
            sides[name, form].train()
    if found > TOLERANCE:
        raise RuntimeError(f"the logits of package and plain formula differ by {found:.1e}")
    return found


def step(model: nn.Module, tokens: Tensor) -> None:
    """Run forward and backward on a batch without padding."""
    key = RandomKey(0, 0, torch.arange(len(tokens), device=tokens.device))
    F.cross_entropy(model(tokens, rng=key), torch.zeros_like(tokens[:, 0])).backward()
    model.zero_grad(set_to_none=True)


def infer(model: nn.Module, tokens: Tensor) -> None:
    """Run the forward pass."""
    with torch.no_grad():
        model(tokens)


def measure(options: argparse.Namespace, dropout: float) -> tuple[list[dict[str, Any]], float]:
    """Time all sides with one dropout rate; return rows and the largest difference of logits.

    A side that exceeds the GPU's memory has "failed" set (`measure_sides`). Logits are compared on
    two sequences, which fit, also on a GPU, where PyTorch does not use TF32 by default.
    """
    device = torch.device(options.device)
    sides = build_sides(options.length, dropout, device)
    tokens = torch.randint(1, 16, (options.batch, options.length), device=device)
    difference = largest_difference(sides, tokens[:2])
    call = step if options.mode == "train" else infer
    steps = {
        side: partial(call, model.train(options.mode == "train"), tokens)
        for side, model in sides.items()
    }
    found = measure_sides(
        steps, options, lambda side: {PLAIN: (side[0], PLAIN), "softmax": (BASELINE, side[1])}
    )
    backends = dict.fromkeys(steps, "plain formula")
    for side, run_step in steps.items():
        if side[1] == PACKAGE:
            backends[side] = "not known" if "failed" in found[side] else backend_of(run_step)
    rows = [
        {"variant": name, "form": form, "attention_dropout": dropout}
        | {"backend": backends[name, form], **found[name, form]}
        for name, form in sides
    ]
    return rows, difference


def finding(package: pd.DataFrame, *, trains: bool) -> str:
    """Return the time of each variant relative to softmax, over the dropout rates."""
    told = []
    for name, part in package[package["variant"] != BASELINE].groupby("variant", sort=False):
        told.append(f"{name}: {span(part['time_over_softmax'], '.2f')}")
    what = "a training step" if trains else "inference"
    return f"{'; '.join(told)} of the time of {what} with {BASELINE}"


def run(options: argparse.Namespace) -> Report:
    """Measure all dropout rates."""
    measured = [measure(options, dropout) for dropout in options.dropout]
    rows = pd.DataFrame([row for part, _ in measured for row in part])
    where = f"{counted(options.batch, 'sequence')} of {counted(options.length, 'token')}"
    package = rows[rows["form"] == PACKAGE]
    sentence = "; ".join(
        f"{row.variant}, dropout {row.attention_dropout:g}: {row.backend}"
        for row in package.itertuples()
    )
    caption = (
        "One step. `time / softmax`: relative to softmax with 8 heads in the same implementation. "
        "Both sides of a ratio have the attention dropout of the row and the backends in their rows"
    )
    trains = options.mode == "train"
    return Report(
        f"Time of {'a training step' if trains else 'inference'}: this package and the plain "
        "formula",
        rows,
        {caption: shown(rows, "attention_dropout", "variant", "form", "backend")},
        [
            f"Long Range Arena's ListOps, {where}, float32, forward"
            f"{' and backward' if trains else ''}",
            f"Backends selected by `auto`: {sentence}",
            "Largest difference between the logits of the two implementations, in evaluation: "
            f"{max(difference for _, difference in measured):.1e}",
            f"{options.warmup} untimed rounds, then "
            f"{' and '.join(str(n) for n in rows['time_repeats'].dropna().astype(int).unique())}",
        ],
        ("variant", "time_over_softmax", "attention_dropout"),
        package,
        finding=finding(package, trains=trains),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser)
    add = parser.add_argument
    add("--length", type=at_least(1), default=2000, help="tokens of a sequence")
    add("--batch", type=at_least(1), default=2, help="sequences of a step")
    add("--dropout", type=float, nargs="+", default=[0.1, 0.0], help="rates of attention dropout")
    add("--mode", default="train", choices=["train", "eval"], help="train: a step; eval: inference")
    parser.set_defaults(repeats=7)


main = command(__name__, __doc__, run, _add_options)

"""Compare a trained model, swapped to half the attention heads, with training from scratch.

    python -m examples.studies.swapped --threads 1 --out FOLDER

A small `nn.TransformerEncoder` (softmax, 4 heads) is trained on generated nested MIN and MAX
expressions of digits. Then, for each seed and with half the heads and two keys per head (MGK),

swapped     the trained model after `lit_probattn.swap`, trained further
fresh       the same model with new weights, trained on the same batches
trained on  the trained model without a swap, trained further for the same number of steps

Accuracy is measured on 400 unseen expressions. Parameters and cache bytes are those of the
attention layers; training steps are timed in turns.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from datamodules.expressions import (
    MAX_LEN,
    NUM_CLASSES,
    Expressions,
    batches,
    draw,
)
from datamodules.lra.listops_generator import TOKENS
from lit_probattn.analysis.drawing import BLUE, spread_curve
from lit_probattn.base.arguments import at_least
from lit_probattn.interop.swap import swap
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import counted, with_deviation
from profiling.study import Report, add_rounds, command, measure_sides, shown

HEADS, WIDTH, LAYERS, BATCH, WARMUP = 4, 64, 2, 64, 50
UNSWAPPED = "softmax, 4 heads"
VARIANTS = {"MGK, 2 heads": "mgk"}  # replacing twice the number of heads
START = {True: "swapped", False: "fresh"}
TRAINED_ON = "trained on"
COLOURS = ("0.4", BLUE, "#b5651d")


class Host(nn.Module):
    """Classifier of expressions built from PyTorch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(TOKENS), WIDTH)
        self.positions = nn.Embedding(MAX_LEN, WIDTH)
        layer = nn.TransformerEncoderLayer(
            *(WIDTH, HEADS, 2 * WIDTH), dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, N), where 0 is padding, to logits (B, 10)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = self.encoder(x, src_key_padding_mask=tokens == 0)
        real = (tokens > 0)[..., None]
        return self.head((x * real).sum(1) / real.sum(1))


def fresh(seed: int) -> Host:
    """Return a model with new weights."""
    torch.manual_seed(seed)
    return Host()


def exchanged(model: Host, variant: str, seed: int) -> tuple[Host, Any]:
    """Return a copy swapped to a variant with half the heads, and the report of the swap."""
    torch.manual_seed(seed)
    return swap(copy.deepcopy(model), VARIANTS[variant], heads=0.5, seed=seed)


def train(
    model: nn.Module, stream: Iterator[Expressions], steps: int, lr: float
) -> Iterator[tuple[int, nn.Module]]:
    """Train; yield the number of steps before the first step and after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    yield 0, model
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / WARMUP)
        batch = next(stream)
        loss = F.cross_entropy(model(batch.tokens), batch.values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, model


@torch.no_grad()
def accuracy(model: nn.Module, test: Expressions) -> float:
    """Return the percentage of correct values."""
    model.eval()
    right = (model(test.tokens).argmax(-1) == test.values).float().mean()
    model.train()
    return 100.0 * float(right)


def curves(options: argparse.Namespace) -> pd.DataFrame:
    """Return accuracy by variant, start, seed and steps; `before` is that of the trained model."""
    rows: list[dict[str, Any]] = []
    marks = sorted({0, *options.at, options.tune_steps})
    for seed in options.seeds:
        learn, test = draw(seed)
        host = fresh(seed)
        for _ in train(host, batches(learn, BATCH, seed), options.steps, options.lr):
            pass
        before = accuracy(host, test)
        print(f"seed {seed}: {before:.1f} % after {options.steps} steps", flush=True)
        sides: list[tuple[str, str, nn.Module]] = [(UNSWAPPED, TRAINED_ON, copy.deepcopy(host))]
        for variant in VARIANTS:
            for trained in (True, False):
                origin = host if trained else fresh(seed + 1000)
                sides.append((variant, START[trained], exchanged(origin, variant, seed)[0]))
        for variant, start, model in sides:
            stream = batches(learn, BATCH, seed + 1)
            for steps, now in train(model, stream, options.tune_steps, options.tune_lr):
                if steps in marks:
                    found = accuracy(now, test)
                    row = {"variant": variant, "start": start, "seed": seed, "steps": steps}
                    rows.append({**row, "accuracy": found, "before": before})
            print(f"seed {seed}: {variant}, {start}: {rows[-1]['accuracy']:.1f} %", flush=True)
    return pd.DataFrame(rows)


def costs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return parameters and cache bytes of the attention layers, and the time of a step."""
    host = fresh(0)
    found, models = {}, {UNSWAPPED: host}
    for variant in VARIANTS:
        models[variant], report = exchanged(host, variant, 0)
        found[variant] = [
            [sum(getattr(layer, name)[place] for layer in report.layers) for place in (0, 1)]
            for name in ("parameters", "cache_bytes")
        ]
    whole = next(iter(found.values()))
    batch = next(batches(draw(0)[0], BATCH, 0))

    def step(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            F.cross_entropy(model(batch.tokens), batch.values).backward()
            model.zero_grad(set_to_none=True)

        return run

    sides = {name: step(model) for name, model in models.items()}
    options = argparse.Namespace(**vars(options), device="cpu")
    measured = measure_sides(sides, options, lambda side: {"unswapped": UNSWAPPED})
    rows = []
    for name, row in measured.items():
        parameters, cache = (part[name != UNSWAPPED] for part in found.get(name, whole))
        sizes = {"parameters": parameters, "cache bytes/token": cache}
        rows.append({"variant": name, **sizes, **row})
    return rows


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return mean ± std over seeds with a row per variant and start and a column per step."""
    wide = with_deviation(rows, ["variant", "start"], "steps", "accuracy", 1)
    return wide.rename(columns={n: f"{n} steps" for n in wide if isinstance(n, int)})


def finding(rows: pd.DataFrame) -> str:
    """Return the accuracies from both starts, and the steps to recover the loss of the swap."""
    parts = []
    first = rows.drop_duplicates("seed")["before"]
    last = rows[rows["steps"] == rows["steps"].max()]
    for variant in [name for name in rows["variant"].unique() if name != UNSWAPPED]:
        own = rows[(rows["variant"] == variant) & (rows["start"] == START[True])]
        after = own[own["steps"] == 0]["accuracy"].mean()
        ends = [
            last[(last["variant"] == variant) & (last["start"] == start)]["accuracy"].mean()
            for start in START.values()
        ]
        parts.append(
            f"{variant}, has {after:.1f} % right after the swap, and after "
            f"{counted(int(rows['steps'].max()), 'step')} {ends[0]:.1f} %, from a fresh start "
            f"{ends[1]:.1f} %"
        )
    host = last[last["variant"] == UNSWAPPED]["accuracy"].mean()
    return (
        f"of a model that has {first.mean():.1f} % right, {'; '.join(parts)}; as it was and "
        f"trained on as long, {host:.1f} % (means of {counted(len(first), 'seed')})"
    )


class Curves(Report):
    """The report of the study; its figure shows the curves with deviations."""

    def drawn(self) -> Any:
        """Return the figure."""
        names = [name for name in self.rows["variant"].dropna().unique() if name != UNSWAPPED]
        figure, axes = panels(1, len(names), 4.6, 3.4)
        rows = self.rows.dropna(subset=["accuracy"])
        for axis, name in zip(axes[0], names, strict=True):
            sides = [(UNSWAPPED, TRAINED_ON), *((name, start) for start in START.values())]
            for (variant, start), colour in zip(sides, COLOURS, strict=True):
                part = rows[(rows["variant"] == variant) & (rows["start"] == start)]
                label = f"{variant}, {start}"
                spread_curve(axis, part, "steps", "accuracy", colour=colour, name=label)
            before = rows.drop_duplicates("seed")["before"].mean()
            axis.axhline(before, color="0.5", lw=0.8, ls=":")
            axis.set(xlabel="steps of training after the start", ylabel="accuracy, %")
            axis.set_title(f"{name} (dotted: the trained model)", fontsize=9)
            axis.legend(loc="lower right")
        return figure


def run(options: argparse.Namespace) -> Report:
    """Train, swap and train further; count and measure."""
    learned = curves(options)
    cost = pd.DataFrame(costs(options))
    return Curves(
        "A trained model with half its heads swapped, beside a fresh start",
        pd.concat([learned, cost], ignore_index=True),
        {
            "Accuracy, %, mean ± std over seeds, after so many steps of training from each start":
                table_of(learned),
            f"Attention layers of one model, and a training step of {counted(BATCH, 'expression')}":
                shown(cost, "variant", "parameters", "cache bytes/token"),
        },
        [
            f"{LAYERS} layers of `nn.TransformerEncoder`, width {WIDTH}, {HEADS} heads, float32; "
            f"nested MIN and MAX of digits, up to {MAX_LEN} tokens, batches of {BATCH}",
            f"the trained model: {counted(options.steps, 'step')}, learning rate {options.lr:g}; "
            f"afterwards {options.tune_lr:g}; seeds {', '.join(map(str, options.seeds))}",
        ],
        ("steps", "accuracy"),
        finding=finding(learned),
    )  # fmt: skip


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    text = "seeds of weights, data and batches"
    add("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2], help=text)
    add("--steps", type=at_least(1), default=1500, help="training steps before the swap")
    text = "training steps after the swap, and from scratch"
    add("--tune_steps", type=at_least(1), default=400, help=text)
    text = "further steps at which accuracy is measured"
    add("--at", type=at_least(0), nargs="+", default=[0, 25, 50, 100, 200], help=text)
    add("--lr", type=float, default=3e-3, help="learning rate of the trained model")
    text = "learning rate after the swap, and from scratch"
    add("--tune_lr", type=float, default=1e-3, help=text)


main = command(__name__, __doc__, run, _add_options)

"""One training step of this package beside the plain formula with its maps stored, as ratios.

    python -m profiling.step_ratio --length 2000 --batch 2 --out reports/step_ratio_listops_cpu

The model of the Long Range Arena's ListOps with softmax of 8 heads, MGK and sMGK of 4, each with
the package's own choice of backend and with attention written as released code writes it
(`profiling/studies/step_ratio.py`). Forward, backward, float32. All sides run in turns in one
process after a warm-up; ratios are medians over rounds of the ratio within a round, with 20 % and
80 % quantiles. Before timing, both forms must give the same logits.
"""

from __future__ import annotations

import argparse
import copy
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_probattn.attention import Attention, MGKAttention, SoftmaxAttention, recorded_choices
from lit_probattn.attention.layer import split_heads
from lit_probattn.configs import attention_entry, attention_factory
from lit_probattn.models.classifiers import Classifier
from lit_probattn.randomness import RandomKey
from lit_probattn.records.provenance import device_name, git_revision, versions
from lit_probattn.records.tables import markdown_table
from profiling.measure.memory import peak_bytes
from profiling.measure.timing import quantile, summarise, time_sides

VARIANTS = {
    "softmax, 8 heads": ("softmax", 8),
    "MGK, 4 heads": ("mgk", 4),
    "sMGK, 4 heads": ("smgk", 4),
}
BASELINE = "softmax, 8 heads"
PACKAGE, PLAIN = "package", "plain"
TOLERANCE = 1e-4  # of logits of order 0.1, float32, before training


class PlainAttention(nn.Module):
    """Self-attention by the plain formula, on the weights of a layer.

    Args:
        layer: softmax, or a mixture with two projections or shifts, without grouped heads.

    Raises:
        NotImplementedError: another variant or option; use the layer's reference backend.
    """

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        served = type(layer) is SoftmaxAttention and layer.core.score == "dot"
        if isinstance(layer, MGKAttention):
            served = layer.core.score == "gaussian" and layer.core.e_step != "hard"
        if not served or layer.num_kv_heads != layer.num_heads or layer.rotary is not None:
            raise NotImplementedError(
                f"no plain form of {type(layer).__name__} with these options: use its reference"
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
        """Σ_r π_r exp(−‖q − k_r‖² / 2σ_r²) over its row sum, (B, H, N, N)."""
        layer = self.layer
        assert isinstance(layer, MGKAttention)
        core = layer.core
        assert core.prior is not None
        if core.key_shift is not None:
            key = key[:, :, None] + core.key_shift[None, :, :, None]  # (B, H, K, N, E)
        prior, variance = core.prior.value.clamp(0.0, 1.0), core.variance()
        density: Tensor | None = None
        for r in range(layer.num_components):
            one = key[:, :, r]
            distance = query.square().sum(-1, keepdim=True) - 2 * query @ one.transpose(-2, -1)
            distance = (distance + one.square().sum(-1)[:, :, None]).clamp_min(0.0)
            scale = variance[..., r].reshape(-1, 1, 1).to(query.dtype)
            part = prior[..., r].reshape(-1, 1, 1) * torch.exp(-distance / (2 * scale))
            density = part if density is None else density + part
        assert density is not None
        if key_mask is not None:
            density = density * key_mask[:, None, None]
        return density / density.sum(-1, keepdim=True)


def materialise(model: nn.Module) -> nn.Module:
    """Replace every attention layer of a model by its plain form, on the same weights."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Attention):
                setattr(module, name, PlainAttention(child))
    return model


def build(config: str, heads: int, length: int, dropout: float) -> Classifier:
    """Build the ListOps model of a variant; all variants from one seed."""
    entry = attention_entry(f"configs/attention/{config}.yaml")
    options = {**entry["init_args"], "num_heads": heads, "dropout": dropout}
    torch.manual_seed(0)
    return Classifier(
        attention_factory(entry["class_path"], options),
        vocab_size=32,
        num_classes=10,
        max_seq_len=length,
        embed_dim=64,
        head_dim=32,
        num_layers=2,
        mlp_dim=128,
        dropout=0.1,
    )


def build_sides(
    length: int, dropout: float, device: torch.device
) -> dict[tuple[str, str], nn.Module]:
    """Return both forms of every variant, by variant and form, with the same weights."""
    sides: dict[tuple[str, str], nn.Module] = {}
    for name, (config, heads) in VARIANTS.items():
        model = build(config, heads, length, dropout).to(device)
        sides[name, PLAIN] = materialise(copy.deepcopy(model))
        sides[name, PACKAGE] = model
    return sides


def largest_difference(sides: dict[tuple[str, str], nn.Module], tokens: torch.Tensor) -> float:
    """Return the largest difference of logits between the two forms of any variant.

    Raises:
        RuntimeError: it is beyond rounding: the two compute something else.
    """
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
        raise RuntimeError(f"the two forms differ by {found:.1e} in their logits")
    return found


def make_step(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward of a batch without padding."""
    target = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    key = RandomKey(0, 0, torch.arange(len(tokens), device=tokens.device))

    def step() -> None:
        F.cross_entropy(model(tokens, rng=key), target).backward()
        model.zero_grad(set_to_none=True)

    return step


def measure(options: argparse.Namespace, dropout: float) -> tuple[pd.DataFrame, float]:
    """Time all sides with one rate of attention dropout; return rows and the largest difference."""
    device = torch.device(options.device)
    sides = build_sides(options.length, dropout, device)
    tokens = torch.randint(1, 16, (options.batch, options.length), device=device)
    difference = largest_difference(sides, tokens)
    steps = {side: make_step(model, tokens) for side, model in sides.items()}
    named = {f"{name}|{form}": step for (name, form), step in steps.items()}
    times = time_sides(
        named,
        device=device,
        warmup=options.warmup,
        repeats=options.repeats,
        max_seconds=options.max_seconds,
    )
    rows = []
    for name, form in steps:
        seconds, plain = times[f"{name}|{form}"], times[f"{name}|{PLAIN}"]
        base = times[f"{BASELINE}|{form}"]
        timing = summarise(seconds)
        row: dict[str, Any] = {
            "variant": name,
            "form": form,
            "attention_dropout": dropout,
            "time_median_s": timing.median_s,
            "time_p20_s": timing.p20_s,
            "time_p80_s": timing.p80_s,
            "time_repeats": timing.repeats,
            "peak_memory_bytes": peak_bytes(steps[name, form], device),
        }
        for label, other in (("plain", plain), ("softmax", base)):
            ratios = [mine / theirs for mine, theirs in zip(seconds, other, strict=True)]
            for suffix, part in (("", 0.5), ("_p20", 0.2), ("_p80", 0.8)):
                row[f"time_over_{label}{suffix}"] = quantile(ratios, part)
        rows.append(row)
    return pd.DataFrame(rows), difference


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows as one reads them."""

    def spread(row: Any, name: str) -> str:
        return f"{row[name]:.3f} [{row[f'{name}_p20']:.3f}, {row[f'{name}_p80']:.3f}]"

    plain = rows[rows["form"] == PLAIN].set_index(["variant", "attention_dropout"])
    memory = plain["peak_memory_bytes"]
    return pd.DataFrame(
        {
            "attention dropout": row["attention_dropout"],
            "variant": row["variant"],
            "form": row["form"],
            "median, s": f"{row['time_median_s']:.3f}",
            "time / plain [p20, p80]": spread(row, "time_over_plain"),
            "time / softmax 8, same form [p20, p80]": spread(row, "time_over_softmax"),
            "peak memory, MiB": f"{row['peak_memory_bytes'] / 2**20:.0f}",
            "memory / plain": "{:.3f}".format(
                row["peak_memory_bytes"] / memory[row["variant"], row["attention_dropout"]]
            ),
        }
        for row in rows.to_dict("records")
    )


def draw(rows: pd.DataFrame, path: Path, title: str) -> None:
    """Draw the ratio of the package's time to the plain formula's, with quantiles."""
    part = rows[rows["form"] == PACKAGE]
    named = zip(part["variant"], part["attention_dropout"], strict=True)
    labels = [f"{variant}\ndropout {rate:g}" for variant, rate in named]
    low = part["time_over_plain"] - part["time_over_plain_p20"]
    high = part["time_over_plain_p80"] - part["time_over_plain"]
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axis.bar(labels, part["time_over_plain"], yerr=[low, high], capsize=4, color="tab:blue")
    axis.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    axis.set(ylabel="time of a step, package / plain", title=title)
    axis.tick_params(axis="x", labelsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_report(
    rows: pd.DataFrame, difference: float, options: argparse.Namespace, command: str
) -> str:
    """Write report.md, rows.csv, ratios.csv and the picture; return the table."""
    out: Path = options.out
    (out / "figures").mkdir(parents=True, exist_ok=True)
    facts = {
        "device": device_name(options.device),
        "versions": versions(),
        "git_revision": git_revision(),
        "command": command,
    }
    rows.assign(**facts).to_csv(out / "rows.csv", index=False)
    ratios = rows[[c for c in rows if c.startswith(("variant", "form", "attention", "time_over"))]]
    ratios.to_csv(out / "ratios.csv", index=False, float_format="%.4f")
    where = f"{options.batch} sequences of {options.length} tokens"
    draw(rows, out / "figures" / "step_time.png", f"ListOps model, {where}, {options.device}")
    text = markdown_table(table(rows))
    rounds = " and ".join(str(n) for n in dict.fromkeys(rows["time_repeats"]))
    backends = "; ".join(f"{call}: {name}" for call, name in recorded_choices().items())
    (out / "report.md").write_text(
        f"""# Time of a training step: this package beside the plain formula

Command: `{command}`
Machine: {facts["device"]}; {facts["versions"]}; revision {facts["git_revision"]}.
Model: Long Range Arena's ListOps (width 64, head size 32, 2 layers), {where}, float32, \
forward and backward; dropout 0.1 outside attention. Backends that `auto` chose: {backends}.

{text}

`plain` stores every N x N map, as released code does (`profiling/studies/step_ratio.py`), on \
the same weights; in evaluation the logits of the two forms differ by at most {difference:.1e}. \
All sides run in turns in one process: {options.warmup} untimed rounds, then {rounds}; ratios are \
medians over rounds of the ratio within a round. Peak memory is the allocator's, above what is \
resident.

![time of a step](figures/step_time.png)
""",
        encoding="utf-8",
    )
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m profiling.step_ratio",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--length", type=int, default=2000, help="tokens of a sequence")
    add("--batch", type=int, default=2, help="sequences of a step")
    add("--dropout", type=float, nargs="+", default=[0.1, 0.0], help="rates of attention dropout")
    add("--device", default="cpu", help="torch device")
    add("--warmup", type=int, default=1, help="untimed rounds")
    add("--repeats", type=int, default=7, help="timed rounds")
    add("--max_seconds", type=float, default=math.inf, help="of each rate; 3 rounds at least")
    add("--out", type=Path, default=Path("reports/step_ratio_listops"), help="report folder")
    options = parser.parse_args(arguments)
    measured = [measure(options, dropout) for dropout in options.dropout]
    rows = pd.concat([part for part, _ in measured], ignore_index=True)
    command = shlex.join(["python", "-m", "profiling.step_ratio", *arguments])
    print(write_report(rows, max(d for _, d in measured), options, command))
    print(f"\nreport: {options.out / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

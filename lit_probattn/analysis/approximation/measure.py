"""Errors of approximations: of the model's metric, and of every layer's output."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_probattn.analysis.approximation.kernels import effective_support, top_mass
from lit_probattn.analysis.approximation.layers import Opened, replaced_cores
from lit_probattn.analysis.approximation.methods import (
    ESTIMATE,
    Approximation,
    Aware,
    aware_weights,
)
from lit_probattn.analysis.approximation.witness import eliminate
from lit_probattn.attention import Attention

Batches = Iterable[Mapping[str, Any]]
# An output this close, relatively, counts as exact.
EXACT_ERROR = 1e-5
# Columns that are means over queries, in the order of `LocalErrors.sums`.
COLUMNS = ("abs_error", "rel_error", "score_error", "num_used", "share_exact")


@dataclass
class Score:
    """Sums over scored words or samples.

    Args:
        loss: sum of −log p.
        wrong: number of wrong predictions; None where a task does not count them.
        count: words or samples.
    """

    loss: float = 0.0
    wrong: float | None = None
    count: int = 0

    @property
    def metric(self) -> str:
        """`perplexity`, or the percentage `error` where wrong predictions are counted."""
        return "perplexity" if self.wrong is None else "error"

    @property
    def value(self) -> float:
        """The metric; NaN without any word."""
        if not self.count:
            return math.nan
        if self.wrong is not None:
            return 100.0 * self.wrong / self.count
        mean = self.loss / self.count
        return math.exp(mean) if mean < 700 else math.inf


@torch.no_grad()
def score(task: Any, batches: Batches) -> Score:
    """Score a task's batches as it stands.

    A task offers `token_results(batch)` (losses, wrong), or `token_losses(batch)`, or is a
    classifier whose call gives logits for `batch["target"]`.
    """
    total = Score()
    for batch in batches:
        wrong: Tensor | None = None
        if hasattr(task, "token_results"):
            losses, wrong = task.token_results(batch)
        elif hasattr(task, "token_losses"):
            losses = task.token_losses(batch)
        else:
            logits = task(batch)
            losses = F.cross_entropy(logits, batch["target"], reduction="none")
            wrong = logits.argmax(-1) != batch["target"]
        total.loss += float(losses.double().sum())
        total.count += len(losses)
        if wrong is not None:
            total.wrong = (total.wrong or 0.0) + float(wrong.sum())
    return total


def score_approximated(
    task: Any,
    batches: Batches,
    layers: Mapping[str, Attention],
    method: Approximation,
    head: int | None = None,
) -> Score:
    """Score with the given layers approximated, their approximate outputs passed on.

    Args:
        task: the task.
        batches: what is scored.
        layers: the layers to approximate, by name.
        method: the approximation.
        head: approximate this head only.
    """

    def core(opened: Opened) -> Tensor:
        found = method.output(opened).to(opened.output.dtype)
        if head is None:
            return found
        chosen = torch.arange(found.shape[1], device=found.device) == head
        return torch.where(chosen.view(1, -1, 1, 1), found, opened.output)

    with replaced_cores(layers, core):
        return score(task, batches)


# ---- errors of layers --------------------------------------------------------------------------


@dataclass
class LocalErrors:
    """Errors per layer, head and method, of layers whose inputs are exact.

    Args:
        methods: the approximations.
        sums: (method number, layer) -> sums of COLUMNS over queries, (H, 5), float64.
        counts: the same key -> queries that count.
        projected: the same key -> sum over queries of ‖W_O (o − õ)‖.
        skew: layer -> sums of effective support and top masses over queries, (H, 1 + masses).
        skew_counts: layer -> queries.
    """

    methods: Sequence[Approximation]
    masses: Sequence[int] = (1, 16, 64)
    sums: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    counts: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    projected: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    skew: dict[str, Tensor] = field(default_factory=dict)
    skew_counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def core(self, opened: Opened) -> Tensor:
        """Measure a call; return the exact output."""
        ranks = [
            m.num_kept
            for m in self.methods
            if isinstance(m, Aware)
            and m.num_kept > 1
            and m.status(opened.value.shape[-1]) == ESTIMATE
        ]
        aware = aware_weights(opened, ranks) if ranks else {}
        for number, method in enumerate(self.methods):
            weights = aware.get(method.num_kept) if isinstance(method, Aware) else None
            weights = method.weights(opened) if weights is None else weights
            output = method.output(opened) if weights is None else weights @ opened.value
            self._add((number, opened.name), method, opened, output, weights)
        self._add_skew(opened)
        return opened.output

    def _rows(self, opened: Opened, least: int) -> Tensor:
        """Real queries with at least `least` visible keys, or as many as there are; (B, N)."""
        visible = opened.num_visible[:, 0]
        return opened.real & (visible >= min(least, int(visible.max())))

    def _add(
        self,
        key: tuple[int, str],
        method: Approximation,
        opened: Opened,
        output: Tensor,
        weights: Tensor | None,
    ) -> None:
        rows = self._rows(opened, method.num_kept)
        difference = opened.output - output.to(opened.output.dtype)
        absolute = difference.norm(dim=-1)
        relative = absolute / opened.output.norm(dim=-1).clamp_min(1e-30)
        if weights is None:
            missing = torch.full_like(absolute, float("nan"))
            used = (missing, missing)
        else:
            used = ((opened.weights - weights).abs().sum(-1), (weights > 0).sum(-1))
        parts = (absolute, relative, *used, relative < EXACT_ERROR)
        stacked = torch.stack([p.double() for p in parts], -1)  # (B, H, N, 5)
        sums = (stacked * rows[:, None, :, None]).sum((0, 2))
        self.sums[key] = self.sums.get(key, torch.zeros_like(sums)) + sums
        self.counts[key] += float(rows.sum())
        joined = difference.transpose(1, 2).flatten(2)
        projected = F.linear(joined, opened.layer.out_proj.weight.to(joined.dtype)).norm(dim=-1)
        self.projected[key] += float((projected * rows).sum())

    def _add_skew(self, opened: Opened) -> None:
        rows = self._rows(opened, opened.weights.shape[-1] // 2)
        parts = [effective_support(opened.weights)]
        parts += [top_mass(opened.weights, count) for count in self.masses]
        sums = (torch.stack(parts, -1).double() * rows[:, None, :, None]).sum((0, 2))
        before = self.skew.get(opened.name, torch.zeros_like(sums))
        self.skew[opened.name] = before + sums
        self.skew_counts[opened.name] += float(rows.sum())

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per method, layer and head; `proj_error` belongs to the layer."""
        found = []
        numbers = {name: i for i, name in enumerate(self.skew, 1)}
        for (number, layer), sums in self.sums.items():
            method, count = self.methods[number], self.counts[number, layer]
            for head, means in enumerate((sums / max(count, 1.0)).tolist()):
                row = {"method": method.name, "num_kept": method.num_kept, **method.settings}
                row |= {"layer": numbers[layer], "head": head, "queries": int(count)}
                row |= dict(zip(COLUMNS, means, strict=True))
                row["proj_error"] = self.projected[number, layer] / max(count, 1.0)
                found.append(row)
        return found

    def skew_rows(self) -> list[dict[str, Any]]:
        """Return effective support and top masses per layer and head."""
        names = ("effective_support", *(f"top_{count}" for count in self.masses))
        return [
            {"layer": number, "head": head, **dict(zip(names, means, strict=True))}
            for number, (layer, sums) in enumerate(self.skew.items(), 1)
            for head, means in enumerate((sums / max(self.skew_counts[layer], 1.0)).tolist())
        ]


@torch.no_grad()
def local_errors(
    task: Any,
    batches: Batches,
    layers: Mapping[str, Attention],
    methods: Sequence[Approximation],
) -> LocalErrors:
    """Measure all methods in all layers while the exact outputs are passed on."""
    errors = LocalErrors(methods)
    with replaced_cores(layers, errors.core):
        score(task, batches)
    return errors


@dataclass
class Witnesses:
    """Carathéodory's theorem checked on a model's own queries.

    Args:
        num_queries: queries tried.
        most_keys: largest support found.
        limit: E_v + 1.
        largest_error: largest relative error of an output.
    """

    num_queries: int = 0
    most_keys: int = 0
    limit: int = 0
    largest_error: float = 0.0

    def core(self, opened: Opened) -> Tensor:
        """Find witnesses for the first sample of a call; return the exact output."""
        for head in range(opened.value.shape[1]):
            value, weights = opened.value[0, head].double(), opened.weights[0, head].double()
            allowed, real = opened.allowed[0, head], opened.real[0]
            allowed, weights = allowed[real], weights[real]
            found, output = eliminate(value, weights, allowed), weights @ value
            error = (found @ value - output).norm(dim=-1) / output.norm(dim=-1).clamp_min(1e-30)
            self.num_queries += len(weights)
            self.most_keys = max(self.most_keys, int((found > 0).sum(-1).max()))
            self.limit = max(self.limit, value.shape[-1] + 1)
            self.largest_error = max(self.largest_error, float(error.max()))
        return opened.output


@torch.no_grad()
def verify_caratheodory(task: Any, batches: Batches, layers: Mapping[str, Attention]) -> Witnesses:
    """Find, for a sample per batch, exact outputs from at most E_v + 1 values."""
    found = Witnesses()
    with replaced_cores(layers, found.core):
        score(task, batches)
    return found

"""Errors of approximations, in the metric of the model and in the outputs of layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_probattn.analysis.approximation.layers import Opened, replaced_cores
from lit_probattn.analysis.approximation.methods import (
    ESTIMATE,
    Approximation,
    Aware,
    aware_weights,
)
from lit_probattn.analysis.approximation.witness import eliminate
from lit_probattn.analysis.head_size.ranks import effective_count
from lit_probattn.attention import Attention
from lit_probattn.base.errors import ConfigError

Batches = Iterable[Mapping[str, Any]]
# Relative error up to which an output counts as exact.
EXACT_ERROR = 1e-5
# Means over queries, in the order of `LocalErrors.errors`.
COLUMNS = ("abs_error", "rel_error", "score_error", "num_used", "share_exact")


@dataclass
class Score:
    """Sums over scored words or samples."""

    loss: float = 0.0  # sum of −log p
    wrong: float | None = None  # wrong predictions; None if the task does not count them
    count: int = 0

    @property
    def metric(self) -> str:
        """`perplexity`, or the percentage `error` if wrong predictions are counted."""
        return "perplexity" if self.wrong is None else "error"

    @property
    def value(self) -> float:
        """The metric; NaN without words."""
        if not self.count:
            return math.nan
        if self.wrong is not None:
            return 100.0 * self.wrong / self.count
        mean = self.loss / self.count
        return math.exp(mean) if mean < 700 else math.inf


@torch.no_grad()
def score(task: Any, batches: Batches) -> Score:
    """Score the batches of a task.

    A task has `token_results(batch)` (losses, wrong) or `token_losses(batch)`, or is a classifier
    that returns logits for `batch["target"]`, or a tuple of logits for its columns, such as the
    first and the last token of an answer, each of which counts. Losses are without label smoothing.

    Raises:
        ConfigError: the task has none of them.
    """
    total = Score()
    for batch in batches:
        wrong: Tensor | None = None
        if hasattr(task, "token_results"):
            losses, wrong = task.token_results(batch)
        elif hasattr(task, "token_losses"):
            losses = task.token_losses(batch)
            losses = losses if losses.dim() == 1 else losses[:, -1]  # smoothed, plain
        elif "target" in batch:
            found, target = task(batch), batch["target"]
            if isinstance(found, Tensor):
                found, target = (found,), target[:, None]
            pairs = list(zip(found, target.unbind(-1), strict=True))
            losses = torch.cat([F.cross_entropy(*pair, reduction="none") for pair in pairs])
            wrong = torch.cat([logits.argmax(-1) != right for logits, right in pairs])
        else:
            raise ConfigError(
                "expected a run of a language model, a classifier or translation, received one of "
                f"{type(task).__name__}, which has no perplexity and no error"
            )
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
    """Score with these layers (or one of their heads) approximated and their outputs passed on."""

    def core(opened: Opened) -> Tensor:
        found = method.output(opened).to(opened.output.dtype)
        if head is None:
            return found
        chosen = torch.arange(found.shape[1], device=found.device) == head
        return torch.where(chosen.view(1, -1, 1, 1), found, opened.output)

    with replaced_cores(layers, core):
        return score(task, batches)


# ---- errors of layers --------------------------------------------------------------------------


class _Means:
    """Running means over selected queries."""

    def __init__(self) -> None:
        self.sums: Any = 0.0
        self.count = 0.0

    def add(self, parts: Sequence[Tensor], rows: Tensor) -> None:
        """Add k values (B, H, N) of the queries `rows` (B, N)."""
        stacked = torch.stack([part.double() for part in parts], -1)  # (B, H, N, k)
        self.sums = self.sums + (stacked * rows[:, None, :, None]).sum((0, 2))
        self.count += float(rows.sum())

    def by_head(self) -> list[list[float]]:
        """Return the k means of each head."""
        return (self.sums / max(self.count, 1.0)).tolist()


class LocalErrors:
    """Errors per layer, head and method for exact inputs."""

    def __init__(self, methods: Sequence[Approximation], masses: Sequence[int] = (1, 16, 64)):
        self.methods, self.masses = methods, masses
        # By method index and layer: COLUMNS, and the sum of ‖W_O (o − õ)‖.
        self.errors: dict[tuple[int, str], _Means] = defaultdict(_Means)
        self.projected: dict[tuple[int, str], float] = defaultdict(float)
        # By layer: effective support and masses.
        self.skew: dict[str, _Means] = defaultdict(_Means)

    def core(self, opened: Opened) -> Tensor:
        """Measure a call; return the exact output."""
        size = opened.value.shape[-1]
        searched = [m for m in self.methods if isinstance(m, Aware) and m.status(size) == ESTIMATE]
        ranks = [method.num_kept for method in searched]
        aware = aware_weights(opened, ranks) if ranks else {}
        for number, method in enumerate(self.methods):
            weights = aware.get(method.num_kept) if isinstance(method, Aware) else None
            weights = method.weights(opened) if weights is None else weights
            output = method.output(opened) if weights is None else weights @ opened.value
            self._add(number, opened, output, weights)
        parts = [effective_count(opened.weights)]
        parts += [top_mass(opened.weights, count) for count in self.masses]
        self.skew[opened.name].add(parts, _rows(opened))
        return opened.output

    def _add(self, number: int, opened: Opened, output: Tensor, weights: Tensor | None) -> None:
        key, rows = (number, opened.name), _rows(opened, self.methods[number].num_kept)
        difference = opened.output - output.to(opened.output.dtype)
        absolute = difference.norm(dim=-1)
        relative = absolute / opened.output.norm(dim=-1).clamp_min(1e-30)
        missing = torch.full_like(absolute, float("nan"))
        used = (missing, missing)
        if weights is not None:
            used = ((opened.weights - weights).abs().sum(-1), (weights > 0).sum(-1))
        self.errors[key].add((absolute, relative, *used, relative < EXACT_ERROR), rows)
        joined = difference.transpose(1, 2).flatten(2)
        projected = F.linear(joined, opened.layer.out_proj.weight.to(joined.dtype)).norm(dim=-1)
        self.projected[key] += float((projected * rows).sum())

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per method, layer and head; `proj_error` belongs to the layer."""
        found = []
        numbers = {name: i for i, name in enumerate(self.skew, 1)}
        for (number, layer), errors in self.errors.items():
            method, count = self.methods[number], errors.count
            projected = self.projected[number, layer] / max(count, 1.0)
            for head, means in enumerate(errors.by_head(), 1):
                row = {"method": method.name, "num_kept": method.num_kept, **method.settings}
                row |= {"layer": numbers[layer], "head": head, "queries": int(count)}
                row |= dict(zip(COLUMNS, means, strict=True))
                found.append(row | {"proj_error": projected})
        return found

    def skew_rows(self) -> list[dict[str, Any]]:
        """Return effective support and top masses per layer and head."""
        names = ("effective_support", *(f"top_{count}" for count in self.masses))
        return [
            {"layer": number, "head": head, **dict(zip(names, means, strict=True))}
            for number, skew in enumerate(self.skew.values(), 1)
            for head, means in enumerate(skew.by_head(), 1)
        ]


def top_mass(weights: Tensor, num_kept: int) -> Tensor:
    """Return the sum of the largest weights of each row; (…)."""
    return weights.topk(min(num_kept, weights.shape[-1]), -1).values.sum(-1)


def _rows(opened: Opened, least: int | None = None) -> Tensor:
    """Return real queries with at least `least` allowed keys, or with all keys of their sample.

    None means half of the sample's keys. Shape (B, N).
    """
    seen = opened.num_visible[:, 0]
    most = seen.amax(-1, keepdim=True)
    return opened.seen.real & (seen >= (most // 2 if least is None else most.clamp(max=least)))


@dataclass
class Witnesses:
    """Verification of Carathéodory's theorem on queries of a model."""

    num_queries: int = 0
    most_keys: int = 0  # largest support
    limit: int = 0  # E_v + 1
    largest_error: float = 0.0  # relative error of an output

    def core(self, opened: Opened) -> Tensor:
        """Find exact outputs of a call's first sample from few values; return the output."""
        for head in range(opened.value.shape[1]):
            value, weights = opened.value[0, head].double(), opened.weights[0, head].double()
            allowed, real = opened.allowed[0, head], opened.seen.real[0]
            allowed, weights = allowed[real], weights[real]
            found, output = eliminate(value, weights, allowed), weights @ value
            error = (found @ value - output).norm(dim=-1) / output.norm(dim=-1).clamp_min(1e-30)
            self.num_queries += len(weights)
            self.most_keys = max(self.most_keys, int((found > 0).sum(-1).max()))
            self.limit = max(self.limit, value.shape[-1] + 1)
            self.largest_error = max(self.largest_error, float(error.max()))
        return opened.output


Observer = TypeVar("Observer", LocalErrors, Witnesses)


@torch.no_grad()
def observed(
    observer: Observer, task: Any, batches: Batches, layers: Mapping[str, Attention]
) -> Observer:
    """Show an observer the calls of all layers, whose exact outputs are passed on; return it."""
    with replaced_cores(layers, observer.core):
        score(task, batches)
    return observer

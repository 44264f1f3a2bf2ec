"""The approximations of the study, as objects that map `Opened` to outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from lit_probattn.analysis.approximation.greedy import Problem, heaviest_support, value_aware
from lit_probattn.analysis.approximation.layers import Opened
from lit_probattn.analysis.approximation.lsh import Duplicates, lsh_attention
from lit_probattn.analysis.approximation.oracles import (
    Window,
    by_norm,
    nearest_value,
    sliding_window,
    value_oblivious,
)
from lit_probattn.analysis.approximation.random_features import (
    Rows,
    draw_rows,
    random_feature_weights,
)

MethodName = Literal["ovo", "ovo_reopt", "ova", "norm", "window", "lsh", "orf"]
# Whether a result is an exact instance of its method.
EXACT, ESTIMATE = "exact", "upper estimate"
# Columns of the results with the options of a method.
_COLUMNS = {
    **{"num_rounds": "rounds", "seed": "draw"},
    **dict.fromkeys(("window", "duplicates", "rows"), "detail"),
}


@dataclass(frozen=True)
class Approximation(ABC):
    """An approximation of one size; `num_kept` is r, the keys per query (and round)."""

    num_kept: int

    name = ""

    @abstractmethod
    def weights(self, opened: Opened) -> Tensor | None:
        """Return the approximate weights, (B, H, N, L); None if the method has none."""

    def output(self, opened: Opened) -> Tensor:
        """Return the approximate outputs of the heads, (B, H, N, E_v)."""
        found = self.weights(opened)
        assert found is not None
        return found @ opened.value

    def status(self, value_dim: int) -> str:
        """Return whether results are exact instances of the method, or estimates."""
        return EXACT

    @property
    def settings(self) -> dict[str, Any]:
        """Options that distinguish it, in addition to `num_kept`, by column of the results."""
        own = [field.name for field in fields(self) if field.name in _COLUMNS]
        return {_COLUMNS[name]: getattr(self, name) for name in own}


@dataclass(frozen=True)
class Oblivious(Approximation):
    """optimal-v-oblivious-r: the r largest weights."""

    name = "ovo"

    def weights(self, opened: Opened) -> Tensor:
        """See `value_oblivious`."""
        return value_oblivious(opened.weights, self.num_kept, opened.allowed)


@dataclass(frozen=True)
class ByNorm(Approximation):
    """The r largest α‖v‖."""

    name = "norm"

    def weights(self, opened: Opened) -> Tensor:
        """See `by_norm`."""
        return by_norm(opened.weights, opened.value, self.num_kept, opened.allowed)


@dataclass(frozen=True)
class Reoptimised(Approximation):
    """The keys of the r largest weights, with optimal weights."""

    name = "ovo_reopt"

    def weights(self, opened: Opened) -> Tensor:
        """See `heaviest_support`."""
        value, weights, allowed = flat(opened)
        problem = Problem(value, weights, allowed, weights @ value)
        found = heaviest_support(problem, self.num_kept).dense(value.shape[-2])
        return found.view_as(opened.weights).to(opened.weights.dtype)


@dataclass(frozen=True)
class Aware(Approximation):
    """optimal-v-aware-r: exact for r = 1 and r > E_v, otherwise a greedy estimate."""

    name = "ova"

    def status(self, value_dim: int) -> str:
        """Return ESTIMATE for 1 < r ≤ E_v, otherwise EXACT."""
        return EXACT if self.num_kept == 1 or self.num_kept > value_dim else ESTIMATE

    def weights(self, opened: Opened) -> Tensor | None:
        """See `nearest_value` and `value_aware`; None for r > E_v."""
        if self.num_kept == 1:
            index = nearest_value(opened.value, opened.output, opened.allowed)[..., None]
            seen = (opened.num_visible > 0).to(opened.weights.dtype)[..., None]
            return torch.zeros_like(opened.weights).scatter(-1, index, seen)
        if self.status(opened.value.shape[-1]) == EXACT:
            return None
        return aware_weights(opened, [self.num_kept])[self.num_kept]

    def output(self, opened: Opened) -> Tensor:
        """Return the exact output for r > E_v, as proved by `eliminate`."""
        found = self.weights(opened)
        return opened.output if found is None else found @ opened.value


@dataclass(frozen=True)
class SlidingWindow(Approximation):
    """The keys around a query."""

    window: Window

    name = "window"

    def weights(self, opened: Opened) -> Tensor:
        """See `sliding_window`."""
        options: Any = {"is_causal": opened.seen.is_causal, "window": self.window}
        return sliding_window(opened.weights, self.num_kept, opened.allowed, **options)


@dataclass(frozen=True)
class Hashing(Approximation):
    """LSH attention; `num_kept` keys per query and round."""

    num_rounds: int
    duplicates: Duplicates
    seed: int

    name = "lsh"

    def weights(self, opened: Opened) -> None:
        """Return None."""
        return None

    def output(self, opened: Opened) -> Tensor:
        """See `lsh_attention`."""
        query, key = opened.pairs()
        value, _, allowed = flat(opened, torch.float32)
        found = lsh_attention(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value,
            num_kept=self.num_kept,
            num_rounds=self.num_rounds,
            generator=named_generator(self.seed, opened.name),
            allowed=allowed,
            duplicates=self.duplicates,
        )
        return found.view_as(opened.output)


@dataclass(frozen=True)
class RandomFeatures(Approximation):
    """Random features; `num_kept` is their number F."""

    rows: Rows
    seed: int

    name = "orf"

    def weights(self, opened: Opened) -> Tensor:
        """See `random_feature_weights`."""
        query, key = opened.pairs()
        generator = named_generator(self.seed, opened.name)
        size, count = query.shape[-1], query.shape[1]
        rows = [draw_rows(self.num_kept, size, self.rows, generator) for _ in range(count)]
        by_head = (x.split(1, 1) for x in (query, key, opened.allowed))
        parts = [
            random_feature_weights(q, k, r, allowed=seen)
            for r, q, k, seen in zip(rows, *by_head, strict=True)
        ]
        return torch.cat(parts, 1).to(opened.weights.dtype)


def flat(opened: Opened, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return value (G, L, E_v), weights (G, N, L) and allowed (G, N, L), G = B · H."""
    return (
        opened.value.flatten(0, 1).to(dtype),
        opened.weights.flatten(0, 1).to(dtype),
        opened.allowed.flatten(0, 1),
    )


def aware_weights(opened: Opened, ranks: Sequence[int]) -> dict[int, Tensor]:
    """Return the greedy estimates of several ranks from one search; r -> (B, H, N, L)."""
    value, weights, allowed = flat(opened)
    found = value_aware(value, weights, ranks, allowed=allowed)
    shape, dtype = opened.weights.shape, opened.weights.dtype
    return {rank: x.view(shape).to(dtype) for rank, x in found.items()}


def named_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator that depends only on the seed and the layer's name."""
    state = seed
    for character in name:
        state = (state * 1000003 + ord(character)) % (1 << 62)
    return torch.Generator().manual_seed(state)

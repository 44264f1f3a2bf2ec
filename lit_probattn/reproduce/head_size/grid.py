"""Points of the head-size experiment: which models, by which rule, with which parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_probattn.configs import ConfigError, read_yaml
from lit_probattn.reproduce.head_size.parameters import Sizes, matched_embed_dim, matched_mlp_dim

Rule = Literal["standard", "fixed", "head_size", "matched_mlp", "matched_width"]


class GridError(ValueError):
    """A grid is malformed; the message is one line."""


@dataclass(frozen=True)
class Point:
    """One model.

    Args:
        rule: `standard` (head size d / h), `fixed` (head size of the grid), `head_size` (several
            head sizes at one number of heads), `matched_mlp` and `matched_width` (standard heads,
            with the parameters of the fixed model by rules M1 and M2).
        num_heads: h.
        head_dim: d_p.
        embed_dim: d.
        mlp_dim: d_ff.
        seed: of the run.
    """

    rule: Rule
    num_heads: int
    head_dim: int
    embed_dim: int
    mlp_dim: int
    seed: int

    @property
    def model(self) -> tuple[int, int, int, int, int]:
        """What decides the result: two rules may ask for one model."""
        return self.num_heads, self.head_dim, self.embed_dim, self.mlp_dim, self.seed

    @property
    def name(self) -> str:
        """Name of the run."""
        h, e, d, f, seed = self.model
        return f"h{h}-e{e}-d{d}-f{f}-seed{seed}"


@dataclass(frozen=True)
class Grid:
    """A grid file of configs/reproduce.

    Args:
        task: task file; its data, schedule and optimiser hold for all points.
        attention: attention file; num_heads is set by the points.
        flags: further flags of the runs, name -> value.
        embed_dim: d.
        mlp_dim: d_ff.
        head_dim: d_p of the rule `fixed`.
        standard_heads: numbers of heads with head size d / h.
        fixed_heads: numbers of heads with head size d_p.
        matched_mlp_heads: numbers of heads of rule M1.
        matched_width_heads: numbers of heads of rule M2.
        head_sizes: head sizes at `head_sizes_heads` heads.
        head_sizes_heads: the number of heads of `head_sizes`.
        seeds: seeds of every point.
    """

    task: str
    attention: str
    embed_dim: int
    mlp_dim: int
    head_dim: int
    flags: dict[str, Any] = field(default_factory=dict)
    standard_heads: tuple[int, ...] = ()
    fixed_heads: tuple[int, ...] = ()
    matched_mlp_heads: tuple[int, ...] = ()
    matched_width_heads: tuple[int, ...] = ()
    head_sizes: tuple[int, ...] = ()
    head_sizes_heads: int = 8
    seeds: tuple[int, ...] = (0,)

    @classmethod
    def read(cls, path: Path) -> Grid:
        """Read a grid file.

        Raises:
            GridError: the file is missing, has an unknown entry, or lacks one.
        """
        try:
            content = read_yaml(path)
            given: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in content.items()
            }
            return cls(**given)
        except (ConfigError, TypeError) as error:
            text = str(error).replace("Grid.__init__() ", "")
            raise GridError(f"grid {path.name}: {' '.join(text.split())}") from error

    def sizes(self, num_heads: int, head_dim: int, num_layers: int, vocab_size: int) -> Sizes:
        """Sizes of a model of the grid's width."""
        return Sizes(self.embed_dim, num_heads, head_dim, self.mlp_dim, num_layers, vocab_size)

    def points(self, num_layers: int, vocab_size: int) -> Iterator[Point]:
        """Yield all points, seed by seed.

        Raises:
            GridError: a number of heads does not divide the width where it must, or a matched size
                does not exist.
        """
        for seed in self.seeds:
            for rule, heads, head_dim, embed_dim, mlp_dim in self._models(num_layers, vocab_size):
                yield Point(rule, heads, head_dim, embed_dim, mlp_dim, seed)

    def _models(
        self, num_layers: int, vocab_size: int
    ) -> Iterator[tuple[Rule, int, int, int, int]]:
        d, f, size = self.embed_dim, self.mlp_dim, self.head_dim
        for heads in self.standard_heads:
            yield "standard", heads, _divide(d, heads), d, f
        for heads in self.fixed_heads:
            yield "fixed", heads, size, d, f
        for other in self.head_sizes:
            yield "head_size", self.head_sizes_heads, other, d, f
        try:
            for heads in self.matched_mlp_heads:
                fixed = self.sizes(heads, size, num_layers, vocab_size)
                yield "matched_mlp", heads, _divide(d, heads), d, matched_mlp_dim(fixed)
            for heads in self.matched_width_heads:
                fixed = self.sizes(heads, size, num_layers, vocab_size)
                # Sinusoids need an even width.
                width = matched_embed_dim(fixed, heads if heads % 2 == 0 else 2 * heads)
                yield "matched_width", heads, _divide(width, heads), width, f
        except ValueError as error:
            raise GridError(str(error)) from error


def _divide(width: int, heads: int) -> int:
    if width % heads:
        raise GridError(f"{heads} heads of size d / h: they do not divide the width {width}")
    return width // heads

"""Points of the head-size experiment by rule, and their table of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_probattn.base.config_files import run_stem
from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.compare.flags import Place
from lit_probattn.compare.tables import Metric, Row, Table, TaskEntry, record
from lit_probattn.configs import compose, read_yaml
from lit_probattn.reproduce.head_size.parameters import Sizes, matched_embed_dim, matched_mlp_dim

RULES = {
    "standard": "head size d / h",
    "fixed": "fixed head size",
    "matched_mlp": "d / h, MLP matched (M1)",
    "matched_width": "d / h, width matched (M2)",
    "head_size": "head size varied",
    "width": "d / h, width varied",
    "width_and_heads": "width varied, one head size",
}


@dataclass(frozen=True)
class Point:
    """One model.

    Args:
        rule: `standard` (head size d / h), `fixed` (head size of the grid), `head_size` (several
            head sizes), `matched_mlp` and `matched_width` (standard heads, with the parameters of
            the fixed model by rules M1 and M2), `width` (standard heads, several widths),
            `width_and_heads` (several widths with one head size).
        num_heads: h.
        head_dim: d_p.
        embed_dim: d.
        mlp_dim: d_ff.
    """

    rule: str
    num_heads: int
    head_dim: int
    embed_dim: int
    mlp_dim: int

    @property
    def model(self) -> tuple[int, int, int, int]:
        """Identity of the model, which several rules may share."""
        return self.num_heads, self.head_dim, self.embed_dim, self.mlp_dim

    @property
    def name(self) -> str:
        """Name of the row: rule and sizes."""
        h, e, d, f = self.model
        return f"{self.rule}-h{h}-e{e}-d{d}-f{f}"


class Perplexity(Metric):
    """Perplexity among test results, of tokens or of masked tokens."""

    def value(self, report: Mapping[str, Any]) -> float:
        """Return the perplexity.

        Raises:
            ConfigError: the report has no perplexity.
        """
        return perplexity_of(report)[1]


def perplexity_of(scores: Mapping[str, Any]) -> tuple[str, float]:
    """Return name and value of the perplexity among test results, of tokens or masked tokens.

    Raises:
        ConfigError: the scores contain no perplexity.
    """
    for name, value in scores.items():
        if name.startswith("test/ppl_"):
            return name, float(value)
        if name == "test/mlm_loss":
            return "exp(test/mlm_loss)", math.exp(float(value))
    raise ConfigError(f"missing test/ppl_* or test/mlm_loss; scores: {', '.join(scores)}")


@dataclass(frozen=True)
class Grid:
    """A grid file of configs/reproduce.

    Args:
        task: task file with data, schedule and optimiser of all points.
        attention: attention file; the points set num_heads.
        flags: additional flags of the runs, name -> value.
        embed_dim: d.
        mlp_dim: d_ff.
        head_dim: d_p of the rule `fixed`.
        standard_heads: numbers of heads with head size d / h.
        fixed_heads: numbers of heads with head size d_p.
        matched_mlp_heads: numbers of heads of rule M1.
        matched_width_heads: numbers of heads of rule M2.
        head_sizes: head sizes with `head_sizes_heads` heads.
        head_sizes_heads: one or several numbers of heads of `head_sizes`.
        widths: embedding sizes of the baselines of several widths.
        width_heads: their numbers of heads, with head size d / h.
        width_head_dim: their head size, with d / width_head_dim heads; both may be set.
        seeds: seeds of all points.
        title: title of its report; the name of the file if empty.
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
    head_sizes_heads: int | tuple[int, ...] = 8
    widths: tuple[int, ...] = ()
    width_heads: tuple[int, ...] = ()
    width_head_dim: int | None = None
    seeds: tuple[int, ...] = (0,)
    title: str = ""

    @classmethod
    def read(cls, path: Path, points: Mapping[str, Any] | None = None) -> Grid:
        """Read a grid file.

        Args:
            path: the file.
            points: entries that override the file.

        Raises:
            ConfigError: the file is missing, has an unknown entry, or lacks one.
        """
        content = {**read_yaml(path), **(points or {})}
        content.pop("kind", None)  # of a grid that is a table
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        return record(cls, f"grid {path.name}", given)

    def sizes(self, num_heads: int, head_dim: int, num_layers: int, vocab_size: int) -> Sizes:
        """Return the sizes of a model with the grid's width."""
        return Sizes(self.embed_dim, num_heads, head_dim, self.mlp_dim, num_layers, vocab_size)

    def points(self, num_layers: int, vocab_size: int) -> Iterator[Point]:
        """Yield all points.

        Raises:
            ConfigError: the width is not divisible by a number of heads, or a matched size does not
                exist.
        """
        d, f, size = self.embed_dim, self.mlp_dim, self.head_dim
        for heads in self.standard_heads:
            yield Point("standard", heads, _divide(d, heads), d, f)
        for heads in self.fixed_heads:
            yield Point("fixed", heads, size, d, f)
        sizes_heads = self.head_sizes_heads
        for heads in sizes_heads if isinstance(sizes_heads, tuple) else (sizes_heads,):
            for other in self.head_sizes:
                yield Point("head_size", heads, other, d, f)
        yield from self._widths()
        with prefixed("", ValueError):
            for heads in self.matched_mlp_heads:
                fixed = self.sizes(heads, size, num_layers, vocab_size)
                width = matched_mlp_dim(fixed)
                yield Point("matched_mlp", heads, _divide(d, heads), d, width)
            for heads in self.matched_width_heads:
                fixed = self.sizes(heads, size, num_layers, vocab_size)
                # Sinusoidal positions require an even width.
                width = matched_embed_dim(fixed, heads if heads % 2 == 0 else 2 * heads)
                yield Point("matched_width", heads, _divide(width, heads), width, f)

    def _widths(self) -> Iterator[Point]:
        f, size = self.mlp_dim, self.width_head_dim
        for width in self.widths:
            for heads in self.width_heads:
                yield Point("width", heads, _divide(width, heads), width, f)
            if size is not None:
                if width % size:
                    raise ConfigError(f"width {width} is not divisible by the head size {size}")
                yield Point("width_and_heads", width // size, size, width, f)

    def table(self, name: str, place: Place, title: str | None = None) -> Table:
        """Return the grid as a table with one row per point.

        Args:
            name: name of the table.
            title: title in one line; None means that of the file.
            place: folders of the data, whose vocabulary rule M2 requires.

        Raises:
            ConfigError: see `points`.
            DataError: the text is required but missing.
        """
        config = compose([self.task], self.flags)
        rows = config["data"]["init_args"].get("vocab_size")
        if rows is None and self.matched_width_heads:
            from lit_probattn.compare.runs import data_of

            data = data_of(config, place)
            data.setup()
            rows = data.vocab_size
        points = self.points(int(config["model"]["init_args"]["num_layers"]), int(rows or 1))
        metric = Perplexity("test", "test", "", ("perplexity", "test"), "perplexity")
        task = TaskEntry(
            name=run_stem(self.task),
            config=self.task,
            metrics={metric.name: metric},
            settings=self.flags,
            checkpoint="last",
        )
        made = {point.name: self._row(point) for point in points}
        title = title or self.title or name
        return Table(name, title, self.seeds, 0, next(iter(made), ""), {task.name: task}, made)

    def _row(self, point: Point) -> Row:
        sizes = {key: getattr(point, key) for key in ("embed_dim", "mlp_dim", "head_dim")}
        return Row(
            name=point.name,
            method=f"{RULES[point.rule]}: {point.head_dim} ({point.embed_dim}/{point.mlp_dim})",
            heads=str(point.num_heads),
            attention=self.attention,
            set={"num_heads": point.num_heads},
            overrides={f"model.init_args.{key}": value for key, value in sizes.items()},
        )


def _divide(width: int, heads: int) -> int:
    if width % heads:
        raise ConfigError(f"width {width} is not divisible by {heads} heads (head size d / h)")
    return width // heads

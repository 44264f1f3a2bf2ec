"""The file of a sweep: a model, variants with a baseline, a grid, and what to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lit_probattn.base import rows
from lit_probattn.base.config_files import file_named, find
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import attention_entry, class_of, read_yaml
from profiling.measure.rows import Quantity

ModelKind = Literal[
    "attention", "language_model", "classifier", "pair_classifier", "encoder_decoder"
]
# A size of the grid.
Size = Annotated[int, Field(ge=1)]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class Strict(BaseModel):
    """A part of the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class AttentionEntry(Strict):
    """An attention as in `configs/attention`: a file, or class_path; init_args override."""

    config: str | None = None
    class_path: str | None = None
    init_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _exactly_one(self) -> AttentionEntry:
        if (self.config is None) == (self.class_path is None):
            raise ValueError("an attention needs either config (a file) or class_path")
        return self

    def resolve(self, root: Path) -> tuple[str, dict[str, Any]]:
        """Return class path and arguments, those of the file first."""
        if self.class_path is not None:
            return self.class_path, dict(self.init_args)
        assert self.config is not None
        entry = attention_entry(find(self.config, root))
        return entry["class_path"], {**entry["init_args"], **self.init_args}


class Variant(Strict):
    """A variant of the sweep.

    Args:
        attention: which attention.
        heads_divisor: with `num_heads` in the grid, the variant uses num_heads / heads_divisor.
        baseline: the variant it is compared with; None means the sweep's baseline.
        backend: this variant's implementation, instead of the grid's.
    """

    attention: AttentionEntry
    heads_divisor: int = Field(default=1, ge=1)
    baseline: str | None = None
    backend: str | None = None


class ModelConfig(Strict):
    """The model around the attention.

    Args:
        kind: which model.
        task: a file of `configs/tasks`; its model sizes are defaults for the ones below.
        head_dim: E; or
        head_dim_divisor: E = embed_dim / head_dim_divisor.
        mlp_dim: inner width of the blocks; or
        mlp_ratio: mlp_dim = mlp_ratio · embed_dim.
        options: further arguments of the model.
    """

    kind: ModelKind = "attention"
    task: str | None = None
    head_dim: int | None = Field(default=None, ge=1)
    head_dim_divisor: int | None = Field(default=None, ge=1)
    num_layers: int | None = Field(default=None, ge=1)
    mlp_dim: int | None = Field(default=None, ge=1)
    mlp_ratio: float | None = Field(default=None, gt=0)
    vocab_size: int | None = Field(default=None, ge=1)
    num_classes: int | None = Field(default=None, ge=1)
    dropout: float | None = Field(default=None, ge=0, lt=1)
    include_output_layer: bool = True
    is_causal: bool = False

    @model_validator(mode="after")
    def _one_rule(self) -> ModelConfig:
        if self.head_dim is not None and self.head_dim_divisor is not None:
            raise ValueError("give head_dim or head_dim_divisor, not both")
        if self.mlp_dim is not None and self.mlp_ratio is not None:
            raise ValueError("give mlp_dim or mlp_ratio, not both")
        return self


class Grid(Strict):
    """The values whose every combination is a point. `num_heads` are the baseline's heads."""

    embed_dim: list[Size] = Field(min_length=1)
    seq_len: list[Size] = Field(min_length=1)
    num_heads: list[Size] | None = None
    batch_size: list[Size] = Field(default=[1], min_length=1)
    mode: list[Literal["train", "eval"]] = Field(default=["eval"], min_length=1)
    backend: list[str] = Field(default=["reference"], min_length=1)
    dtype: list[Dtype] = Field(default=["float32"], min_length=1)


class TimingConfig(Strict):
    """How time is taken."""

    warmup: int = Field(default=3, ge=0)
    repeats: int = Field(default=20, ge=1)
    max_seconds: float = Field(default=60.0, gt=0)


class Published(Strict):
    """A number to compare with, published or counted by hand, and where ours is found.

    Args:
        what: what it is, for the table.
        value: the number.
        source: where it was published.
        metric: a column of the rows, in the unit of `scale`.
        variant: which variant.
        is_ratio: the ratio to the baseline instead of the value; predicted if not measured.
        scale: our value is divided by this.
        where: columns that pick the point.
    """

    what: str
    value: float
    source: str
    metric: str
    variant: str
    is_ratio: bool = False
    scale: float = 1.0
    where: dict[str, int | str] = Field(default_factory=dict)

    def find(self, frame: pd.DataFrame, ratios: pd.DataFrame) -> float | None:
        """Return our measured number, or None if it was not measured."""
        table = ratios if self.is_ratio else frame
        rows = table[table["variant"] == self.variant]
        if self.is_ratio:
            rows = rows[rows["metric"] == self.metric]
        else:
            rows = rows[(rows["source"] == "measured") & (rows["status"] == "ok")]
        for column, value in self.where.items():
            rows = rows[rows[column] == value]
        values = rows[self.metric] if not self.is_ratio else rows["ratio_measured"]
        if self.is_ratio and values.dropna().empty:
            values = rows["ratio_predicted"]
        values = values.dropna()
        return float(values.iloc[0]) / self.scale if len(values) else None


Axis = Literal["embed_dim", "seq_len", "grid_heads"]


class Claim(Strict):
    """A part of a sentence that numbers of a sweep can contradict: one condition, at every place.

    Args:
        metric: a column of the table of rows; `memory_bytes` is resident memory and the peak above
            it together.
        variants: which; None means all that have a baseline.
        scope: of the rows: `attention`, `layers`, `model`.
        mode: `eval`, `train`; None means all of the sweep.
        below: the ratio to the baseline is smaller than this at every place.
        reaches: the ratio to the baseline is at most this somewhere.
        falls_over: along these axes the ratio never rises, and falls somewhere on every line.
        constant_over: along these axes the ratio stays within 1 %.
        within: values of the variants differ by at most this share of the smallest.
        ordered: values of the variants rise in the order of `variants`.
    """

    metric: str = "macs"
    variants: list[str] | None = None
    scope: Literal["attention", "layers", "model"] = "model"
    mode: Literal["eval", "train"] | None = None
    below: float | None = None
    reaches: float | None = None
    falls_over: list[Axis] = Field(default_factory=list)
    constant_over: list[Axis] = Field(default_factory=list)
    within: float | None = None
    ordered: bool = False

    @model_validator(mode="after")
    def _one_condition(self) -> Claim:
        conditions = (self.below, self.reaches, self.within)
        given = sum(value is not None for value in conditions) + self.ordered
        given += bool(self.falls_over) + bool(self.constant_over)
        if given != 1:
            raise ValueError(
                "a claim needs one of below, reaches, falls_over, constant_over, within, ordered"
            )
        return self


class Sentence(Strict):
    """A sentence of a paper; a text alone is one that nothing judges.

    Args:
        says: the sentence, in our words.
        holds: what must hold for it.
        figure: the published figure, where a sweep belongs to several.
    """

    says: str
    holds: list[Claim] = Field(default_factory=list)
    figure: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        return {"says": given} if isinstance(given, str) else given


class Figure(Strict):
    """What the report compares with a published figure or table.

    Args:
        title: heading.
        paper: what the paper says; a sentence with `holds` gets a verdict.
        notes: what explains a difference, one sentence each.
        published: published numbers beside ours.
    """

    title: str
    paper: list[Sentence] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    published: list[Published] = Field(default_factory=list)


class SweepConfig(Strict):
    """The file of `lit-probattn sweep`; `name` is that of its folder of results."""

    name: str = Field(pattern=r"^[\w+-][\w.+-]*$")
    model: ModelConfig
    variants: dict[str, Variant] = Field(min_length=1)
    baseline: str | None = None
    grid: Grid
    measure: list[Quantity] = Field(default=["cost"], min_length=1)
    device: str = "cpu"
    timing: TimingConfig = Field(default_factory=TimingConfig)
    memory_limit_bytes: int | None = Field(default=None, ge=1)
    point_timeout_s: float = Field(default=1800.0, gt=0)
    seed: int = 0
    report: Figure | None = None

    @property
    def sentences(self) -> list[Sentence]:
        """The paper's sentences that get a verdict."""
        return [one for one in self.report.paper if one.holds] if self.report else []

    @model_validator(mode="after")
    def _known_variants_of_claims(self) -> SweepConfig:
        for sentence in self.sentences:
            for name in (n for claim in sentence.holds for n in claim.variants or ()):
                if name not in self.variants:
                    raise ValueError(
                        f"a claim names {name!r}, which is not among the variants: "
                        f"{', '.join(self.variants)}"
                    )
        return self

    @model_validator(mode="after")
    def _known_baselines(self) -> SweepConfig:
        names = {self.baseline, *(v.baseline for v in self.variants.values())} - {None}
        for name in sorted(str(n) for n in names):
            if name not in self.variants:
                raise ValueError(
                    f"baseline {name!r} is not among the variants: {', '.join(self.variants)}"
                )
        return self

    def check_classes(self, root: Path) -> None:
        """Import the class of every variant.

        Raises:
            ConfigError: one cannot be had; see `class_of`.
        """
        for name, variant in self.variants.items():
            try:
                class_of(variant.attention.resolve(root)[0])
            except ConfigError as error:
                raise ConfigError(f"variants.{name}: {error}") from error

    def baseline_of(self, variant: str) -> str | None:
        """Return the baseline of a variant, or None if it has none or is one itself."""
        own = self.variants[variant].baseline or self.baseline
        return None if own == variant else own


def describe(error: ValidationError) -> str:
    """Return a validation error in one line, with the nearest valid name for a wrong one."""
    return rows.describe(error, _all_fields())


def _all_fields() -> set[str]:
    parts: list[type[Strict]] = [SweepConfig, ModelConfig, Grid, Variant, AttentionEntry]
    parts += [TimingConfig, Figure, Published, Sentence, Claim]
    return {name for model in parts for name in model.model_fields}


def load_sweep(path: str | Path) -> SweepConfig:
    """Read and check a sweep file, given by its path or its name in configs/profiling.

    Raises:
        ConfigError: the file is missing or wrong; one line that names the place.
    """
    try:
        return SweepConfig.model_validate(read_yaml(file_named("measurement", str(path))))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from error

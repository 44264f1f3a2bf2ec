"""The sweep file: a model, variants with a baseline, a grid, and the quantities to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lit_probattn.base.config_files import file_named, find
from lit_probattn.base.errors import ConfigError, nearest, prefixed
from lit_probattn.base.rows import describe
from lit_probattn.configs import attention_entry, class_of, read_yaml
from profiling.measure.rows import PLACE, SETTING, ProfileRow, Quantity

ModelKind = Literal[
    "attention", "language_model", "classifier", "pair_classifier", "encoder_decoder"
]
# A size of the grid.
Size = Annotated[int, Field(ge=1)]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]

# Settings of `model` that a kind of model does not have.
UNUSED: dict[ModelKind, tuple[str, ...]] = {
    "attention": (
        *("num_layers", "mlp_dim", "mlp_ratio", "vocab_size", "num_classes", "dropout"),
        "include_output_layer",
    ),
    "language_model": ("num_classes",),
    "classifier": ("is_causal", "include_output_layer"),
    "pair_classifier": ("is_causal", "include_output_layer"),
    "encoder_decoder": ("num_classes",),
}


class Strict(BaseModel):
    """A section of the file; unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid")


class AttentionEntry(Strict):
    """An attention variant as in `configs/attention`: config or class_path; init_args override."""

    config: str | None = None
    class_path: str | None = None
    init_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _exactly_one(self) -> AttentionEntry:
        if (self.config is None) == (self.class_path is None):
            raise ValueError("an attention needs exactly one of config (a file) and class_path")
        return self

    def resolve(self, root: Path) -> tuple[str, dict[str, Any]]:
        """Return class path and arguments; init_args override those of the file."""
        if self.class_path is not None:
            return self.class_path, dict(self.init_args)
        assert self.config is not None
        entry = attention_entry(find(self.config, root))
        return entry["class_path"], {**entry["init_args"], **self.init_args}


class Variant(Strict):
    """A variant of the sweep.

    Args:
        attention: class and arguments of the attention layer.
        heads_divisor: with `num_heads` in the grid, the variant uses num_heads / heads_divisor.
        baseline: the variant in the denominator of ratios; None means the sweep's baseline.
        backend: backend of this variant, overriding the grid.
    """

    attention: AttentionEntry
    heads_divisor: int = Field(default=1, ge=1)
    baseline: str | None = None
    backend: str | None = None


class ModelConfig(Strict):
    """The model around the attention.

    Args:
        kind: name of the model.
        head_dim: E; or
        head_dim_divisor: E = embed_dim / head_dim_divisor.
        mlp_dim: inner width of the blocks; or
        mlp_ratio: mlp_dim = mlp_ratio · embed_dim.
    """

    kind: ModelKind = "attention"
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
            raise ValueError("set head_dim or head_dim_divisor, not both")
        if self.mlp_dim is not None and self.mlp_ratio is not None:
            raise ValueError("set mlp_dim or mlp_ratio, not both")
        for name in UNUSED[self.kind]:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: no effect with kind {self.kind}; remove it")
        return self


class Grid(Strict):
    """Values whose combinations are the points. `num_heads` is the baseline's number of heads."""

    embed_dim: list[Size] = Field(min_length=1)
    seq_len: list[Size] = Field(min_length=1)
    num_heads: list[Size] | None = None
    batch_size: list[Size] = Field(default=[1], min_length=1)
    mode: list[Literal["train", "eval"]] = Field(default=["eval"], min_length=1)
    backend: list[str] = Field(default=["reference"], min_length=1)
    dtype: list[Dtype] = Field(default=["float32"], min_length=1)


class TimingConfig(Strict):
    """Warm-up, repeats and limits of time measurements."""

    warmup: int = Field(default=3, ge=0)
    repeats: int = Field(default=20, ge=1)
    max_seconds: float = Field(default=60.0, gt=0)


class Published(Strict):
    """A published or hand-counted value, and the point that reproduces it.

    Args:
        what: label in the table.
        value: the published value.
        source: its publication.
        metric: a column of the rows, in the unit of `scale`.
        variant: name of the variant.
        is_ratio: use the ratio to the baseline instead of the value; predicted if not measured.
        scale: divisor of the reproduced value.
        where: values of the columns that select the point.
    """

    what: str
    value: float
    source: str
    metric: str
    variant: str
    is_ratio: bool = False
    scale: float = 1.0
    where: dict[str, int | str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known_columns(self) -> Published:
        fields = {*ProfileRow.model_fields, "memory_bytes"}
        columns = {*PLACE, *SETTING} if self.is_ratio else fields
        for name, known in ((self.metric, fields), *((name, columns) for name in self.where)):
            if name not in known:
                raise ValueError(f"unknown column {name!r}{nearest(name, known)}")
        if not self.value or not self.scale:
            raise ValueError("value and scale must not be 0")
        return self

    def find(self, frame: pd.DataFrame, ratios: pd.DataFrame) -> float | None:
        """Return the reproduced value, or None if it was not measured."""
        rows, wanted, columns = frame, {"source": "measured", "status": "ok"}, [self.metric]
        if self.is_ratio:
            rows, wanted = ratios, {"metric": self.metric}
            columns = ["ratio_measured", "ratio_predicted"]
        for column, value in (("variant", self.variant), *wanted.items(), *self.where.items()):
            rows = rows[rows[column] == value]
        values = [value for column in columns for value in rows[column].dropna()]
        return float(values[0]) / self.scale if values else None


Axis = Literal["embed_dim", "seq_len", "grid_heads"]


class Claim(Strict):
    """A testable part of a sentence: one condition that must hold at every point of a sweep.

    Args:
        metric: a column of the rows; `memory_bytes` is the sum of resident memory and the peak
            above it.
        variants: names of the variants; None means all that have a baseline.
        scope: scope of the rows: `attention`, `layers`, `model`.
        mode: `eval` or `train`; None means all modes of the sweep.
        below: the ratio to the baseline is below this value at every point.
        reaches: the ratio to the baseline is at most this value at one point or more.
        falls_over: the ratio never rises along these axes, and falls at least once on every line.
        constant_over: the ratio stays within 1 % along these axes.
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
    """A sentence of a paper; a plain string is a sentence that is not judged.

    Args:
        says: the sentence, paraphrased.
        holds: the claims that must hold for it.
        figure: the published figure, if a sweep reproduces several.
    """

    says: str
    holds: list[Claim] = Field(default_factory=list)
    figure: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        return {"says": given} if isinstance(given, str) else given


class Figure(Strict):
    """A published figure or table that the report compares with the sweep.

    Args:
        title: heading of the section.
        paper: sentences of the paper; those with `holds` get a verdict.
        notes: explanations of differences, one sentence each.
        published: published values to compare with reproduced ones.
    """

    title: str
    paper: list[Sentence] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    published: list[Published] = Field(default_factory=list)


class SweepConfig(Strict):
    """The file of `lit-probattn sweep`; `name` is the name of its results folder."""

    name: str = Field(pattern=r"^[\w+-][\w.+-]*$")
    model: ModelConfig
    variants: dict[str, Variant] = Field(min_length=1)
    baseline: str | None = None
    grid: Grid
    measure: list[Quantity] = Field(default=["cost"], min_length=1)
    device: Device = "cpu"
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
    def _known_variants(self) -> SweepConfig:
        claims = (claim for sentence in self.sentences for claim in sentence.holds)
        named = [("a claim", name) for claim in claims for name in claim.variants or ()]
        named += [(one.what, one.variant) for one in (self.report.published if self.report else ())]
        for what, name in named:
            if name not in self.variants:
                raise ValueError(
                    f"{what} names {name!r}, which is not among the variants: "
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
            ConfigError: a class cannot be imported; see `class_of`.
        """
        for name, variant in self.variants.items():
            with prefixed(f"variants.{name}", ConfigError):
                class_of(variant.attention.resolve(root)[0])

    def baseline_of(self, variant: str) -> str | None:
        """Return the baseline of a variant, or None if it has none or is one itself."""
        own = self.variants[variant].baseline or self.baseline
        return None if own == variant else own


File = TypeVar("File", bound=Strict)


def load(path: str | Path, kind: type[File]) -> File:
    """Load and validate a file, given by its path or its name in configs/profiling.

    Raises:
        ConfigError: the file is missing or invalid; one line with the location.
    """
    try:
        return kind.model_validate(read_yaml(file_named("measurement", str(path))))
    except ValidationError as error:
        parts = kind.model_json_schema()
        sections = (parts, *parts.get("$defs", {}).values())
        known = [name for section in sections for name in section.get("properties", ())]
        raise ConfigError(f"{path}: {describe(error, known)}") from error


def load_sweep(path: str | Path) -> SweepConfig:
    """Load a sweep file; see `load`."""
    return load(path, SweepConfig)

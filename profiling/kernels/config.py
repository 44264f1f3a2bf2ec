"""The file of `python -m profiling kernels`: sides to compare, and bounds on their ratios."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from lit_probattn.base.errors import ConfigError, nearest
from profiling.sweep.config import AttentionEntry, Device, Dtype, Size, Strict, load

Mode = Literal["train", "eval", "decode"]
Scope = Literal["attention", "layer"]
LAYER_HEADS = 8  # width over head_dim in scope `layer`
SdpaBackend = Literal["any", "cudnn", "flash", "efficient", "math"]


class TorchSdpa(Strict):
    """PyTorch's softmax attention with the backend that it selects, or one given by name."""

    num_heads: int = Field(ge=1)
    backend: SdpaBackend = "any"


class TorchLayer(Strict):
    """`torch.nn.MultiheadAttention` without returned weights; a layer without a decoding cache."""

    num_heads: int = Field(ge=1)


class TorchProducts(Strict):
    """Only the matrix products of linear attention, forward and backward, by `torch.bmm`.

    There are 2 and 4 without a mask, and 4 and 8 with a causal mask, computed with the chunks and
    spans of `lit_probattn.attention.linear.chunkwise`.
    """

    num_heads: int = Field(ge=1)


class Grid(Strict):
    """Points at which all sides are measured; a value overrides that of the file."""

    seq_lens: list[Size] = Field(min_length=1)
    head_dims: list[Size] = Field(min_length=1)
    is_causal: list[bool] = Field(default=[False], min_length=1)
    modes: list[Mode] = Field(default=["train"], min_length=1)
    scopes: list[Scope] = Field(default=["attention"], min_length=1)
    dtypes: list[Dtype] | None = None
    num_threads: list[Size] = Field(
        default=[], description="PyTorch's CPU threads; empty: unchanged"
    )
    tokens: int = Field(ge=1, description="batch size times length, equal at every point")


class Side(Strict):
    """One implementation: an attention variant on a backend, or one of PyTorch's.

    Args:
        seq_lens: lengths at which it runs, if it is too slow or large at others; None means all.
        head_dims: head sizes at which it runs.
        dtypes: dtypes in which it runs.
        modes: modes in which it runs.
        sdpa: the implementation that PyTorch's attention uses on backend `sdpa`.
    """

    attention: AttentionEntry | None = None
    torch_sdpa: TorchSdpa | None = None
    torch_layer: TorchLayer | None = None
    torch_products: TorchProducts | None = None
    backend: str = "reference"
    seq_lens: list[int] | None = None
    head_dims: list[int] | None = None
    dtypes: list[Dtype] | None = None
    modes: list[Mode] | None = None
    sdpa: SdpaBackend = "any"

    @model_validator(mode="after")
    def _exactly_one(self) -> Side:
        kinds = ("attention", "torch_sdpa", "torch_layer", "torch_products")
        if sum(getattr(self, kind) is not None for kind in kinds) != 1:
            raise ValueError(f"a side needs exactly one of {', '.join(kinds)}")
        if self.sdpa != "any" and (self.attention is None or self.backend != "sdpa"):
            raise ValueError("sdpa requires an attention layer with backend: sdpa")
        return self

    def runs_at(self, point: KernelsConfig) -> bool:
        """Return whether this side runs at a point."""
        if self.torch_layer is not None and (point.scope != "layer" or point.mode == "decode"):
            return False
        if self.torch_products is not None and (point.scope, point.mode) != ("attention", "train"):
            return False
        asked = ((self.seq_lens, point.seq_len), (self.head_dims, point.head_dim))
        return all(
            values is None or value in values
            for values, value in (*asked, (self.dtypes, point.dtype), (self.modes, point.mode))
        )


class Bounds(Strict):
    """Bounds on a comparison; None means no bound."""

    max_time_ratio: float | None = None
    min_time_ratio: float | None = None
    max_memory_ratio: float | None = None
    min_tflops: float | None = Field(default=None, description="of `side`, timed by CUDA graph")


class Gate(Bounds):
    """Bounds at the points that match all given values."""

    head_dim: int | None = None
    mode: Mode | None = None
    seq_len: int | None = None
    min_seq_len: int = 1
    dtype: Dtype | None = None

    @model_validator(mode="after")
    def _asks_something(self) -> Gate:
        if all(getattr(self, name) is None for name in Bounds.model_fields):
            raise ValueError(f"a gate needs one of {', '.join(Bounds.model_fields)}")
        return self

    def applies(self, point: KernelsConfig) -> bool:
        """Return whether the gate applies to a point; gates on TFLOP/s exclude causal calls."""
        names = ("head_dim", "mode", "seq_len", "dtype")
        given = {name: getattr(self, name) for name in names}
        same = all(value in (None, getattr(point, name)) for name, value in given.items())
        return same and point.seq_len >= self.min_seq_len and not point.is_causal


class Comparison(Bounds):
    """Two sides, bounds on their ratios at all points, and gates at some points.

    Args:
        predicted: time ratio of forward and backward by head size, predicted before it was
            measured (`--model`).
    """

    name: str
    side: str
    against: str
    predicted: dict[int, str] = Field(default_factory=dict)
    gates: list[Gate] = Field(default_factory=list)

    def bounds(self, point: KernelsConfig) -> list[Bounds]:
        """Return the bounds on the comparison at a point."""
        return [self, *(gate for gate in self.gates if gate.applies(point))]


class ParityCases(Strict):
    """Kernels whose errors are compared with float64 before anything is timed (`--parity`).

    Args:
        cases: parts of the names of the cases, comma-separated; None means all.
        head_dims: head sizes by dtype.
    """

    cases: str | None = None
    head_dims: dict[Dtype, list[int]] = Field(min_length=1)


class KernelsConfig(Strict):
    """The file of `python -m profiling kernels`.

    `figure` defines the comparisons of the figure: label of a row, label of a mark, name. Mode
    `train` is forward and backward, `eval` forward, `decode` one query over `seq_len` keys. With
    scope `layer` everything runs with its projections, to and from width 8 · `head_dim`.
    """

    device: Device = "cpu"
    dtype: Dtype = "float32"
    mode: Mode = "train"
    scope: Scope = "attention"
    batch_size: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    is_causal: bool = False
    num_threads: int | None = Field(default=None, ge=1)
    seed: int = 0
    warmup: int = Field(default=3, ge=0)
    repeats: int = Field(default=20, ge=1)
    max_seconds: float = 120.0
    grid: Grid | list[Grid] | None = None
    sides: dict[str, Side]
    comparisons: list[Comparison]
    figure: dict[str, dict[str, str]] = Field(default_factory=dict)
    parity_tests: list[str] = Field(default_factory=list)
    parity: ParityCases | None = None

    @model_validator(mode="after")
    def _one_check(self) -> KernelsConfig:
        if self.parity is not None and self.parity_tests:
            raise ValueError("parity and parity_tests exclude each other")
        return self

    @model_validator(mode="after")
    def _known_comparisons(self) -> KernelsConfig:
        names = [comparison.name for comparison in self.comparisons]
        for name in (name for row in self.figure.values() for name in row.values()):
            if name not in names:
                raise ValueError(f"figure names comparison {name!r}{nearest(name, names)}")
        return self

    @model_validator(mode="after")
    def _known_sides(self) -> KernelsConfig:
        for comparison in self.comparisons:
            for name in (comparison.side, comparison.against):
                if name not in self.sides:
                    raise ValueError(
                        f"comparison {comparison.name!r}: unknown side {name!r}; "
                        f"expected one of {', '.join(self.sides)}"
                    )
        return self


def points(config: KernelsConfig) -> list[KernelsConfig]:
    """Return the configurations of all points in the order of the grids; without grids, the file.

    A point has the sides that run at its length, and their comparisons.
    """
    if config.grid is None:
        return [_at(config, {})]
    found = []
    for grid in config.grid if isinstance(config.grid, list) else [config.grid]:
        names = ("dtype", "head_dim", "seq_len", "is_causal", "mode", "scope", "num_threads")
        threads: list[int | None] = [*grid.num_threads] or [config.num_threads]
        axes = (grid.head_dims, grid.seq_lens, grid.is_causal, grid.modes, grid.scopes, threads)
        for values in product(grid.dtypes or [config.dtype], *axes):
            place: dict[str, object] = dict(zip(names, values, strict=True))
            place["batch_size"] = max(1, grid.tokens // values[2])
            point = _at(config, place)
            found += [] if point in found else [point]  # grids may overlap
    return found


def _at(config: KernelsConfig, place: dict[str, object]) -> KernelsConfig:
    point = config.model_copy(update={**place, "grid": None})
    sides = {name: side for name, side in config.sides.items() if side.runs_at(point)}
    compared = [c for c in config.comparisons if c.side in sides and c.against in sides]
    return point.model_copy(update={"sides": sides, "comparisons": compared})


def narrowed(
    config: KernelsConfig,
    *,
    dtypes: list[str] | None = None,
    cases: str | None = None,
    **axes: list[int] | None,
) -> KernelsConfig:
    """Return the file with other points and the comparisons whose name contains one of `cases`.

    `axes`, lists of a `Grid`, replace those of the file; `dtypes` keeps the points that have one of
    them.

    Raises:
        ConfigError: points are given for a file without a grid, or no point or comparison matches.
    """
    update = {name: values for name, values in axes.items() if values is not None}
    given = [*update, *(["dtypes"] if dtypes is not None else [])]
    if given and config.grid is None:
        raise ConfigError(f"{', '.join(given)}: the file has no grid to override")
    if given and config.grid is not None:
        grids = config.grid if isinstance(config.grid, list) else [config.grid]
        changed = [grid.model_copy(update=update) for grid in grids]
        if dtypes is not None:
            in_file = [grid.dtypes or [config.dtype] for grid in changed]
            kept = [[name for name in names if name in dtypes] for names in in_file]
            changed = [
                grid.model_copy(update={"dtypes": names})
                for grid, names in zip(changed, kept, strict=True)
                if names
            ]
        if not changed:
            raise ConfigError(f"no point of the file is in {', '.join(dtypes or [])}")
        config = config.model_copy(update={"grid": changed})
    if cases is None:
        return config
    chosen = [c for c in config.comparisons if any(part in c.name for part in cases.split(","))]
    if not chosen:
        names = "; ".join(c.name for c in config.comparisons)
        raise ConfigError(f"no comparison name contains {cases!r}; comparisons: {names}")
    used = {name for c in chosen for name in (c.side, c.against)}
    sides = {name: side for name, side in config.sides.items() if name in used}
    return config.model_copy(update={"comparisons": chosen, "sides": sides})


def load_kernels(path: str | Path) -> KernelsConfig:
    """Load a kernels file; a ConfigError names the location in one line."""
    return load(path, KernelsConfig)

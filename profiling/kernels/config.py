"""The file of `python -m profiling kernels`: sides, and what their ratios must not exceed."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from lit_probattn.configs import ConfigError, read_yaml
from profiling.sweep.config import AttentionEntry, Strict, describe

Mode = Literal["train", "eval"]
SdpaBackend = Literal["any", "cudnn", "flash", "efficient", "math"]


class TorchSdpa(Strict):
    """PyTorch's own softmax attention: what it chooses, or one of its backends by name."""

    num_heads: int = Field(ge=1)
    backend: SdpaBackend = "any"


class Grid(Strict):
    """Points at which all sides are measured; each value replaces that of the file."""

    seq_lens: list[int] = Field(min_length=1)
    head_dims: list[int] = Field(min_length=1)
    is_causal: list[bool] = Field(default=[False], min_length=1)
    modes: list[Mode] = Field(default=["train"], min_length=1)
    num_threads: list[int] = Field(default=[], description="of PyTorch on a CPU; none: as set")
    tokens: int = Field(ge=1, description="batch size times length, the same at every point")


class Side(Strict):
    """One implementation: an attention variant on a backend, or PyTorch's fused softmax."""

    attention: AttentionEntry | None = None
    torch_sdpa: TorchSdpa | None = None
    backend: str = "reference"
    max_seq_len: int | None = Field(default=None, description="left out of longer points")

    @model_validator(mode="after")
    def _exactly_one(self) -> Side:
        if (self.attention is None) == (self.torch_sdpa is None):
            raise ValueError("a side needs either attention or torch_sdpa")
        return self


class Comparison(Strict):
    """Two sides, and what their ratios must not exceed."""

    name: str
    side: str
    against: str
    max_time_ratio: float | None = None
    max_memory_ratio: float | None = None


class KernelsConfig(Strict):
    """The file of `python -m profiling kernels`."""

    device: str = "cpu"
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    mode: Mode = "train"
    batch_size: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    is_causal: bool = False
    num_threads: int | None = None
    seed: int = 0
    warmup: int = Field(default=3, ge=0)
    repeats: int = Field(default=20, ge=1)
    max_seconds: float = 120.0
    grid: Grid | None = None
    sides: dict[str, Side]
    comparisons: list[Comparison]
    parity_tests: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _known_sides(self) -> KernelsConfig:
        for comparison in self.comparisons:
            for name in (comparison.side, comparison.against):
                if name not in self.sides:
                    raise ValueError(
                        f"comparison {comparison.name!r} names side {name!r}; "
                        f"expected one of {', '.join(self.sides)}"
                    )
        return self


def points(config: KernelsConfig) -> list[KernelsConfig]:
    """Return the configurations of all points of the grid; the file's own without one."""
    if config.grid is None:
        return [config]
    grid = config.grid
    names = ("head_dim", "seq_len", "is_causal", "mode", "num_threads")
    threads: list[int | None] = [*grid.num_threads] or [config.num_threads]
    found = []
    for values in product(grid.head_dims, grid.seq_lens, grid.is_causal, grid.modes, threads):
        batch_size = max(1, grid.tokens // values[1])
        point = {**dict(zip(names, values, strict=True)), "batch_size": batch_size, "grid": None}
        found.append(config.model_copy(update=point))
    return found


def narrowed(
    config: KernelsConfig,
    *,
    seq_lens: list[int] | None = None,
    head_dims: list[int] | None = None,
    num_threads: list[int] | None = None,
    cases: str | None = None,
) -> KernelsConfig:
    """Return the file with other points, and only comparisons whose name contains one of `cases`.

    Raises:
        ConfigError: points are given for a file without a grid, or no comparison is left.
    """
    points_given = {"seq_lens": seq_lens, "head_dims": head_dims, "num_threads": num_threads}
    update = {name: values for name, values in points_given.items() if values is not None}
    if update and config.grid is None:
        raise ConfigError(f"{', '.join(update)}: the file has no grid whose points they replace")
    if update and config.grid is not None:
        config = config.model_copy(update={"grid": config.grid.model_copy(update=update)})
    if cases is None:
        return config
    kept = [c for c in config.comparisons if any(part in c.name for part in cases.split(","))]
    if not kept:
        names = "; ".join(c.name for c in config.comparisons)
        raise ConfigError(f"no comparison has {cases!r} in its name; there are: {names}")
    used = {name for c in kept for name in (c.side, c.against)}
    sides = {name: side for name, side in config.sides.items() if name in used}
    return config.model_copy(update={"comparisons": kept, "sides": sides})


def load_kernels(path: str | Path) -> KernelsConfig:
    """Read and check a kernels file; a ConfigError names the place in one line."""
    try:
        return KernelsConfig.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from error

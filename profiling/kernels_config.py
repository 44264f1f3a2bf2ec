"""The file of `python -m profiling kernels`: sides, and what their ratios must not exceed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from profiling.builders import ConfigError, read_yaml
from profiling.config import AttentionEntry, describe

Mode = Literal["train", "eval"]


class TorchSdpa(BaseModel):
    """PyTorch's own fused softmax attention."""

    model_config = ConfigDict(extra="forbid")
    num_heads: int = Field(ge=1)


class Side(BaseModel):
    """One implementation: an attention variant on a backend, or PyTorch's fused softmax."""

    model_config = ConfigDict(extra="forbid")
    attention: AttentionEntry | None = None
    torch_sdpa: TorchSdpa | None = None
    backend: str = "reference"

    @model_validator(mode="after")
    def _exactly_one(self) -> Side:
        if (self.attention is None) == (self.torch_sdpa is None):
            raise ValueError("a side needs either attention or torch_sdpa")
        return self


class Comparison(BaseModel):
    """Two sides, and what their ratios must not exceed."""

    model_config = ConfigDict(extra="forbid")
    name: str
    side: str
    against: str
    max_time_ratio: float | None = None
    max_memory_ratio: float | None = None


class KernelsConfig(BaseModel):
    """The file of `python -m profiling kernels`."""

    model_config = ConfigDict(extra="forbid")
    device: str = "cpu"
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    mode: Mode = "train"
    batch_size: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    is_causal: bool = False
    seed: int = 0
    warmup: int = Field(default=3, ge=0)
    repeats: int = Field(default=20, ge=1)
    max_seconds: float = 120.0
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


def load_kernels(path: str | Path) -> KernelsConfig:
    """Read and check a kernels file.

    Raises:
        ConfigError: the file is missing or wrong; one line that names the place.
    """
    try:
        return KernelsConfig.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from error

"""The points of a sweep file: resolved sizes, stable identities, shards."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import digest
from profiling.measure.rows import PLACE, Quantity
from profiling.sweep.config import UNUSED, ModelConfig, ModelKind, SweepConfig

# All but the dropout are needed by the kinds of models that have them.
_SIZES = ("head_dim", "mlp_dim", "num_layers", "vocab_size", "num_classes", "dropout")

_DEFAULTS: dict[str, dict[str, Any]] = {
    "attention": {},
    "language_model": {"num_layers": 16, "vocab_size": 267735, "dropout": 0.1},
    "classifier": {"num_layers": 2, "dropout": 0.1},
    "pair_classifier": {"num_layers": 2, "dropout": 0.1, "num_classes": 2},
    "encoder_decoder": {"num_layers": 6, "dropout": 0.3},
}


@dataclass(frozen=True)
class Point:
    """One measurement: a variant, a combination of the grid's values, and a quantity.

    `problem` is the reason why the point cannot be built; it then becomes a failed row.
    """

    sweep: str
    quantity: Quantity
    variant: str
    baseline: str | None
    class_path: str
    init_args: Mapping[str, Any]
    model: ModelKind
    sizes: Mapping[str, Any]
    embed_dim: int
    seq_len: int
    grid_heads: int | None
    batch_size: int
    mode: str
    backend: str
    dtype: str
    device: str
    timing: Mapping[str, Any]
    seed: int
    memory_limit_bytes: int | None
    problem: str | None = None

    @property
    def point_id(self) -> str:
        """Identity of the point: a digest of all settings that affect the result."""
        content = json.dumps(dataclasses.asdict(self), sort_keys=True, default=str)
        return digest(content, 16)

    @property
    def label(self) -> str:
        """Short description for progress lines."""
        heads = "" if self.grid_heads is None else f" H={self.grid_heads}"
        return (
            f"{self.quantity} {self.variant} D={self.embed_dim} N={self.seq_len}{heads} "
            f"B={self.batch_size} {self.mode} {self.backend} {self.dtype}"
        )

    @property
    def in_process(self) -> bool:
        """Whether the point runs in the sweep's process: counting allocates no memory."""
        return self.quantity == "cost"


def model_sizes(config: ModelConfig, embed_dim: int) -> tuple[dict[str, Any], str | None]:
    """Return the sizes of the model at one width, and the reason if they are invalid."""
    sizes = dict(_DEFAULTS[config.kind])
    problem = None
    for name in _SIZES:
        value = getattr(config, name)
        if value is not None:
            sizes[name] = value
    if config.head_dim_divisor is not None:
        if embed_dim % config.head_dim_divisor:
            problem = (
                f"embed_dim {embed_dim} is not divisible by head_dim_divisor "
                f"{config.head_dim_divisor}"
            )
        sizes["head_dim"] = embed_dim // config.head_dim_divisor
    if config.mlp_ratio is not None:
        sizes["mlp_dim"] = round(config.mlp_ratio * embed_dim)
    optional = (*UNUSED[config.kind], "dropout")
    missing = [n for n in _SIZES if n not in optional and sizes.get(n) is None]
    if missing:
        raise ConfigError(
            f"model of kind {config.kind} needs {', '.join(missing)}: set them under model"
        )
    sizes["include_output_layer"] = config.include_output_layer
    sizes["is_causal"] = config.is_causal
    return sizes, problem


def make_plan(config: SweepConfig, root: Path) -> list[Point]:
    """Return all points of a sweep: first counts, then memory, then time.

    Args:
        config: the sweep.
        root: folder to which paths in the file are relative.
    """
    grid, points = config.grid, []
    attentions = {name: v.attention.resolve(root) for name, v in config.variants.items()}
    order = [q for q in ("cost", "memory", "time") if q in config.measure]
    heads_axis: list[int | None] = [None] if grid.num_heads is None else [*grid.num_heads]
    axes = itertools.product(
        order,
        grid.embed_dim,
        grid.seq_len,
        heads_axis,
        grid.batch_size,
        grid.mode,
        grid.backend,
        grid.dtype,
        config.variants,
    )
    for quantity, width, length, heads, batch, mode, backend, dtype, name in axes:
        sizes, problem = model_sizes(config.model, width)
        own = config.variants[name].backend
        if own is not None and backend != grid.backend[0]:
            continue
        class_path, init_args = attentions[name]
        init_args = dict(init_args)
        if heads is not None:
            divisor = config.variants[name].heads_divisor
            if heads % divisor:
                problem = f"num_heads {heads} is not divisible by heads_divisor {divisor}"
            init_args["num_heads"] = max(1, heads // divisor)
        points.append(
            Point(
                sweep=config.name,
                quantity=quantity,
                variant=name,
                baseline=config.baseline_of(name),
                class_path=class_path,
                init_args=init_args,
                model=config.model.kind,
                sizes=sizes,
                embed_dim=width,
                seq_len=length,
                grid_heads=heads,
                batch_size=batch,
                mode=mode,
                backend=own or backend,
                dtype=dtype,
                device=config.device,
                timing=config.timing.model_dump() if quantity == "time" else {},
                seed=config.seed,
                memory_limit_bytes=config.memory_limit_bytes,
                problem=problem,
            )
        )
    return points


def shard(points: Sequence[Point], index: int, count: int) -> list[Point]:
    """Return one of `count` shares of the places of a plan, each place with all its variants.

    A variant and its baseline are therefore measured on one machine. Places are dealt in turns of
    alternating direction, so that no share has all the long sequences.
    """
    places: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        place = point.quantity, *(getattr(point, name) for name in PLACE), point.mode, point.dtype
        places.setdefault(place, []).append(point)
    turn = [*range(count), *reversed(range(count))]
    dealt = zip(itertools.cycle(turn), places.values())
    return [point for share, place in dealt if share == index for point in place]

"""Every variant, found by walking the public list and the shipped configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import yaml
from torch import Tensor

from lit_probattn.attention import Attention, variants
from lit_probattn.configs import class_of
from tests.support.helpers import cpu_backends
from tests.support.paths import CONFIGS

EMBED, HEAD = 11, 5


def shipped_variants() -> dict[str, tuple[type[Attention], dict[str, Any]]]:
    """Return class and options of every file of configs/attention, without dropout."""
    found = {}
    for path in sorted((CONFIGS / "attention").glob("*.yaml")):
        entry = yaml.safe_load(path.read_text())["model"]["init_args"]["attention"]
        found[path.stem] = (class_of(entry["class_path"]), {**entry["init_args"], "dropout": 0.0})
    return found


def layers() -> dict[str, Callable[..., Attention]]:
    """Return what makes each variant on small sizes: plain classes, and every shipped file."""
    made: dict[str, Callable[..., Attention]] = {
        name: partial(cls, EMBED, 4, head_dim=HEAD) for name, cls in variants().items()
    }
    for name, (cls, options) in shipped_variants().items():
        made[name] = partial(cls, EMBED, head_dim=HEAD, **options)
    return made


def examples() -> dict[str, Callable[..., Attention]]:
    """Return what makes each option that variants name for checks, on small sizes."""
    return {
        f"{name}: {example.name}": partial(
            cls, EMBED, **{"num_heads": 2, "head_dim": HEAD, **example.options}
        )
        for name, cls in variants().items()
        for example in cls.kernel_examples
        if not name.startswith("Released")
    }


def serving(layer: Attention, x: Tensor, **call: Any) -> list[str]:
    """Return the implementations on a CPU that serve a call of self-attention."""
    described = layer.core.describe(layer.call(x, **call))
    return [name for name in cpu_backends(layer) if layer.core.refusal(name, described) is None]

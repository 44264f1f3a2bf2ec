"""Every variant, found by walking the public list and the shipped configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lit_probattn.attention import Attention, variants
from lit_probattn.attention.own.contract import EMBED as EMBED
from lit_probattn.attention.own.contract import HEAD as HEAD
from lit_probattn.attention.own.contract import serving as serving
from lit_probattn.configs import attention_entry, class_of
from profiling.kernels.cases import CASES
from tests.support.paths import shipped


def shipped_variants() -> dict[str, tuple[type[Attention], dict[str, Any]]]:
    """Return class and options of every file of configs/attention itself, without dropout."""
    found = {}
    for path in (path for path in shipped("attention") if path.parent.name == "attention"):
        entry = attention_entry(path)
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
    """Return what makes each option that kernels are compared with, on small sizes."""
    return {
        f"{case.layer.__name__}: {case.name}": partial(
            case.layer, EMBED, **{"num_heads": 2, "head_dim": HEAD, **case.options}
        )
        for case in CASES
    }

"""Every variant, found by walking the public list and the shipped configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, TypeVar
from unittest import mock

from lit_probattn.attention import Attention, variants
from lit_probattn.attention.own import contract
from lit_probattn.attention.own.contract import CHECKS
from lit_probattn.attention.own.contract import EMBED as EMBED
from lit_probattn.attention.own.contract import HEAD as HEAD
from lit_probattn.attention.own.contract import backends_for as backends_for
from lit_probattn.configs import attention_entry, class_of
from profiling.kernels.cases import CASES
from tests.support.paths import shipped

T = TypeVar("T")


def shipped_variants() -> dict[str, tuple[type[Attention], dict[str, Any]]]:
    """Return class and options of every file of configs/attention itself, without dropout."""
    found = {}
    for path in (path for path in shipped("attention") if path.parent.name == "attention"):
        entry = attention_entry(path)
        found[path.stem] = (class_of(entry["class_path"]), {**entry["init_args"], "dropout": 0.0})
    return found


def layers() -> dict[str, Callable[..., Attention]]:
    """Return what makes each variant on small sizes: every shipped file, and other plain classes.

    All have four heads. A class whose defaults a file has, the number of heads aside, is that
    file's variant.
    """
    shipped = shipped_variants()
    named = [(cls, _own(cls, options)) for cls, options in shipped.values()]
    made: dict[str, Callable[..., Attention]] = {
        name: partial(cls, EMBED, 4, head_dim=HEAD)
        for name, cls in variants().items()
        if (cls, {}) not in named
    }
    for name, (cls, options) in shipped.items():
        made[name] = partial(cls, EMBED, head_dim=HEAD, **{**options, "num_heads": 4})
    return made


def _own(cls: type[Attention], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the class's defaults, but for the number of heads."""
    defaults = {name: p.default for name, p in signature(cls).parameters.items()}
    defaults |= {"num_heads": options["num_heads"], "dropout": 0.0}
    return {name: v for name, v in options.items() if name not in defaults or v != defaults[name]}


def examples() -> dict[str, Callable[..., Attention]]:
    """Return what makes each option that kernels are compared with, on small sizes."""
    return {
        f"{case.layer.__name__}: {case.name}": partial(
            case.layer, EMBED, **{"num_heads": 2, "head_dim": HEAD, **case.options}
        )
        for case in CASES
    }


def in_turn(
    makes: Mapping[str, Callable[..., Attention]], cases: Sequence[T], nth: int = 2
) -> Iterator[tuple[str, T]]:
    """Yield names and cases: each of several presets of a class takes every nth case in turn.

    Fewer than n presets share the cases, so that a class takes each of them at least once.
    """
    presets = defaultdict(list)
    for name, make in makes.items():
        presets[type(make())].append(name)
    for names in presets.values():
        for (turn, name), (number, case) in product(enumerate(names), enumerate(cases)):
            if (turn + number) % min(nth, len(names)) == 0:
                yield name, case


def keep_in_blocks(check: str, make: Callable[..., Attention]) -> None:
    """Run a check of the contract with several blocks of queries in each pass.

    Long sequences have about 40 queries in a block. With the budget of short sequences every block
    would be a single query, which takes ten times as long.
    """
    runs = [(contract.WAYS, 400)]
    if check in ("causality", "padding"):
        runs = [(contract.WAYS[:2], 400), (contract.WAYS[2:], 100_000)]
    for ways, scores in runs:
        with mock.patch.object(contract, "WAYS", ways), contract.small_blocks(scores):
            CHECKS[check].run(make)

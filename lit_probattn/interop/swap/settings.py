"""The settings of a swap: the variant, its options, the fraction of heads to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import Any

import torch

from lit_probattn.attention import Attention
from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.core import Core
from lit_probattn.attention.mgk.core import MGKCore
from lit_probattn.attention.softmax import SoftmaxCore
from lit_probattn.base.arguments import without_effect
from lit_probattn.base.config_files import list_attention
from lit_probattn.base.errors import nearest

# Variants whose cores start from the weights of a host; others are created by name.
STARTED = ("softmax", "mgk", "smgk")
# Most keys per head, and largest seed: larger values take minutes, or overflow.
MOST_COMPONENTS, MOST_SEED = 256, 2**40
# Options of the cores that the swap sets, or that require this package's training loop.
_OWN = {
    "num_components",
    "shifted_keys",
    "score",
    "rotary_shift",
    "em_weighting",
    "m_step_variance",
}


@dataclass(frozen=True)
class Settings:
    """The arguments of `swap` that all layers share; see `swap`.

    Raises:
        ValueError: a name is unknown (the message gives the most similar) or values do not match.
    """

    variant: str = "mgk"
    heads: float = 1.0
    num_components: int | None = None
    score: str | None = None
    spread: float = 0.1
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    factory: Callable[..., Attention] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.variant, str):
            raise ValueError(f"variant must be a name, received {self.variant!r}")
        if not (self.has_own_core or self._has_maker):
            near = nearest(self.variant, STARTED, lists=False)
            near = near or nearest(self.variant, list_attention())
            raise ValueError(
                f"unknown variant {self.variant!r}{near}; swap accepts names "
                "of lit_probattn.list_attention(), paths of such files, and classes"
            )
        self._check_kinds()
        if not 0.0 < self.heads <= 1.0 or abs(self.group_size * self.heads - 1.0) > 1e-6:
            raise ValueError(
                f"heads is the fraction of heads to keep: 1, 1/2, 1/3, …; received {self.heads}"
            )
        if self.group_size > 1 and self.has_own_core and self.variant != "mgk":
            raise ValueError(
                f"heads={self.heads} needs several keys per head, which {self.variant} does not "
                "have; use mgk, or heads=1"
            )
        self._check_components()
        if not self.has_own_core:
            if self.spread != 0.1:
                raise ValueError(f"spread is for mgk and smgk, received variant {self.variant}")
            return
        if self.variant == "softmax" and self.num_components is not None:
            raise ValueError("num_components is for mgk and smgk, received variant softmax")
        if not 0.0 <= self.spread < math.inf:
            raise ValueError(
                f"spread must be a finite number of at least 0, received {self.spread}"
            )
        if abs(self.seed) > MOST_SEED:
            raise ValueError(f"seed must be from -2**40 to 2**40, received {self.seed}")
        known = {option.name for option in fields(self.core_class.options_class)} - _OWN
        for name in self.options.keys() - known:
            raise ValueError(
                f"{self.variant} has no option {name!r} in a swap{nearest(name, known)}"
            )
        if self.options.get("e_step") == "soft":
            raise ValueError(
                "e_step=soft needs the M-step of this package's training; use learned or hard"
            )
        for name, told in without_effect(self.core_class.options_class(**self.arguments())).items():
            if name in self.options:
                raise ValueError(f"{self.variant}: {told}")

    def _check_components(self) -> None:
        if not 1 <= self.components <= MOST_COMPONENTS:
            raise ValueError(
                f"num_components must be from 1 to {MOST_COMPONENTS}, received {self.components}"
            )
        if self.components % self.group_size:
            raise ValueError(
                f"num_components must be a multiple of 1/heads = {self.group_size}, received "
                f"{self.components}: one head has the keys of {self.group_size} heads"
            )

    @property
    def has_own_core(self) -> bool:
        """Whether the variant starts from the weights of a host, with a core created here."""
        return self.variant in STARTED and self.factory is None

    @property
    def _has_maker(self) -> bool:
        """Whether the variant is a class, a path of a file, or a name."""
        if self.factory is not None or self.variant in list_attention():
            return True
        return "." in self.variant

    def _check_kinds(self) -> None:
        """Raise a ValueError if a value has another type, for example in an edited recipe."""
        for name, kinds, word in (
            ("heads", (int, float), "a number"),
            ("spread", (int, float), "a number"),
            ("num_components", (int, type(None)), "a whole number"),
            ("seed", (int,), "a whole number"),
            ("score", (str, type(None)), "a name"),
            ("options", (dict,), "a mapping"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"{name} must be {word}, received {value!r}")

    @property
    def group_size(self) -> int:
        """Number of merged heads per head."""
        return round(1.0 / self.heads)

    @property
    def components(self) -> int:
        """K of mixtures."""
        if self.variant not in ("mgk", "smgk"):
            return self.group_size if self.num_components is None else self.num_components
        return max(2, self.group_size) if self.num_components is None else self.num_components

    @property
    def keys_per_head(self) -> int:
        """Keys per head and position from the projection: 1 if components are shifts."""
        joins = not self.has_own_core and self.group_size > 1
        return self.components if self.variant == "mgk" or joins else 1

    @property
    def chosen_score(self) -> str:
        """`dot`, which starts from the old model; shifted keys require `gaussian` to differ."""
        return self.score or ("gaussian" if self.variant == "smgk" else "dot")

    @property
    def core_class(self) -> type[Core]:
        """The class of the cores."""
        return SoftmaxCore if self.variant == "softmax" else MGKCore

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the variant."""
        if self.variant == "softmax":
            return {"score": self.chosen_score, **self.options}
        mixture: dict[str, Any] = {"num_components": self.components, "score": self.chosen_score}
        if self.variant == "smgk":
            mixture |= {"shifted_keys": True, "shift_init_std": self.spread}
        return {**mixture, "prior_param": "softmax", **self.options}

    def make_core(self, layout: HeadLayout) -> Core:
        """Return a core; shifts are drawn from `seed` without changing torch's generator."""
        options = self.core_class.options_class(**self.arguments())
        with _seeded(self.seed):
            return self.core_class(layout, options=options)

    def make_layer(self, embed_dim: int, num_heads: int, **common: Any) -> Attention:
        """Return a whole layer, including projections, of a variant whose core is not created here.

        Raises:
            ValueError: the variant does not support the arguments.
        """
        count = self.components if self.group_size > 1 else self.num_components
        named = {"num_components": count, "score": self.score}
        common = {**{n: v for n, v in named.items() if v is not None}, **common}
        make = self._maker()  # importing a module may draw
        with _seeded(self.seed):
            return make(embed_dim, num_heads, **common)

    def _maker(self) -> Callable[..., Attention]:
        if self.factory is not None:
            return self.factory
        configs: Any = import_module("lit_probattn.configs")
        if self.variant in list_attention() or self.variant.endswith((".yaml", ".yml")):
            return partial(configs.create, self.variant)
        found: Callable[..., Attention] = configs.class_of(self.variant)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON supports."""
        return {name: value for name, value in asdict(self).items() if name != "factory"}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator on the CPU, and restore it."""
    with torch.random.fork_rng(devices=()):
        torch.random.default_generator.manual_seed(seed)
        yield

"""A variant of attention with its numbers, and `attend`: its heads by one of the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lit_probattn.attention.backends import Backend, Engine, choose
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.engines.normal_form import NORMAL_FORM
from lit_probattn.attention.engines.scores import Scores
from lit_probattn.attention.functional import autocast_off, masked_softmax, reference_weights


class Variant:
    """Base of every variant: a frozen value of its tensors and switches; it owns no parameters.

    One gives a `name`, its equation in `scores`, and its normal form in `lower`: then all engines
    serve it that do not lack what it `needs`. Without a normal form the reference serves it, or the
    `engines` that it names.
    """

    name: ClassVar[str]
    engines: ClassVar[Mapping[str, Engine]] = {"reference": NORMAL_FORM["reference"]}
    # Row of `backends.AUTO`.
    kind: str = "mixture"
    # Score tensors per head that the reference stores; for the choice of backend.
    score_maps: int = 1
    # Added to the sum of exponentials of every row, by the reference only.
    row_eps: float = 0.0
    # Families of fused kernels, as folder/family below `kernels/`; the defaults' first.
    kernels: ClassVar[tuple[str, ...]] = ()
    # Whether there are scores before a softmax.
    has_scores: ClassVar[bool] = True
    # The implementation whose products `cost` states.
    stated_backend: ClassVar[Backend] = "reference"

    def __init_subclass__(cls) -> None:
        if "lower" in vars(cls) and "engines" not in vars(cls):
            cls.engines = NORMAL_FORM

    def scores(self, call: HeadCall) -> Tensor:
        """Return the scores before bias, mask and softmax by the equation, (B, H, N, L).

        Query and key have the dtype of scores and sums, at least float32.
        """
        raise NotImplementedError(f"{self.name} has no scores")

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return the scores in normal form, up to what is constant in a row.

        Query and key have the dtype of the call's, and terms are those of the rounded vectors in at
        least float32. With `own_keys` every component has its key, and there are no coefficients.
        """
        raise NotImplementedError(f"{self.name} has no normal form")

    def needs(self) -> dict[str, str]:
        """Return what not every engine has, each with the option that asks for it.

        Names are those of `backends.Engine.lacks`: `maximum`, `function` and `function without
        layers` of several maps, `map noise`, `head noise`, `row_eps`, `normaliser`.
        """
        return {}

    def sizes(self, call: HeadCall) -> dict[str, int]:
        """Return what an engine may have limits for, by the names of `backends.Engine.limits`."""
        return {}

    def normalise(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """Return weights of scores (B, H, N, L) over what is allowed, zeros in empty rows."""
        return masked_softmax(scores, allowed, self.row_eps)

    def check(self, call: HeadCall) -> None:
        """Refuse what the variant has no place for.

        Raises:
            ValueError: it says what the variant takes instead.
        """

    def weights(self, call: HeadCall) -> Tensor:
        """Return the maps (B, H, N, L) by the equation, without dropout."""
        return reference_weights(self.scores(call.precise()), call.masks, self.normalise)

    @property
    def kernel(self) -> str:
        """The family of `kernels` that serves these numbers."""
        return self.kernels[0] if self.kernels else ""


def attend(call: HeadCall, variant: Variant, backend: str = "auto", kind: str = "") -> Tensor:
    """Attend; (B, H, N, E_v) in the dtype of the queries.

    Args:
        call: heads, masks, draws.
        variant: how scores come about, with its numbers.
        backend: implementation to use; one of `BACKENDS`.
        kind: row of `AUTO`. Empty means the variant's own.

    Raises:
        ValueError: the variant has no place for the call's bias, scale or cache.
        NotImplementedError: the requested backend cannot serve the call.
    """
    variant.check(call)
    with autocast_off(call.query):
        engine = variant.engines[choose(variant, backend, call, kind)]
        return engine.compute(call, variant).to(call.query.dtype)

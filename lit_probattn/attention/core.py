"""What a variant learns: its parameters, and the variant of a call that is made from them.

Projections, rotations and caches are the caller's: `Attention` here, or any other model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from lit_probattn.attention.backends import BACKENDS, Backend, attend, choose, engines_of
from lit_probattn.attention.cache import Cache, KVCache
from lit_probattn.attention.call import HeadCall, HeadLayout, check_heads, outline
from lit_probattn.attention.engines.documents import attend_to_documents, weights_of_documents
from lit_probattn.attention.numerics import autocast_off
from lit_probattn.attention.rotary import Rotary
from lit_probattn.attention.variant import Engine, Variant


@dataclass(frozen=True)
class ParameterTable:
    """Learned parameters other than projections, formatted for reports.

    Args:
        values: (rows, components); a row is a head, or the layer.
        title: what the numbers are.
        component: what a column stands for.
        is_matrix: shown as a matrix, however small.
        is_share: comparable after division by the sum of a row.
        of_layer: the only row belongs to the layer.
    """

    values: Tensor
    title: str
    component: str
    is_matrix: bool = False
    is_share: bool = False
    of_layer: bool = False


class Gaussians(NamedTuple):
    """A mixture of Gaussians per key: keys (B, H_key, K, L, E), log π or None, σ² (H_prior, K)."""

    key: Tensor
    log_prior: Tensor | None
    variance: Tensor


class Core(nn.Module):
    """Parameters of a variant; base of every core.

    Args:
        layout: heads and their sizes.
        backend: implementation to use; see `lit_probattn.attention.backends`.
        options: the variant's, an instance of `options_class`. None means its defaults.
        rotary: turns keys, for variants that change them before.

    Raises:
        ValueError: `backend` is unknown, or see `make_parameters`.
        TypeError: a part of the core is missing, or the options are another variant's; the message
            names it.
    """

    # The class of the variants that it makes.
    makes: ClassVar[type[Variant]]
    # The record of its options.
    options_class: ClassVar[type[Any]] = object
    # Row of `backends.AUTO` in place of the variant's own.
    auto_kind: str = ""
    # Whether scores depend on positions, so that a query by itself gives something else.
    knows_positions: bool = False
    # Whether training calls go to `accumulate_m_step` first.
    has_m_step: bool = False
    # Whether `gaussians` and `posterior` exist.
    has_gaussians: ClassVar[bool] = False
    has_components: bool = False
    # Whether padded keys behind a mask change nothing, so that packed documents may be padded.
    takes_padding: bool = True

    def __init__(
        self,
        layout: HeadLayout,
        backend: Backend = "auto",
        options: Any = None,
        *,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        options = self.options_class() if options is None else options
        if not isinstance(options, self.options_class):
            raise TypeError(
                f"{type(self).__name__} has the options of {self.options_class.__name__}, received "
                f"{options!r}"
            )
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
        lacking = [] if hasattr(type(self), "makes") else ["makes"]
        lacking += [] if type(self).variant is not Core.variant else ["variant"]
        if lacking:
            raise TypeError(
                f"{type(self).__name__} lacks {', '.join(lacking)}, which a core gives; a layer "
                f"that defines reference_scores(self, query, key) needs no core"
            )
        self.layout, self.backend, self.rotary = layout, backend, rotary
        self.make_parameters(options)

    def make_parameters(self, options: Any) -> None:
        """Make what the variant learns; `options` is an instance of `options_class`.

        Raises:
            ValueError: options contradict each other or the layout.
        """

    def forward(self, call: HeadCall) -> Tensor:
        """Attend; (B, H, N, E_v) in the dtype of the queries.

        Raises:
            ValueError: the heads are not those of the layout, or the variant has no place for the
                call's bias, scale or cache.
            NotImplementedError: the requested backend cannot serve the call.
        """
        self.admit(call)
        if call.packing is not None:
            form = {"pads": self.takes_padding, "has_scores": self.makes.has_scores}
            return attend_to_documents(self, call, self.layout.out, **form)
        batch, _, num_queries, _ = call.query.shape
        if num_queries == 0:  # no engine divides zero rows into blocks
            return call.query.new_zeros(batch, self.layout.out, 0, call.value.shape[-1])
        with autocast_off(call.query):
            if self.training and self.has_m_step:
                self.accumulate_m_step(call)
            variant = self.variant(call)
            out = attend(call, variant, self.backend, self.auto_kind)
            if call.cache is not None:
                call.cache.after_call(call, variant)
        return out

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's says Any

    @abstractmethod
    def variant(self, call: HeadCall) -> Variant:
        """Return the variant of a call: the parameters' present values, draws, the call's scale."""

    # ------------------------------------------------------------------ the variant's part
    def components(self, key: Tensor) -> Tensor:
        """Turn stored keys into those that scores see."""
        return key

    def accumulate_m_step(self, call: HeadCall) -> None:
        """Add a training call to the sums of setting B's M-step, before its output is computed."""

    def check(self, bias: Tensor | None, cache: Cache) -> None:
        """Refuse, before tokens are appended to a cache, what the variant has no place for.

        Raises:
            ValueError: it says what the variant takes instead.
        """

    def admit(self, call: HeadCall) -> None:
        """Refuse a call whose heads are not the layout's.

        Raises:
            ValueError: it says what is expected instead.
        """
        check_heads(call, self.layout, self.name, self.has_components)

    # ------------------------------------------------------------------ choosing
    def needs(self) -> dict[str, str]:
        """Return what the variant needs in its present mode; see `Variant.needs`."""
        return self._outlined.needs()

    @property
    def _outlined(self) -> Variant:
        """The variant of a call that has sizes and no numbers."""
        return self.variant(outline(self.layout, 1, 1, 1))

    @property
    def name(self) -> str:
        """Name of the variant."""
        return self.makes.name

    @property
    def backends(self) -> Mapping[str, Engine]:
        """The engines, by name, that serve the variant in its present mode, if not every call."""
        variant = self._outlined
        needs, engines = variant.needs().keys(), engines_of(variant)
        return {name: engine for name, engine in engines.items() if not needs & engine.lacks}

    def unambiguous_pairs(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the pairs whose winning component leads by more than rounding, (B, H, N, L).

        None means all.
        """
        return None

    def pick(self, call: HeadCall) -> str:
        """Return the name of the implementation that computes a call; see `backends.choose`."""
        return choose(self.variant(call), self.backend, call, self.auto_kind)

    # ------------------------------------------------------------------ maps, for analysis
    def scores(self, call: HeadCall) -> Tensor:
        """Return the call's scores before mask and softmax by the equation, (B, H, N, L)."""
        call.refuse_documents("scores")
        return self.variant(call).scores(call.precise())

    def weights(self, call: HeadCall) -> Tensor:
        """Return the maps (B, H, N, L) of the call by the equation, without dropout.

        Raises:
            ValueError: the heads are not those of the layout, or the variant has no place for the
                call's bias, scale or cache.
            NotImplementedError: the variant has no maps.
        """
        self.admit(call)
        if call.packing is not None:
            return weights_of_documents(self.weights, call, self.layout.out)
        with autocast_off(call.query):
            variant = self.variant(call)
            variant.check(call)
            return variant.weights(call)

    def gaussians(self, call: HeadCall) -> Gaussians:
        """Return the Gaussians whose densities the scores are; where `has_gaussians`."""
        raise NotImplementedError(f"{self.name} is not a mixture of Gaussians")

    def posterior(self, call: HeadCall) -> tuple[Tensor, Tensor]:
        """Return weights P_ij (B, H, N, L) and responsibilities γ_ijr of a key's components.

        γ is (B, H, K, N, L); P_ij γ_ijr is the joint posterior of key and component. Where
        `has_components`.
        """
        raise NotImplementedError(f"{self.name} has no components with responsibilities")

    def learned(self) -> dict[str, ParameterTable]:
        """Return what was learned beside the projections, by name."""
        return {}

    # ------------------------------------------------------------------ decoding
    def new_cache(self, capacity: int = 0) -> Cache:
        """Return an empty memory for decoding, with room for `capacity` positions."""
        return KVCache(capacity)

    def absorb(self, call: HeadCall) -> None:
        """Take keys without queries into the call's cache, where it keeps sums of them."""

"""The parameters of a variant, and the variant of a call that is built from them.

Projections, rotations and caches belong to the caller: `Attention`, or any other model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from lit_probattn.attention.backends import Backend, attend, choose, engines_of
from lit_probattn.attention.cache import Cache, KVCache
from lit_probattn.attention.call import HeadCall, HeadLayout, check_heads, outline
from lit_probattn.attention.engines.documents import attend_to_documents, weights_of_documents
from lit_probattn.attention.numerics import autocast_off
from lit_probattn.attention.rotary import Rotary
from lit_probattn.attention.variant import Engine, Variant
from lit_probattn.base.arguments import check_argument


@dataclass(frozen=True)
class ParameterTable:
    """Learned parameters other than projections, formatted for reports.

    Args:
        values: (rows, components); a row is a head, or the layer.
        title: describes the numbers.
        component: describes a column.
        is_matrix: whether to show it as a matrix, whatever its size.
        is_share: whether values are comparable after division by the sum of their row.
        of_layer: whether the only row belongs to the layer.
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


def _reject_gradient(_: Tensor) -> None:
    """Raise in a backward pass through a decoding step.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "a decoding cache stores keys and values without their graph, so gradients would lack "
        "them: call the layer without a cache, or in torch.no_grad()"
    )


class Core(nn.Module):
    """Parameters of a variant; base class of every core.

    Args:
        layout: heads and their sizes.
        backend: implementation to use; see `lit_probattn.attention.backends`.
        options: options of the variant, an instance of `options_class`. None means the defaults.
        rotary: rotates keys, for variants that change keys before rotation.

    Raises:
        ValueError: `backend` is unknown, or see `make_parameters`.
        TypeError: a part of the core is missing, or the options belong to another variant; the
            message names it.
    """

    # The class of the variants that `variant` returns.
    makes: ClassVar[type[Variant]]
    # The dataclass of the options.
    options_class: ClassVar[type[Any]] = object
    # Row of `backends.AUTO` instead of the variant's row.
    auto_kind: str = ""
    # Whether scores depend on positions, so that a query alone has other scores.
    knows_positions: bool = False
    # Whether training calls run `accumulate_m_step` first.
    has_m_step: bool = False
    # Whether `gaussians` and `posterior` exist.
    has_gaussians: ClassVar[bool] = False
    has_components: bool = False
    # Whether masked padding keys do not affect the output, so that packed documents may be padded.
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
        check_argument("backend", backend, Backend)
        lacking = [] if hasattr(type(self), "makes") else ["makes"]
        lacking += [] if type(self).variant is not Core.variant else ["variant"]
        if lacking:
            raise TypeError(
                f"{type(self).__name__} lacks {', '.join(lacking)}, which a core must define; a "
                "layer that defines reference_scores(self, query, key) needs no core"
            )
        self.layout, self.backend, self.rotary = layout, backend, rotary
        self.make_parameters(options)

    def make_parameters(self, options: Any) -> None:
        """Create the parameters; `options` is an instance of `options_class`.

        Raises:
            ValueError: options contradict each other or the layout.
        """

    def forward(self, call: HeadCall) -> Tensor:
        """Compute attention; (B, H, N, E_v) in the dtype of the queries.

        Raises:
            ValueError: the heads do not match the layout, or the variant does not support the
                call's bias, scale or cache.
            NotImplementedError: the requested backend does not support the call.
        """
        self.admit(call)
        if call.packing is not None:
            form = {"pads": self.takes_padding, "has_scores": self.makes.has_scores}
            return attend_to_documents(self, call, self.layout.out, **form)
        with autocast_off(call.query):
            if self.training and self.has_m_step and call.query.shape[2]:
                self.accumulate_m_step(call)
            variant = self.variant(call)
            out = attend(call, variant, self.backend, self.auto_kind)
            if call.cache is not None:
                call.cache.after_call(call, variant)
                of_memory = call.first_query is not None
                if out.requires_grad and not of_memory and call.graph is None:
                    out.register_hook(_reject_gradient)
        return out

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's says Any

    @abstractmethod
    def variant(self, call: HeadCall) -> Variant:
        """Return the variant of a call: current parameters, draws and the call's scale."""

    # ------------------------------------------------------------------ the variant's part
    def components(self, key: Tensor) -> Tensor:
        """Return the keys of all components from the stored keys."""
        return key

    def accumulate_m_step(self, call: HeadCall) -> None:
        """Add a training call to the sums of setting B's M-step, before its output is computed."""

    def check(self, bias: Tensor | None, cache: Cache) -> None:
        """Raise if the variant does not support a bias or cache, before tokens are appended.

        Raises:
            ValueError: it is not supported; the message names an alternative.
        """

    def admit(self, call: HeadCall) -> None:
        """Raise if the heads of a call do not match the layout.

        Raises:
            ValueError: they do not match; the message contains the expected heads.
        """
        check_heads(call, self.layout, self.name, self.has_components)

    # ------------------------------------------------------------------ choosing
    def needs(self) -> dict[str, str]:
        """Return the features that the variant needs in its current mode; see `Variant.needs`."""
        return self._outlined.needs()

    @property
    def _outlined(self) -> Variant:
        """The variant of a call with sizes and without data."""
        return self.variant(outline(self.layout, 1, 1, 1))

    @property
    def name(self) -> str:
        """The name of the variant."""
        return self.makes.name

    @property
    def backends(self) -> Mapping[str, Engine]:
        """Engines, by name, that support the variant in its current mode, if not every call."""
        variant = self._outlined
        needs, engines = variant.needs().keys(), engines_of(variant)
        return {name: engine for name, engine in engines.items() if not needs & engine.lacks}

    def unambiguous_pairs(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the pairs whose largest component leads by more than rounding, (B, H, N, L).

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
        """Return the attention weights (B, H, N, L) of a call by the equation, without dropout.

        Raises:
            ValueError: the heads do not match the layout, or the variant does not support the
                call's bias, scale or cache.
            NotImplementedError: the variant has no attention weights.
        """
        self.admit(call)
        if call.packing is not None:
            return weights_of_documents(self.weights, call, self.layout.out)
        with autocast_off(call.query):
            variant = self.variant(call)
            variant.check(call)
            return variant.weights(call)

    def gaussians(self, call: HeadCall) -> Gaussians:
        """Return the Gaussians whose densities are the scores, if `has_gaussians`."""
        raise NotImplementedError(f"{self.name} is not a mixture of Gaussians")

    def posterior(self, call: HeadCall) -> tuple[Tensor, Tensor]:
        """Return weights P_ij (B, H, N, L) and responsibilities γ_ijr of a key's components.

        γ is (B, H, K, N, L); P_ij γ_ijr is the joint posterior of key and component. Requires
        `has_components`.
        """
        raise NotImplementedError(f"{self.name} has no components with responsibilities")

    def learned(self) -> dict[str, ParameterTable]:
        """Return the learned parameters other than projections, by name."""
        return {}

    # ------------------------------------------------------------------ decoding
    def new_cache(self, capacity: int = 0) -> Cache:
        """Return an empty decoding cache that reserves space for `capacity` positions."""
        return KVCache(capacity)

    def absorb(self, call: HeadCall) -> None:
        """Add keys without queries to the call's cache, if it stores sums of keys."""

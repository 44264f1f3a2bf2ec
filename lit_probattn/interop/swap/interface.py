"""The attention function and masks that transformers calls, and caches of several keys per head.

Rotation, norms of queries and keys, caches, masks, position biases, checkpointing and `generate`
remain the library's code. A layer without a core calls the library's function, so partly swapped
models work.

If only the attention function were registered, every mask would be lost without a warning: the name
must be registered for masks as well.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.interop.swap.classes import first_tokens
from lit_probattn.interop.swap.core import documents_mask, packing_of_documents
from lit_probattn.interop.swap.cores import Cores

# The names under which the function and its masks are registered: masks as for PyTorch's fused
# attention, none where a layer is causal; and masks that are always added and contain causality,
# for models that support only their own eager attention or treat "sdpa" specially by its name.
NAME, EAGER = "lit_probattn", "lit_probattn_eager"
# Arguments of a call that change scores in an unsupported way.
LOST = {
    "softcap": "it caps its scores (soft cap), which no variant supports",
    **dict.fromkeys(("s_aux", "sinks"), "it has attention sinks, which no variant supports"),
    **dict.fromkeys(("indices", "block_indices"), "it selects its keys, which is not supported"),
    "cache": "it reads a paged cache, which is not supported",
}
# Other arguments of the library's functions; windows are in its masks.
KNOWN = {
    *("attention_mask", "dropout", "scaling", "is_causal", "position_bias", "sliding_window"),
    "output_attentions",
}


def attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for transformers' `AttentionInterface`.

    Args:
        module: the attention layer; without `cores`, the library's function is called.
        query: (B, H, N, E).
        key: (B, H_kv·K, L, E), or from a cache (B, H_kv, L, K·E).
        value: (B, H_kv, L, E_v).
        attention_mask: True where a pair may attend, or floats to add. None with a causal layer
            means the causal mask.
        dropout: probability, 0 in evaluation.
        scaling: factor on products.
        is_causal: overrides the layer's attribute.
        position_bias: added to the scores, (1, H, N, L) of the host's heads.
        kwargs: other arguments of the library; `output_attentions` requests attention weights, and
            `cu_seq_lens_q`, `cu_seq_lens_k` are bounds of packed documents.

    Returns:
        (B, N, H, E_v), and the attention weights (B, H, N, L) if requested.

    Raises:
        ValueError: bounds of documents do not match the tokens.
        NotImplementedError: the call changes scores in an unsupported way.
    """
    own = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bounds: Tensor | None = kwargs.get("cu_seq_lens_q")
    cores, packing = cores_of(module), None
    if cores is not None and not torch.compiler.is_compiling():
        _check_registered()
    if bounds is not None:  # the library's mask contains documents only if it has positions
        ends = bounds, kwargs.get("cu_seq_lens_k", bounds)
        if cores is not None and attention_mask is None and position_bias is None:
            packing = packing_of_documents(query, value, ends)
        if packing is None:
            causal = attention_mask is None and bool(own)
            attention_mask = documents_mask(query, value, ends, attention_mask, causal)
    if cores is None:
        given: Any = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        given |= {"position_bias": position_bias, **kwargs}
        return as_the_library(module, query, key, value, attention_mask, **given)
    cores.check_weights(module)
    for name in LOST:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__}: {name} is not supported by a swap")
    key = unpacked(key, query.shape[-1])
    causal = query.shape[2] > 1 and attention_mask is None and own
    rows = query.shape[2]
    if causal and key.shape[2] > rows:  # the rest of a static cache is empty
        key, value = key[:, :, :rows], value[:, :, :rows]
    if position_bias is not None:
        position_bias = position_bias[..., : value.shape[2]]
    masks: dict[str, Any] = {"mask": attention_mask, "bias": position_bias, "packing": packing}
    options: dict[str, Any] = {"is_causal": bool(causal), "scale": scaling, "dropout": dropout}
    needs_weights = bool(kwargs.get("output_attentions"))
    out, weights = cores.attend(
        0, query, key, value, needs_weights=needs_weights, **options, **masks
    )
    cores.tokens = None
    return out.transpose(1, 2).contiguous(), weights


def with_masks_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function for `EAGER`: only the mask of a call hides pairs."""

    def eager(module: Any, *tensors: Any, **kwargs: Any) -> Any:
        return function(module, *tensors, **{**kwargs, "is_causal": False})

    return eager


class InterfaceCores(Cores):
    """The core of a layer that transformers calls; unpickling registers the attention function."""

    def __init__(self) -> None:
        super().__init__(None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register()


def cores_of(module: Any) -> Cores | None:
    """Return the cores of a swapped layer, or None."""
    cores = getattr(module, "cores", None)
    return cores if isinstance(cores, Cores) else None


def as_the_library(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as the library does, with masks of `NAME`: True where a pair may attend."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is not None and any(given.get(name) is not None for name in LOST):
        # Only its eager function supports soft caps and sinks. It adds its masks.
        if mask is not None and mask.dtype == torch.bool:
            low = torch.finfo(query.dtype).min
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, low)
        known = {name: value for name, value in given.items() if value is not None}
        result: tuple[Tensor, Tensor | None] = own(module, query, key, value, mask, **known)
        return result
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, mask, **given)


def lost_argument(module: Any, kwargs: dict[str, Any]) -> str:
    """Return why a call of the interface would lose an argument, or an empty string.

    An argument that the eager function of the layer's module reads by name changes its scores.
    """
    given = {name for name, value in kwargs.items() if value is not None}
    reasons = [reason for name, reason in LOST.items() if name in given]
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    read = [] if own is None else inspect.signature(own).parameters
    unknown = [name for name in read if name in given and name not in KNOWN]
    reasons += [f"its scores depend on {name!r}, which no variant supports" for name in unknown]
    return next(iter(reasons), "")


def unpacked(key: Tensor, head_dim: int) -> Tensor:
    """Return keys of a cache, (B, H_kv, L, K·E), as (B, H_kv·K, L, E)."""
    if key.shape[-1] == head_dim:
        return key
    return key.unflatten(-1, (-1, head_dim)).transpose(2, 3).flatten(1, 2)


def _check_registered() -> None:
    """Raise if the mask function is not registered, because masks would then be missing.

    Raises:
        RuntimeError: the library has no masks named `NAME`.
    """
    from transformers import AttentionMaskInterface

    if NAME not in AttentionMaskInterface():
        raise RuntimeError(
            f"transformers has no masks named {NAME!r}, so causality and padding would be lost: "
            "call lit_probattn.register()"
        )


def register() -> None:
    """Register the names in transformers, for attention and for masks.

    `model.set_attn_implementation("lit_probattn")` is then possible without a swap, and layers
    without a core use the library's function. `swap` and unpickling call this function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(EAGER, with_masks_alone(attention_function))
    AttentionMaskInterface.register(EAGER, eager_mask)


def use_in(model: nn.Module) -> list[tuple[Any, str]]:
    """Set the attention function in all parts of a model that have the interface.

    Returns:
        The parts, and the names of their previous functions.
    """
    before = []
    for module in reversed(list(model.modules())):
        part: Any = module
        if not hasattr(part, "set_attn_implementation"):
            continue
        parts: Any = [m for m in module.modules() if m is not module]
        hosts = (m for m in parts if hasattr(m, "set_attn_implementation"))
        inner = {m.config._attn_implementation for m in hosts}
        joins = inner and inner <= {NAME, EAGER}
        known = hasattr(sys.modules.get(type(part).__module__), "ALL_ATTENTION_FUNCTIONS")
        plain = part._supports_sdpa and not _names_sdpa(type(part).__module__)
        name = NAME if plain and EAGER not in inner else EAGER
        if (known or joins) and part.config._attn_implementation != name:
            register()
            before.append((part, part.config._attn_implementation))
            part.set_attn_implementation(name)
    return before


@lru_cache(maxsize=256)
def _names_sdpa(module: str) -> bool:
    """Whether a module compares the name of the attention function with "sdpa".

    Gemma 4, for example, cuts queries off unless that function would take no mask as causal.
    """
    try:
        return '_attn_implementation == "sdpa"' in inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # of an interactive session, for example
        return False


@contextmanager
def replaced(function: Callable[..., Any]) -> Iterator[None]:
    """Temporarily replace the function that transformers calls by the names."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import AttentionInterface

    register()
    AttentionInterface.register(NAME, function)
    AttentionInterface.register(EAGER, with_masks_alone(function))
    try:
        yield
    finally:
        register()


class PackedCache:
    """A cache for one layer, with the K components of a key concatenated.

    A static cache allocates as many values as key heads. Packed as (B, H_kv, L, K·E), keys have as
    many heads as values; the sizes of keys and values may differ.

    Args:
        cache: the library's cache.
        num_heads: H_kv.
    """

    def __init__(self, cache: Any, num_heads: int) -> None:
        self.cache, self.num_heads = cache, num_heads

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append packed keys; return all keys, packed, and values."""
        packed = key.unflatten(1, (self.num_heads, -1)).transpose(2, 3).flatten(3)
        return self.cache.update(packed, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("cache", "num_heads"):  # missing while a copy is created
            raise AttributeError(name)
        return getattr(self.cache, name)


def keep_function(module: Any) -> None:
    """Make a swapped layer raise if its attention function is changed."""
    if hasattr(module, "config"):
        name = module.config._attn_implementation
        module.register_forward_pre_hook(partial(check_function, name))


def check_function(name: str, module: Any, args: Any) -> None:
    """Raise if transformers would not call the cores of a layer; a pre-forward hook.

    Args:
        name: name of the attention function at the swap.
        module: the layer.
        args: arguments of its forward.

    Raises:
        RuntimeError: its configuration names a function of the library.
    """
    now = module.config._attn_implementation
    if now not in (NAME, EAGER):
        raise RuntimeError(
            f"the attention function was set to {now!r} after the swap, which would ignore the "
            f"swap: call model.set_attn_implementation({name!r})"
        )


def keep_tokens(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Store the tokens of a forward for a variant that reads them; a pre-forward hook."""
    module.cores.tokens = first_tokens(args, kwargs)


def pack_cache(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Wrap the cache of a call for keys with components; a pre-forward hook."""
    cache = kwargs.get("past_key_values")
    if cache is not None:
        heads = module.cores.core(0).layout.key
        if hasattr(cache, "cross_attention_cache"):
            both = copy.copy(cache)  # shares the layers and the number of tokens
            both.self_attention_cache = PackedCache(cache.self_attention_cache, heads)
            both.cross_attention_cache = PackedCache(cache.cross_attention_cache, heads)
            kwargs = {**kwargs, "past_key_values": both}
        else:
            kwargs = {**kwargs, "past_key_values": PackedCache(cache, heads)}
    return args, kwargs

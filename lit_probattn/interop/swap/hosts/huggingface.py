"""Attention of Hugging Face transformers, by exchanging projections under the host's own forward.

Their attention layers find the number of heads from the widths of their projections. So a swap
exchanges the projections, hangs our core on the layer as `core`, and registers an attention
function that uses it. Rotation, norms of queries and keys, caches, masks, biases of positions,
checkpointing and `generate` stay the library's code; the components of a key pass through it as
further key heads, side by side. A layer without a core goes to the library's own function, so that
partly swapped models work.

Registering the attention function alone would lose every mask, without a word: the name must be
registered for masks too.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import with_dropout
from lit_probattn.attention.core import Core
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.interop.swap.core import (
    documents_mask,
    head_call,
    mean_of_groups,
    packing_of_documents,
)
from lit_probattn.interop.swap.hosts.base import (
    PROBE,
    Host,
    Place,
    Sizes,
    plain_linear,
    random_input,
)
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.weights import (
    HeadWeights,
    RotaryPairs,
    Rows,
    linear,
    projection,
    read_heads,
)

# The name under which our function and its masks are registered.
NAME = "lit_probattn"
# Names of query, key, value and output projections by class; a dot leads into the parent.
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj")
_BERT = ("query", "key", "value", "..output.dense")
_GPT2 = ("c_attn", "c_attn", "c_attn", "c_proj")
_T5 = ("q", "k", "v", "o")
CLASSES = {
    "BertSelfAttention": _BERT,
    "BertCrossAttention": _BERT,
    "RobertaSelfAttention": _BERT,
    "RobertaCrossAttention": _BERT,
    "GPT2Attention": _GPT2,
    "LlamaAttention": _LLAMA,
    "Qwen2Attention": _LLAMA,
    "Qwen3Attention": _LLAMA,
    "MistralAttention": _LLAMA,
    "Gemma3Attention": _LLAMA,
    "ViTAttention": _LLAMA,
    "T5Attention": _T5,
}
# Attributes of layers whose scores have something that our cores have not.
_LOST = {
    "attn_logit_softcapping": "it caps its scores (soft cap), which our scores have no place for",
    "softcap": "it caps its scores (soft cap), which our scores have no place for",
    "sinks": "it has attention sinks, which our sums have no place for",
}
# Arguments of an attention call that change scores in a way that we have no place for.
_LOST_ARGUMENTS = ("softcap", "s_aux", "cache")


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
    """Attend as transformers' `AttentionInterface` asks for it.

    Args:
        module: the attention layer; without a `core` it is attended to as the library does.
        query: (B, H, N, E).
        key: (B, H_kv·K, L, E), or from a cache (B, H_kv, L, K·E).
        value: (B, H_kv, L, E_v).
        attention_mask: True where a pair may attend, or floats to add. None with a causal layer
            means the causal mask.
        dropout: probability, 0 in evaluation.
        scaling: factor on products.
        is_causal: in place of the layer's own.
        position_bias: added to the scores, (1, H, N, L) of the former heads.
        kwargs: what else the library passes; maps are returned if `output_attentions` is among it,
            and `cu_seq_lens_q`, `cu_seq_lens_k` are bounds of packed documents.

    Returns:
        (B, N, H, E_v), and the maps (B, H, N, L) if they are asked for.

    Raises:
        ValueError: bounds of documents are not those of the tokens.
        NotImplementedError: the call changes scores in a way that we have no place for.
    """
    own = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bounds: Tensor | None = kwargs.get("cu_seq_lens_q")
    core, packing = getattr(module, "core", None), None
    if bounds is not None:  # the library's mask knows of documents only where it has positions
        ends = bounds, kwargs.get("cu_seq_lens_k", bounds)
        if core is not None and attention_mask is None and position_bias is None:
            packing = packing_of_documents(query, value, ends)
        if packing is None:
            causal = attention_mask is None and bool(own)
            attention_mask = documents_mask(query, value, ends, attention_mask, causal)
    if core is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            **kwargs,
        )
    for name in _LOST_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__}: {name} is not supported by a swap")
    key = unpacked(core, key, query.shape[-1])
    causal = query.shape[2] > 1 and attention_mask is None and own
    rows = query.shape[2]
    if causal and key.shape[2] > rows:  # the rest of a static cache is empty
        key, value = key[:, :, :rows], value[:, :, :rows]
    if position_bias is not None:
        position_bias = position_bias[..., : value.shape[2]]
        position_bias = mean_of_groups(position_bias, module.swapped.groups)
    call = head_call(
        *(query, key, value),
        mask=attention_mask,
        bias=position_bias,
        is_causal=causal,
        scale=scaling,
        packing=packing,
    )
    out = core(with_dropout(call, dropout))
    weights = core.weights(call) if kwargs.get("output_attentions") else None
    return out.transpose(1, 2).contiguous(), weights


def unpacked(core: Core, key: Tensor, head_dim: int) -> Tensor:
    """Return keys of a cache, (B, H_kv, L, K·E), as (B, H_kv·K, L, E)."""
    if key.shape[-1] == head_dim:
        return key
    return key.unflatten(-1, (-1, head_dim)).transpose(2, 3).flatten(1, 2)


def register() -> None:
    """Make our function known to the library, for attention and for masks."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, sdpa_mask)


class Swapped:
    """Marks a layer; a process that reads it from a pickle comes to know our function.

    Args:
        groups: the former query heads of every head. None means that all stayed.
    """

    def __init__(self, groups: list[list[int]] | None) -> None:
        self.groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register()


class PackedCache:
    """A cache as one layer sees it: the K components of a key side by side.

    A static cache makes room for as many values as there are key heads. Packed as (B, H_kv, L, K·E)
    keys have as many heads as values; the sizes of keys and values may differ.

    Args:
        cache: the library's.
        num_heads: H_kv.
    """

    def __init__(self, cache: Any, num_heads: int) -> None:
        self.cache, self.num_heads = cache, num_heads

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append packed keys; return all keys, packed, and values."""
        packed = key.unflatten(1, (self.num_heads, -1)).transpose(2, 3).flatten(3)
        return self.cache.update(packed, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("cache", "num_heads"):  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.cache, name)


def pack_cache(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Wrap the cache of a call, before the forward of a layer whose keys have components."""
    cache = kwargs.get("past_key_values")
    if cache is not None:
        heads = module.core.layout.key
        if hasattr(cache, "cross_attention_cache"):
            both = copy.copy(cache)  # shares what has been seen, and the layers
            both.self_attention_cache = PackedCache(cache.self_attention_cache, heads)
            both.cross_attention_cache = PackedCache(cache.cross_attention_cache, heads)
            kwargs = {**kwargs, "past_key_values": both}
        else:
            kwargs = {**kwargs, "past_key_values": PackedCache(cache, heads)}
    return args, kwargs


class HuggingFaceHost(Host):
    """Exchanges the projections of transformers' layers."""

    name = "transformers"

    def claims(self, place: Place) -> bool:
        """Every class of the library that calls itself attention and has projections."""
        kind = type(place.module)
        if not kind.__module__.startswith("transformers."):
            return False
        if kind.__name__ in CLASSES:
            return True
        holds = [type(m) for m in place.module.modules() if m is not place.module]
        if any("Attention" in k.__name__ for k in holds):
            return False  # it only surrounds one
        return "Attention" in kind.__name__ and any(issubclass(k, nn.Linear) for k in holds)

    def sizes(self, place: Place) -> Sizes:
        """Return the sizes of a layer of which we keep everything."""
        old: Any = place.module
        if getattr(old, "core", None) is not None:
            raise UnsupportedError("it is swapped already")
        for name, reason in _LOST.items():
            if getattr(old, name, None) is not None:
                raise UnsupportedError(reason)
        if type(old).__name__ not in CLASSES:
            raise UnsupportedError(
                f"{type(old).__name__} is not among the classes that are known: "
                f"{', '.join(CLASSES)}"
            )
        size = _head_dim(old)
        linears = [_plain(name, m) for name, m in _projections(place)]
        width, kv_width = _width(linears[0]), _width(linears[2])
        if _is_joint(old):
            width = kv_width = old.embed_dim
        rotary: RotaryPairs | None = None
        if "position_embeddings" in inspect.signature(old.forward).parameters:
            rotary = "halves"
        fixed = ""
        if rotary is not None and _partial_rotation(old.config):
            fixed = "only a part of its heads is rotated"
        return Sizes(width // size, kv_width // size, size, size, rotary, fixed)

    def read(self, place: Place, sizes: Sizes) -> HeadWeights:
        """Return the weights, `Conv1D` the right way round."""
        old: Any = place.module
        query, key, value, out = (_rows(m) for _, m in _projections(place))
        if _is_joint(old):
            parts = 2 if old.is_cross_attention else 3
            joint: Any = zip(
                *(t.chunk(parts) for t in _rows(old.c_attn) if t is not None), strict=True
            )
            pairs: list[Rows] = list(joint)
            query = _rows(old.q_attn) if old.is_cross_attention else pairs[0]
            key, value = pairs[-2:]
        return read_heads(query, key, value, out, sizes.num_heads, sizes.num_kv_heads)

    def put(
        self, place: Place, weights: HeadWeights, core: Core, settings: Settings
    ) -> nn.Module | None:
        """Exchange the projections and hang the core on the layer."""
        old: Any = place.module
        rows = [
            projection(t, biased)
            for t, biased in zip(
                (weights.query, weights.key, weights.value), weights.biased, strict=True
            )
        ]
        names = [name for name, _ in _projections(place)]
        if _is_joint(old):
            if old.is_cross_attention:
                old.q_attn = _conv1d(rows.pop(0), old.q_attn)
            joint: Any = list(zip(*rows, strict=True))
            old.split_size = [len(weight) for weight in joint[0]]
            old.c_attn = _conv1d((torch.cat(joint[0]), torch.cat(joint[1])), old.c_attn)
            old.c_proj = _conv1d(weights.joint_out, old.c_proj)
        else:
            for name, pair in zip(names, (*rows, weights.joint_out), strict=True):
                holder, own = _holder(place, name)
                like = getattr(holder, own).weight
                setattr(holder, own, linear(pair, like))
        old.core, old.swapped = core.train(old.training), Swapped(weights.groups)
        if settings.keys_per_head > 1:
            old.register_forward_pre_hook(pack_cache, with_kwargs=True)
        return None

    def owned(self, place: Place) -> list[nn.Module]:
        """Return the layer, and its output projection where that is the parent's."""
        (_, out) = _projections(place)[3]
        return [place.module] if out in place.module.modules() else [place.module, out]

    def probe(self, place: Place) -> Tensor:
        """Return the output for random tokens, rotated if the host rotates."""
        layer: Any = place.module
        names = inspect.signature(layer.forward).parameters
        query, *_, (_, out) = _projections(place)
        like = query[1].weight
        x = random_input(like, _inner(query[1]))
        given: dict[str, Any] = {}
        for name in ("attention_mask", "mask"):
            if name in names:
                given[name] = None
        if "position_embeddings" in names:
            angles = random_input(like, _head_dim(layer) // 2, seed=1)[:1].repeat(1, 1, 2)
            given["position_embeddings"] = (angles.cos(), angles.sin())
        if is_cross(place):
            other = random_input(like, _inner(_projections(place)[1][1]), PROBE[1] + 1, seed=2)
            name = "key_value_states" if "key_value_states" in names else "encoder_hidden_states"
            given[name] = other
        result: Tensor = layer(x, **given)[0]
        return result if out in layer.modules() else out(result)

    def finish(self, model: nn.Module) -> None:
        """Register our function and its masks, and let every part of the model use them."""
        from transformers import PreTrainedModel

        register()
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and module.config._attn_implementation != NAME:
                module.set_attn_implementation(NAME)
        for name, module in model.named_modules():
            config: Any = getattr(module, "config", None)
            if (
                isinstance(getattr(module, "swapped", None), Swapped)
                and config._attn_implementation != NAME
            ):
                config._attn_implementation = NAME  # a layer outside of a PreTrainedModel
                if config._attn_implementation != NAME:
                    raise RuntimeError(f"{name}: transformers does not let it use our attention")


def is_cross(place: Place) -> bool:
    """Whether a layer attends to another sequence."""
    layer: Any = place.module
    named = type(layer).__name__ + type(place.parent).__name__
    return "Cross" in named or bool(getattr(layer, "is_cross_attention", False))


def _head_dim(layer: Any) -> int:
    names = ("head_dim", "attention_head_size", "key_value_proj_dim")
    return int(next(getattr(layer, name) for name in names if hasattr(layer, name)))


def _is_joint(layer: Any) -> bool:
    return hasattr(layer, "c_attn")


def _holder(place: Place, name: str) -> tuple[Any, str]:
    """Return the module that holds a projection, and its name there; `..` is the parent."""
    base: Any = place.parent if name.startswith("..") else place.module
    path, _, own = name.removeprefix("..").rpartition(".")
    return (base.get_submodule(path) if path else base), own


def _projections(place: Place) -> list[tuple[str, Any]]:
    """Return names and modules of query, key, value and output projection."""
    names = CLASSES[type(place.module).__name__]
    if getattr(place.module, "is_cross_attention", False) and _is_joint(place.module):
        names = ("q_attn", *names[1:])
    return [(name, getattr(*_holder(place, name), None)) for name in names]


def _plain(name: str, module: object) -> Any:
    if (
        type(module).__name__ == "Conv1D"
        and type(module).__module__ == "transformers.pytorch_utils"
    ):
        return module
    return plain_linear(name.removeprefix(".."), module)


def _is_conv1d(module: object) -> bool:
    kind = type(module)
    return f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D"


def _rows(module: Any) -> Rows:
    weight = module.weight.T if _is_conv1d(module) else module.weight
    return weight, module.bias


def _width(module: Any) -> int:
    return int(_rows(module)[0].shape[0])


def _inner(module: Any) -> int:
    return int(_rows(module)[0].shape[1])


def _conv1d(rows: Rows, like: Any) -> nn.Module:
    """Return a `Conv1D` with this weight, which it keeps transposed, and bias."""
    weight, bias = rows
    made: Any = type(like)(1, 1)
    made.nf, made.nx = weight.shape
    keep = {"requires_grad": like.weight.requires_grad}
    made.weight = nn.Parameter(weight.T.to(like.weight).contiguous(), **keep)
    made.bias = nn.Parameter(bias.to(like.bias).clone(), **keep)  # type: ignore[union-attr]
    return made


def _partial_rotation(config: Any) -> bool:
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given, *(v for v in given.values() if isinstance(v, dict))]
    return any(kind.get("partial_rotary_factor", 1.0) != 1.0 for kind in kinds)

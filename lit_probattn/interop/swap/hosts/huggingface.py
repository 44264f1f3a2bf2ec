"""Attention of Hugging Face transformers, by exchanging projections under the host's own forward.

Their attention layers find the number of heads from the widths of their projections. So a swap
exchanges the projections and hangs our core on the layer as `core`; the components of a key pass
through the library's code as further key heads, side by side, to `interface.attention_function`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.core import Core
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.interop.swap.hosts.base import (
    PROBE,
    Host,
    Place,
    Sizes,
    plain_linear,
    random_input,
)
from lit_probattn.interop.swap.interface import NAME, Swapped, pack_cache, register
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.weights import (
    HeadWeights,
    RotaryPairs,
    Rows,
    linear,
    projection,
    read_heads,
)

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

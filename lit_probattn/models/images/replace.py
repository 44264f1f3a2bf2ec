"""Replacing the attention of timm's Swin and ViT models by any variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import timm.layers.attention as timm_attention
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer import WindowAttention as TimmWindowAttention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention.layer import Attention
from lit_probattn.base.arguments import check_argument
from lit_probattn.models.images.layers import KeySlot, TokenAttention, WindowAttention
from lit_probattn.models.images.weights import copy_weights, draw_weights
from lit_probattn.models.per_layer import layer_factories

WeightInit = Literal["fresh", "copy"]


@dataclass(frozen=True)
class Place:
    """A block of a model whose attention can be replaced."""

    index: int  # index of the block in the model
    stage: int | None  # index of its stage in a Swin model; None in a ViT
    name: str  # of the block in the model
    block: Any  # timm's block; its layer is `block.attn`


def places_of(model: nn.Module) -> list[Place]:
    """Return all blocks of a model, in order.

    Raises:
        NotImplementedError: the model is neither a Swin nor a ViT of timm.
    """
    if isinstance(model, SwinTransformer):
        layers: Any = model.layers
        named = [
            (stage, f"layers.{stage}.blocks.{number}", block)
            for stage, layer in enumerate(layers)
            for number, block in enumerate(layer.blocks)
        ]
        return [Place(index, *place) for index, place in enumerate(named)]
    if isinstance(model, VisionTransformer):
        blocks: Any = model.blocks
        return [Place(i, None, f"blocks.{i}", block) for i, block in enumerate(blocks)]
    raise NotImplementedError(
        f"cannot replace the attention of {type(model).__name__}; use a Swin or ViT model of timm "
        "(swin_*, vit_*, deit_*)"
    )


def replace_attention(
    model: nn.Module,
    attention: Callable[..., Attention],
    *,
    stages: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    global_heads: int | Sequence[int] | None = None,
    head_ratio: float | None = None,
    init: WeightInit = "fresh",
    allow_padding: bool = False,
) -> list[str]:
    """Replace the attention of a timm model in place; return the names of the changed blocks.

    All other parts of the model are unchanged, including their weights and state-dict names.
    Replaced layers keep the relative position table, the window shift and
    the output dropout. Dropout of attention weights is an argument of the new layer. If a layer
    cannot be replaced, none is.

    Args:
        attention: called once per layer as `attention(embed_dim, head_dim=E, num_heads=H)`; the
            layers of a `PerLayer` are indexed over the blocks of the whole model.
        stages: stages of a Swin model, from 0. None means all.
        blocks: indices of blocks in the whole model, instead of `stages`.
        global_heads: number of global heads, for variants that have them: one number, or one for
            each of `stages` in their order. None keeps the variant's default.
        head_ratio: number of local heads per global head, instead of `global_heads`.
        init: weights of the new projections: initialised as in timm (`fresh`), or copied from the
            replaced layers (`copy`); a global head copies the first local head that
            `mixing_init=copy` maps to it.
        allow_padding: accept windows that do not divide the image. As in timm, the image is
            then padded with zeros, which take part in attention.

    Raises:
        ValueError: a stage or block does not exist, the arguments are mutually exclusive, the
            variant does not have global heads, or a window does not divide the image.
        NotImplementedError: the model, or a layer of it, is not supported.
    """
    places = places_of(model)
    chosen = _choose(places, stages, blocks)
    made = layer_factories(attention, len(places))
    heads = _global_heads(chosen, stages, global_heads, head_ratio)
    check_argument("init", init, WeightInit)
    for place in chosen:
        _check(place, allow_padding)
    slot = key_slot(model) or KeySlot()
    layers = []  # all of them first: an error leaves the model as it was
    for place in chosen:
        old = place.block.attn
        layer = _make(made[place.index], old, heads[place.index])
        copy_weights(old, layer) if init == "copy" else draw_weights(layer)
        layers.append(layer.to(old.proj.weight.device, old.proj.weight.dtype))
    for place, layer in zip(chosen, layers, strict=True):
        old = place.block.attn
        if isinstance(old, TimmWindowAttention):
            layer.core.auto_kind = "window"
            place.block.attn = WindowAttention(layer, old, slot, place.index)
        else:
            place.block.attn = TokenAttention(layer, old, slot, place.index)
    return [place.name for place in chosen]


def key_slot(model: nn.Module) -> KeySlot | None:
    """Return the key slot shared by the replaced layers of a model, or None."""
    layers = (m for m in model.modules() if isinstance(m, TokenAttention | WindowAttention))
    return next((layer.slot for layer in layers), None)


def recompute_blocks(model: nn.Module) -> None:
    """Recompute the blocks of a model in backward, each with the random key of its forward pass.

    With timm's switch, a backward pass after two forward passes would draw for both with the key of
    the second.
    """
    slot = key_slot(model)
    if slot is None:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
        return
    for place in places_of(model):
        place.block.forward = partial(_recomputed, place.block.forward, slot)


def _recomputed(forward: Callable[..., Tensor], slot: KeySlot, *args: Any, **kwargs: Any) -> Tensor:
    key = slot.key

    def run(*args: Any, **kwargs: Any) -> Tensor:
        slot.key = key
        return forward(*args, **kwargs)

    out: Tensor = checkpoint(run, *args, use_reentrant=False, **kwargs)
    return out


def _choose(
    places: list[Place], stages: Sequence[int] | None, blocks: Sequence[int] | None
) -> list[Place]:
    if stages is not None and blocks is not None:
        raise ValueError("stages and blocks are mutually exclusive: blocks index the whole model")
    if blocks is not None:
        _check_numbers("blocks", blocks, len(places))
        return [places[index] for index in sorted(blocks)]
    if stages is None:
        return places
    if places[0].stage is None:
        raise ValueError("stages are for Swin models; a ViT has none, so set blocks")
    _check_numbers("stages", stages, 1 + max(place.stage or 0 for place in places))
    return [place for place in places if place.stage in stages]


def _check_numbers(name: str, numbers: Sequence[int], count: int) -> None:
    if not all(0 <= number < count for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{name} must be distinct numbers from 0 to {count - 1}, received {list(numbers)}"
        )


def _global_heads(
    chosen: list[Place],
    stages: Sequence[int] | None,
    global_heads: int | Sequence[int] | None,
    head_ratio: float | None,
) -> dict[int, dict[str, Any]]:
    """Return the global-head arguments of every chosen block."""
    if global_heads is not None and head_ratio is not None:
        raise ValueError(
            f"global_heads and head_ratio are mutually exclusive, received {global_heads} and "
            f"{head_ratio}"
        )
    if head_ratio is not None:
        ratio = {"num_global_heads": None, "head_ratio": head_ratio}
        return {place.index: ratio for place in chosen}
    if global_heads is None:
        return {place.index: {} for place in chosen}
    if isinstance(global_heads, int):
        return {place.index: {"num_global_heads": global_heads} for place in chosen}
    if stages is None or len(global_heads) != len(stages):
        raise ValueError(
            f"global_heads must have one number for each of stages={stages}, received "
            f"{list(global_heads)}"
        )
    by_stage = dict(zip(stages, global_heads, strict=True))
    return {p.index: {"num_global_heads": by_stage[p.stage or 0]} for p in chosen}


def _check(place: Place, allow_padding: bool) -> None:
    """Raise for timm layers that cannot be replaced."""
    old = place.block.attn
    if isinstance(old, TimmWindowAttention):
        sides = zip(place.block.input_resolution, place.block.window_size, strict=True)
        if not allow_padding and any(side % window for side, window in sides):
            raise ValueError(
                f"{place.name}: windows of {'x'.join(map(str, place.block.window_size))} tokens do "
                f"not divide {'x'.join(map(str, place.block.input_resolution))}; choose another "
                "image or window size, or set allow_padding=True for zeros at the edge as in timm"
            )
        return
    if not isinstance(old, timm_attention.Attention):
        raise NotImplementedError(
            f"{place.name}: attention {type(old).__name__} cannot be replaced; expected timm's "
            "plain Attention or Swin's WindowAttention"
            + (" (it is replaced already)" if hasattr(old, "slot") else "")
        )
    for name in ("q_norm", "k_norm", "norm"):
        if not isinstance(getattr(old, name, nn.Identity()), nn.Identity):
            raise NotImplementedError(f"{place.name}: {name} inside attention is not supported")
    if getattr(old, "gate", None) is not None:
        raise NotImplementedError(f"{place.name}: gated attention is not supported")
    if old.proj.out_features != old.qkv.in_features:
        raise NotImplementedError(
            f"{place.name}: attention from {old.qkv.in_features} to {old.proj.out_features} "
            "channels is not supported"
        )


def _make(attention: Callable[..., Attention], old: Any, heads: dict[str, Any]) -> Attention:
    """Call the factory with the sizes of timm's layer."""
    head_dim = old.qkv.out_features // 3 // old.num_heads
    try:
        return attention(old.qkv.in_features, head_dim=head_dim, num_heads=old.num_heads, **heads)
    except TypeError as error:
        if heads and "unexpected keyword" in str(error):
            raise ValueError(
                f"this attention variant has no global heads ({error}); unset global_heads "
                "and head_ratio, or use FiSHAttention"
            ) from error
        raise

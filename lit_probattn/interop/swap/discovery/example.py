"""An example batch for a model: given, or created from the model's description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Example = Callable[[nn.Module], Any]


def runner(model: nn.Module, example: Any) -> Example | None:
    """Return a function that runs a model on an example, or None without an example.

    Args:
        model: any model.
        example: a tensor, positional arguments, keyword arguments, or a function of the model.
            None means the input that the model's library describes.
    """
    if callable(example) and not isinstance(example, torch.Tensor):
        call: Example = example
        return call
    if example is None:
        example = default_example(model)
    if example is None:
        return None
    if isinstance(example, Mapping):
        return lambda m: m(**example)
    if isinstance(example, tuple | list):
        return lambda m: m(*example)
    return lambda m: m(example)


def default_example(model: Any) -> Any:
    """Return a batch for a model of transformers or timm, or None."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None or like.is_meta:
        return None
    config = getattr(model, "config", None)
    if hasattr(model, "dummy_inputs") and config is not None:
        return _of_transformers(model, config, like)
    side = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if side is None:
        side = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (0,))[1:]
    channels = getattr(model, "in_chans", 3)
    sides = (side, side) if isinstance(side, int) else side
    return _image(like, channels, *sides) if sides else None


def _of_transformers(model: Any, config: Any, like: torch.Tensor) -> Any:
    if model.main_input_name == "input_ids":
        given = {name: value.to(like.device) for name, value in model.dummy_inputs.items()}
        if getattr(config, "is_encoder_decoder", False):
            given.setdefault("decoder_input_ids", given["input_ids"])
        return given
    if model.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        side = config.image_size
        sides = side if isinstance(side, tuple | list) else (side, side)
        return {"pixel_values": _image(like, getattr(config, "num_channels", 3), *sides)}
    return None


def _image(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return two images of constant noise."""
    return torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(like)

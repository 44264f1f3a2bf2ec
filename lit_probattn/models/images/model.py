"""timm models with the call signature that the tasks expect."""

from __future__ import annotations

from typing import Annotated, Any

import timm
import torch
from torch import Tensor, nn

from lit_probattn.attention.layer import AttentionFactory
from lit_probattn.base.arguments import Count, Range, Rate, checks_arguments
from lit_probattn.models.images.replace import (
    WeightInit,
    key_slot,
    places_of,
    recompute_blocks,
    replace_attention,
)
from lit_probattn.randomness import RandomKey


class ImageModel(nn.Module):
    """A Swin or ViT of timm with the attention of some blocks replaced.

    Weights are not downloaded.

    Args:
        attention: called once per replaced layer as
            `attention(embed_dim, head_dim=E, num_heads=H)`.
        model_name: timm's name of the model.
        num_classes: number of labels.
        image_size: side length of the images in pixels.
        replace: False trains timm's original model.
        stages: stages of a Swin model whose attention is replaced, from 0. None means all.
        blocks: indices of blocks to replace, instead of `stages`.
        global_heads: number of global heads for each of `stages`.
        head_ratio: number of local heads per global head, instead of `global_heads`.
        attention_weights: new layers are initialised (`fresh`), or a `copy` of the replaced ones.
        allow_padding: accept windows that do not divide the image, padded as in timm.
        drop_path: largest probability of dropping a branch of a block (stochastic depth).
        activation_checkpointing: recompute the blocks in backward instead of storing activations.
        channels_last: use the channels-last memory format for images and convolutions.
        model_options: further arguments of timm's model.

    Raises:
        ValueError: timm does not have this model or rejects the sizes, or `drop_path` is out of
            range; see also `replace_attention`.
    """

    @checks_arguments
    def __init__(
        self,
        attention: AttentionFactory,
        *,
        model_name: str,
        num_classes: Count,
        image_size: Count = 224,
        replace: bool = True,
        stages: list[int] | None = None,
        blocks: list[int] | None = None,
        global_heads: Count | list[int] | None = None,
        head_ratio: Annotated[float, Range(1)] | None = None,
        attention_weights: WeightInit = "fresh",
        allow_padding: bool = False,
        drop_path: Rate = 0.0,
        activation_checkpointing: bool = False,
        channels_last: bool = False,
        model_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if model_name not in timm.list_models():
            close = ", ".join(timm.list_models(f"*{model_name[:6]}*")[:8])
            raise ValueError(f"timm has no model {model_name!r}; similar: {close or 'none'}")
        self.image_size, self.channels_last = image_size, channels_last
        net: Any = timm.create_model(
            model_name,
            pretrained=False,
            num_classes=num_classes,
            img_size=image_size,
            drop_path_rate=drop_path,
            **(model_options or {}),
        )
        places_of(net)
        self.replaced: list[str] = []
        if replace:
            self.replaced = replace_attention(
                net,
                attention,
                stages=stages,
                blocks=blocks,
                global_heads=global_heads,
                head_ratio=head_ratio,
                init=attention_weights,
                allow_padding=allow_padding,
            )
        self._slot = key_slot(net)
        if activation_checkpointing:
            recompute_blocks(net)
        if channels_last:
            net.to(memory_format=torch.channels_last)
        self.net: Any = net

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters without weight decay: vectors, biases and positions."""
        named = {f"net.{name}" for name in self.net.no_weight_decay()}
        vectors = {name for name, value in self.named_parameters() if value.ndim <= 1}
        return named | vectors | {n for n, _ in self.named_parameters() if n.endswith(".bias")}

    def forward(
        self, inputs: Tensor, *, key_mask: Tensor | None = None, rng: RandomKey | None = None
    ) -> Tensor:
        """Map normalised images (B, 3, S, S) to logits (B, num_classes).

        `key_mask` is ignored, since every pixel is real; `rng` is the key of dropout and noise.

        Raises:
            ValueError: the images have another size.
        """
        expected = (self.image_size, self.image_size)
        if inputs.dim() != 4 or tuple(inputs.shape[-2:]) != expected:
            raise ValueError(
                f"expected images (B, 3, {expected[0]}, {expected[1]}), received "
                f"{tuple(inputs.shape)}: set the same image_size for data and model"
            )
        if self._slot is not None:
            self._slot.key = rng
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return self.net(inputs)

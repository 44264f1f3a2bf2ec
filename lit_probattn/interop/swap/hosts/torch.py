"""PyTorch's own attention: `nn.MultiheadAttention`, alone or in `nn.TransformerEncoder/Decoder`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lit_probattn.attention.core import Core
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.interop.multihead import MultiheadForm, as_multihead_attention
from lit_probattn.interop.swap.hosts.base import Host, Place, Sizes, random_input
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.weights import HeadWeights, Rows, linear, projection, read_heads


class TorchHost(Host):
    """Puts a whole layer of ours, in torch's form, where `nn.MultiheadAttention` was.

    It is no subclass: the fused paths of `nn.TransformerEncoderLayer` would go round it.
    """

    name = "torch"

    def claims(self, place: Place) -> bool:
        """Every `nn.MultiheadAttention`, and what a swap has put there."""
        return isinstance(place.module, nn.MultiheadAttention | MultiheadForm)

    def sizes(self, place: Place) -> Sizes:
        """Return the sizes of a layer of which we keep everything."""
        old: Any = place.module
        if isinstance(old, MultiheadForm):
            raise UnsupportedError("it is one of our layers already")
        if type(old) is not nn.MultiheadAttention:
            raise UnsupportedError(
                f"{type(old).__name__} changes nn.MultiheadAttention, unknown how"
            )
        if old.bias_k is not None:
            raise UnsupportedError(
                "add_bias_kv=True adds a learned key, for which we have no place"
            )
        if old.add_zero_attn:
            raise UnsupportedError(
                "add_zero_attn=True adds a key of zeros, for which we have no place"
            )
        if old.kdim != old.vdim:
            raise UnsupportedError(f"kdim={old.kdim} and vdim={old.vdim}: expected the same")
        return Sizes(old.num_heads, old.num_heads, old.head_dim, old.head_dim)

    def read(self, place: Place, sizes: Sizes) -> HeadWeights:
        """Return the weights, whether the three projections are one tensor or three."""
        old: Any = place.module
        weights = [old.q_proj_weight, old.k_proj_weight, old.v_proj_weight]
        if old.in_proj_weight is not None:
            weights = list(old.in_proj_weight.chunk(3))
        biases = [None] * 3 if old.in_proj_bias is None else list(old.in_proj_bias.chunk(3))
        pairs: list[Rows] = list(zip(weights, biases, strict=True))
        out = (old.out_proj.weight, old.out_proj.bias)
        query, key, value = pairs
        return read_heads(query, key, value, out, sizes.num_heads, sizes.num_kv_heads)

    def put(
        self, place: Place, weights: HeadWeights, core: Core, settings: Settings
    ) -> nn.Module | None:
        """Return a layer of ours in torch's form."""
        old: Any = place.module
        like = old.out_proj.weight
        layer = settings.make_layer(
            old.embed_dim,
            core.layout.out,
            head_dim=old.head_dim,
            key_embed_dim=old.kdim,
            bias=old.in_proj_bias is not None,
            dropout=old.dropout,
        )
        layer.query_proj = linear(projection(weights.query, weights.biased[0]), like)
        layer.key_proj = linear(projection(weights.key, weights.biased[1]), like)
        layer.value_proj = linear(projection(weights.value, weights.biased[2]), like)
        layer.out_proj = linear(weights.joint_out, like)
        layer.core = core
        return as_multihead_attention(layer, batch_first=old.batch_first).train(old.training)

    def probe(self, place: Place) -> Tensor:
        """Return the output for random tokens; other tokens are keys where these are wider."""
        layer: Any = place.module
        like = next(layer.parameters())
        query = random_input(like, layer.embed_dim)
        key = query if layer.kdim == layer.embed_dim else random_input(like, layer.kdim, seed=1)
        if not layer.batch_first:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        output: Tensor = layer(query, key, key, need_weights=False)[0]
        return output

    def finish(self, model: nn.Module) -> None:
        """Keep encoders from nested tensors: they look into the layer that was there."""
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder) and any(
                isinstance(m, MultiheadForm) for m in module.modules()
            ):
                module.use_nested_tensor = False

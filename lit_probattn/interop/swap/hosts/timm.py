"""timm's attention: ViT and its family, EVA and DINOv3, BEiT, Swin 1 and 2.

timm's own forward ends in a reshape to the old number of heads, so each class gets a module with
its call. Norms of queries and keys, gates, rotary positions and tables of positions stay timm's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_probattn.attention.call import with_dropout
from lit_probattn.attention.core import Core
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.interop.swap.core import head_call, mean_of_groups, scaled
from lit_probattn.interop.swap.hosts.base import (
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


class Swapped(nn.Module):
    """Projections with our core between them, and everything else of timm's layer.

    Args:
        old: timm's layer.
        weights: what its projections became.
        core: the variant.
    """

    def __init__(self, old: Any, weights: HeadWeights, core: Core) -> None:
        super().__init__()
        like = old.proj.weight
        self.q_proj = linear(projection(weights.query, weights.biased[0]), like)
        self.k_proj = linear(projection(weights.key, weights.biased[1]), like)
        self.v_proj = linear(projection(weights.value, weights.biased[2]), like)
        self.proj = linear(weights.joint_out, like)
        self.q_norm: nn.Module = getattr(old, "q_norm", None) or nn.Identity()
        self.k_norm: nn.Module = getattr(old, "k_norm", None) or nn.Identity()
        self.norm: nn.Module = getattr(old, "norm", None) or nn.Identity()
        self.gate = getattr(old, "gate", None)
        self.attn_drop, self.proj_drop = old.attn_drop, old.proj_drop
        self.core, self.groups = core, weights.groups
        self.num_heads, self.head_dim = core.layout.out, core.layout.head_dim
        self.train(old.training)
        self.keep(old)

    def keep(self, old: Any) -> None:
        """Take over what else timm's layer has."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (B, H, N, E), key (B, H_kv·K, N, E) and value, normed."""
        q, k, v = (
            projected(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.q_norm(q), self.k_norm(k), v

    def joined(self, x: Tensor, heads: tuple[Tensor, Tensor, Tensor], **masks: Any) -> Tensor:
        """Attend, and join the heads to the output."""
        dropout = self.attn_drop.p if self.training else 0.0
        out = self.core(with_dropout(head_call(*heads, **masks), dropout))
        out = self.norm(out.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        result: Tensor = self.proj_drop(self.proj(out))
        return result


class SwappedTokens(Swapped):
    """In the place of timm's `Attention`."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Map (B, N, C) to (B, N, C); masks are those of `scaled_dot_product_attention`."""
        return self.joined(x, self.heads(x), mask=attn_mask, is_causal=is_causal)


class SwappedRotary(Swapped):
    """In the place of timm's `AttentionRope` and `EvaAttention`."""

    def keep(self, old: Any) -> None:
        """Take over how it rotates."""
        self.num_prefix_tokens = old.num_prefix_tokens
        self.rotate_half = getattr(old, "rotate_half", False)

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Map (B, N, C) to (B, N, C); all but the prefix tokens are rotated by `rope`."""
        q, k, v = self.heads(x)
        if rope is not None:
            q, k = self.rotated(q, rope).type_as(v), self.rotated(k, rope).type_as(v)
        return self.joined(x, (q, k, v), mask=attn_mask, is_causal=is_causal)

    def rotated(self, heads: Tensor, rope: Tensor) -> Tensor:
        """Turn what stands behind the prefix tokens."""
        from timm.layers import apply_rot_embed_cat

        first = self.num_prefix_tokens
        if rope.dim() > 2 and rope.shape[-3] not in (1, heads.shape[1]):  # angles of each head
            rope = rope.repeat_interleave(heads.shape[1] // rope.shape[-3], -3)
        turned = apply_rot_embed_cat(heads[:, :, first:], rope, half=self.rotate_half)
        return torch.cat([heads[:, :, :first], turned], 2)


class _WithTable(Swapped):
    """A layer whose host keeps a table of relative positions, under `host.`, with its methods."""

    def keep(self, old: Any) -> None:
        """Take over its tables."""
        for name in (*_PROJECTIONS, "attn_drop", "proj_drop"):
            if hasattr(old, name):
                setattr(old, name, None)
        self.host = old

    def table(self) -> Tensor | None:
        """Return the bias of the layer's own table, (1, H, N, N)."""
        if getattr(self.host, "relative_position_bias_table", None) is None:
            return None
        return mean_of_groups(self.host._get_rel_pos_bias(), self.groups)


class SwappedBeit(_WithTable):
    """In the place of the attention of BEiT."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Map (B, N, C) to (B, N, C); the bias, (1, H, N, N) of the old heads, is added."""
        bias = self.table()
        if shared_rel_pos_bias is not None:
            shared = mean_of_groups(shared_rel_pos_bias, self.groups)
            bias = shared if bias is None else bias + shared
        return self.joined(x, self.heads(x), bias=bias)


class SwappedWindows(_WithTable):
    """In the place of Swin's `WindowAttention`, first and second version."""

    def keep(self, old: Any) -> None:
        """Take over its tables; the core attends in windows."""
        super().keep(old)
        self.core.auto_kind = "window"

    @property
    def window_size(self) -> tuple[int, int]:
        """Height and width of a window."""
        size: tuple[int, int] = self.host.window_size
        return size

    @property
    def window_area(self) -> int:
        """Tokens of a window."""
        return self.window_size[0] * self.window_size[1]

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Change the window as timm does."""
        self.host.set_window_size(window_size)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside each window.

        Args:
            x: windows, picture by picture, (B · windows, N, C).
            mask: timm's mask of a shifted picture, (windows of a picture, N, N), which is added.
        """
        q, k, v = self.heads(x)
        scale = None
        if hasattr(self.host, "logit_scale"):  # Swin 2: cosines times a factor per head
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            factor = self.host.logit_scale.clamp(max=math.log(100.0)).exp()[None]
            q, k = scaled(self.core, q, k, mean_of_groups(factor, self.groups))
            scale = 1.0
        bias = self.table()
        if mask is not None:
            windows = mask.repeat(x.shape[0] // mask.shape[0], 1, 1)[:, None]
            bias = windows if bias is None else bias + windows
        return self.joined(x, (q, k, v), bias=bias, scale=scale)

    def table(self) -> Tensor | None:
        """Return the bias of all pairs of a window; of Swin 2 as its own forward computes it."""
        host = self.host
        if not hasattr(host, "cpb_mlp"):
            return super().table()
        values = host.cpb_mlp(host.relative_coords_table).view(-1, host.num_heads)
        area = self.window_area
        rows = values[host.relative_position_index.view(-1)].view(area, area, -1)
        return mean_of_groups(16.0 * rows.permute(2, 0, 1).sigmoid()[None], self.groups)


_PROJECTIONS = ("qkv", "q_proj", "k_proj", "v_proj", "proj", "q_bias", "k_bias", "v_bias")
CLASSES: dict[str, type[Swapped]] = {
    "timm.layers.attention.Attention": SwappedTokens,
    "timm.layers.attention.AttentionRope": SwappedRotary,
    "timm.models.eva.EvaAttention": SwappedRotary,
    "timm.models.beit.Attention": SwappedBeit,
    "timm.models.swin_transformer.WindowAttention": SwappedWindows,
    "timm.models.swin_transformer_v2.WindowAttention": SwappedWindows,
}


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


class TimmHost(Host):
    """Puts a module with timm's call in the place of its attention."""

    name = "timm"

    def claims(self, place: Place) -> bool:
        """The classes of `CLASSES`, and what a swap has put there."""
        return isinstance(place.module, Swapped) or _path(place.module) in CLASSES

    def sizes(self, place: Place) -> Sizes:
        """Return the sizes of a layer of which we keep everything."""
        old: Any = place.module
        if isinstance(old, Swapped):
            raise UnsupportedError("it is one of our layers already")
        for name in ("qkv", "q_proj", "k_proj", "v_proj", "proj"):
            if getattr(old, name, None) is not None:
                plain_linear(name, getattr(old, name))
        heads, kv = old.num_heads, getattr(old, "num_kv_heads", old.num_heads)
        size = old.proj.in_features // heads
        fixed = ""
        if getattr(old, "gate", None) is not None:
            fixed = "its gate has a place for each of the old heads"
        elif not isinstance(getattr(old, "norm", None) or nn.Identity(), nn.Identity):
            fixed = "its norm goes over all heads together"
        elif any(getattr(m, "rope_mixed", False) for m in place.model.modules()):
            fixed = "each of its heads is rotated by angles of its own"
        rotary: RotaryPairs | None = None
        if hasattr(old, "num_prefix_tokens"):
            rotary = "halves" if getattr(old, "rotate_half", False) else "neighbours"
        return Sizes(heads, kv, size, size, rotary, fixed)

    def read(self, place: Place, sizes: Sizes) -> HeadWeights:
        """Return the weights; a key bias that the host keeps at zero does not count as one."""
        old: Any = place.module
        if getattr(old, "qkv", None) is None:
            linears = (old.q_proj, old.k_proj, old.v_proj)
            pairs: list[Rows] = [(m.weight, m.bias) for m in linears]
        else:
            biases = [None] * 3 if old.qkv.bias is None else list(old.qkv.bias.chunk(3))
            if getattr(old, "q_bias", None) is not None:
                biases = [old.q_bias, None, old.v_bias]
            pairs = list(zip(old.qkv.weight.chunk(3), biases, strict=True))
        out = (old.proj.weight, old.proj.bias)
        query, key, value = pairs
        return read_heads(query, key, value, out, sizes.num_heads, sizes.num_kv_heads)

    def put(
        self, place: Place, weights: HeadWeights, core: Core, settings: Settings
    ) -> nn.Module | None:
        """Return the module that stands for timm's class."""
        return CLASSES[_path(place.module)](place.module, weights, core)

    def probe(self, place: Place) -> Tensor:
        """Return the output for random tokens, rotated or windowed as the class is."""
        layer: Any = place.module
        if isinstance(layer, Swapped):
            first = layer.q_proj
        else:
            first = layer.q_proj if getattr(layer, "qkv", None) is None else layer.qkv
        # A table of positions is for one number of tokens.
        host = getattr(layer, "host", layer)
        window = getattr(host, "window_size", None)
        tokens = 16 if window is None else window[0] * window[1]
        if window is not None and hasattr(host, "num_relative_distance"):
            tokens += 1  # BEiT's class token
        x = random_input(first.weight, first.in_features, tokens)
        if not hasattr(layer, "num_prefix_tokens"):
            output: Tensor = layer(x)
            return output
        half = layer.proj.in_features // layer.num_heads // 2
        angles = random_input(first.weight, half, tokens - layer.num_prefix_tokens, 1)[0]
        if getattr(layer, "rotate_half", False):
            angles = angles.repeat(1, 2)
        else:
            angles = angles.repeat_interleave(2, 1)
        output = layer(x, rope=torch.cat([angles.sin(), angles.cos()], -1))
        return output

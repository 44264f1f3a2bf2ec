"""Parameters of models with fixed head size, and rules to match them.

Letters of the low-rank paper: d embedding size, h heads, d_p head size, a = h d_p inner width,
l layers, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Args:
        embed_dim: d.
        num_heads: h.
        head_dim: d_p.
        mlp_dim: inner width of the MLPs.
        num_layers: l.
        vocab_size: v; the output layer is tied to the embedding.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_layers: int
    vocab_size: int

    @property
    def inner_dim(self) -> int:
        """a = h d_p, the inner width of attention."""
        return self.num_heads * self.head_dim


def model_weights(sizes: Sizes) -> int:
    """Return the weights of blocks and one embedding, l (4 d a + 2 d d_ff) + v d.

    Biases and norms do not count.
    """
    d, layers = sizes.embed_dim, sizes.num_layers
    return layers * (4 * d * sizes.inner_dim + 2 * d * sizes.mlp_dim) + sizes.vocab_size * d


def matched_mlp_dim(fixed: Sizes) -> int:
    """Rule M1: return the MLP width of the baseline (head size d / h) with equal parameters.

        d_ff' = d_ff + 2 (h d_p − d)

    Exact without biases; the operations that are linear in n are also equal.

    Raises:
        ValueError: d is not divisible by h, or the width would not be positive.
    """
    if fixed.embed_dim % fixed.num_heads:
        raise ValueError(
            f"embed_dim of the baseline must be divisible by num_heads, received {fixed.embed_dim} "
            f"and {fixed.num_heads}"
        )
    width = fixed.mlp_dim + 2 * (fixed.inner_dim - fixed.embed_dim)
    if width < 1:
        raise ValueError(f"the matched mlp_dim would be {width}: the fixed model is too small")
    return width


def matched_embed_dim(fixed: Sizes, multiple: int) -> int:
    """Rule M2: return the embedding size of the baseline with equal parameters.

        d' = (−B + √(B² + 16 l T)) / (8 l),   B = 2 l d_ff + v,   T the parameters to match

        The embedding is tied and there are no biases.

    Args:
        fixed: the model to match.
        multiple: round to a multiple of this.
    """
    layers = fixed.num_layers
    total = model_weights(fixed)
    b = 2 * layers * fixed.mlp_dim + fixed.vocab_size
    exact = (-b + (b * b + 16 * layers * total) ** 0.5) / (8 * layers)
    return max(multiple, round(exact / multiple) * multiple)

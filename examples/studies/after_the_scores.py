"""Two variants from papers that change the steps after the scores, by hooks of own variants.

python examples/studies/after_the_scores.py
lit-probattn check after_the_scores.MultiToken --allow_code after_the_scores
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from lit_probattn.attention import Attention, HeadLayout


class MultiToken(Attention):
    """Scores are convolved over heads and keys before the softmax.

    Source: multi-token attention, Golovneva et al., 2025 (arXiv 2504.00927).
    Departs from the source: the convolution is over keys and heads, not over queries, so that
    blocks of queries stay independent; masked pairs count as zero.
    """

    mixes_heads = True

    def __init__(self, embed_dim: int, num_heads: int, *, num_keys: int = 3, **common):
        super().__init__(embed_dim, num_heads, **common)
        kernel = 0.1 * torch.randn(num_heads, num_heads, 1, num_keys)
        kernel[:, :, 0, num_keys // 2] += torch.eye(num_heads)
        self.kernel = nn.Parameter(kernel)

    def reference_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return scaled dot products."""
        return query @ key.mT / query.shape[-1] ** 0.5

    def normalise(self, scores: Tensor) -> Tensor:
        """Convolve unmasked scores, then apply the softmax."""
        lowest = torch.finfo(scores.dtype).min
        hidden, pad = scores == lowest, self.kernel.shape[-1] // 2
        kernel = self.kernel.to(scores.dtype)
        mixed = nn.functional.conv2d(scores.masked_fill(hidden, 0.0), kernel, padding=(0, pad))
        return mixed.masked_fill(hidden, lowest).softmax(-1)


class Interleaved(Attention):
    """A head has P pseudo queries, keys and values, mixed from all heads, in one softmax.

    Source: interleaved head attention, Duvvuri et al., 2026 (arXiv 2602.21371).
    Departs from the source: the value projection mixes heads; outputs of a head's P pseudo queries
    are averaged with learned weights.
    """

    mixes_heads = True

    def __init__(self, embed_dim: int, num_heads: int, *, num_pseudo: int = 2, **common):
        self.num_pseudo = num_pseudo
        super().__init__(embed_dim, num_heads, **common)
        size = num_heads * num_pseudo, num_heads
        self.of_query, self.of_key = (
            nn.Parameter(torch.randn(size) / size[1] ** 0.5) for _ in "qk"
        )
        self.collapse = nn.Parameter(torch.full((num_heads, num_pseudo, 1, 1), 1 / num_pseudo))

    def head_layout(self) -> HeadLayout:
        """Return a layout with P² maps and P values per head."""
        plain, pseudo = super().head_layout(), self.num_pseudo
        out = plain.out * pseudo**2
        return replace(plain, value=plain.out * pseudo, out=out, gated=plain.out)

    def reference_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return scores by head, pseudo key and pseudo query, (B, H P², N, L)."""
        q, k = (
            torch.einsum("oh,bhne->bone", weight.to(x.dtype), x).unflatten(1, (-1, self.num_pseudo))
            for weight, x in ((self.of_query, query), (self.of_key, key))
        )
        return (q[:, :, None] @ k[:, :, :, None].mT / query.shape[-1] ** 0.5).flatten(1, 3)

    def normalise(self, scores: Tensor) -> Tensor:
        """Apply one softmax over the keys of all pseudo keys."""
        pseudo = self.num_pseudo
        parts = scores.unflatten(1, (-1, pseudo, pseudo)).movedim(2, -2)  # (B, H, P, n, P, L)
        weights = parts.flatten(-2).softmax(-1).unflatten(-1, (pseudo, -1))
        return weights.movedim(-2, 2).flatten(1, 3)

    def gate(self, out: Tensor, x: Tensor) -> Tensor:
        """Sum over pseudo keys and average over pseudo queries."""
        parts = out.unflatten(1, (self.num_heads, self.num_pseudo, self.num_pseudo)).sum(2)
        return (parts * self.collapse.to(out.dtype)).sum(2)


if __name__ == "__main__":
    torch.manual_seed(0)
    tokens = torch.randn(2, 300, 64)
    for layer in (MultiToken(64, num_heads=4), Interleaved(64, num_heads=4)):
        outputs = {}
        for backend in ("reference", "blockwise"):
            layer.backend = backend
            outputs[backend] = layer(tokens, is_causal=True)
        error = (outputs["reference"] - outputs["blockwise"]).abs().max().item()
        print(f"{type(layer).__name__}: blockwise differs from the reference by {error:.0e}")

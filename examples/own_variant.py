"""Your own attention variant: define the scores, and inherit everything else.

python own_variant.py
lit-probattn check own_variant.CosineAttention --allow_code own_variant
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lit_probattn.attention import Attention


class CosineAttention(Attention):
    """Scores are cosines times a learned sharpness per head."""

    def __init__(self, embed_dim: int, num_heads: int, *, sharpness: float = 10.0, **common):
        super().__init__(embed_dim, num_heads, **common)
        start = torch.full((self.num_heads, 1, 1), sharpness)
        self.log_sharpness = torch.nn.Parameter(start.log())

    def reference_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """From (B, H, N, E) and (B, H, L, E) to (B, H, N, L)."""
        cosines = normalize(query, dim=-1) @ normalize(key, dim=-1).mT
        return self.log_sharpness.exp().to(query.dtype) * cosines


if __name__ == "__main__":
    torch.manual_seed(0)
    layer, tokens = CosineAttention(64, num_heads=4), torch.randn(2, 600, 64)
    outputs = {}
    for backend in ("reference", "blockwise"):
        layer.backend = backend
        outputs[backend] = layer(tokens, is_causal=True)
    error = (outputs["reference"] - outputs["blockwise"]).abs().max().item()
    print(f"blockwise differs from the reference by {error:.0e}")
    print(f"multiply-adds for 600 tokens: {layer.cost(600).macs:,}")

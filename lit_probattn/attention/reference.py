"""From scores to outputs by materialising the maps: the end of every softmax-like reference."""

from __future__ import annotations

from torch import Tensor

from lit_probattn.attention.functional import masked_softmax, repeat_heads
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import AttentionDropout


def reference_weights(scores: Tensor, masks: Masks, row_eps: float = 0.0) -> Tensor:
    """Return softmax(scores + bias) over what the masks allow, (B, H, N, L).

    Args:
        scores: (B, H, N, L).
        masks: what each query may see.
        row_eps: added to each row's sum of exponentials.
    """
    cols = range(masks.num_keys)
    bias = masks.bias_block(masks.all_rows, cols)
    if bias is not None:
        scores = scores + bias
    return masked_softmax(scores, masks.allowed(masks.all_rows, cols, scores.device), row_eps)


def reference_output(
    scores: Tensor,
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    row_eps: float = 0.0,
) -> Tensor:
    """Return dropout(softmax(scores)) @ value, (B, H, N, E_v), materialising the maps."""
    weights = reference_weights(scores, masks, row_eps)
    if dropout is not None:
        batch, heads, rows, cols = weights.shape
        keep = dropout.keep(batch, heads, range(rows), range(cols), weights.device)
        weights = weights * keep * dropout.scale
    return weights @ repeat_heads(value.to(weights.dtype), weights.shape[1])

"""MGK with ALiBi (Press et al., 2022): a variant that the package does not have, on all engines.

Under a causal mask −m_h (i − j) is m_h j up to what is constant in a row: a term of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_probattn.attention import HeadCall, MGKAttention
from lit_probattn.attention.mgk.core import MGKCore
from lit_probattn.attention.mgk.functions import MGK
from lit_probattn.attention.numerics import compute_dtype, repeat_heads
from lit_probattn.attention.variant import Scores


def ramp(num_heads: int, num_keys: int, like: Tensor, first: int = 0) -> Tensor:
    """Return m_h j, (H, 1, L), in the dtype of scores."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads)
    places = torch.arange(first, first + num_keys, dtype=torch.float64)
    return (slopes[:, None, None] * places).to(like.device, compute_dtype(like))


@dataclass(frozen=True)
class ALiBiMGK(MGK):
    name = "alibi_mgk"

    def scores(self, call: HeadCall) -> Tensor:
        return super().scores(call) + ramp(call.query.shape[1], call.num_keys, call.query)

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        heads, scores = call.query.shape[1], super().lower(call, own_keys=own_keys)
        coef = None if scores.coef is None else repeat_heads(scores.coef[None], heads)[0]
        col = repeat_heads(scores.col, heads)
        first = (call.first_key or 0) + call.num_terms
        col = col + ramp(heads, col.shape[-1], call.query, first)
        return replace(scores, key=repeat_heads(scores.key, heads), coef=coef, col=col)


class ALiBiMGKCore(MGKCore):
    makes = ALiBiMGK


class ALiBiMGKAttention(MGKAttention):
    core_class = ALiBiMGKCore

"""From tensors to the arguments of the kernels of softmax and mixture attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_probattn.kernels.launch import Shape, choose_launch
from lit_probattn.kernels.runtime import padded, unit_stride

# log₂ of the smallest factor F of shifted keys that the one-exponential form is used for, and how
# far weights may exceed 1 there, so that float16 weights stay far from its smallest number.
_SPREAD_LIMIT = {torch.float16: 16.0}
_HEADROOM = {torch.float16: 8.0}
_LOG2E = 1.4426950408889634


def _num_components(key: Tensor, row_bias: Tensor | None, key_bias: Tensor | None) -> int:
    sizes = [key.shape[2]] + [x.shape[2] for x in (row_bias, key_bias) if x is not None]
    return max(sizes)


def _spread(row_bias: Tensor, key_bias: Tensor) -> Tensor:
    """Return a bound on -log₂ F for every sample and head, (B, H)."""
    rows = (row_bias.amax(2) - row_bias.amin(2)).amax(-1)
    cols = (key_bias.amax(2) - key_bias.amin(2)).amax(-1)
    cols = cols.repeat_interleave(rows.shape[1] // cols.shape[1], 1)
    return torch.minimum(rows, cols) * _LOG2E


def _strides(tensor: Tensor | None, *dims: int) -> tuple[int, ...]:
    """Return strides, 0 where the tensor is broadcast or absent."""
    if tensor is None:
        return (0,) * len(dims)
    return tuple(0 if tensor.shape[d] == 1 else tensor.stride(d) for d in dims)


class DenseCall:
    """Arguments that the forward and backward kernels share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scales: Tensor | None,
        row_bias: Tensor | None,
        key_bias: Tensor | None,
        bias: Tensor | None,
        key_mask: Tensor | None,
        pair_mask: Tensor | None,
        draw: Tensor | None,
        scale: float,
        is_causal: bool,
        hard: bool,
        equal_scales: bool,
        threshold: int,
    ) -> None:
        self.query, self.key, self.value = (unit_stride(x) for x in (query, key, value))
        num = _num_components(key, row_bias, key_bias)
        self.components, self.products = num, key.shape[2]
        equal = equal_scales or scales is None or num == 1
        factored = self.products == 1 and num > 1 and equal and not hard
        factored = factored and row_bias is not None and key_bias is not None
        terms = [None if x is None else x.float().contiguous() for x in (row_bias, key_bias)]
        self.row_bias, self.key_bias = terms
        assert not factored or (terms[0] is not None and terms[1] is not None)
        spread = _spread(terms[0], terms[1]) if factored else None  # type: ignore[arg-type]
        masks = [None if x is None else x.view(torch.uint8) for x in (key_mask, pair_mask)]
        key_mask = None if masks[0] is None else masks[0].contiguous()
        self.scales = None if scales is None else scales.float().contiguous()
        self.pointers = (
            *(self.scales, self.row_bias, self.key_bias, spread),
            *(key_mask, masks[1], bias, draw),
        )
        keep_scale = 65536 / (32768 - threshold)
        limit = _SPREAD_LIMIT.get(query.dtype, 64.0)
        self.numbers = (float(scale), keep_scale, threshold, limit)
        self.headroom = _HEADROOM.get(query.dtype, 0.0)
        self.input_strides = (
            *self.query.stride()[:3],
            *self.key.stride()[:4],
            *self.value.stride()[:3],
        )
        self.pair_strides = (*_strides(masks[1], 0, 1, 2, 3), *_strides(bias, 0, 1, 2, 3))
        heads, rows = query.shape[1:3]
        self.sizes = (
            *(heads, rows, key.shape[3]),
            *(heads // key.shape[1], heads // value.shape[1]),
        )
        self.flags: dict[str, Any] = {
            "COMPONENTS": num,
            "PRODUCTS": self.products,
            "HARD": hard,
            "FACTORED": factored,
            "EQUAL_SCALES": equal,
            "CAUSAL": is_causal,
            "HAS_SCALES": scales is not None,
            "HAS_ROW": row_bias is not None,
            "HAS_COL": key_bias is not None,
            "HAS_KEY_MASK": key_mask is not None,
            "HAS_PAIR_MASK": pair_mask is not None,
            "HAS_BIAS": bias is not None,
            "DROPOUT": draw is not None,
            "KEY_DIM": query.shape[-1],
            "KEY_PAD": padded(query.shape[-1]),
            "VALUE_DIM": value.shape[-1],
            "VALUE_PAD": padded(value.shape[-1]),
        }

    @property
    def form(self) -> str:
        """Name of the form of scores, which launch configurations depend on."""
        if self.components == 1:
            return "softmax"
        family = "smgk" if self.products == 1 else "mgk"
        return f"{family}_hard" if self.flags["HARD"] else family

    def launch(self, kernel: str) -> tuple[dict[str, int], int, int]:
        """Return the launch options of a kernel, and its tile sizes."""
        width = max(self.flags["KEY_PAD"], self.flags["VALUE_PAD"])
        name = f"{self.form}_{kernel}"
        shape = Shape(name, width, self.components, self.query.element_size())
        found = choose_launch(shape, self.query.device)
        options = {
            "BLOCK_Q": found.block_q,
            "BLOCK_K": found.block_k,
            "num_warps": found.num_warps,
            "num_stages": found.num_stages,
        }
        return options, found.block_q, found.block_k

"""All engines with the features they lack; a new engine is one entry here and one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.engines.blocks import by_blocks
from lit_probattn.attention.engines.flex import by_flex, missing_gpu
from lit_probattn.attention.engines.kernels import WIDEST_IN_KERNEL, by_kernels, kernel_refusal
from lit_probattn.attention.engines.native import by_tiles, missing_library, must_convert
from lit_probattn.attention.engines.sdpa import by_sdpa
from lit_probattn.attention.numerics import reference_output
from lit_probattn.attention.variant import Engine, lowered


def by_equation(call: HeadCall, variant: Any) -> Tensor:
    """Attend by the variant's equation: stored scores, softmax, dropout, sum of values."""
    call = call.precise()
    return reference_output(
        variant.scores(call), call.value, call.masks, call.dropout, variant.normalise
    )


_TRANSFORM = {"transform": "cannot be transformed by torch.func or forward-mode AD"}
# Features that no engine with blocks supports.
LACKS_OF_BLOCKS = {
    **_TRANSFORM,
    "dynamic": "cannot be exported for a dynamic number of positions: it counts its blocks",
}
LACKS_OF_OPERATORS = {
    **_TRANSFORM,
    "exported": "cannot be exported: it is not an operation of PyTorch",
}
# Features that cross-attention does not support.
LACKS_OF_CROSS_ATTENTION = {
    "rotary": "cannot rotate by positions of two sequences ({}): set rotary_dim=0",
    "one length": "cannot divide by √N of two sequences ({}): set padded_len",
}

# Functions that a user's class defines.
_HOOKS = {
    "own scores": "cannot call functions of a class ({})",
    "own weights": "cannot call functions of a class ({})",
}
_ROW_EPS = "cannot add row_eps to the sums of rows"
_NORMALISER = "cannot normalise rows by a function other than softmax ({})"
_NO_LAYERS = "does not support this function of several maps ({})"
# Features that PyTorch's softmax attention kernels lack.
_LACKS_OF_PYTORCH = {
    "transform": LACKS_OF_BLOCKS["transform"],
    "dropout": "cannot draw the counter-based attention dropout",
    "bias gradient": "cannot give a gradient to the additive bias without storing all scores",
    "maximum": "cannot take the maximum over components ({})",
    "function": "cannot take a function of several maps ({})",
    "map noise": "cannot add noise to the scores ({})",
    "head noise": "cannot add noise to the scores ({})",
    "row_eps": _ROW_EPS,
    "normaliser": _NORMALISER,
    **_HOOKS,
}

# Engines of every variant with a normal form.
NORMAL_FORM: Mapping[str, Engine] = {
    "reference": Engine(by_equation),
    "sdpa": Engine(lowered(by_sdpa, own_keys=True), lacks=_LACKS_OF_PYTORCH),
    "blockwise": Engine(
        lowered(by_blocks, precise=True), lacks={**LACKS_OF_BLOCKS, "row_eps": _ROW_EPS}
    ),
    "native": Engine(
        lowered(by_tiles, precise=must_convert),
        lacks={
            **LACKS_OF_OPERATORS,
            "function without layers": _NO_LAYERS,
            "row_eps": _ROW_EPS,
            "normaliser": _NORMALISER,
            **_HOOKS,
        },
        limits={"components": 16, "global maps": 16, "hidden units": 16},
        missing=missing_library,
    ),
    "flex": Engine(
        lowered(by_flex),
        lacks={
            **_LACKS_OF_PYTORCH,
            "exported": "cannot be exported: it is compiled separately",
        },
        missing=missing_gpu,
    ),
    "triton": Engine(
        lowered(by_kernels, fused=True, widest=WIDEST_IN_KERNEL),
        lacks={
            **LACKS_OF_OPERATORS,
            "function without layers": _NO_LAYERS,
            "power": _NO_LAYERS,
            "row_eps": _ROW_EPS,
            "normaliser": _NORMALISER,
            **_HOOKS,
        },
        # A program contains the score tiles of all maps and all hidden units; the queries of a tile
        # stay in shared memory.
        limits={
            "global maps": 16,
            "entries of all global maps": 1024,
            "hidden units": 32,
        },
        missing=kernel_refusal,
    ),
}

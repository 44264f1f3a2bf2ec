"""Count multiply-adds by fvcore and FLOPs by PyTorch; unknown operations raise an error.

Convention: one multiply-add is two FLOPs. Only matrix products count; fvcore adds five operations
per element of a normalisation, which are reported separately. Exponentials, softmax, masks and
additions are not counted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.graphs import fixed_sizes
from lit_probattn.base.torch_internals import (
    CDIST_OPERATORS,
    CPU_ATTENTION_OPERATORS,
    TorchDispatchMode,
    is_decomposed,
    packet_of,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fvcore scripts a function on import
    from fvcore.nn import FlopCountAnalysis

CONVENTION = (
    "1 multiply-add (MAC) = 2 FLOP; matrix products only; causal masks do not reduce counts"
)

# Operations with the cost of a matrix product: without a formula they must not count as 0.
_HEAVY = re.compile(
    r"attention|cdist|euclidean_dist|matmul|einsum|tensordot|conv|fft|_mm$|^mm$|bmm|addmv|"
    r"^mv$|^dot$|vdot|inner$|^linear$|grouped_mm|rnn|lstm|gru"
)
# Operators of this package that draw random numbers, which have no products.
_DRAWS = frozenset({"keep_pairs", "normal_noise", "philox_words"})


@dataclass(frozen=True)
class Macs:
    """Multiply-adds of a call in matrix products, and fvcore's operations of normalisations."""

    products: int
    norms: int = 0

    def plus(self, other: Macs) -> Macs:
        """Add."""
        return Macs(self.products + other.products, self.norms + other.norms)

    def minus(self, other: Macs) -> Macs:
        """Subtract."""
        return self.plus(other.times(-1))

    def times(self, factor: int) -> Macs:
        """Multiply."""
        return Macs(self.products * factor, self.norms * factor)


# ---------------------------------------------------------------------- fvcore
def _sizes(value: Any) -> list[int]:
    sizes = value.type().sizes()
    if sizes is None:
        raise UnsupportedError("a tensor has no known shape while counting with fvcore")
    return [int(s) for s in sizes]


def _sdpa_handle(inputs: list[Any], outputs: list[Any]) -> int:
    """Count query·key and weights·value of each head; grouped heads count per query head."""
    query, key, value = (_sizes(i) for i in inputs[:3])
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _einsum_handle(inputs: list[Any], outputs: list[Any]) -> int:
    """Count a two-operand einsum exactly: the product of the sizes of all letters."""
    equation = inputs[0].toIValue().replace(" ", "")
    operands = [_sizes(t) for t in inputs[1].node().inputs()]
    terms = equation.split("->")[0].split(",")
    if len(operands) == 1:
        return 0
    if len(operands) != 2 or "." in equation:
        raise UnsupportedError(f"no fvcore formula for einsum {equation!r}")
    letters: dict[str, int] = {}
    for term, shape in zip(terms, operands, strict=True):
        for letter, size in zip(term, shape, strict=True):
            letters[letter] = max(size, letters.get(letter, 1))
    return math.prod(letters.values())


def _baddbmm_handle(inputs: list[Any], outputs: list[Any]) -> int:
    return math.prod(_sizes(inputs[1])) * _sizes(inputs[2])[-1]


def _cdist_handle(inputs: list[Any], outputs: list[Any]) -> int:
    """Count a distance like a dot product, as in the papers."""
    return math.prod(_sizes(outputs[0])) * _sizes(inputs[0])[-1]


def _matmul_handle(inputs: list[Any], outputs: list[Any]) -> int:
    """Count output elements times inner size; fvcore's handle ignores broadcast batch axes."""
    first, second = _sizes(inputs[0]), _sizes(inputs[1])
    if len(first) == 1 or len(second) == 1:
        return math.prod(first) * math.prod(second) // first[-1]
    batch = math.prod(torch.broadcast_shapes(tuple(first[:-2]), tuple(second[:-2])))
    return batch * first[-2] * first[-1] * second[-1]


_HANDLES: dict[str, Callable[..., int]] = {
    "aten::matmul": _matmul_handle,
    "aten::scaled_dot_product_attention": _sdpa_handle,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _sdpa_handle,
    "aten::einsum": _einsum_handle,
    "aten::baddbmm": _baddbmm_handle,
    "aten::cdist": _cdist_handle,
}


@contextlib.contextmanager
def _functions_opened() -> Iterator[None]:
    """Trace into autograd functions, which otherwise are one node that fvcore counts as zero."""

    def apply(cls: Any, *args: Any) -> Any:
        if cls.setup_context is not torch.autograd.Function.setup_context:
            return cls.forward(*args)
        return cls.forward(mock.MagicMock(), *args)  # instead of the autograd context

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def fvcore_macs(model: nn.Module, inputs: torch.Tensor) -> Macs:
    """Count the forward pass with fvcore, preferably on `meta`; UnsupportedError if impossible."""
    analysis = FlopCountAnalysis(model, (inputs,))
    analysis.set_op_handle(**_HANDLES)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    analysis.tracer_warnings("none")
    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    with torch.no_grad(), fixed_sizes(), _functions_opened(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_operator = dict(analysis.by_operator())
        unsupported = dict(analysis.unsupported_ops())
    unknown = sorted(name for name in unsupported if _without_formula(name))
    if unknown:
        raise UnsupportedError(
            f"fvcore has no formula for {', '.join(unknown)}; add a handle to {__name__}"
        )
    norms = sum(int(v) for k, v in by_operator.items() if "norm" in k)
    return Macs(sum(int(v) for v in by_operator.values()) - norms, norms)


def _without_formula(name: str) -> bool:
    """Return whether an operation that a counter skipped (`space::name`) may contain products."""
    space, _, operation = name.partition("::")
    foreign = name.startswith("prim::PythonOp") or space not in ("aten", "prim")
    return foreign or _HEAVY.search(operation.strip("_")) is not None


# ---------------------------------------------------------------------- PyTorch's counter
def _cdist_flops(first: Any, second: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    rows, cols, width = first[-2], second[-2], first[-1]
    return 2 * math.prod(first[:-2]) * rows * cols * width


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward_flops(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _added_product_flops(_: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(first) * int(second[-1])


_EXTRA_FORMULAS: dict[Any, Any] = {
    **dict.fromkeys(CDIST_OPERATORS, _cdist_flops),
    # PyTorch 2.11 has no formulas for these.
    CPU_ATTENTION_OPERATORS[0]: _attention_flops,
    CPU_ATTENTION_OPERATORS[1]: _attention_backward_flops,
    # No version has formulas for products that are added in place.
    torch.ops.aten.baddbmm_: _added_product_flops,
}


class _Guard(TorchDispatchMode):
    """Raises for operations like matrix products without a formula in the counter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = packet_of(func)
        if packet not in flop_registry and packet not in _EXTRA_FORMULAS:
            space, _, name = str(packet).partition(".")
            heavy = space != "aten" or _HEAVY.search(name.strip("_")) is not None
            heavy = heavy and not (space == "lit_probattn" and name in _DRAWS)
            if heavy and space not in ("prim", "prims", "profiler") and not is_decomposed(func):
                raise UnsupportedError(
                    f"no FLOP formula is registered for {packet}; register one with "
                    "torch.utils.flop_counter.register_flop_formula"
                )
        return func(*args, **(kwargs or {}))


def torch_flops(function: Callable[[], object]) -> int:
    """Count the FLOPs of a call, including backward; UnsupportedError for unknown operations."""
    counter = FlopCounterMode(display=False, custom_mapping=_EXTRA_FORMULAS)
    with counter, _Guard():
        function()
    return int(counter.get_total_flops())


def torch_flops_by_module(model: nn.Module, function: Callable[[], object]) -> dict[str, int]:
    """Count the FLOPs of a call by module of a model, including submodules."""
    counter = FlopCounterMode(display=False, custom_mapping=_EXTRA_FORMULAS)
    with counter, _Guard():
        function()
    whole = type(model).__name__
    return {
        name.removeprefix(f"{whole}."): sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
    }


def torch_macs(model: nn.Module, inputs: torch.Tensor) -> Macs:
    """Count the multiply-adds of a forward pass without gradients."""
    with torch.no_grad():
        return Macs(torch_flops(lambda: model(inputs)) // 2)


def torch_train_macs(model: nn.Module, inputs: torch.Tensor) -> Macs:
    """Count the multiply-adds of a forward and backward pass, including input gradients."""

    def step() -> None:
        given = inputs.detach().requires_grad_() if inputs.is_floating_point() else inputs
        model(given).float().sum().backward()

    try:
        return Macs(torch_flops(step) // 2)
    finally:
        model.zero_grad(set_to_none=True)

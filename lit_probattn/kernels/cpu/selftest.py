"""Whether the C library computes what torch computes, tried once per process."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from lit_probattn.base.torch_internals import outside_modes
from lit_probattn.kernels.cpu import rows
from lit_probattn.kernels.cpu.library import Unavailable, load
from lit_probattn.randomness import AttentionDropout, RandomKey, normal_noise

logger = logging.getLogger("lit_probattn")

# Of weights and gradients of a few rows in float32; they are about 1e-7.
_ERROR = 1e-5


def _key() -> RandomKey:
    # Made here: whoever imports this module may do so among fake tensors.
    return RandomKey(7, 3, torch.tensor([5, 2**31 + 9], device="cpu")).fold(1)


@lru_cache(maxsize=1)
def failure() -> str | None:
    """Say why the library cannot serve ("cannot …"), or None; warns once."""
    reason: str | None = None
    try:
        load()
        # Hooks of a caller, as a checkpoint has them, would count what is saved here.
        hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        with torch.inference_mode(False), torch.enable_grad(), outside_modes(), hooks:
            wrong = next((name for name, right in _checks() if not right), None)
        if wrong is not None:
            reason = f"cannot be trusted: its self-test of {wrong} failed"
    except Unavailable as error:
        reason = str(error)
    if reason is not None:
        logger.warning("the C library of the CPU %s; torch operations serve instead", reason)
    return reason


@lru_cache(maxsize=1)
def draws_noise() -> bool:
    """Whether the library's noise has the bits of `randomness.normal_noise` on this machine."""
    if failure() is not None:
        return False
    blocks = ((3, range(2, 9), range(5, 140)), (8, range(3), range(70)))
    cpu = torch.device("cpu")
    with outside_modes():
        return all(
            torch.equal(
                rows.normal_noise(_key(), 2, maps, row, col),
                normal_noise(_key(), 2, maps, row, col, cpu),
            )
            for maps, row, col in blocks
        )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _checks() -> list[tuple[str, bool]]:
    dropout = AttentionDropout(0.3, _key())
    row, col = range(4, 9), range(3, 600)
    expected = dropout.keep(2, 3, row, col, torch.device("cpu"))
    same_bits = torch.equal(rows.keep(dropout, 2, 3, row, col), expected)
    return [("dropout", same_bits), ("softmax", _softmax_error() < _ERROR)]


def _softmax_error() -> float:
    """Return the largest error of a softmax with two components and of its gradients."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, 6, 37)
    drawn = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    maps, grad = [drawn[0] * 3.0, drawn[1] * 3.0], drawn[2]
    block = rows.Block(heads=1, count=1, rows=6, cols=37, all_rows=6, all_cols=37, components=2)
    out, weights = torch.empty_like(grad), torch.empty_like(grad)
    rows.rows_forward(block, maps, out)
    exact: list[Tensor] = [m.double().requires_grad_() for m in maps]
    expected = torch.logsumexp(torch.stack(exact), 0).softmax(-1)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    found = [m.clone() for m in maps]
    rows.rows_backward(block, maps, weights, grad.clone(), rows.RowGrads(found))
    pairs = [(out, expected), (weights, expected), *zip(found, wanted, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)

"""A check of a kernel on the machine that is about to use it, at its first use.

Compilers and drivers differ; a kernel that is wrong here must not train a model. A family of
kernels is named folder/family, as in `dense/mgk`: the folder's module `selftest` has `self_test(
family, device, dtype, sizes)`, which runs the kernel on small tensors with the sizes of the call's
query and value heads and returns pairs (found, float64). Keep it to a few launches: compiling them
is what the first call waits for. The result is kept for the process, per family, GPU, Triton
version, dtype and head sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import NamedTuple

import torch
from torch import Tensor

from lit_probattn.base.memory import is_predicting
from lit_probattn.base.torch_internals import outside_modes
from lit_probattn.kernels.runtime import PairOptions, draw_tensor
from lit_probattn.randomness import STREAM_DROPOUT, AttentionDropout, RandomKey

# Largest error relative to the largest entry: a few roundings of the dtype, far below a wrong term.
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

HeadDims = tuple[int, int]  # of query and value heads
SelfTest = Callable[[str, torch.device, torch.dtype, HeadDims], list[tuple[Tensor, Tensor]]]
_results: dict[Tested, str | None] = {}


@dataclass(frozen=True)
class Tested:
    """What a result holds for."""

    family: str
    gpu: str
    triton: str
    dtype: torch.dtype
    head_dims: HeadDims


def failure(family: str, dtype: torch.dtype, head_dims: HeadDims) -> str | None:
    """Run the self-test of a family once on the current GPU; say how it failed, or None.

    Warns once when it fails. Leaves random states and the modes of the caller alone. Predictions of
    memory launch nothing, so for them nothing is tested.
    """
    if is_predicting():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    key = Tested(family, gpu, metadata.version("triton"), dtype, head_dims)
    if key not in _results:
        _results[key] = run(family, device, dtype, head_dims)
        if _results[key] is not None:
            warnings.warn(f"kernel {family}: {_results[key]}; it is not used", stacklevel=3)
    return _results[key]


def run(family: str, device: torch.device, dtype: torch.dtype, head_dims: HeadDims) -> str | None:
    """Run a self-test now; return "failed …", or None when it passes."""
    sizes = " and ".join(str(size) for size in dict.fromkeys(head_dims))
    where = f"on {device} in {str(dtype).removeprefix('torch.')} with heads of {sizes}"
    folder, name = family.split("/")
    test: SelfTest = import_module(f"{__package__}.{folder}.selftest").self_test
    try:
        # Inference mode, in which Lightning validates, would leave the test without gradients.
        with torch.inference_mode(False), torch.enable_grad(), outside_modes():
            pairs = test(name, device, dtype, head_dims)
            errors = [_relative_error(found, exact) for found, exact in pairs]
    except Exception as error:  # a compiler may fail in any way
        return f"failed its self-test {where}: {type(error).__name__}: {str(error)[:200]}"
    worst = max(errors)
    if worst <= BOUND[dtype]:
        return None
    return f"failed its self-test {where}: relative error {worst:.1e}, at most {BOUND[dtype]:.0e}"


def _relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest error over the largest exact entry; infinite where it is not finite."""
    error = (found.double() - exact.double()).abs().max() / exact.double().abs().max()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def random_tensor(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return normal numbers from a generator of its own, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def in_float64(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves in float64 with the values of tensors."""
    return [x.detach().double().requires_grad_() for x in tensors]


def beside(
    found: Sequence[Tensor],
    truth: Sequence[Tensor],
    leaves: Sequence[Tensor],
    exact: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (found, float64) of the outputs, then of the gradients of all leaves."""
    grads = torch.autograd.grad(found, leaves, cotangents)
    true = torch.autograd.grad(truth, exact, [x.double() for x in cotangents])
    pairs = zip((*found, *grads), (*truth, *true), strict=True)
    return [(x.detach(), y.detach()) for x, y in pairs]


class Selection(NamedTuple):
    """Masks and dropout of a call, as a kernel takes them and by pair.

    Args:
        seen: pairs that may attend, broadcastable to (B, H, N, L).
        factor: 0 at dropped pairs and 1 / (1 - p) at the others.
    """

    options: PairOptions
    seen: Tensor
    factor: Tensor

    def weights(self, scores: Tensor) -> Tensor:
        """Return what attention makes of scores."""
        return scores.masked_fill(~self.seen, float("-inf")).softmax(-1) * self.factor


def causal(rows: int, keys: int, device: torch.device) -> Selection:
    """Return a causal mask, bottom-right aligned."""
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    return Selection({"is_causal": True}, seen, torch.ones((), device=device))


def masked(shape: tuple[int, int, int, int], device: torch.device) -> Selection:
    """Return a mask of keys and one of pairs per head, with dropout, for (B, H, N, L) scores."""
    batch, heads, rows, keys = shape
    generator = torch.Generator().manual_seed(11)
    key_mask = (torch.rand(batch, keys, generator=generator) < 0.8).to(device)
    pair_mask = (torch.rand(1, heads, rows, keys, generator=generator) < 0.8).to(device)
    dropout = AttentionDropout(0.3, RandomKey(3, step=5, layer=2))
    kept = dropout.keep(batch, heads, range(rows), range(keys), device)
    words = dropout.key.philox_key(STREAM_DROPOUT), dropout.key.samples(batch, device)
    options: PairOptions = {
        "key_mask": key_mask,
        "pair_mask": pair_mask,
        "draw": draw_tensor(*words),
        "threshold": dropout.threshold,
    }
    return Selection(options, key_mask[:, None, None] & pair_mask, kept * dropout.scale)

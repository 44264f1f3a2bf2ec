"""A self-test of kernels on the current machine, at their first use.

Compilers and drivers differ; a kernel that is wrong on this machine must not train a model. A
family of kernels is named folder/family, for example `dense/mgk`: the folder's module `selftest`
has `self_test(family, device, dtype, sizes)`, which runs the kernel on small tensors with the
call's query and value head sizes and returns pairs (found, float64). It should use few launches,
because the first call waits for their compilation. The result is cached in the process, per family,
GPU, Triton version, dtype and head sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import NamedTuple

import torch
from torch import Tensor

from lit_probattn.base.memory import is_predicting
from lit_probattn.base.torch_internals import outside_modes
from lit_probattn.kernels.runtime import PairOptions, draw_tensor
from lit_probattn.randomness import STREAM_DROPOUT, AttentionDropout, RandomKey

# Largest error relative to the largest element: a few roundings, far below a wrong term.
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

HeadDims = tuple[int, int]  # sizes of query and value heads
SelfTest = Callable[[str, torch.device, torch.dtype, HeadDims], list[tuple[Tensor, Tensor]]]
_results: dict[tuple[object, ...], str | None] = {}  # by family, GPU, Triton, dtype and sizes


def failure(family: str, dtype: torch.dtype, head_dims: HeadDims) -> str | None:
    """Run the self-test of a family once on the current GPU; return how it failed, or None.

    Warns once if it fails. Random states and modes of the caller are unchanged. While memory is
    predicted, nothing is launched or tested.
    """
    if is_predicting():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    key = (family, gpu, metadata.version("triton"), dtype, head_dims)
    if key not in _results:
        _results[key] = run(family, device, dtype, head_dims)
        if _results[key] is not None:
            warnings.warn(f"kernel {family}: {_results[key]}; it is not used", stacklevel=3)
    return _results[key]


def run(family: str, device: torch.device, dtype: torch.dtype, head_dims: HeadDims) -> str | None:
    """Run a self-test; return "failed …", or None if it passes."""
    sizes = " and ".join(str(size) for size in dict.fromkeys(head_dims))
    where = f"on {device} in {str(dtype).removeprefix('torch.')} with heads of {sizes}"
    folder, name = family.split("/")
    test: SelfTest = import_module(f"{__package__}.{folder}.selftest").self_test
    try:
        # Inference mode, which Lightning uses for validation, would disable gradients.
        with torch.inference_mode(False), torch.enable_grad(), outside_modes():
            pairs = test(name, device, dtype, head_dims)
            errors = [_relative_error(found, exact) for found, exact in pairs]
    except Exception as error:  # compilers raise any kind of exception
        return f"failed its self-test {where}: {type(error).__name__}: {str(error)[:200]}"
    worst = max(errors)
    if worst <= BOUND[dtype]:
        return None
    return f"failed its self-test {where}: relative error {worst:.1e}, at most {BOUND[dtype]:.0e}"


def _relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest error relative to the largest exact element; inf if not finite."""
    error = (found.double() - exact.double()).abs().max() / exact.double().abs().max()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def random_tensor(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return normal numbers from a separate generator, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def in_float64(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return float64 leaves with the same values."""
    return [x.detach().double().requires_grad_() for x in tensors]


def beside(
    found: Sequence[Tensor],
    truth: Sequence[Tensor],
    leaves: Sequence[Tensor],
    exact: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (found, float64) of the outputs and of the gradients of all leaves."""
    grads = torch.autograd.grad(found, leaves, cotangents)
    true = torch.autograd.grad(truth, exact, [x.double() for x in cotangents])
    pairs = zip((*found, *grads), (*truth, *true), strict=True)
    return [(x.detach(), y.detach()) for x, y in pairs]


class Selection(NamedTuple):
    """Masks and dropout of a call, as kernel arguments and per pair.

    Args:
        seen: allowed pairs, broadcastable to (B, H, N, L).
        factor: 0 for dropped pairs and 1 / (1 - p) for others.
    """

    options: PairOptions
    seen: Tensor
    factor: Tensor

    def weights(self, scores: Tensor) -> Tensor:
        """Return attention weights of scores; zeros in rows without allowed pairs."""
        weights = scores.masked_fill(~self.seen, float("-inf")).softmax(-1)
        return weights.masked_fill(~self.seen.any(-1, keepdim=True), 0.0) * self.factor


def causal(rows: int, keys: int, device: torch.device) -> Selection:
    """Return a causal mask, bottom-right aligned."""
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    return Selection({"is_causal": True}, seen, torch.ones((), device=device))


def masked(shape: tuple[int, int, int, int], device: torch.device) -> Selection:
    """Return masks of keys, queries and pairs per head, with dropout, for (B, H, N, L) scores.

    The first half of the first sample's queries is not needed. They have no allowed pairs either,
    so that their outputs are zero whether or not a kernel skips them.
    """
    batch, heads, rows, keys = shape
    generator = torch.Generator().manual_seed(11)
    key_mask = (torch.rand(batch, keys, generator=generator) < 0.8).to(device)
    pair_mask = (torch.rand(1, heads, rows, keys, generator=generator) < 0.8).to(device)
    query_mask = torch.ones(batch, rows, dtype=torch.bool, device=device)
    query_mask[0, : rows // 2] = False
    pair_mask = pair_mask & query_mask[:, None, :, None]
    dropout = AttentionDropout(0.3, RandomKey(3, step=5, layer=2))
    kept = dropout.keep(batch, heads, range(rows), range(keys), device)
    words = dropout.key.philox_key(STREAM_DROPOUT), dropout.key.samples(batch, device)
    options: PairOptions = {
        "key_mask": key_mask,
        "query_mask": query_mask,
        "pair_mask": pair_mask,
        "draw": draw_tensor(*words),
        "threshold": dropout.threshold,
    }
    return Selection(options, key_mask[:, None, None] & pair_mask, kept * dropout.scale)

"""Launch configurations by measurement: the fastest candidate of every kernel on this GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lit_probattn.kernels.launch import Launch, Shape, forced_for, seen_shapes, write_tuned
from profiling.kernels.cases import Case, compile_cases
from profiling.kernels.compile import HEAD_DIMS
from profiling.kernels.parity import heads_and_gradients, make_inputs
from profiling.measure.environment import device_name, versions
from profiling.measure.timing import summarise, time_once

_TOKENS, _LENGTH, _REPEATS = 16384, 4096, 5


def candidates(shape: Shape) -> Iterator[Launch]:
    """Return what is worth trying for a kernel."""
    tiles = [(128, 64), (128, 32), (64, 64), (64, 32), (128, 128), (64, 128), (32, 64), (32, 32)]
    for (block_q, block_k), warps, stages in product(tiles, (4, 8), (2, 3)):
        if "key" in shape.kernel:  # the outer tile is one of keys
            block_q, block_k = block_k, block_q
        if block_q * block_k * shape.num_tiles <= 128 * 128 * 2:
            yield Launch(block_q, block_k, warps, stages)


def tune(
    head_dims: Sequence[int] = HEAD_DIMS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    cases: Sequence[Case] | None = None,
) -> tuple[str, list[dict[str, object]]]:
    """Time forward and backward with every candidate; store the fastest of every kernel.

    A candidate that does not compile, or does not fit, is passed over. Kernels are tuned one after
    the other, the others keeping what they have.

    Returns:
        The file that holds the table, and a line per kernel.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    best: dict[str, Launch] = {}
    lines: list[dict[str, object]] = []
    for case, head_dim, dtype in product(cases or compile_cases(), head_dims, dtypes):
        heads = max(1, 512 // head_dim // case.options.get("num_components", 1))
        torch.manual_seed(0)
        layer = case.layer(head_dim, head_dim, **{**case.options, "num_heads": heads}).to(device)
        inputs = make_inputs(layer, case, _LENGTH, _LENGTH, dtype, seed=0, clear=False)

        def run() -> None:
            heads_and_gradients(layer, "triton", inputs, dtype)  # noqa: B023

        with seen_shapes() as shapes:
            run()
        for shape in shapes:
            if shape.key in best:
                continue
            times = {}
            for launch in candidates(shape):
                try:
                    with _disable_current_modes(), forced_for(shape.key, launch):
                        run()
                        seconds = [time_once(run, device) for _ in range(_REPEATS)]
                except Exception:  # a candidate may ask for more than the GPU has
                    continue
                times[launch] = summarise(seconds).median_s
            if times:
                best[shape.key] = min(times, key=lambda launch: times[launch])
                lines.append(
                    {
                        "kernel": shape.key,
                        "best": str(best[shape.key]),
                        "candidates": len(times),
                        "ms": f"{times[best[shape.key]] * 1e3:.3f}",
                    }
                )
    about = f"{device_name('cuda')}; {versions()}; N = {_LENGTH}, causal"
    path = write_tuned(torch.cuda.get_device_capability(device), best, about)
    return str(path), lines

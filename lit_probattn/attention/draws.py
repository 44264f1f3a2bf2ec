"""Random draws for attention, by the C library on a CPU if its self-test passes, else by torch.

Both give the same bits, so results do not depend on the choice. Under a compiler, a key whose seed
is a tensor draws by operators, which become part of the graph; other keys break the graph. An
exported program draws by PyTorch operations, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from lit_probattn import randomness
from lit_probattn.attention.masks import span
from lit_probattn.base.graphs import written
from lit_probattn.base.memory import is_computed, only_shapes
from lit_probattn.base.torch_internals import is_mapped, outside_graphs
from lit_probattn.randomness import AttentionDropout, RandomKey

Rest = ParamSpec("Rest")
_Draw = Callable[Concatenate[RandomKey, Rest], Tensor]


def fresh_key() -> RandomKey:
    """Return a new key from torch's generator on the CPU.

    Raises:
        NotImplementedError: the seed differs between the entries of `torch.func.vmap`.
    """
    seed = torch.randint(2**62, (1,), device="cpu")
    if is_mapped(seed):
        raise NotImplementedError(
            "dropout, noise and random features have one draw for all entries of torch.func.vmap: "
            'set randomness="same", or pass rng=RandomKey(seed)'
        )
    return RandomKey(int(seed) if written() is None else seed)


def traceable(
    name: str, arguments: str, empty: Callable[..., Tensor]
) -> Callable[[_Draw[Rest]], _Draw[Rest]]:
    """Return a decorator for draws (key, *rest), which compiled graphs contain as operators.

    Args:
        name: the operator is `lit_probattn::<name>`.
        arguments: schema of the arguments after the key.
        empty: (*rest) -> an empty tensor of the draw's shape, for graphs.
    """

    def decorate(draw: _Draw[Rest]) -> _Draw[Rest]:
        eager: Callable[..., Tensor] = outside_graphs(draw)

        def run(seed: Tensor, ids: Tensor | None, step: int, layer: int, *rest: Any) -> Tensor:
            return eager(RandomKey(int(seed), step, ids, layer), *rest)

        key = "Tensor seed, Tensor? ids, SymInt step, SymInt layer"
        schema = f"({key}, {arguments}) -> Tensor"
        made = torch.library.custom_op(f"lit_probattn::{name}", run, mutates_args=(), schema=schema)
        made.register_fake(lambda seed, ids, step, layer, *rest: empty(*rest))
        operator: Callable[..., Tensor] = made

        @wraps(draw)
        def call(key: RandomKey, *rest: Any) -> Tensor:
            if isinstance(key.seed, Tensor) and written() == "compiled":
                return operator(key.seed, key.sample_ids, key.step, key.layer, *rest)
            return eager(key, *rest)

        return call  # type: ignore[return-value]

    return decorate


def keep_pairs(
    dropout: AttentionDropout,
    batch_size: int,
    num_heads: int,
    rows: range,
    cols: range,
    device: torch.device,
) -> Tensor:
    """Return `AttentionDropout.keep` of a block, (B, H, rows, cols) bool."""
    block = [rows.start, rows.stop, cols.start, cols.stop]
    return _kept(dropout.key, dropout.p, batch_size, num_heads, block, device)


def normal_noise(
    key: RandomKey,
    batch_size: int,
    num_maps: int,
    rows: range,
    cols: range,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return `randomness.normal_noise` of a block, (B, num_maps, rows, cols)."""
    block = [rows.start, rows.stop, cols.start, cols.stop]
    return _noise(key, batch_size, num_maps, block, device, dtype)


@traceable(
    "philox_words",
    "SymInt stream, SymInt batch_size, Device device",
    lambda stream, batch_size, device: torch.empty(
        2 + batch_size, dtype=torch.int64, device=device
    ),
)
def philox_words(key: RandomKey, stream: int, batch_size: int, device: torch.device) -> Tensor:
    """Return the words that kernels draw from, (2 + B,) int64; see `runtime.draw_tensor`."""
    from lit_probattn.kernels.runtime import draw_tensor

    return draw_tensor(key.philox_key(stream), key.samples(batch_size, device))


# ---- blocks of draws -----------------------------------------------------------------------------


def _empty(batch: int, maps: int, block: list[int], device: Any, dtype: torch.dtype) -> Tensor:
    sizes = (batch, maps, block[1] - block[0], block[3] - block[2])
    return torch.empty(sizes, dtype=dtype, device=device)


def _is_shape(device: torch.device) -> bool:
    """Whether a draw has a shape only, as in predictions of memory; it is then one allocation."""
    return device.type == "meta" or only_shapes(torch.empty(0, device=device))


def _is_native(device: torch.device) -> bool:
    """Whether new tensors have memory on the CPU, and no graph is recorded.

    Those inside `torch.func.functionalize` have the address 0.
    """
    if device.type != "cpu":
        return False
    made = torch.empty(1, device=device)
    return is_computed(made) and made.data_ptr() != 0


@traceable(
    "keep_pairs",
    "float p, SymInt batch_size, SymInt num_heads, SymInt[] block, Device device",
    lambda p, batch, heads, block, device: _empty(batch, heads, block, device, torch.bool),
)
def _kept(
    key: RandomKey,
    p: float,
    batch_size: int,
    num_heads: int,
    block: list[int],
    device: torch.device,
) -> Tensor:
    if _is_shape(device):
        return _empty(batch_size, num_heads, block, device, torch.bool)
    dropout, rows, cols = AttentionDropout(p, key), span(*block[:2]), span(*block[2:])
    if _is_native(device):
        from lit_probattn.kernels.cpu import draws as native
        from lit_probattn.kernels.cpu.selftest import failure

        if failure() is None:
            return native.keep(dropout, batch_size, num_heads, rows, cols)
    return dropout.keep(batch_size, num_heads, rows, cols, device)


@traceable(
    "normal_noise",
    "SymInt batch_size, SymInt num_maps, SymInt[] block, Device device, ScalarType dtype",
    _empty,
)
def _noise(
    key: RandomKey,
    batch_size: int,
    num_maps: int,
    block: list[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    if _is_shape(device):
        return _empty(batch_size, num_maps, block, device, dtype)
    rows, cols = span(*block[:2]), span(*block[2:])
    if dtype == torch.float32 and _is_native(device):
        from lit_probattn.kernels.cpu import draws as native
        from lit_probattn.kernels.cpu.selftest import draws_noise

        if draws_noise():
            return native.normal_noise(key, batch_size, num_maps, rows, cols)
    return randomness.normal_noise(key, batch_size, num_maps, rows, cols, device, dtype)

"""Random draws for attention, by the C library on a CPU if its self-test passes, else by torch.

Both give the same bits, so results do not depend on the choice. Under a compiler, a key whose seed
is a tensor draws by operators of this module, which become part of the graph; other keys break the
graph. An exported program draws by PyTorch operations, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_probattn import randomness
from lit_probattn.base.graphs import written
from lit_probattn.base.memory import is_computed, only_shapes
from lit_probattn.base.torch_internals import outside_graphs
from lit_probattn.randomness import AttentionDropout, RandomKey


def fresh_key() -> RandomKey:
    """Return a new key from torch's generator on the CPU."""
    seed = torch.randint(2**62, (1,), device="cpu")
    return RandomKey(int(seed) if written() is None else seed)


def is_traced(key: RandomKey) -> bool:
    """Whether a graph of `torch.compile` contains the draws of a key as operators."""
    return isinstance(key.seed, Tensor) and written() == "compiled"


def keep_pairs(
    dropout: AttentionDropout,
    batch_size: int,
    num_heads: int,
    rows: range,
    cols: range,
    device: torch.device,
) -> Tensor:
    """Return `AttentionDropout.keep` of a block, (B, H, rows, cols) bool."""
    key = dropout.key
    if not is_traced(key):
        return _keep_pairs(dropout, batch_size, num_heads, rows, cols, device)
    assert isinstance(key.seed, Tensor)
    block = [rows.start, rows.stop, cols.start, cols.stop]
    kept: Tensor = _keep_operator(
        *(key.seed, key.sample_ids, key.step, key.layer, dropout.p),
        *(batch_size, num_heads, block, device),
    )
    return kept


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
    if not is_traced(key):
        return _normal_noise(key, batch_size, num_maps, rows, cols, device, dtype)
    assert isinstance(key.seed, Tensor)
    block = [rows.start, rows.stop, cols.start, cols.stop]
    noise: Tensor = _noise_operator(
        *(key.seed, key.sample_ids, key.step, key.layer),
        *(batch_size, num_maps, block, device, dtype),
    )
    return noise


def philox_words(key: RandomKey, stream: int, batch_size: int, device: torch.device) -> Tensor:
    """Return the words that kernels draw from, (2 + B,) int64; see `runtime.draw_tensor`."""
    if not is_traced(key):
        return _philox_words(key, stream, batch_size, device)
    assert isinstance(key.seed, Tensor)
    words: Tensor = _words_operator(
        key.seed, key.sample_ids, key.step, key.layer, stream, batch_size, device
    )
    return words


# ---- eager draws -----------------------------------------------------------------------------


@outside_graphs
def _keep_pairs(
    dropout: AttentionDropout,
    batch_size: int,
    num_heads: int,
    rows: range,
    cols: range,
    device: torch.device,
) -> Tensor:
    if device.type == "meta":
        shape = (batch_size, num_heads, len(rows), len(cols))
        return torch.empty(shape, dtype=torch.bool, device=device)
    if _plain(device):
        from lit_probattn.kernels.cpu import draws as native
        from lit_probattn.kernels.cpu.selftest import failure

        if failure() is None:
            return native.keep(dropout, batch_size, num_heads, rows, cols)
    if _fake():
        key, block = dropout.key, [rows.start, rows.stop, cols.start, cols.stop]
        kept: Tensor = _keep_operator(
            *(torch.empty(1, dtype=torch.int64), key.sample_ids, 0, 0, dropout.p),
            *(batch_size, num_heads, block, device),
        )
        return kept
    return dropout.keep(batch_size, num_heads, rows, cols, device)


@outside_graphs
def _normal_noise(
    key: RandomKey,
    batch_size: int,
    num_maps: int,
    rows: range,
    cols: range,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    if device.type == "meta":
        return torch.empty((batch_size, num_maps, len(rows), len(cols)), dtype=dtype, device=device)
    if dtype == torch.float32 and _plain(device):
        from lit_probattn.kernels.cpu import draws as native
        from lit_probattn.kernels.cpu.selftest import draws_noise

        if draws_noise():
            return native.normal_noise(key, batch_size, num_maps, rows, cols)
    if _fake():
        block = [rows.start, rows.stop, cols.start, cols.stop]
        noise: Tensor = _noise_operator(
            *(torch.empty(1, dtype=torch.int64), key.sample_ids, 0, 0),
            *(batch_size, num_maps, block, device, dtype),
        )
        return noise
    return randomness.normal_noise(key, batch_size, num_maps, rows, cols, device, dtype)


def _philox_words(key: RandomKey, stream: int, batch_size: int, device: torch.device) -> Tensor:
    from lit_probattn.kernels.runtime import draw_tensor

    return draw_tensor(key.philox_key(stream), key.samples(batch_size, device))


def _plain(device: torch.device) -> bool:
    """Whether new tensors have memory on the CPU, and no graph is recorded."""
    return device.type == "cpu" and is_computed(torch.empty(0))


def _fake() -> bool:
    """Whether new tensors have shapes only, as in predictions of memory.

    A draw is then one operator, which allocates the same as the C library: its result.
    """
    return only_shapes(torch.empty(0))


# ---- operators of a graph ----------------------------------------------------------------------


def _operator(
    name: str, arguments: str, draw: Callable[..., Tensor], empty: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Define `lit_probattn::<name>`, whose draw is identified by the parts of a key.

    Args:
        name: name of the operator.
        arguments: its schema, after the schema of the key.
        draw: (key, *arguments) -> the draw.
        empty: (*arguments) -> an empty tensor of its shape, for graphs and predictions.
    """

    def run(seed: Tensor, sample_ids: Tensor | None, step: int, layer: int, *rest: Any) -> Tensor:
        return draw(RandomKey(int(seed), step, sample_ids, layer), *rest)

    key = "Tensor seed, Tensor? sample_ids, SymInt step, SymInt layer"
    schema = f"({key}, {arguments}) -> Tensor"
    made = torch.library.custom_op(f"lit_probattn::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(lambda seed, sample_ids, step, layer, *rest: empty(*rest))
    return made


_keep_operator = _operator(
    "keep_pairs",
    "float p, SymInt batch_size, SymInt num_heads, SymInt[] block, Device device",
    lambda key, p, batch_size, num_heads, block, device: _keep_pairs(
        AttentionDropout(p, key),
        batch_size,
        num_heads,
        range(*block[:2]),
        range(*block[2:]),
        device,
    ),
    lambda p, batch_size, num_heads, block, device: torch.empty(
        (batch_size, num_heads, block[1] - block[0], block[3] - block[2]),
        dtype=torch.bool,
        device=device,
    ),
)
_noise_operator = _operator(
    "normal_noise",
    "SymInt batch_size, SymInt num_maps, SymInt[] block, Device device, ScalarType dtype",
    lambda key, batch_size, num_maps, block, device, dtype: _normal_noise(
        key, batch_size, num_maps, range(*block[:2]), range(*block[2:]), device, dtype
    ),
    lambda batch_size, num_maps, block, device, dtype: torch.empty(
        (batch_size, num_maps, block[1] - block[0], block[3] - block[2]),
        dtype=dtype,
        device=device,
    ),
)
_words_operator = _operator(
    "philox_words",
    "SymInt stream, SymInt batch_size, Device device",
    _philox_words,
    lambda stream, batch_size, device: torch.empty(
        2 + batch_size, dtype=torch.int64, device=device
    ),
)

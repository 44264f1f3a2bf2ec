"""Comparisons that several test files make."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    get_origin,
    get_type_hints,
)

import pytest
import torch
from torch import Tensor, nn

from lit_probattn.base.arguments import Range, parts_of
from lit_probattn.base.errors import ConfigError

# Imported by conftest before kernels are: attention brings Triton along, through PyTorch.
if TYPE_CHECKING:
    from lit_probattn.attention import Attention
    from lit_probattn.attention.backends import Backend
    from lit_probattn.randomness import RandomKey


def listening_on(port: int) -> list[str]:
    """Addresses, as Linux writes them, on which this machine listens at a port."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for path in tables if path.exists() for line in path.open()]
    found = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [address for address, number in found if int(number, 16) == port]


LOOPBACK = "0100007F"


def double(*shape: int) -> Tensor:
    """Return standard normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def run_with_gradients(
    layer: nn.Module, inputs: list[Tensor], call: Callable[[list[Tensor]], Tensor], seed: int = 7
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output and the gradient of every input and parameter for a fixed cotangent."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    layer.zero_grad(set_to_none=True)
    out = call(leaves)
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    out.backward(cotangent)
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    for index, leaf in enumerate(leaves):
        if leaf.grad is not None:
            grads[f"input{index}"] = leaf.grad
    return out.detach(), grads


def largest_difference(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> tuple[float, float]:
    """Return the largest absolute difference of outputs, and of any gradient.

    A gradient that only one side has counts as a difference unless it is zero.
    """
    out = (found[0].double() - expected[0].double()).abs().max().item() if found[0].numel() else 0.0
    grad = 0.0
    for name in {*found[1], *expected[1]}:
        a, b = found[1].get(name), expected[1].get(name)
        if a is None or b is None:
            only = a if a is not None else b
            difference = only.double().abs().max().item()
        else:
            difference = (a.double() - b.double()).abs().max().item()
        # NaN must not pass a comparison.
        grad = max(grad, difference if difference == difference else float("inf"))
    return (out if out == out else float("inf")), grad


def cpu_backends(layer: Attention) -> list[str]:
    """Return the implementations that run on this CPU in float64; kernels have their own tests."""
    from lit_probattn.attention.own.contract import cpu_backends as found

    return found(layer)


def _no_library() -> str | None:
    from lit_probattn.attention.engines.native import native_refusal

    return native_refusal("cpu")


def skip_without_library(backend: str) -> None:
    """Skip a test of `native` if the C library does not run on this CPU."""
    reason = _no_library() if backend == "native" else None
    if reason is not None:
        pytest.skip(f"the C library {reason}")


def use_oracle(layer: Attention, oracle: Callable[..., Tensor]) -> None:
    """Let an independent function compute the layer's heads, in place of every backend.

    Args:
        layer: changed in place.
        oracle: takes query, key, value, and by name masks, dropout and the variant's own arguments;
            those that it does not name must have their defaults.
    """
    from lit_probattn.attention.variant import Engine

    core, engine = layer.core, Engine(as_backend(oracle))
    made = type(core).variant

    def variant(call):
        found = made(core, call)
        object.__setattr__(found, "own_engines", {"reference": engine})
        return found

    core.variant = variant
    layer.backend = "reference"


def use_backend(layer: Attention, backend: Backend) -> None:
    """Let the layer compute with its own implementations again, by the one that is named.

    The test is skipped where `native` is named and there is no library.
    """
    skip_without_library(backend)
    vars(layer.core).pop("variant", None)
    layer.backend = backend


def as_backend(oracle: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an oracle with the signature of a backend."""
    known = inspect.signature(oracle).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())

    def backend(call, arguments) -> Tensor:
        query, key, value, masks, dropout = call.heads
        given = {}
        if "scale_ratio" in known:
            given["scale_ratio"] = call.scale_ratio()
        if hasattr(arguments, "components"):  # the oracle knows keys of every component
            key, arguments = (
                arguments.components(key),
                dataclasses.replace(arguments, key_shift=None),
            )
        for field in dataclasses.fields(arguments):
            content = getattr(arguments, field.name)
            if field.name in known or takes_all:
                given[field.name] = content
            else:
                assert content == field.default, f"the oracle does not know {field.name}"
        return oracle(query, key, value, masks=masks, dropout=dropout, **given)

    return backend


def make_call(
    layer: Attention,
    num_queries: int,
    num_keys: int,
    masks: str = "none",
    is_causal: bool = False,
    rng: RandomKey | None = None,
) -> tuple[list[Tensor], Callable[[list[Tensor]], Tensor]]:
    """Return inputs of two samples in float64 (query, key, value, bias), and the call on them.

    Args:
        masks: `key` (the second sample has no real token), `pairs` and `bias`, joined by `+`.
    """
    generator = torch.Generator().manual_seed(num_queries * 100 + num_keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def coin(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < 0.6

    key_mask = coin(2, num_keys) if "key" in masks else None
    if key_mask is not None:
        key_mask[1] = False
    pairs = coin(2, 1, num_queries, num_keys) if "pairs" in masks else None
    bias = [normal(1, layer.num_heads, num_queries, num_keys)] if "bias" in masks else []
    inputs = [normal(2, n, layer.embed_dim) for n in (num_queries, num_keys, num_keys)]

    def call(leaves: list[Tensor]) -> Tensor:
        bias = leaves[3] if len(leaves) > 3 else None
        if bias is not None and layer.backend == "sdpa":
            bias = bias.detach()  # PyTorch's fused attention refuses a bias that wants a gradient
        given = {"key_mask": key_mask, "attn_mask": pairs, "bias": bias}
        return layer(*leaves[:3], is_causal=is_causal, rng=rng, **given)

    return [*inputs, *bias], call


def assert_same(
    found: tuple[Tensor, dict[str, Tensor]],
    expected: tuple[Tensor, dict[str, Tensor]],
    tolerance: float = 1e-12,
    case: object = "",
) -> None:
    """Compare outputs, and gradients with ten times the tolerance."""
    out, grad = largest_difference(found, expected)
    assert out < tolerance, case
    assert grad < 10 * tolerance, case


def assert_equals_the_sums(
    layer: Attention,
    oracle: Callable[..., Tensor],
    backends: Sequence[str],
    case: tuple[tuple[int, int], str, bool],
    *,
    rng: RandomKey | None = None,
    tolerance: float = 1e-12,
) -> dict[str, Tensor]:
    """Compare backends with an oracle, output and every gradient; return the last gradients.

    Args:
        case: numbers of queries and keys, masks of `make_call`, and whether the call is causal.
        tolerance: of the output in float64; the default suits sums of up to 57 terms of order one.
    """
    (rows, cols), masks, is_causal = case
    inputs, call = make_call(layer, rows, cols, masks, is_causal, rng)
    use_oracle(layer, oracle)
    output, grads = run_with_gradients(layer, inputs, call)
    found: dict[str, Tensor] = {}
    for backend in backends:
        use_backend(layer, backend)
        result = run_with_gradients(layer, inputs, call)
        wanted = grads if layer.backend != "sdpa" else {**grads, "input3": torch.zeros(())}
        assert_same(result, (output, wanted), tolerance, (backend, *case))
        found = result[1]
    return found


def assert_dropout_draws_the_pairs_of(
    oracle: Callable[..., Tensor], layer: Attention, backend: str
) -> None:
    """Compare attention dropout with an oracle that reads the same draw; it must drop something."""
    from lit_probattn.randomness import RandomKey

    rng = RandomKey(3, step=5, sample_ids=torch.tensor([41, 7]), layer=2)
    assert_equals_the_sums(layer, oracle, [backend], ((13, 19), "key", True), rng=rng)
    inputs, call = make_call(layer, 13, 19, "key", True, rng)
    kept, _ = run_with_gradients(layer, inputs, call)
    layer.eval()
    assert (run_with_gradients(layer, inputs, call)[0] - kept).abs().max() > 1e-3


def assert_blocks_of_any_size_agree(layer: Attention) -> None:
    """Compare blocks of queries with the reference, output and every gradient."""
    from lit_probattn.attention.own.contract import small_blocks
    from lit_probattn.randomness import RandomKey

    rng = RandomKey(0, sample_ids=torch.tensor([1, 2]))
    inputs, call = make_call(layer, 17, 17, "key+pairs+bias", True, rng)
    layer.backend = "reference"
    expected = run_with_gradients(layer, inputs, call)
    layer.backend = "blockwise"
    for scores in (1, 500, 1200, 1 << 20):  # rows of a head, a head, heads of both samples, all
        with small_blocks(scores):
            assert_same(run_with_gradients(layer, inputs, call), expected)


@torch.no_grad()
def cache_bytes_per_token(layer: Attention, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Measure a layer's memory in decoding: bytes for each further token, and constant bytes."""
    was_training = layer.training
    layer.eval()
    held = []
    for length in (2, 5):
        cache = layer.new_cache()
        layer(torch.zeros(1, length, layer.embed_dim, dtype=dtype), is_causal=True, cache=cache)
        held.append(cache.num_bytes)
    layer.train(was_training)
    per_token = (held[1] - held[0]) // 3
    return per_token, held[0] - 2 * per_token


def types_of(cls: type) -> dict[str, Any]:
    """Return the types of arguments, those of base classes included."""
    hints: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            hints = get_type_hints(vars(base)["__init__"], include_extras=True) | hints
    return hints


def _others(kind: Any) -> Iterator[tuple[Any, str]]:
    """Values that a type does not declare, and what is said of them."""
    parts, notes = parts_of(kind)
    if len(parts) == 1 and get_origin(parts[0]) is Literal:
        yield "neither", "one of .*"
    if float in parts:
        yield float("nan"), "a number"
    number = float if float in parts else int
    for known in notes:
        if not isinstance(known, Range):
            continue
        told = re.escape(str(known))
        outside = [known.above, known.below]
        outside += [known.least - 1] if known.least is not None else []
        outside += [known.most + 1] if known.most is not None else []
        yield from ((number(value), told) for value in outside if value is not None)
        if number is float:
            yield from ((value, "finite") for value in (float("inf"), float("-inf")))


def refuses_other_values(make: Callable[..., Any], kinds: Mapping[str, Any]) -> set[str]:
    """Assert that arguments are refused by name if their types do not declare the value.

    Returns:
        The numbers that may have any value.
    """
    free = set()
    for name, kind in kinds.items():
        parts, notes = parts_of(kind)
        if {int, float} & {*parts} and not any(isinstance(known, Range) for known in notes):
            free.add(name)
        for value, told in _others(kind):
            with pytest.raises(ConfigError, match=f"^{name} must be {told}, received {value!r}$"):
                make(**{name: value})
    return free


def error_of(
    command: Any,
    door: Callable[[Any], int] | None = None,
    status: int | None = 2,
    *,
    alone: bool = True,
) -> str:
    """Return the one line of an error on stderr of a command that fails.

    Args:
        command: its words.
        door: runs them, and returns the exit status; by default the package's command line.
        status: the exit status; None means 1 or 2.
        alone: whether stderr has no other line.

    Raises:
        AssertionError: another exit status, or another number of lines.
    """
    from lit_probattn.__main__ import main

    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            found: Any = (door or main)(command)
        except SystemExit as stop:  # of a parser
            found = stop.code
    assert found in ((1, 2) if status is None else (status,)), f"exit status {found}"
    lines = told.getvalue().splitlines()
    found = [line for line in lines if line.startswith("error")]
    assert len(found) == 1, told.getvalue()
    assert found == lines or not alone, told.getvalue()
    return found[0]


def with_options(words: Sequence[str], *more: str) -> list[str]:
    """Words of a command with further options, which replace equal ones and their values."""
    kept: list[str] = []
    replaced = False
    for word in words:
        replaced = word in more if word.startswith("--") else replaced
        if not replaced:
            kept.append(word)
    return [*kept, *more]

"""Count the multiply-adds and parameters of a point's model, and compare with closed forms.

The blocks of a stack are identical, which is checked; one is counted and multiplied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lit_probattn.attention import Attention
from lit_probattn.attention.backends import Backend, recorded_choices
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.torch_internals import FakeTensorMode
from lit_probattn.measure.counters import Macs, fvcore_macs, torch_macs, torch_train_macs
from lit_probattn.models.adaptive_softmax import AdaptiveSoftmax
from lit_probattn.models.transformer import Transformer
from profiling.cost.exact import ExactCost, attention_cost, backend_macs, scope_costs
from profiling.cost.models import AttentionOnly
from profiling.measure.rows import Scope
from profiling.sweep.models import build_model, make_inputs, model_shape
from profiling.sweep.plan import Point

# Allowed relative difference of measured value and closed form.
TOLERANCE = 1e-6
_OPERATORS = frozenset({"native", "triton"})  # tracing does not support them
SCOPES: tuple[Scope, ...] = ("attention", "layers", "model")


# The known columns of a row; see `profiling.measure.rows.ProfileRow`.
Entry = dict[str, Any]


@contextlib.contextmanager
def _fake_cpu() -> Iterator[str]:
    with FakeTensorMode(), torch.device("cpu"):
        yield "cpu"


@contextlib.contextmanager
def _meta() -> Iterator[str]:
    with torch.device("meta"):
        yield "meta"


def _device(backends: Collection[str], train: bool) -> AbstractContextManager[str]:
    """Return a context with the device on which backends run the operations of real tensors.

    The C library has fake CPU tensors only. PyTorch's attention runs on meta tensors as plain
    matrix products, on fake CPU tensors as the fused kernel, whose backward pass recomputes the
    scores.
    """
    return _fake_cpu() if "native" in backends or (train and "sdpa" in backends) else _meta()


def _layer_calls(point: Point) -> tuple[int, int]:
    """Return the number of sequences per attention layer, and of attention layers."""
    shape = model_shape(point)
    return (point.batch_size, 1) if shape is None else (shape.calls, shape.num_attentions)


def attention_layers(model: nn.Module) -> list[Attention]:
    """Return the attention layers of a model, in order."""
    return [m for m in model.modules() if isinstance(m, Attention)]


def stacks(model: nn.Module) -> list[Transformer]:
    """Return the stacks of blocks of a model."""
    return [m for m in model.modules() if isinstance(m, Transformer)]


def require_identical(blocks: nn.ModuleList) -> None:
    """Raise a ValueError if blocks of a stack differ in structure or parameter shapes."""

    def signature(block: nn.Module) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
        return repr(block), [(n, tuple(p.shape)) for n, p in block.named_parameters()]

    first = signature(blocks[0])
    for index, block in enumerate(blocks):
        if signature(block) != first:
            raise ValueError(f"block {index} differs from block 0: expected identical blocks")


def count_parameters(model: nn.Module, attention_only: bool) -> dict[Scope, int]:
    """Count the parameters of the attention layers, the blocks and the whole model."""
    layers = attention_layers(model)
    counts: dict[Scope, int] = {"attention": sum(_numel(layer) for layer in layers)}
    if not attention_only:
        counts["layers"] = sum(_numel(stack.blocks) for stack in stacks(model))
        counts["model"] = _numel(model)
    return counts


def table_parameters(model: nn.Module) -> int:
    """Count token and position embeddings, including an output layer tied to them."""
    tables = (nn.Embedding, AdaptiveSoftmax)
    return sum(_numel(m) for m in model.modules() if isinstance(m, tables))


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _backend_note(layer: Attention, inputs: Tensor, backend: str, train: bool) -> str:
    """Return the operations that the backend runs, and the recomputation in the backward pass."""
    view = AttentionOnly(layer)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        view(inputs)
    operations = sorted(str(k).removeprefix("aten.") for k in counter.flop_counts["Global"])
    note = f"{backend}: {', '.join(operations)}"
    if train:
        ratio = torch_train_macs(view, inputs).products / max(1, counter.get_total_flops() // 2)
        note += f"; forward + backward = {ratio:.4f} x forward (3 if nothing is computed again)"
    return note


def _selected(point: Point) -> list[str]:
    """Return the backend of each attention layer of a point's model, in order.

    `auto` is what it selects on a CPU.
    """
    with _fake_cpu() as device:
        model = build_model(point)
        layers = attention_layers(model)
        if point.backend != "auto":
            return [point.backend] * len(layers)
        found: dict[nn.Module, str] = {}

        def note(layer: nn.Module, *_: Any) -> None:
            found[layer] = list(recorded_choices().values())[-1]

        for layer in layers:
            layer.register_forward_hook(note)
        with torch.set_grad_enabled(point.mode == "train"):  # which a learned bias requires
            model(make_inputs(point, device))
        return [found[layer] for layer in layers]


def _build(point: Point, backends: Sequence[str]) -> tuple[nn.Module, list[Attention]]:
    """Return the point's model, whose attention layers have these backends, and the layers."""
    model = build_model(point)
    layers = attention_layers(model)
    for layer, name in zip(layers, backends, strict=True):
        layer.backend = cast(Backend, name)
    return model, layers


def count_costs(point: Point) -> tuple[Attention, list[Entry]]:
    """Return the first attention layer of a model, and measured and closed-form counts by scope.

    In training these are forward and backward; fvcore counts the forward pass only, of operators
    of a library as blocks.
    """
    train, selected = point.mode == "train", _selected(point)
    backend = " and ".join(sorted({*selected}))
    with torch.device("meta"):
        traced = ["blockwise" if name in _OPERATORS else name for name in selected]
        model, layers = _build(point, traced)
        for module in layers:
            module.dropout = 0.0  # has no products, and tracing does not support its generator
        layer = layers[0]
        measured = _measure(point, model, "meta", fvcore_macs)
        parameters = count_parameters(model, model_shape(point) is None)
        tables = table_parameters(model)
    with _device(selected, train) as device:
        model, (first, *_) = _build(point, selected)
        torch_counts = _measure(point, model, device, torch_train_macs if train else torch_macs)
        label = backend if point.backend == backend else f"{point.backend} ({backend})"
        note = _backend_note(first, _probe(point, first), label, train)
    same = not train and not _OPERATORS & {*selected}  # operations for both counters
    problem, exact = None, None
    try:
        exact = _exact(point, layer, backend)
    except UnsupportedError as error:
        problem = str(error)
    entries: list[Entry] = []
    for scope, operations in measured.items():
        found: Entry = {
            **{"source": "measured", "scope": scope, "backend_note": note, "reason": problem},
            **_products(torch_counts[scope].products),
            "fvcore_operations": operations.products + operations.norms,
            "num_parameters": parameters[scope],
        }
        if scope == "model":
            found["num_parameters_non_embedding"] = parameters["model"] - tables
        analytic = None if exact is None else exact[scope]
        entries.append(found | _differences(found, operations if same else None, analytic))
        if analytic is not None:
            entries.append(analytic)
    return layer, entries


def _products(macs: int | None) -> Entry:
    return {"macs": macs, "flops": None if macs is None else 2 * macs}


def _differences(found: Entry, fvcore: Macs | None, exact: Entry | None) -> Entry:
    """Compare a count with fvcore and the closed form; return the status of a difference."""
    told = []
    if fvcore is not None and _differ(found["macs"], fvcore.products):
        told.append(f"FlopCounterMode {found['macs']} and fvcore {fvcore.products} MACs")
    if exact is not None:
        if exact["macs"] is not None and _differ(found["macs"], exact["macs"]):
            told.append(f"measured {found['macs']} and closed form {exact['macs']} MACs")
        ours, theirs = found["num_parameters"], exact["num_parameters"]
        if ours != theirs:
            told.append(f"measured {ours} and closed form {theirs} parameters")
    return {"status": "mismatch", "reason": "; ".join(told)} if told else {}


def _differ(first: int | None, second: int | None) -> bool:
    if first is None or second is None:
        return first != second
    return abs(first - second) > TOLERANCE * max(abs(first), abs(second))


def _probe(point: Point, layer: Attention) -> Tensor:
    calls, _ = _layer_calls(point)
    shape = (calls, point.seq_len, layer.embed_dim)
    return torch.empty(*shape, dtype=getattr(torch, point.dtype))


def _measure(
    point: Point, model: nn.Module, device: str, count: Callable[[nn.Module, Tensor], Macs]
) -> dict[Scope, Macs]:
    """Count an attention layer, and stacks and model by models with one and two blocks."""
    if isinstance(getattr(model, "is_causal", None), bool):
        model.is_causal = False  # type: ignore[assignment]
    layer = attention_layers(model)[0]
    alone, (_, num_layers) = count(AttentionOnly(layer), _probe(point, layer)), _layer_calls(point)
    result: dict[Scope, Macs] = {"attention": alone.times(num_layers)}
    if model_shape(point) is None:
        return result
    found, inputs = stacks(model), make_inputs(point, device)
    whole = [stack.blocks for stack in found]
    for stack, blocks in zip(found, whole, strict=True):
        require_identical(blocks)
        stack.blocks = blocks[:1]
    result["model"], result["layers"] = (once := count(model, inputs)), Macs(0)
    for stack, blocks in zip(found, whole, strict=True):
        stack.blocks = nn.ModuleList(blocks[i % len(blocks)] for i in range(2))
        step = count(model, inputs).minus(once)
        stack.blocks = blocks[:1]
        result["layers"] = result["layers"].plus(step.times(len(blocks)))
        result["model"] = result["model"].plus(step.times(len(blocks) - 1))
    for stack, blocks in zip(found, whole, strict=True):
        stack.blocks = blocks
    return result


def _exact(point: Point, layer: Attention, backend: str) -> dict[Scope, Entry]:
    shape, train, dtype = model_shape(point), point.mode == "train", getattr(torch, point.dtype)
    one = attention_cost(layer, point.seq_len)
    run = backend_macs(layer, point.seq_len, backend, train=train, dtype=dtype)
    per_layer, num_layers = _layer_calls(point)
    calls = per_layer * num_layers
    reason = None if run is not None else f"no closed form for backend {backend}"
    costs: dict[str, ExactCost] = {
        "attention": ExactCost(one.macs * calls, 0, one.num_parameters * num_layers)
    }
    if shape is not None:
        costs = scope_costs(shape, one)
    printed = one.paper_flops if one.paper_flops_printed is None else one.paper_flops_printed
    entries: dict[Scope, Entry] = {}
    for scope in SCOPES[: len(costs)]:
        cost = costs[scope]
        macs = None
        if run is not None:
            rest = cost.macs - one.macs * calls
            macs = run * calls + rest * (3 if train else 1)
        found: Entry = {
            **{"source": "analytic", "scope": scope, "reason": reason, **_products(macs)},
            "num_parameters": cost.num_parameters,
        }
        if shape is not None and scope == "model":
            tables = shape.embedding_parameters
            found["num_parameters_non_embedding"] = cost.num_parameters - tables
        if backend == layer.core.makes.stated_backend:
            found["fvcore_operations"] = cost.macs + cost.norm_operations
        if scope == "attention":
            found["paper_operations"] = one.paper_flops * calls
            found["paper_operations_printed"] = printed * calls
        entries[scope] = found
    return entries

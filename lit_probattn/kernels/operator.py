"""Forward and backward of a kernel as PyTorch operators: schema, fakes, autograd, FLOP formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from lit_probattn.base.graphs import NO_SECOND_DERIVATIVE, reject_second_derivative
from lit_probattn.base.torch_internals import (
    add_flop_formula,
    below_autograd,
    in_forward_mode,
    is_batched_gradient,
    is_counted,
    is_intercepted,
    library_of,
    outside_graphs,
    register_flop_formulas,
)

# `torch.library.custom_op` defines the same, but a call through its bookkeeping takes about twice
# as long, which short sequences do not hide.
_PREFIX = "lit_probattn::"

# Implementations of the operators by name, for tools that count their launches.
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
}


def new_gradients(
    call: Any,
    names: Sequence[str],
    skipped: Sequence[str] = (),
    keep_strides: bool = False,
    dtype: torch.dtype | None = torch.float32,
) -> tuple[Tensor, ...]:
    """Return buffers for the gradients of inputs; empty for inputs that are None or skipped.

    Gradients of query, key and value have their dtype and, with `keep_strides`, their strides if
    these are dense; other gradients have `dtype`, or the input's dtype if it is None.
    """
    found = []
    for name in names:
        x = getattr(call, name)
        if x is None or name in skipped:
            found.append(call.query.new_empty(0, dtype=dtype))
        elif name not in ("query", "key", "value"):
            found.append(x.new_empty(x.shape, dtype=dtype))
        else:
            room = torch.empty_like(x) if keep_strides else x.new_empty(x.shape)
            if room.stride(-1) != 1 and room.shape[-1] > 1:  # kernels store contiguous rows
                room = x.new_empty(x.shape)
            found.append(room)
    return tuple(found)


class _Operator:
    """`lit_probattn::<schema>`, defined anew if the package is imported again.

    Args:
        schema: name, arguments and results.
        run: the implementation.
        fake: returns empty results.
    """

    def __init__(self, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        name, space = schema.partition("(")[0], _PREFIX.removesuffix("::")
        self._library = library_of(space, name)
        self._library.define(schema, tags=torch.Tag.pt2_compliant_tag)
        self._library.impl(name, outside_graphs(run), "CompositeExplicitAutograd")

        def recorded(*args: Any) -> Any:
            register_flop_formulas()  # compiled code calls the operator directly
            return fake(*args)

        torch.library.register_fake(_PREFIX + name, recorded, lib=self._library)
        IMPLEMENTATIONS[_PREFIX + name] = run
        self.overload: Callable[..., Any] = getattr(getattr(torch.ops, space), name).default

    def differentiate(self, apply: Callable[..., Any]) -> None:
        """Let `apply`, of an autograd function that calls the operator, compute its gradients."""
        operator: Any = self.overload

        def call(*args: Any) -> Any:
            if _is_differentiated(x for x in args if isinstance(x, Tensor)):
                return apply(*args)
            with below_autograd():
                return operator(*args)

        self._library.impl(operator, call, "Autograd")


def _is_differentiated(tensors: Iterable[Tensor]) -> bool:
    """Return whether a derivative of a call with these tensors may be needed."""
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return has_gradient or in_forward_mode()


class _WithoutDerivative(torch.autograd.Function):
    """Operator of a backward pass.

    Raises:
        NotImplementedError: it is differentiated.
    """

    @staticmethod
    def forward(ctx: Any, operator: Callable[..., Any], *args: Any) -> Any:
        with below_autograd():
            return operator(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


def define_operators(
    names: tuple[str, str],
    inputs: type[Any],
    forward: Callable[[Any], tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    *,
    new_outputs: Callable[[Any], tuple[Tensor, ...]],
    gradients: tuple[str, ...],
    flops: Callable[[Any, bool], int],
    optional: tuple[tuple[str, ...], ...] = (),
    has_normaliser: bool = True,
    num_outputs: int = 4,
    keep_strides: bool = False,
    dtype: torch.dtype | None = torch.float32,
    outputs_for: Mapping[str, int] | None = None,
    inference: Callable[[Any], tuple[Tensor, ...]] | None = None,
    is_seen: Callable[[Sequence[Tensor]], bool] = is_intercepted,
) -> Callable[..., Any]:
    """Define `lit_probattn::<name>` and an operator for its backward; return a function for it.

    The function calls the operators only where something sees them, or where the dispatcher must
    compute a pending negation (`Tensor.is_neg`). Elsewhere it calls `forward` and `backward`
    directly, without the dispatcher.

    Backward is called as `backward(call, grad, …, [output, …,] skipped)`.

    Args:
        inputs: a NamedTuple of the arguments, tensors first; its annotations determine the schema,
            and all functions here take one.
        backward: returns the gradients of the inputs in `gradients`, with the layout of
            `new_gradients`, which the fake calls.
        new_outputs: returns buffers for the outputs.
        gradients: names of the inputs that have gradients.
        flops: takes inputs whose tensors are replaced by their shapes, and whether to count
            backward. A multiply-add has 2 FLOPs, and only products count; a causal mask does not
            halve the count, and recomputation in backward counts once, as in PyTorch's formulas.
        optional: groups of inputs whose gradients are computed only if one of the group is needed.
        has_normaliser: the outputs are a result and a normaliser without gradient, which backward
            reads; otherwise all outputs have gradients and backward reads no output.
        num_outputs: number of outputs without a normaliser.
        keep_strides: see `new_gradients`.
        dtype: see `new_gradients`.
        outputs_for: inputs that backward receives as an output, given by its number, of the same
            shape and dtype, so that the input itself is not saved.
        inference: `forward` without what only backward needs. None means `forward`.
        is_seen: whether something sees the operators in a call with these tensors.
    """
    fields = {name: _TYPES[kind] for name, kind in get_type_hints(inputs).items()}
    schema = ", ".join(f"{kind} {name}" for name, kind in fields.items())
    num_tensors = sum(kind.startswith("Tensor") for kind in fields.values())
    num_grads = 1 if has_normaliser else num_outputs
    num_outputs = 2 if has_normaliser else num_outputs
    before = [f"Tensor? grad_{i}" for i in range(num_grads)]
    before += ["Tensor out", "Tensor normaliser"] if has_normaliser else []

    def returns(count: int) -> str:
        return f"({', '.join(['Tensor'] * count)})"

    def split(args: Sequence[Any]) -> tuple[Any, Sequence[Any], list[str]]:
        """Return the inputs, the arguments before them, and the names of skipped gradients."""
        *found, wanted = args
        call = inputs(*found[len(before) :])
        groups = [group for group, wants in zip(optional, wanted, strict=True) if not wants]
        return call, found[: len(before)], [name for group in groups for name in group]

    def run_backward(*args: Any) -> tuple[Tensor, ...]:
        call, given, skipped = split(args)
        return backward(call, *given, skipped)

    def fake_backward(*args: Any) -> tuple[Tensor, ...]:
        call, _, skipped = split(args)
        return new_gradients(call, gradients, skipped, keep_strides, dtype)

    def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
        return [x for x in tensors if x is not None]

    def alone(found: tuple[Tensor, ...]) -> Any:
        return found[0] if num_outputs == 1 else found

    def run_forward(*args: Any) -> Any:
        return alone(forward(inputs(*args)))

    whole = _Operator(
        f"{names[0]}({schema}) -> {returns(num_outputs)}",
        run_forward,
        lambda *args: alone(new_outputs(inputs(*args))),
    )
    gradient = _Operator(
        f"{names[1]}({', '.join(before)}, {schema}, bool[] wanted) -> {returns(len(gradients))}",
        run_backward,
        fake_backward,
    )

    first, second = whole.overload, gradient.overload

    def differentiated(
        compute: Callable[..., Any], compute_gradients: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function of the arguments, differentiated by `compute_gradients`."""

        class Differentiated(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                output = compute(*args)
                kept = output if has_normaliser else ()
                tensors = dict(zip(fields, args[:num_tensors], strict=False))
                tensors |= {name: output[number] for name, number in (outputs_for or {}).items()}
                ctx.save_for_backward(*kept, *tensors.values())
                ctx.switches = args[num_tensors:]
                ctx.set_materialize_grads(False)
                if has_normaliser:
                    ctx.mark_non_differentiable(output[1])
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
                reject_second_derivative()
                if all(grad is None for grad in grads):
                    return (None,) * len(fields)
                needed = dict(zip(fields, ctx.needs_input_grad, strict=True))
                wanted = [any(needed[name] for name in group) for group in optional]
                saved = ctx.saved_tensors
                found = compute_gradients(*grads[:num_grads], *saved, *ctx.switches, wanted)
                call = inputs(*saved[len(before) - num_grads :], *ctx.switches)
                made = {
                    name: grad.to(getattr(call, name).dtype)
                    for name, grad in zip(gradients, found, strict=True)
                    if needed[name]
                }
                return tuple(made.get(name) for name in fields)

        apply: Callable[..., Any] = Differentiated.apply
        return apply

    def below(*args: Any) -> Any:
        with below_autograd():
            return first(*args)

    def direct_backward(*args: Any) -> tuple[Tensor, ...]:
        tensors = present(args[: len(before) + num_tensors])
        pending = any(is_batched_gradient(x) or x.is_neg() for x in tensors)
        if is_counted() or is_seen(tensors) or pending:
            return second(*args)
        return run_backward(*args)

    direct = differentiated(run_forward, direct_backward)
    whole.differentiate(differentiated(below, second))
    gradient.differentiate(functools.partial(_WithoutDerivative.apply, second))

    def call(*args: Any) -> Any:
        tensors = present(args[:num_tensors])
        if is_counted() or is_seen(tensors) or any(x.is_neg() for x in tensors):
            return first(*args)
        if _is_differentiated(tensors):
            return direct(*args)
        return alone((inference or forward)(inputs(*args)))

    add_flop_formula(first, lambda *args, **_: flops(inputs(*args), False))
    add_flop_formula(second, lambda *args, **_: flops(inputs(*args[len(before) : -1]), True))
    return call

"""Checks before a model is changed: the layers, and whether each can be swapped."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lit_probattn.base.errors import UnsupportedError, nan_among, nearest

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def check_model(model: nn.Module) -> None:
    """Raise for objects that are not modules, and for wrappers that hold the parameters.

    Raises:
        ValueError: the model is wrapped; the message names the wrapper.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is {model!r}, expected a torch.nn.Module")
    wrapper = next((kind for kind in map(_wrapper_of, model.modules()) if kind), None)
    if wrapper is not None:
        raise ValueError(
            f"the model is wrapped by {wrapper}, which would not include new parameters: swap the "
            "model before it is wrapped"
        )


def _wrapper_of(module: nn.Module) -> str | None:
    """Return the name of the wrapper that distributes a module's parameters, or None."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            return kind.__name__
    parts = module.parameters(recurse=False)
    return "DTensor" if any(type(p.data).__name__ == "DTensor" for p in parts) else None


def choose_layers(
    names: Sequence[str], layers: Sequence[str] | None, keep: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the layers to swap, and why each of the others is kept.

    Args:
        names: all layers.
        layers: names or patterns (`*` matches anything) of layers to swap. None means all.
        keep: names or patterns of layers to leave unchanged.

    Raises:
        ValueError: a pattern matches no layer, or no layer is left.
    """
    for pattern in (*(layers or ()), *keep):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no attention layer is called {pattern!r}{nearest(pattern, names)}")
    kept = {}
    for name in names:
        if layers is not None and not any(fnmatchcase(name, p) for p in layers):
            kept[name] = "not among `layers`"
        elif any(fnmatchcase(name, p) for p in keep):
            kept[name] = "as asked by `keep`"
    chosen = [name for name in names if name not in kept]
    if not chosen:
        raise ValueError(f"no layer is left to swap: all of {', '.join(names)} are kept")
    return chosen, kept


def check_patterns(**given: Sequence[str] | None) -> None:
    """Raise if a string is passed instead of a list of names.

    Raises:
        ValueError: the message names the argument.
    """
    for name, patterns in given.items():
        if isinstance(patterns, str):
            raise ValueError(f"{name} is a string, expected a list of names: [{patterns!r}]")


def refuse(refused: Sequence[tuple[str, nn.Module, str]], count: int) -> None:
    """Raise if there are layers that cannot be swapped.

    Args:
        refused: name, module and reason of each.
        count: number of all layers to swap.

    Raises:
        ValueError: there are such layers; the message names all of them.
    """
    if not refused:
        return
    names: dict[str, list[str]] = {}  # by class and reason
    for name, module, reason in refused:
        names.setdefault(f"({type(module).__name__}): {reason}", []).append(name or "(the model)")
    lines = [f"  {', '.join(group)} {reason}" for reason, group in names.items()]
    raise ValueError(
        f"{len(refused)} of {count} attention layers cannot be swapped; the model is unchanged:\n"
        + "\n".join(lines)
        + "\n`keep` of lit_probattn.swap lists names and patterns of layers to leave unchanged"
    )


def refuse_what_is_lost(
    model: nn.Module, own: str, owned: Sequence[nn.Module], *, replaced: bool = True
) -> None:
    """Raise for weights that new weights cannot replace.

    Args:
        model: the model.
        own: name of the layer, for messages.
        owned: modules that the swap changes.
        replaced: whether their weights are replaced. If not, weights may be tied within the
            swapped modules, and tensors that are not parameters are allowed.

    Raises:
        UnsupportedError: a weight is tied, is computed from others, or contains NaN.
    """
    parts = {id(m) for module in owned for m in module.modules()}
    ours: dict[int, list[str]] = {}
    others: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        holders = ours if id(module) in parts else others
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append(dot + name)
        computed = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
        if not replaced:
            kept_by = ("_orig", "_g")  # prunings, and norms that are hooks
            computed = [n for n in computed if any(hasattr(module, n + end) for end in kept_by)]
        computed += list(module.parametrizations) if is_parametrized(module) else []
        if id(module) in parts and computed:
            path = f"{dot}{computed[0]}".removeprefix(f"{own}.")
            raise UnsupportedError(
                f"{path} is computed from others (a parametrization, a mask, a norm), which would "
                "be lost; make it a plain weight first"
            )
    for identity, names in ours.items():
        first, *more = [*names[: None if replaced else 1], *others.get(identity, [])]
        if more:
            path = first.removeprefix(f"{own}.")
            raise UnsupportedError(f"its {path} is {more[0]} too (tied), which a swap would undo")
    bad = next(filter(None, (nan_among(module.named_parameters()) for module in owned)), None)
    if bad is not None:
        raise UnsupportedError(bad)

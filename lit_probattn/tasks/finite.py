"""Detection of non-finite losses and gradients, and of their origin."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from lit_probattn.tasks.distributed import local_part

MAX_LISTED_SAMPLES = 64


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; the weights were not updated."""


def largest_gradient(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the largest absolute gradient entry of this rank, (); 0 without gradients.

    It is NaN or infinite if any entry is.
    """
    found = (parameter.grad for parameter in parameters)
    gradients = [local_part(gradient) for gradient in found if gradient is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))


def first_bad_gradient(module: nn.Module) -> str | None:
    """Return the name of the first parameter whose gradient is not finite."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not bool(local_part(parameter.grad).isfinite().all()):
            return name
    return None


def first_bad_module(module: nn.Module, run: Callable[[], object]) -> str | None:
    """Return name and class of the first submodule with a non-finite output while `run` runs.

    Children return before their parents, so the result is the innermost module. `run` is executed
    without gradients and without compiled code, which would skip the hooks.
    """
    found: list[str] = []

    def look(name: str, child: nn.Module, _inputs: object, output: object) -> None:
        if not found and not _all_finite(output):
            found.append(f"{name} ({type(child).__name__})")

    with ExitStack() as hooks, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name, child in module.named_modules():
            if name:
                hooks.enter_context(child.register_forward_hook(partial(look, name)))
        run()
    return found[0] if found else None


def describe_samples(sample_ids: Iterable[int]) -> str:
    """Format up to 64 sample ids for a message."""
    ids = list(sample_ids)
    more = f" and {len(ids) - MAX_LISTED_SAMPLES} more" if len(ids) > MAX_LISTED_SAMPLES else ""
    return ", ".join(str(i) for i in ids[:MAX_LISTED_SAMPLES]) + more


def _all_finite(output: object) -> bool:
    if isinstance(output, Tensor):
        return not output.is_floating_point() or bool(output.isfinite().all())
    if isinstance(output, tuple | list):
        return all(_all_finite(item) for item in output)
    return True

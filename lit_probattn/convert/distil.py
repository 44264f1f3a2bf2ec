"""Teaching a converted layer to give the old layer's output, one layer at a time."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lit_probattn.attention import Attention, SoftmaxAttention
from lit_probattn.convert.layer import LayerInputs, output_error, split

_Layer = TypeVar("_Layer", bound=Attention)


@dataclass(frozen=True)
class Distillation:
    """How layers are taught.

    Args:
        steps: steps of Adam for each layer.
        lr: its learning rate, which falls to 0 in a straight line.
        batch_size: samples of a step.
        seed: of which samples.
    """

    steps: int
    lr: float = 1e-3
    batch_size: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Taught:
    """Relative root mean squared error of a layer's output, before and after it was taught."""

    before: float
    after: float

    def line(self) -> str:
        """Return the errors for a person."""
        return f"distilled: output error {100 * self.before:.1f} % -> {100 * self.after:.1f} %"


def distil_layer(
    old: SoftmaxAttention, new: _Layer, inputs: LayerInputs, how: Distillation, name: str = ""
) -> tuple[_Layer, Taught]:
    """Return a layer that was taught to give the old one's output on the old one's inputs.

    The loss is Σ ‖new − old‖² / Σ ‖old‖² over the real tokens of a batch, the bias of the old
    output taken out below. Where there are enough samples, a quarter is kept apart for the errors,
    as in the conversion itself.

    Args:
        name: of the layer, for the progress bar.
    """
    fit, test, _ = split(inputs)
    assert fit is not None
    assert test is not None
    dtype = old.query_proj.weight.dtype
    old, new = copy.deepcopy(old).eval(), copy.deepcopy(new).eval()
    bias = torch.zeros(()) if old.out_proj.bias is None else old.out_proj.bias.detach()
    before = _error(old, new, test)
    # Nothing is drawn, so the scale of a variant's noise has no gradient.
    optimizer = torch.optim.Adam([p for p in new.parameters() if p.requires_grad], lr=how.lr)
    generator = torch.Generator().manual_seed(how.seed)
    for step in _shown(how.steps, name):
        optimizer.param_groups[0]["lr"] = how.lr * (1.0 - step / how.steps)
        chosen = torch.randint(len(fit.x), (min(how.batch_size, len(fit.x)),), generator=generator)
        x, real = fit.x[chosen].to(dtype), fit.real[chosen]
        given: dict[str, Any] = {"key_mask": real, "is_causal": fit.is_causal}
        with torch.no_grad():
            target = old(x, **given)[real]
        error = (new(x, **given)[real] - target).square().sum()
        optimizer.zero_grad()
        (error / (target - bias).square().sum()).backward()
        optimizer.step()
    optimizer.zero_grad()
    return new.train(), Taught(before, _error(old, new, test))


@torch.no_grad()
def _error(old: SoftmaxAttention, new: Attention, test: LayerInputs) -> float:
    pair: tuple[SoftmaxAttention, Attention] = copy.deepcopy(old).double(), copy.deepcopy(new)
    return output_error(pair[0], pair[1].double(), test)


def _shown(steps: int, name: str) -> Iterator[int]:
    """Yield the steps, with a bar on a terminal."""
    if not sys.stderr.isatty():
        yield from range(steps)
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(range(steps), f"distilling {name}", console=Console(stderr=True))

"""Memory of the points of a sweep, predicted on fake tensors before they are measured.

There is no prediction for a GPU: a step that does not fit fails sooner than a prediction takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from lit_probattn.base.memory import predicted_bytes
from profiling.sweep.models import make_step
from profiling.sweep.plan import Point

KERNELS = "triton"  # the backend that runs on a GPU only
_LINEAR_FROM = 2  # layers; one layer alone does not show the peak between two


@dataclass(frozen=True)
class Prediction:
    """The prediction for a point.

    Args:
        memory: predicted peak of one step above resident memory, and resident memory, in bytes;
            None if unknown.
        problem: the reason why the model cannot be built.
    """

    memory: tuple[int, int] | None = None
    problem: str | None = None

    def __str__(self) -> str:
        if self.memory is None:
            return "no prediction"
        return f"predicted peak {sum(self.memory) / 2**20:.1f} MiB"


def predict(point: Point) -> tuple[int, int] | None:
    """Predict (peak above resident, resident) in bytes on fake tensors, without allocation.

    Layers are alike, so both are linear in their number from two layers on: a deeper model follows
    from models of two and three layers. None for kernels of a GPU, which fake tensors on the CPU
    cannot follow.
    """
    if point.backend == KERNELS:
        return None
    layers = point.sizes.get("num_layers", 1)
    if layers <= _LINEAR_FROM + 1:
        return _predict_whole(point)
    (peak, resident), (more_peak, more_resident) = (
        _predict_whole(replace(point, sizes={**point.sizes, "num_layers": number}))
        for number in (_LINEAR_FROM, _LINEAR_FROM + 1)
    )
    more = layers - _LINEAR_FROM
    return peak + more * (more_peak - peak), resident + more * (more_resident - resident)


def _predict_whole(point: Point) -> tuple[int, int]:
    return predicted_bytes(partial(make_step, point, torch.device("cpu")))


class Predictions:
    """Predicted memory of the points of a sweep, once for a point's memory and time.

    On a GPU there are none.
    """

    def __init__(self, device: str) -> None:
        self.known: dict[str, Prediction] = {}
        self.live = torch.device(device).type != "cuda"

    def of(self, point: Point) -> Prediction | None:
        """Return the prediction for a point, or None."""
        name = replace(point, quantity="memory", timing={}).point_id
        if name not in self.known and self.live:
            try:
                self.known[name] = Prediction(predict(point))
            except Exception as error:  # the measurement raises the same error
                text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self.known[name] = Prediction(problem=text)
        return self.known.get(name)

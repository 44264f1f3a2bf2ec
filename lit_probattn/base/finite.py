"""Whether weights are numbers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def nan_among(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Say which of the named tensors is the first that holds NaN ("… holds NaN"), or None.

    Infinities pass, as masks may hold them; tensors without memory have no numbers.
    """
    for name, tensor in tensors:
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = int(tensor.isnan().sum())
        if bad:
            return f"{name} holds NaN in {bad} of {tensor.numel()} numbers"
    return None

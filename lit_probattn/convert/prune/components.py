"""Usage of the components of MGK and sMGK, and the weights of the components kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention import MGKAttention
from lit_probattn.attention.mgk.options import variance_multipliers
from lit_probattn.convert.files import find_layers
from lit_probattn.convert.layer import LayerInputs


@torch.no_grad()
def component_usage(layer: MGKAttention, inputs: LayerInputs) -> Tensor:
    """Return the usage U_r of the components of each key head, (R, K).

    Where query heads share a key head, the largest usage counts.
    """
    total = torch.zeros(layer.num_heads, layer.num_components, dtype=torch.float64)
    for one in inputs.each():
        call = layer.call(one.x, key_mask=one.key_mask, is_causal=one.is_causal)
        weights, shares = layer.core.posterior(call)
        read = (weights[:, :, None] * shares).sum(-1)[0]  # (H, K, N)
        total += read[..., one.real[0]].sum(-1).double()
    rows = layer.layout.key
    return (total / int(inputs.real.sum())).unflatten(0, (rows, -1)).amax(1)


def kept_components(
    layers: Mapping[str, MGKAttention], usage: Mapping[str, Tensor], threshold: float
) -> dict[str, Tensor]:
    """Return the components kept by each row of `component_usage`, ascending, by layer."""
    counted = deciding_usage(layers, usage)
    most = max(int((values >= threshold).sum(1).max()) for values in counted.values())
    return {
        name: values.argsort(dim=1, descending=True, stable=True)[:, : max(1, most)].sort(1).values
        for name, values in counted.items()
    }


def deciding_usage(
    layers: Mapping[str, MGKAttention], usage: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the largest usage over the rows that must keep the same components, by layer."""
    counted = dict(usage)
    for name, layer in layers.items():
        prior = layer.core.prior
        if prior is not None and prior.share == "layer":
            counted[name] = usage[name].amax(0).expand_as(usage[name])
    if any(_fixed_and_different(layer) for layer in layers.values()):
        largest = torch.cat(list(usage.values())).amax(0)
        counted = {name: largest.expand_as(values) for name, values in usage.items()}
    return counted


def _fixed_and_different(layer: MGKAttention) -> bool:
    variance = layer.core.variance
    return variance.log_variance is None and not variance.is_equal


def prune_layers(
    state: Mapping[str, Tensor],
    layers: Mapping[str, MGKAttention],
    indices: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return a state dict with fewer components, in the model and its moving average.

    Args:
        state: state dict of the task, with the model as `model` and the average as `ema.module`.
        layers: layers before pruning, by name in the model.
        indices: components that each layer keeps, (R, K').
    """
    fresh = dict(state)
    for full in find_layers(fresh):
        name = next(n for n in layers if full.endswith(f".{n}"))
        fresh |= prune_state(state, full, layers[name], indices[name])
    return fresh


def prune_state(
    state: Mapping[str, Tensor], name: str, layer: MGKAttention, indices: Tensor
) -> dict[str, Tensor]:
    """Return the entries of a layer that change.

    Priors shared by positions are renormalised. Logits of priors per position are kept, but their
    softmax renormalises each position, which shifts weight between positions.

    Args:
        state: state dict of the whole model.
        name: name of the layer in it.
        layer: layer before pruning.
        indices: components to keep, (R, K').
    """
    rows, new = len(indices), {}
    for part in ("weight", "bias"):
        key = f"{name}.key_proj.{part}"
        if key in state and not layer.shifted_keys:
            heads = state[key].unflatten(0, (rows, layer.num_components, layer.head_dim))
            new[key] = _select(heads, indices).flatten(0, 2)
    for part in ("key_shift", "variance.log_variance"):
        key = f"{name}.core.{part}"
        if key in state:
            new[key] = _select(state[key], indices)
    key, prior = f"{name}.core.prior.value", layer.core.prior
    if prior is not None:
        values = state[key]
        kept = values[indices[0]] if prior.share == "layer" else _select(values, indices)
        # Priors per position keep their weight relative to other positions.
        if prior.share != "head_position" and (prior.param == "clamp" or prior.by_m_step):
            total = kept.clamp(0.0, 1.0).sum(-1, keepdim=True)
            kept = kept.clamp(0.0, 1.0) / total.where(total > 0, 1.0)
        new[key] = kept
    return new


def _select(values: Tensor, indices: Tensor) -> Tensor:
    """Select components, the second dimension, for each head, the first."""
    return torch.stack([values[row, each] for row, each in enumerate(indices)])


def pruned_entry(entry: Mapping[str, Any], layer: MGKAttention, indices: Tensor) -> dict[str, Any]:
    """Return the configuration's attention entry with fewer components."""
    arguments = dict(entry.get("init_args") or {})
    variance = arguments.get("variance", "equal")
    if variance != "equal":
        multipliers = variance_multipliers(variance, layer.num_components)
        arguments["variance"] = [multipliers[index] for index in indices[0].tolist()]
    arguments["num_components"] = indices.shape[1]
    return {"class_path": entry["class_path"], "init_args": arguments}

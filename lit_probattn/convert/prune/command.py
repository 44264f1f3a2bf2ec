"""Drop components of MGK or sMGK that receive little attention.

    lit-probattn convert prune runs/listops-mgk/0 pruned.ckpt --threshold 0.05

The usage of a component, U_r = mean over queries of Σ_j P_ijr with P the joint posterior of key and
component, is measured on validation batches of the run. All heads keep the same number of
components: that of the head with the most components at or above the threshold. Each head keeps its
most used ones; priors shared by positions are renormalised. Where heads cannot choose components
independently, the largest usage counts: over the heads of a layer with one prior per layer, and
over all heads of all layers if fixed variances distinguish components.

Writes `pruned.ckpt`, to start from (`--init_from pruned.ckpt`), and `pruned.yaml`, its attention
file (`--config pruned.yaml` after the run's own). Usage and the effect on the model, on the same
batches, are printed and stored in the checkpoint under "pruning".
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lit_probattn.attention import Attention, MGKAttention
from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.configs import instantiate
from lit_probattn.convert.files import check_output, require_no_hooks, write
from lit_probattn.convert.model import compare_losses, compare_models, layer_inputs
from lit_probattn.convert.prune.components import (
    component_usage,
    deciding_usage,
    kept_components,
    prune_layers,
    pruned_entry,
)
from lit_probattn.convert.to_mgk import open_run
from lit_probattn.training.checkpoints import (
    find_file,
    in_task,
    load_checkpoint,
    of_model,
)
from lit_probattn.training.trained import load_weights


def _own_layers(found: Mapping[str, Attention]) -> dict[str, MGKAttention]:
    layers = {}
    for name, layer in found.items():
        if not isinstance(layer, MGKAttention):
            raise ConfigError(
                f"{name} is {type(layer).__name__}: only models with MGK or sMGK attention can be "
                "pruned"
            )
        require_no_hooks(layer)
        layers[name] = layer
    return layers


def _entry_of(config: Mapping[str, Any], layers: Mapping[str, MGKAttention]) -> dict[str, Any]:
    entry: dict[str, Any] = config["init_args"]["attention"]
    name = str(entry.get("class_path", "")).rpartition(".")[2]
    if any(type(layer).__name__ != name for layer in layers.values()):
        raise ConfigError(
            f"the attention of the run is {name}, which differs between layers: pruning requires "
            "the same attention in all layers"
        )
    return entry


def run(options: argparse.Namespace) -> list[str]:
    """Prune `options.checkpoint` to `options.output`; return the lines to print.

    Raises:
        ConfigError: the checkpoint or the options are invalid.
        CheckpointError: a file cannot be read or written.
    """
    if not 0.0 < options.threshold <= 1.0:
        raise ConfigError(f"--threshold must be in (0, 1], received {options.threshold:g}")
    check_output(options.output)
    options.checkpoint = find_file(options.checkpoint)
    checkpoint = load_checkpoint(options.checkpoint)
    state, run = checkpoint.get("state_dict", {}), open_run(options)
    layers = _own_layers(run.layers)
    entry = _entry_of(run.config["model"], layers)
    batches = list(islice(run.data.val_dataloader(), options.num_batches))
    seen = of_model(layer_inputs(run.task, list(in_task(layers)), batches))
    usage = {name: component_usage(layer, seen[name]) for name, layer in layers.items()}
    indices = kept_components(layers, usage, options.threshold)
    first = next(iter(layers))
    before, after = layers[first].num_components, indices[first].shape[1]
    if after == before:
        needed = max(float(v.amin(1).max()) for v in deciding_usage(layers, usage).values())
        raise ConfigError(
            f"nothing to prune: some head uses all {before} components at least "
            f"{options.threshold:g}; raise --threshold above {needed:.4f}"
        )
    fresh = prune_layers(state, layers, indices)
    config = copy.deepcopy(run.config["model"])
    config["init_args"]["attention"] = pruned_entry(entry, layers[first], indices[first])
    with prefixed("cannot build the pruned model", ConfigError):
        new = load_weights(instantiate(pl.LightningModule, config), fresh, options.output)
    replaced = in_task({name: new.model.get_submodule(name) for name in layers})
    compared = compare_models(run.task, replaced, batches)
    losses = compare_losses(run.task, replaced, batches)
    report = {
        "source": str(options.checkpoint.name),
        "source_step": int(checkpoint.get("global_step", 0)),
        "threshold": options.threshold,
        "usage": {name: values.tolist() for name, values in usage.items()},
        "kept": {name: values.tolist() for name, values in indices.items()},
        "model": asdict(compared) | asdict(losses),
    }
    written = {"model": {"init_args": {"attention": config["init_args"]["attention"]}}}
    done = write(options.output, checkpoint, written, state_dict=fresh, pruning=report)
    lines = [_line(name, usage[name], indices[name]) for name in layers]
    lines.append(f"components per head: {before} before, {after} after")
    return [*lines, *dict.fromkeys((compared.line(), losses.line())), done]


def _line(name: str, usage: Tensor, indices: Tensor) -> str:
    heads = [
        " ".join(
            f"{value:.3f}" if index in kept else f"({value:.3f})" for index, value in enumerate(row)
        )
        for row, kept in zip(usage.tolist(), indices.tolist(), strict=True)
    ]
    return f"{name}: usage by head, dropped in parentheses: {'; '.join(heads)}"


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `run`."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="checkpoint with MGK or sMGK attention, or its run folder")
    add("output", type=Path, help="checkpoint to write, NAME.ckpt")
    add("--threshold", type=float, default=0.05, help="smallest usage to keep")
    add("--config", type=Path, help="the run's config.yaml")
    add("--num_batches", type=at_least(1), default=8, help="validation batches to use")
    add_flag(parser)

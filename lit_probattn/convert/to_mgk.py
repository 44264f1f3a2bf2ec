"""Turn the softmax attention of a checkpoint into MGK: fewer heads, several keys per position.

    python -m lit_probattn.convert runs/lra_text-softmax/0/checkpoints/best-00020000.ckpt mgk.ckpt

Writes `mgk.ckpt`, for `--ckpt_path mgk.ckpt`, and `mgk.yaml`, the attention file that goes with it
(`--config mgk.yaml` after the run's own). Every layer's error and, with data, the model's, are
printed and stored in the checkpoint under "conversion". A conversion is where fine-tuning starts.

With the run's config.yaml (found beside the checkpoint, or --config) batches of its data go through
the model, and what each layer sees decides pairs of heads, factors, priors and value maps. Without
it (--weights_only) only the weights count, and --head_dim is needed.

Two other conversions have their own --help: `convert from_transformers FOLDER OUT.ckpt` reads a
BERT or a RoBERTa, `convert to_transformers CHECKPOINT FOLDER` writes one.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lit_probattn.attention import MGKAttention
from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.config_files import find
from lit_probattn.convert.files import (
    ConversionError,
    check_output,
    find_layers,
    put_layers,
    restore_layer,
    write,
)
from lit_probattn.convert.layer import LayerErrors, LayerInputs, convert_layer
from lit_probattn.training.checkpoints import CheckpointError, find_file, load_checkpoint
from lit_probattn.training.trained import Trained, open_trained

Batches = Sequence[dict[str, Tensor]]


@dataclass(frozen=True)
class ModelErrors:
    """What conversion did to the whole model, on validation batches."""

    logit_error: float  # ‖new − old‖ / ‖old‖ of the model's outputs
    agreement: float  # share of rows whose largest output is the same
    num_rows: int

    def line(self) -> str:
        """Return one line for a person."""
        return (
            f"model: output error {100 * self.logit_error:.1f} %, same prediction in "
            f"{100 * self.agreement:.1f} % of {self.num_rows} rows"
        )


@torch.no_grad()
def layer_inputs(task: nn.Module, names: list[str], batches: Batches) -> dict[str, LayerInputs]:
    """Return what the named layers of a task see.

    Raises:
        ConversionError: a layer adds a bias of its own to the scores of each head.
    """
    seen: dict[str, list[LayerInputs]] = {name: [] for name in names}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bias = kwargs.get("bias")
        if bias is not None and bias.dim() > 2 and bias.shape[-3] > 1:
            raise ConversionError(
                f"{name}: every head has a bias of its own (relative positions), which fewer heads "
                "cannot take: train MGK on pictures from the beginning"
            )
        given = kwargs.get("key_mask"), kwargs.get("is_causal", False)
        seen[name].append(LayerInputs(args[0], *given))

    with ExitStack() as hooks:
        for name in names:
            layer = task.get_submodule(name)
            hook = layer.register_forward_pre_hook(partial(keep, name), with_kwargs=True)
            hooks.enter_context(hook)
        for batch in batches:
            task(batch)
    return {name: _join(parts) for name, parts in seen.items()}


def _join(parts: list[LayerInputs]) -> LayerInputs:
    """Put the inputs of several batches together, padded to the longest."""
    length = max(part.x.shape[1] for part in parts)
    pad = nn.functional.pad
    xs = [pad(part.x, (0, 0, 0, length - part.x.shape[1])) for part in parts]
    masks = [pad(part.real, (0, length - part.x.shape[1])) for part in parts]
    return LayerInputs(torch.cat(xs), torch.cat(masks), parts[0].is_causal)


@torch.no_grad()
def model_errors(task: nn.Module, layers: dict[str, MGKAttention], batches: Batches) -> ModelErrors:
    """Compare the outputs of a task with its old and with the new layers."""
    converted = copy.deepcopy(task)
    for name, layer in layers.items():
        converted.set_submodule(name, copy.deepcopy(layer).eval())
    difference = size = 0.0
    same = rows = 0
    for batch in batches:
        real = batch["sample_ids"] >= 0
        before, after = (model(batch)[real].double() for model in (task, converted))
        difference += float((after - before).square().sum())
        size += float(before.square().sum())
        same += int((before.argmax(-1) == after.argmax(-1)).sum())
        rows += before[..., 0].numel()
    return ModelErrors((difference / size) ** 0.5, same / max(1, rows), rows)


def convert_layers(
    state: dict[str, Tensor], head_dim: int, inputs: dict[str, LayerInputs], **options: Any
) -> tuple[dict[str, MGKAttention], dict[str, LayerErrors]]:
    """Convert every attention layer of a state dict; return layers and errors by name.

    Args:
        inputs: what layers saw, by name; layers without an entry are converted from weights alone.
    """
    layers, errors = {}, {}
    for name in find_layers(state):
        old = restore_layer(state, name, head_dim)
        try:
            layers[name], errors[name] = convert_layer(old, inputs=inputs.get(name), **options)
        except ValueError as error:
            raise ConversionError(f"{name}: {error}") from error
    return layers, errors


def attention_config(layer: MGKAttention, dropout: float) -> dict[str, Any]:
    """Return the attention file that builds layers like this one."""
    arguments: dict[str, Any] = {
        "num_heads": layer.num_heads,
        "num_components": layer.num_components,
        "score": layer.core.score,
        "prior_param": "softmax",
        "dropout": dropout,
    }
    if layer.value_head_dim != layer.head_dim:
        arguments["value_head_dim"] = layer.value_head_dim
    if not layer.use_bias:
        arguments["bias"] = False
    attention = {"class_path": "lit_probattn.attention.MGKAttention", "init_args": arguments}
    return {"model": {"init_args": {"attention": attention}}}


def convert_checkpoint(options: argparse.Namespace) -> list[str]:
    """Convert `options.checkpoint` to `options.output`; return the lines to print.

    Raises:
        ConversionError: the checkpoint or the options do not fit.
        CheckpointError: a file cannot be read or written.
    """
    check_output(options.output)
    options.checkpoint = find_file(options.checkpoint)
    checkpoint = load_checkpoint(options.checkpoint)
    state = checkpoint.get("state_dict", {})
    run = None if options.weights_only else _open_run(options)
    old = [] if run is None else list(run.layers.values())
    sizes = {layer.head_dim for layer in old}
    head_dim = options.head_dim or (sizes.pop() if len(sizes) == 1 else None)
    head_dim = head_dim or checkpoint.get("hyper_parameters", {}).get("head_dim")
    if head_dim is None:
        raise ConversionError("the head size is not known: give --head_dim or the run's --config")
    batches, inputs = [], {}
    if run is not None:
        batches = list(islice(run.data.val_dataloader(), options.num_batches))
        inputs = layer_inputs(run.task, find_layers(state), batches)
    settings = {"num_components": options.num_components, "score": options.score}
    layers, errors = convert_layers(
        state, head_dim, inputs, value_head_dim=options.value_head_dim, **settings
    )
    lines = [f"{name}: {error.line()}" for name, error in errors.items()]
    report: dict[str, Any] = {
        "source": str(options.checkpoint.name),
        "source_step": int(checkpoint.get("global_step", 0)),
        **settings,
        "layers": {name: asdict(error) for name, error in errors.items()},
    }
    if run is not None:
        found = model_errors(run.task, layers, batches)
        report["model"] = asdict(found)
        lines.append(found.line())
    dropout = max((layer.dropout for layer in old), default=0.0)
    config = attention_config(next(iter(layers.values())), dropout)
    fresh = put_layers(state, layers)
    done = write(options.output, checkpoint, config, state_dict=fresh, conversion=report)
    return [*lines, done]


def _open_run(options: argparse.Namespace) -> Trained:
    """Open the run that the checkpoint belongs to."""
    path = options.config or options.checkpoint.resolve().parent.parent / "config.yaml"
    if not find(path).is_file():
        raise ConversionError(
            f"no config at {path}: give the run's --config, or --weights_only with --head_dim"
        )
    wanted = argparse.Namespace(checkpoint=options.checkpoint, config=[path], data=[], device="cpu")
    try:
        trained = open_trained(wanted)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConversionError(f"cannot build the run of {path}: {error}") from error
    if type(trained.task).forward is pl.LightningModule.forward:
        raise ConversionError(
            f"{type(trained.task).__name__} does not map a batch to one prediction per row, so "
            "data cannot be used: give --weights_only with --head_dim"
        )
    return trained


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_probattn.convert",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint with softmax attention, or its run folder")
    add("output", type=Path, help="the checkpoint to write, NAME.ckpt")
    add("--num_components", type=int, default=2, help="old heads per new head")
    add(
        "--score",
        choices=("dot", "gaussian"),
        default="dot",
        help="dot starts at the old logits; gaussian drops the keys' norms and starts further away",
    )
    add("--config", type=Path, help="the run's config.yaml")
    add("--num_batches", type=int, default=8, help="validation batches to look at")
    add("--weights_only", action="store_true", help="use no data")
    add("--head_dim", type=int, help="head size, where no configuration says it")
    add("--value_head_dim", type=int, help="size of new value heads")
    add_flag(parser)
    options = parser.parse_args(arguments)
    if options.num_batches < 1:
        parser.error(f"--num_batches must be at least 1, received {options.num_batches}")
    try:
        lines = convert_checkpoint(options)
    except (CheckpointError, ConversionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Turn the softmax attention of a checkpoint into MGK: fewer heads, several keys per position.

    python -m lit_probattn.convert runs/lra_text-softmax/0/checkpoints/best-00020000.ckpt mgk.ckpt

Writes `mgk.ckpt`, for `--ckpt_path mgk.ckpt`, and `mgk.yaml`, the attention file that goes with it
(`--config mgk.yaml` after the run's own). Every layer's error and, with data, the model's, are
printed and stored in the checkpoint under "conversion". A conversion is where fine-tuning starts.

With the run's config.yaml (found beside the checkpoint, or --config) batches of its data go through
the model, and what each layer sees decides pairs of heads, factors, priors and value maps. Without
it (--weights_only) only the weights count, and --head_dim is needed.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from torch import Tensor, nn

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.configs import find
from lit_probattn.convert.layer import LayerErrors, LayerInputs, convert_layer
from lit_probattn.training.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from lit_probattn.training.trained import open_trained


@dataclass(frozen=True)
class ModelErrors:
    """What conversion did to the whole model, on validation batches.

    Args:
        logit_error: ‖new − old‖ / ‖old‖ of the model's outputs.
        agreement: share of rows whose largest output is the same.
        num_rows: rows compared.
    """

    logit_error: float
    agreement: float
    num_rows: int

    def line(self) -> str:
        """One line for a person."""
        return (
            f"model: output error {100 * self.logit_error:.1f} %, same prediction in "
            f"{100 * self.agreement:.1f} % of {self.num_rows} rows"
        )


@dataclass(frozen=True)
class Run:
    """A trained task and its data.

    Args:
        task: the task, in evaluation mode, with the checkpoint's weights.
        data: the DataModule, set up.
        head_dim: E, if all layers have the same.
        attention_dropout: dropout of the attention layers.
    """

    task: pl.LightningModule
    data: pl.LightningDataModule
    head_dim: int | None
    attention_dropout: float

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        """Return the first validation batches."""
        loader: Iterable[dict[str, Tensor]] = self.data.val_dataloader()
        return list(islice(loader, count))

    @torch.no_grad()
    def layer_inputs(self, names: list[str], num_batches: int) -> dict[str, LayerInputs]:
        """Return what the named layers see on validation batches.

        Raises:
            ConversionError: a layer adds a bias of its own to the scores of each head.
        """
        seen: dict[str, list[LayerInputs]] = {name: [] for name in names}

        def watch(name: str) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                bias = kwargs.get("bias")
                if bias is not None and bias.dim() > 2 and bias.shape[-3] > 1:
                    raise ConversionError(
                        f"{name}: every head has a bias of its own (relative positions), which "
                        "fewer heads cannot take: train MGK on pictures from the beginning"
                    )
                inputs = LayerInputs(
                    args[0], kwargs.get("key_mask"), kwargs.get("is_causal", False)
                )
                seen[name].append(inputs)

            return self.task.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

        hooks = [watch(name) for name in names]
        try:
            for batch in self.batches(num_batches):
                self.task(batch)
        finally:
            for handle in hooks:
                handle.remove()
        return {name: _join(parts) for name, parts in seen.items()}

    @torch.no_grad()
    def model_errors(self, layers: dict[str, MGKAttention], num_batches: int) -> ModelErrors:
        """Compare the outputs of the task with the old and the new layers."""
        converted = copy.deepcopy(self.task)
        for name, layer in layers.items():
            converted.set_submodule(name, copy.deepcopy(layer).eval())
        difference = size = 0.0
        same = rows = 0
        for batch in self.batches(num_batches):
            real = batch["sample_ids"] >= 0
            before, after = (task(batch)[real].double() for task in (self.task, converted))
            difference += float((after - before).square().sum())
            size += float(before.square().sum())
            same += int((before.argmax(-1) == after.argmax(-1)).sum())
            rows += before[..., 0].numel()
        return ModelErrors((difference / size) ** 0.5, same / max(1, rows), rows)


def _join(parts: list[LayerInputs]) -> LayerInputs:
    """Put the inputs of several batches together, padded to the longest."""
    length = max(part.x.shape[1] for part in parts)
    xs, masks = [], []
    for part in parts:
        missing = length - part.x.shape[1]
        xs.append(nn.functional.pad(part.x, (0, 0, 0, missing)))
        masks.append(nn.functional.pad(part.real, (0, missing)))
    return LayerInputs(torch.cat(xs), torch.cat(masks), parts[0].is_causal)


_PARTS = ("query_proj", "key_proj", "value_proj", "out_proj")

# What belongs to the run that wrote the checkpoint and not to the new weights.
_DROPPED = ("loops", "callbacks", "MixedPrecision", "training")


class ConversionError(ValueError):
    """The checkpoint cannot be converted."""


def find_layers(state: dict[str, Tensor]) -> list[str]:
    """Return the names of the attention layers in a state dict, in its order.

    Raises:
        ConversionError: there are none.
    """
    ending = "query_proj.weight"
    names = [key.removesuffix(ending).rstrip(".") for key in state if key.endswith(ending)]
    if not names:
        raise ConversionError("the checkpoint has no attention layers (no *.query_proj.weight)")
    return names


def restore_layer(state: dict[str, Tensor], name: str, head_dim: int) -> SoftmaxAttention:
    """Return a layer of a state dict as softmax attention.

    Raises:
        ConversionError: it has other parameters than softmax attention, shares keys among heads, or
            its width is not a multiple of `head_dim`.
    """
    prefix = f"{name}." if name else ""
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    extra = sorted(key for key in own if key.split(".")[0] not in _PARTS)
    if extra:
        raise ConversionError(
            f"{name} is not plain softmax attention: it also has {', '.join(extra)}"
        )
    width, embed_dim = own["query_proj.weight"].shape
    if width % head_dim or own["key_proj.weight"].shape != (width, embed_dim):
        raise ConversionError(
            f"{name}: query_proj is {tuple(own['query_proj.weight'].shape)} and key_proj "
            f"{tuple(own['key_proj.weight'].shape)}; expected the same, with rows a multiple of "
            f"head_dim={head_dim}"
        )
    num_heads = width // head_dim
    layer = SoftmaxAttention(
        embed_dim,
        num_heads,
        head_dim=head_dim,
        value_head_dim=own["value_proj.weight"].shape[0] // num_heads,
        bias="query_proj.bias" in own,
    )
    layer.load_state_dict(own)
    return layer


def convert_state(
    state: dict[str, Tensor],
    head_dim: int,
    inputs: dict[str, LayerInputs],
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, MGKAttention], dict[str, LayerErrors]]:
    """Convert every attention layer of a state dict.

    Args:
        state: names and tensors of a model with softmax attention.
        head_dim: E.
        inputs: what layers saw, by name; layers without an entry are converted from weights alone.
        options: of `convert_layer`.

    Returns:
        The new state dict, the new layers and their errors by name.
    """
    layers, errors = {}, {}
    for name in find_layers(state):
        old = restore_layer(state, name, head_dim)
        try:
            layers[name], errors[name] = convert_layer(old, inputs=inputs.get(name), **options)
        except ValueError as error:
            raise ConversionError(f"{name}: {error}") from error
    prefixes = tuple(f"{name}." if name else "" for name in layers)
    fresh = {k: v for k, v in state.items() if not k.startswith(prefixes)}
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        fresh.update({f"{prefix}{k}": v.clone() for k, v in layer.state_dict().items()})
    return fresh, layers, errors


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
    config_file = options.output.with_suffix(".yaml")
    for path in (options.output, config_file):
        if path.exists():
            raise ConversionError(f"{path} exists: choose another name or remove it")
    checkpoint = load_checkpoint(options.checkpoint)
    state = checkpoint.get("state_dict", {})
    run = None if options.weights_only else _open_run(options)
    head_dim = options.head_dim or (run.head_dim if run is not None else None)
    head_dim = head_dim or checkpoint.get("hyper_parameters", {}).get("head_dim")
    if head_dim is None:
        raise ConversionError("the head size is not known: give --head_dim or the run's --config")
    inputs = {} if run is None else run.layer_inputs(find_layers(state), options.num_batches)
    fresh, layers, errors = convert_state(
        state,
        head_dim,
        inputs,
        num_components=options.num_components,
        score=options.score,
        value_head_dim=options.value_head_dim,
    )
    lines = [f"{name}: {error.line()}" for name, error in errors.items()]
    report: dict[str, Any] = {
        "source": str(options.checkpoint.name),
        "source_step": int(checkpoint.get("global_step", 0)),
        "num_components": options.num_components,
        "score": options.score,
        "layers": {name: asdict(error) for name, error in errors.items()},
    }
    if run is not None:
        model_errors = run.model_errors(layers, options.num_batches)
        report["model"] = asdict(model_errors)
        lines.append(model_errors.line())
    kept = {k: v for k, v in checkpoint.items() if k not in _DROPPED}
    new = {
        **kept,
        "state_dict": fresh,
        "epoch": 0,
        "global_step": 0,
        "optimizer_states": [],
        "lr_schedulers": [],
        "conversion": report,
    }
    save_checkpoint(new, options.output)
    first = next(iter(layers.values()))
    dropout = 0.0 if run is None else run.attention_dropout
    config_file.write_text(yaml.safe_dump(attention_config(first, dropout), sort_keys=False))
    return [*lines, f"wrote {options.output} and {config_file}"]


def _open_run(options: argparse.Namespace) -> Run:
    """Open the run that the checkpoint belongs to.

    Raises:
        ConversionError: there is no configuration, or it does not fit checkpoint or data.
    """
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
    layers = list(trained.layers.values())
    sizes = {layer.head_dim for layer in layers}
    dropout = max((layer.dropout for layer in layers), default=0.0)
    return Run(trained.task, trained.data, sizes.pop() if len(sizes) == 1 else None, dropout)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_probattn.convert",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint with softmax attention")
    parser.add_argument("output", type=Path, help="the checkpoint to write, NAME.ckpt")
    parser.add_argument("--num_components", type=int, default=2, help="old heads per new head")
    parser.add_argument(
        "--score",
        choices=("dot", "gaussian"),
        default="dot",
        help="dot starts at the old logits; gaussian drops the keys' norms and starts further away",
    )
    parser.add_argument("--config", type=Path, help="the run's config.yaml")
    parser.add_argument(
        "--num_batches", type=int, default=8, help="validation batches that go through the model"
    )
    parser.add_argument("--weights_only", action="store_true", help="use no data")
    parser.add_argument("--head_dim", type=int, help="head size, where no config says it")
    parser.add_argument("--value_head_dim", type=int, help="size of new value heads")
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

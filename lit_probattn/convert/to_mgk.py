"""Convert the softmax attention of a checkpoint to a variant with fewer heads or score maps.

    lit-probattn convert runs/lra_text-softmax/0/checkpoints/best-00020000.ckpt mgk.ckpt
    lit-probattn convert runs/mnli-softmax/0 smgk.ckpt --to smgk --anneal 2000

mgk creates heads with several keys per position, smgk heads with one key and learned shifts, fish
local heads mixed from fewer global heads. Writes `mgk.ckpt`, to start from (`--init_from mgk.ckpt`,
or `--ckpt_path mgk.ckpt`), and `mgk.yaml`, its attention file (`--config mgk.yaml` after the run's
own). The errors of the layers and, with data, of the model are printed and stored in the checkpoint
under "conversion". A converted checkpoint is a starting point for fine-tuning.

Gaussian scores (smgk, or --score gaussian) drop the key norms of dot products. --anneal STEPS
restores them and removes them gradually over the first STEPS steps of training.

With the run's config.yaml (from the run folder, or --config), batches of its data pass through
the model, and the inputs of the layers determine head groups, factors, priors and value maps.
With --weights_only, no data are read. The configuration, if there is one (NAME.yaml beside
NAME.ckpt counts), sets head size and dropout; without it, pass --head_dim.

`--to safetensors` writes the weights of any checkpoint unchanged. Other conversions have their own
--help: `convert from_transformers FOLDER OUT.ckpt` reads BERT or RoBERTa, `convert to_transformers
CHECKPOINT FOLDER` writes one, `convert prune CHECKPOINT OUT.ckpt` drops components of MGK or sMGK
that are little used, and `convert wider_heads CHECKPOINT OUT.ckpt` enlarges the heads of softmax
attention.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

from lit_probattn.attention import Attention
from lit_probattn.attention.fish.layer import FiSHAttention
from lit_probattn.attention.mgk.annealing import DOT_PRODUCTS
from lit_probattn.attention.mgk.layer import MGKAttention
from lit_probattn.attention.mgk.options import MGKOptions
from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.config_files import is_there
from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.configs import own_config
from lit_probattn.convert.files import (
    attention_file,
    check_output,
    configured_layers,
    find_layers,
    model_arguments,
    put_layers,
    write,
)
from lit_probattn.convert.layer import LayerInputs, Mixture, check_layer
from lit_probattn.convert.model import (
    Target,
    compare_models,
    convert_layers,
    layer_inputs,
)
from lit_probattn.training.checkpoints import find_file, load_checkpoint
from lit_probattn.training.trained import Trained, open_trained

# Flags for mixtures of keys, for shifts, and for FiSH.
_MIXTURE = ("num_components", "score", "anneal")
_SHIFTS = ("old_heads", "spread")
_FISH = ("num_global_heads",)
KINDS = {"mgk": _MIXTURE, "smgk": (*_MIXTURE, *_SHIFTS), "fish": _FISH}


def read_target(options: argparse.Namespace) -> Target:
    """Return the target selected by the flags.

    Raises:
        ConfigError: the flags are incompatible.
    """
    for name in (*_MIXTURE, *_SHIFTS, *_FISH):
        if getattr(options, name) is not None and name not in KINDS[options.to]:
            kinds = " or ".join(kind for kind, names in KINDS.items() if name in names)
            raise ConfigError(f"--{name} requires --to {kinds}, received --to {options.to}")
    sizes = {"value_head_dim": options.value_head_dim}
    if options.to == "fish":
        return Target(num_global_heads=options.num_global_heads, **sizes)
    names = ("num_components", "old_heads", "score", "spread")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given |= {"shifted_keys": options.to == "smgk", "seed": options.seed}
    given |= {} if options.anneal is None else asdict(DOT_PRODUCTS)
    with prefixed("", ValueError):
        mixture = Mixture(**given)
    if options.anneal is not None and mixture.form == "dot":
        raise ConfigError("--anneal requires Gaussian scores: add --score gaussian")
    return Target(mixture, **sizes)


def _settings(target: Target) -> dict[str, Any]:
    """Return the report's entries for the target."""
    if target.mixture is None:
        return {"num_global_heads": target.num_global_heads}
    return asdict(target.mixture) | {"score": target.mixture.form}


def attention_config(layer: Attention, dropout: float) -> dict[str, Any]:
    """Return the attention entry that builds layers like a converted one."""
    arguments: dict[str, Any] = {"num_heads": layer.num_heads}
    if isinstance(layer, MGKAttention):
        arguments |= {"num_components": layer.num_components, "score": layer.core.score}
        options = [(option, getattr(layer.options, option.name)) for option in fields(MGKOptions)]
        arguments |= {option.name: value for option, value in options if value != option.default}
    elif isinstance(layer, FiSHAttention):
        arguments["num_global_heads"] = layer.num_global_heads
    arguments["dropout"] = dropout
    if layer.value_head_dim != layer.head_dim:
        arguments["value_head_dim"] = layer.value_head_dim
    if not layer.use_bias:
        arguments["bias"] = False
    name = type(layer).__name__
    return {"class_path": f"lit_probattn.attention.{name}", "init_args": arguments}


def run(options: argparse.Namespace) -> list[str]:
    """Convert `options.checkpoint` to `options.output`; return the lines to print.

    Raises:
        ConfigError: the checkpoint or the options are invalid.
        CheckpointError: a file cannot be read or written.
    """
    target = read_target(options)
    check_output(options.output)
    options.checkpoint = find_file(options.checkpoint)
    checkpoint = load_checkpoint(options.checkpoint)
    state = checkpoint.get("state_dict", {})
    run = None if options.weights_only else open_run(options)
    old = [] if run is None else list(run.layers.values())
    config_file = options.config or attention_file(options.checkpoint) if run is None else None
    head_dim = _head_size(options, {layer.head_dim for layer in old}, checkpoint, config_file)
    if config_file is not None:
        old = configured_layers(config_file, state, head_dim)
    for layer in old:  # other attention has the same parameters
        with prefixed("attention of the run", ValueError):
            check_layer(layer)
    batches: list[Any] = []
    inputs: dict[str, LayerInputs] = {}
    if run is not None:
        batches = list(islice(run.data.val_dataloader(), options.num_batches))
        inputs = layer_inputs(run.task, find_layers(state), batches)
    found = convert_layers(state, head_dim, inputs, target)
    lines = found.lines()
    report: dict[str, Any] = {
        "source": str(options.checkpoint.name),
        "source_step": int(checkpoint.get("global_step", 0)),
        "to": options.to,
        **_settings(target),
        "layers": {name: asdict(error) for name, error in found.errors.items()},
    }
    if run is not None:
        compared = compare_models(run.task, found.layers, batches)
        report["model"] = asdict(compared)
        lines.append(compared.line())
    dropout = max((layer.dropout for layer in old), default=0.0)
    entries = [attention_config(layer, dropout) for layer in found.layers.values()]
    if any(entry != entries[0] for entry in entries):
        raise ConfigError(
            "the layers differ in number or size of heads, which one attention file cannot "
            "express: all layers must be alike"
        )
    arguments: dict[str, Any] = {"attention": entries[0]}
    if options.anneal is not None:
        arguments["norm_annealing_steps"] = options.anneal
    fresh = put_layers(state, found.layers)
    config = {"model": {"init_args": arguments}}
    done = write(options.output, checkpoint, config, state_dict=fresh, conversion=report)
    return [*lines, done]


def _head_size(
    options: argparse.Namespace,
    sizes: set[int],
    checkpoint: dict[str, Any],
    config: Path | None,
) -> int:
    """Return the size of the old heads.

    Args:
        options: of the command; `head_dim` may be set.
        sizes: sizes in the run's layers, if it was opened.
        checkpoint: may store the size.
        config: configuration of a checkpoint without data, if there is one.

    Raises:
        ConfigError: the size is unknown, or the flag contradicts it.
    """
    known: dict[Any, Any] = {"the run": sizes.pop()} if len(sizes) == 1 else {}
    known[options.checkpoint] = checkpoint.get("hyper_parameters", {}).get("head_dim")
    if config is not None:
        known[config] = model_arguments(config).get("head_dim")
    head_dim = options.head_dim or next(filter(None, known.values()), None)
    for place, size in known.items():
        if size is not None and options.head_dim not in (None, size):
            raise ConfigError(
                f"--head_dim {options.head_dim} differs from {size} of {place}: remove --head_dim"
            )
    if head_dim is None:
        raise ConfigError("unknown head size: pass --head_dim or the run's --config")
    return int(head_dim)


def open_run(options: argparse.Namespace) -> Trained:
    """Open the run of the checkpoint."""
    path = options.config or own_config(options.checkpoint)
    if not is_there(path):
        without = ", or --weights_only with --head_dim" if "weights_only" in options else ""
        raise ConfigError(f"configuration not found: {path}; pass the run's --config{without}")
    wanted = argparse.Namespace(checkpoint=options.checkpoint, config=[path], data=[], device="cpu")
    errors = (KeyError, TypeError, ValueError, RuntimeError)
    with prefixed(f"cannot build the run of {path}", *errors):
        return open_trained(wanted)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `run`."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="checkpoint with softmax attention, or its run folder")
    add("output", type=Path, help="checkpoint to write, NAME.ckpt")
    add("--to", choices=tuple(KINDS), default="mgk", help="the new attention")
    add("--num_components", type=int, help="components per head, for mgk and smgk; default: 2")
    add(
        "--score",
        choices=("dot", "gaussian"),
        help="for mgk: dot (default) starts at the old logits, gaussian drops the key norms",
    )
    text = "remove the key norms over this many steps"
    add("--anneal", type=at_least(1), metavar="STEPS", help=text)
    add("--old_heads", type=int, help="old heads per new head, for smgk; default: num_components")
    add("--spread", type=float, help="noise of smgk's shifts, in deviations of keys; default: 0.1")
    add("--num_global_heads", type=int, help="for fish; default: half the heads")
    add("--seed", type=int, default=0, help="seed of --spread")
    add("--config", type=Path, help="the run's config.yaml")
    add("--num_batches", type=at_least(1), default=8, help="validation batches to use")
    add("--weights_only", action="store_true", help="convert without data")
    add("--head_dim", type=int, help="head size, if no configuration has it")
    add("--value_head_dim", type=int, help="size of new value heads")
    add_flag(parser)

"""Turn the softmax attention of a checkpoint into another: fewer heads, keys or score maps.

    lit-probattn convert runs/lra_text-softmax/0/checkpoints/best-00020000.ckpt mgk.ckpt
    lit-probattn convert runs/mnli-softmax/0 smgk.ckpt --to smgk --anneal 2000

mgk makes heads with several keys per position, smgk with one key and learned shifts, fish local
heads that are mixed from fewer maps. Writes `mgk.ckpt`, to start from (`--init_from mgk.ckpt`, or
`--ckpt_path mgk.ckpt`), and `mgk.yaml`, the attention file that goes with it (`--config mgk.yaml`
after the run's own). Every layer's error and, with data, the model's, are printed and stored in the
checkpoint under "conversion". A conversion is where fine-tuning starts.

Gaussian scores (of smgk, or --score gaussian) lack what dot products have of the keys' norms.
--anneal STEPS puts it back, and has training take it away over its first STEPS steps.

With the run's config.yaml (found beside the checkpoint, or --config) batches of its data go through
the model, and what each layer sees decides groups of heads, factors, priors and value maps. Without
it (--weights_only) only the weights count, and --head_dim is needed.

`--to safetensors` writes the weights of any checkpoint as they are. Other conversions have their
own --help: `convert from_transformers FOLDER OUT.ckpt` reads a BERT or a RoBERTa, `convert
to_transformers CHECKPOINT FOLDER` writes one, `convert prune CHECKPOINT OUT.ckpt` drops components
of MGK or sMGK that are hardly used.
"""

from __future__ import annotations

import argparse
import sys
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
from lit_probattn.base.arguments import Parser
from lit_probattn.base.config_files import is_there
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import read_yaml
from lit_probattn.convert.files import check_output, find_layers, put_layers, write
from lit_probattn.convert.layer import LayerInputs, Mixture
from lit_probattn.convert.model import (
    Target,
    compare_models,
    convert_layers,
    layer_inputs,
)
from lit_probattn.training.checkpoints import CheckpointError, find_file, load_checkpoint
from lit_probattn.training.trained import Trained, open_trained

# Flags that say something of mixtures of keys, of shifts among them, and of FiSH.
_MIXTURE = ("num_components", "score", "anneal")
_SHIFTS = ("old_heads", "spread")
_FISH = ("num_global_heads",)
KINDS = {"mgk": _MIXTURE, "smgk": (*_MIXTURE, *_SHIFTS), "fish": _FISH}


def read_target(options: argparse.Namespace) -> Target:
    """Return what the flags ask for.

    Raises:
        ConfigError: they exclude each other.
    """
    for name in (*_MIXTURE, *_SHIFTS, *_FISH):
        if getattr(options, name) is not None and name not in KINDS[options.to]:
            kinds = " and ".join(kind for kind, names in KINDS.items() if name in names)
            raise ConfigError(f"--{name} is for --to {kinds}, received --to {options.to}")
    sizes = {"value_head_dim": options.value_head_dim}
    if options.to == "fish":
        return Target(num_global_heads=options.num_global_heads, **sizes)
    names = ("num_components", "old_heads", "score", "spread")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given |= {"shifted_keys": options.to == "smgk", "seed": options.seed}
    given |= {} if options.anneal is None else asdict(DOT_PRODUCTS)
    try:
        mixture = Mixture(**given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if options.anneal is not None and mixture.form == "dot":
        raise ConfigError("--anneal is for Gaussian scores: add --score gaussian")
    return Target(mixture, **sizes)


def _settings(target: Target) -> dict[str, Any]:
    """Return what the report says of the target."""
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


def convert_checkpoint(options: argparse.Namespace) -> list[str]:
    """Convert `options.checkpoint` to `options.output`; return the lines to print.

    Raises:
        ConfigError: the checkpoint or the options do not fit.
        CheckpointError: a file cannot be read or written.
    """
    target = read_target(options)
    check_output(options.output)
    options.checkpoint = find_file(options.checkpoint)
    checkpoint = load_checkpoint(options.checkpoint)
    state = checkpoint.get("state_dict", {})
    run = None if options.weights_only else open_run(options)
    old = [] if run is None else list(run.layers.values())
    head_dim = _head_size(options, {layer.head_dim for layer in old}, checkpoint)
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
            "the layers have different numbers or sizes of heads, which one attention file cannot "
            "say: only models whose layers are alike can be converted"
        )
    arguments: dict[str, Any] = {"attention": entries[0]}
    if options.anneal is not None:
        arguments["norm_annealing_steps"] = options.anneal
    fresh = put_layers(state, found.layers)
    config = {"model": {"init_args": arguments}}
    done = write(options.output, checkpoint, config, state_dict=fresh, conversion=report)
    return [*lines, done]


def _head_size(options: argparse.Namespace, sizes: set[int], checkpoint: dict[str, Any]) -> int:
    """Return the size of the old heads: of the layers, or as checkpoint, run or flag say it.

    Raises:
        ConfigError: nobody says it, or the flag says another.
    """
    known: dict[Any, Any] = {"the run": sizes.pop()} if len(sizes) == 1 else {}
    known[options.checkpoint] = checkpoint.get("hyper_parameters", {}).get("head_dim")
    head_dim = options.head_dim or next(filter(None, known.values()), None)
    config = own_config(options.checkpoint)
    if options.weights_only and config.is_file():
        model = read_yaml(config).get("model") or {}
        known[config] = (model.get("init_args") or {}).get("head_dim")
    for place, size in known.items():
        if size is not None and options.head_dim not in (None, size):
            raise ConfigError(
                f"--head_dim {options.head_dim}, but {place} says {size}: leave --head_dim out"
            )
    if head_dim is None:
        raise ConfigError("the head size is not known: give --head_dim or the run's --config")
    return int(head_dim)


def own_config(checkpoint: Path) -> Path:
    """Return where the configuration of a checkpoint's run is, if it lies in one."""
    return checkpoint.resolve().parent.parent / "config.yaml"


def open_run(options: argparse.Namespace) -> Trained:
    """Open the run that the checkpoint belongs to."""
    path = options.config or own_config(options.checkpoint)
    if not is_there(path):
        without = ", or --weights_only with --head_dim" if "weights_only" in options else ""
        raise ConfigError(f"no config at {path}: give the run's --config{without}")
    wanted = argparse.Namespace(checkpoint=options.checkpoint, config=[path], data=[], device="cpu")
    try:
        trained = open_trained(wanted)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot build the run of {path}: {error}") from error
    return trained


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = Parser("python -m lit_probattn.convert", __doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint with softmax attention, or its run folder")
    add("output", type=Path, help="the checkpoint to write, NAME.ckpt")
    add("--to", choices=tuple(KINDS), default="mgk", help="the new attention; default: mgk")
    add("--num_components", type=int, help="components of a head, mgk and smgk; default: 2")
    add(
        "--score",
        choices=("dot", "gaussian"),
        help="of mgk: dot, its default, starts at the old logits; gaussian drops the keys' norms",
    )
    add("--anneal", type=int, metavar="STEPS", help="take the keys' norms away over these steps")
    add("--old_heads", type=int, help="old heads per new head of smgk; default: num_components")
    add("--spread", type=float, help="of smgk's shifts, in deviations of the keys; default: 0.1")
    add("--num_global_heads", type=int, help="of fish; default: half the heads")
    add("--seed", type=int, default=0, help="of the spread")
    add("--config", type=Path, help="the run's config.yaml")
    add("--num_batches", type=int, default=8, help="validation batches to look at")
    add("--weights_only", action="store_true", help="use no data")
    add("--head_dim", type=int, help="head size, where no configuration says it")
    add("--value_head_dim", type=int, help="size of new value heads")
    add_flag(parser)
    options = parser.parse_args(arguments)
    for name in ("num_batches", "anneal"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, received {value}")
    try:
        lines = convert_checkpoint(options)
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

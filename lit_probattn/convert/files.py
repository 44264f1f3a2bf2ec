"""Shared by checkpoint conversions: finding attention layers and writing files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lit_probattn.attention import Attention, SoftmaxAttention
from lit_probattn.attention.layer import PROJECTIONS
from lit_probattn.base.config_files import is_there
from lit_probattn.base.errors import ConfigError, nan_among
from lit_probattn.configs import attention_entry, build_attention, own_config, read_yaml
from lit_probattn.models.per_layer import attention_entries
from lit_probattn.training.checkpoints import save_checkpoint

# State of the run that wrote the checkpoint, not of the weights.
_DROPPED = ("loops", "callbacks", "MixedPrecision", "training")


def find_layers(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the attention layers in a state dict, in order.

    Raises:
        ConfigError: the state dict has no attention layers.
    """
    ending = "query_proj.weight"
    names = [key.removesuffix(ending).rstrip(".") for key in state if key.endswith(ending)]
    if not names:
        raise ConfigError("the checkpoint has no attention layers (no *.query_proj.weight)")
    return names


def model_arguments(config: Path) -> dict[str, Any]:
    """Return `model.init_args` of a configuration file."""
    return (read_yaml(config).get("model") or {}).get("init_args") or {}


def attention_file(checkpoint: Path) -> Path | None:
    """Return the configuration file that defines the attention of a checkpoint, or None.

    It is NAME.yaml beside NAME.ckpt, as conversions write it, or the config.yaml of its run.
    """
    found = filter(is_there, (checkpoint.with_suffix(".yaml"), own_config(checkpoint)))
    return next((path for path in found if "attention" in model_arguments(path)), None)


def configured_layers(config: Path, state: Mapping[str, Tensor], head_dim: int) -> list[Attention]:
    """Return the distinct attention layers that a configuration defines, without weights.

    Args:
        config: configuration of the run, or attention file.
        state: state dict of the run's checkpoint.
        head_dim: size of the heads.

    Raises:
        ConfigError: the file defines no attention, or an invalid one.
    """
    names = find_layers(state)
    entries = attention_entries(attention_entry(config))[-len(names) :]  # maybe without the default
    width = state[f"{names[0]}.query_proj.weight".lstrip(".")].shape[1]
    with torch.device("meta"):
        return [
            build_attention(entry["class_path"], entry.get("init_args") or {}, width, head_dim)
            for entry in entries
        ]


def require_no_hooks(layer: Attention) -> None:
    """Raise a ConfigError for a layer whose class changes weights or outputs by hooks.

    Converted weights would leave them out.
    """
    if layer.hooks():
        raise ConfigError(
            f"{type(layer).__name__} defines {', '.join(layer.hooks())}: only layers without hooks "
            "can be converted"
        )


def restore_layer(state: dict[str, Tensor], name: str, head_dim: int) -> SoftmaxAttention:
    """Return a layer of a state dict as softmax attention.

    Raises:
        ConfigError: the layer has parameters that softmax attention lacks, shares keys among heads,
            or its width is not a multiple of `head_dim`.
    """
    prefix = f"{name}." if name else ""
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    extra = sorted(key for key in own if key.split(".")[0] not in PROJECTIONS)
    if extra:
        raise ConfigError(f"{name} is not plain softmax attention: it also has {', '.join(extra)}")
    width, embed_dim = own["query_proj.weight"].shape
    if width % head_dim or own["key_proj.weight"].shape != (width, embed_dim):
        raise ConfigError(
            f"{name}: query_proj is {tuple(own['query_proj.weight'].shape)} and key_proj "
            f"{tuple(own['key_proj.weight'].shape)}; expected equal shapes with rows a multiple of "
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


def put_layers(state: Mapping[str, Tensor], layers: Mapping[str, Attention]) -> dict[str, Tensor]:
    """Return a state dict in which the given layers, by name, replace those of the same names."""
    prefixes = {name: f"{name}." if name else "" for name in layers}
    new = {
        prefixes[name] + key: value.clone()
        for name, layer in layers.items()
        for key, value in layer.state_dict().items()
    }
    gone = tuple(prefixes.values())
    return {k: v for k, v in state.items() if k in new or not k.startswith(gone)} | new


def check_output(output: Path) -> Path:
    """Return the path of the configuration file for a new checkpoint.

    Raises:
        ConfigError: the path is not the name of a checkpoint, or a file exists.
    """
    if not output.name or output.suffix == ".yaml":  # the configuration file has that name
        raise ConfigError(f"output must be NAME.ckpt, received {output}")
    config_file = output.with_suffix(".yaml")
    for path in (output, config_file):
        if path.exists():
            raise ConfigError(f"{path} exists: choose another name or remove it")
    return config_file


def write(
    output: Path, checkpoint: Mapping[str, Any], config: dict[str, Any], **changed: Any
) -> str:
    """Write a checkpoint for a new run and a configuration file for it; return a line to print.

    State of the run that wrote `checkpoint` is dropped; `changed` overrides entries of it. The
    model's arguments in `config` replace those of the checkpoint.

    Raises:
        CheckpointError: the file cannot be written.
        ConfigError: a weight is NaN, or a file exists.
    """
    config_file = check_output(output)
    bad = nan_among(changed.get("state_dict", {}).items())
    if bad is not None:
        raise ConfigError(f"conversion produced NaN: {bad}; no files were written")
    new = {k: v for k, v in checkpoint.items() if k not in _DROPPED} | changed
    arguments = checkpoint.get("hyper_parameters", {}) | config["model"]["init_args"]
    new["hyper_parameters"] = arguments
    new |= {"epoch": 0, "global_step": 0, "optimizer_states": [], "lr_schedulers": []}
    save_checkpoint(new, output)
    config_file.write_text(yaml.safe_dump(config, sort_keys=False))
    return f"wrote {output} and {config_file}"

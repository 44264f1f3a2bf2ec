"""Folders in which transformers keeps a model: config.json and the weights beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lit_probattn.base.errors import ConfigError, nan_among
from lit_probattn.base.files import replacing
from lit_probattn.training.checkpoints import code_needed

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# In the order in which they are looked for; an index names the files of a model in several.
_FILES = (
    *(WEIGHTS, "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ConfigError: it is missing, or something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} not found{_there(path.parent)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise ConfigError(f"{path} is not JSON: {error}; get it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object; get it again")
    return content


def _there(folder: Path) -> str:
    """Name what is in a folder that lacks something."""
    if not folder.is_dir():
        return f": {folder} is not a folder"
    names = sorted(path.name for path in folder.iterdir())
    return f"; in {folder} there are {', '.join(names[:8])}" if names else f"; {folder} is empty"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model by their names, from one file or from several.

    Raises:
        ConfigError: a file is missing, damaged, would need code to load, or holds NaN.
    """
    found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if found is None:
        raise ConfigError(
            f"{folder} has none of {', '.join(_FILES)}{_there(folder)}; other formats are not "
            "read: save the model with transformers' save_pretrained"
        )
    if found.suffix != ".json":
        return _read_tensors(found)
    weight_map = read_json(found).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{found} has no weight_map; get it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        if Path(name).name != name:
            raise ConfigError(f"{found} names {name!r}: expected files of its own folder")
        tensors |= _read_tensors(folder / name)
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise ConfigError(f"{found} names {absent[0]}, which its file has not; get both again")
    return tensors


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file."""
    if not path.is_file():
        raise ConfigError(f"{path} not found{_there(path.parent)}; get all files of the model")
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged: {error}; get it again") from None
    except Exception as error:  # of pickles, archives and tensors
        code = code_needed(error)
        reason = "it is damaged, or not a file of PyTorch"
        if code is not None:
            reason = f"it needs code to load ({code}), and only tensors are read"
        raise ConfigError(
            f"{path} cannot be read: {reason}; get it again, or {WEIGHTS} in its place"
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ConfigError(f"{path} does not hold tensors by name; expected a state dict")
    bad = nan_among(loaded.items())
    if bad is not None:
        raise ConfigError(f"{path}: {bad}")
    return dict(loaded)


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Write config.json and model.safetensors; return a line.

    Raises:
        ConfigError: one of the two exists, or cannot be written.
    """
    for name in (CONFIG, WEIGHTS):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} exists: choose another folder or remove it")
    content = save({k: t.contiguous() for k, t in tensors.items()}, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    try:
        for name, data in ((WEIGHTS, content), (CONFIG, text.encode("utf-8"))):
            with replacing(folder / name) as file:
                file.write(data)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}") from None
    return f"wrote {folder / CONFIG} and {folder / WEIGHTS}"

"""Model folders of transformers: config.json and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.base.files import replacing
from lit_probattn.interop.state_dicts import folder_content, read_state_dict

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# In order of preference; an index lists the files of a sharded model.
_FILES = (
    *(WEIGHTS, "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ConfigError: the file is missing, or does not hold a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} not found{folder_content(path.parent)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise ConfigError(f"{path} is not valid JSON: {error}; download it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object; download it again")
    return content


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the state dict of a model, from one file or several.

    Raises:
        ConfigError: a file is missing or corrupt, requires code to load, or contains NaN.
    """
    found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if found is None:
        raise ConfigError(
            f"{folder} has none of {', '.join(_FILES)}{folder_content(folder)}; other formats are "
            "not supported: save the model with save_pretrained of transformers"
        )
    if found.suffix != ".json":
        return read_state_dict(found)
    weight_map = read_json(found).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{found} has no weight_map; download it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        if Path(name).name != name:
            raise ConfigError(f"{found} names {name!r}: expected files in the same folder")
        if not (folder / name).is_file():
            listed = folder_content(folder)
            raise ConfigError(f"{folder / name} not found{listed}; download all files of the model")
        tensors |= read_state_dict(folder / name)
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise ConfigError(f"{found} names {absent[0]}, missing from its file; download both again")
    return tensors


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Write config.json and model.safetensors; return a line to print.

    Raises:
        ConfigError: a file exists or cannot be written.
    """
    for name in (CONFIG, WEIGHTS):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} exists: choose another folder or remove it")
    content = save({k: t.contiguous() for k, t in tensors.items()}, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    with prefixed(f"cannot write to {folder}", OSError):
        for name, data in ((WEIGHTS, content), (CONFIG, text.encode("utf-8"))):
            with replacing(folder / name) as file:
                file.write(data)
    return f"wrote {folder / CONFIG} and {folder / WEIGHTS}"

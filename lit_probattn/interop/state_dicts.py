"""State dicts in files of other programs."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lit_probattn.base.errors import ConfigError, nan_among

# Messages of `torch.load` that name the code it rejects.
_CODE = (
    r"GLOBAL ([\w.]+) (?:was not an allowed|whose module)",
    r"add_safe_globals` but got <(?:class|built-in function) '?([\w.]+)",
    r"Trying to call reduce for unrecognized function <(?:built-in )?function ([\w.]+)",
)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read safetensors, or a torch.save file with or without an outer `model` or `state_dict`.

    Raises:
        ConfigError: the file is missing, corrupt or a folder, requires code to load, contains no
            tensors by name, or contains NaN.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, expected a file of tensors by name")
    if not path.is_file():
        raise ConfigError(f"{path} not found{folder_content(path.parent)}")
    try:
        if path.suffix == ".safetensors":
            loaded: Any = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ConfigError(f"{path} is corrupt: {error}; download it again") from None
    except Exception as error:  # from pickle, zip or tensor decoding
        code = code_needed(error)
        reason = "it is corrupt, or not a PyTorch file; download it again, or as .safetensors"
        if code is not None:
            reason = (
                f"it requires code to load ({code}), and only tensors are loaded; save its "
                "state_dict() instead, or download it as .safetensors"
            )
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    for outer in ("model", "state_dict"):
        loaded = loaded.get(outer, loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ConfigError(f"{path} is not a state dict: expected tensors by name")
    bad = nan_among(loaded.items())
    if bad is not None:
        raise ConfigError(f"{path}: {bad}, so its outputs would be NaN")
    return dict(loaded)


def code_needed(error: Exception) -> str | None:
    """Return the name of the code that a file needs and `torch.load` rejects, or None.

    The original message would recommend running the code of the file.
    """
    text = str(error)
    found = next((m for pattern in _CODE if (m := re.search(pattern, text))), None)
    return None if found is None else found[1]


def folder_content(folder: Path) -> str:
    """List the content of a folder, for an error about a missing file."""
    if not folder.is_dir():
        return f": {folder} is not a folder"
    names = sorted(path.name for path in folder.iterdir())
    return f"; {folder} contains {', '.join(names[:8])}" if names else f"; {folder} is empty"

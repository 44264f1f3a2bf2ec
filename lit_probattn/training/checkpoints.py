"""Checkpoint files: atomic writes, verification, search.

Names: `step-00000500.ckpt` (complete training state), `best-00000400.ckpt` (the same, at the
best validation) and `average-10-00000500.ckpt` (the mean of the ten newest, weights only).
The number is the optimiser step.
"""

import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import torch
from lightning.fabric.plugins.io import CheckpointIO
from safetensors.torch import save
from torch import Tensor

from lit_probattn.base.errors import nan_among, prefixed
from lit_probattn.base.files import digest_of, replacing
from lit_probattn.interop.state_dicts import code_needed

Kind = Literal["step", "best"]
Value = TypeVar("Value")
_NAME = re.compile(r"(step|best|average-\d+)-(\d{8})\.ckpt")
_AVERAGE = re.compile(r"average-(\d+)")


# Exceptions of the zip module for corrupt bytes; a corrupt flag can look like encryption.
_BAD_ARCHIVE = (
    *(zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, KeyError),
    *(NotImplementedError, RuntimeError),
)
# The archive's comment, at its end, contains the SHA-256 of everything before it: the checksums of
# members do not cover the table of contents, whose corruption PyTorch's reader may not detect.
_SEAL = b"sha256:"
_SEAL_BYTES = len(_SEAL) + 64

# The end record of an archive; its last two bytes are the length of the comment.
_END, _END_BYTES = b"PK\x05\x06", 22

MODEL = "model."  # prefix of the model's entries in a task
_AVERAGED_MODEL = "ema.module."  # prefix of their moving average

# Keys that every checkpoint of a run contains.
_PARTS = ("state_dict", "global_step", "pytorch-lightning_version")


class CheckpointError(RuntimeError):
    """A checkpoint is missing, corrupt, or cannot be written."""


def checkpoint_path(folder: Path, kind: Kind, step: int) -> Path:
    """Return the path of the checkpoint of one step."""
    return folder / f"{kind}-{step:08d}.ckpt"


def list_checkpoints(folder: Path, kind: Kind) -> list[Path]:
    """Return the checkpoints of one kind in a folder, newest step first."""
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    found = [
        (int(m[2]), path)
        for m, path in named
        if m is not None and m[1] == kind and not path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def is_run_checkpoint(path: Path) -> bool:
    """Whether a file name is that of a checkpoint written by a run."""
    return _NAME.fullmatch(path.name) is not None


def selected_by_validation(path: Path) -> bool:
    """Whether a checkpoint may be selected by a validation score: all but `step` and `average`."""
    named = _NAME.fullmatch(path.name)
    return named is None or named[1] == "best"


def step_of(path: Path) -> int:
    """Return the optimiser step of a checkpoint, from its name or else from its content."""
    named = _NAME.fullmatch(path.name)
    return int(named[2]) if named is not None else int(load_checkpoint(path)["global_step"])


def check_checkpoint(path: Path) -> None:
    """Verify the archive's checksums.

    Raises:
        CheckpointError: the file is missing, truncated or corrupt.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint not found: {path}{_existing(path)}")
    if path.stat().st_size == 0:
        raise CheckpointError(f"checkpoint {path} is empty")
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
        sealed = _seal_holds(path)
    except _BAD_ARCHIVE as error:
        raise CheckpointError(f"checkpoint {path} is corrupt: {error}") from error
    if member is not None:
        raise CheckpointError(f"checkpoint {path} is corrupt: checksum of {member!r} is wrong")
    if not sealed:
        raise CheckpointError(f"checkpoint {path} is corrupt: checksum of the file is wrong")


def find_file(path: Path) -> Path:
    """Return the checkpoint that a path denotes: the file itself, or a checkpoint of a run folder.

    `RUN` and `RUN/best` denote the best one, or without a validation the newest; `RUN/last` the
    newest; `RUN/average-10` the mean of the ten newest, which is computed. `RUN/checkpoints` is
    equivalent to `RUN`.

    Raises:
        CheckpointError: there is none, or all of a run are corrupt.
    """
    if path.is_file():
        return path
    count = averaged_number(path.name)
    if count is not None and not path.exists():
        inner = path.parent / "checkpoints"
        return average_newest(inner if inner.is_dir() else path.parent, count)
    asked = path.name if path.name in ("best", "last") and not path.exists() else ""
    folder = path.parent if asked else path
    kinds: tuple[Kind, ...] = ("step",) if asked == "last" else ("best", "step")
    for place in (folder / "checkpoints", folder):
        for kind in kinds:
            found = newest_good_checkpoint(place, kind)
            if found is not None:
                return found
    raise CheckpointError(f"checkpoint not found: {path}{_existing(path)}")


def _existing(path: Path) -> str:
    """List the checkpoints near a path without one, for a message."""
    for place in (path / "checkpoints", path, path.parent, path.parent / "checkpoints"):
        names = sorted(p.name for p in place.glob("*.ckpt") if p.is_file() and p != path)
        if names:
            return f"; in {place} there are {', '.join(names[:8])}"
    return ""


def _seal(file: BinaryIO) -> None:
    """Append the seal to a newly written archive without comment."""
    file.flush()
    end = file.seek(-2, os.SEEK_END)  # the length of the comment
    file.seek(0)
    digest = digest_of(_parts(file, end))
    file.seek(end)
    file.write(_SEAL_BYTES.to_bytes(2, "little") + _SEAL + digest.encode())


def _seal_holds(path: Path) -> bool:
    """Whether the seal matches the file; True for files of other programs, which have none."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES - _SEAL_BYTES))
        end = file.read()
        record = end.rfind(_END)
        declared = int.from_bytes(end[record + _END_BYTES - 2 : record + _END_BYTES], "little")
        if record < 0 or declared != _SEAL_BYTES:
            return True
        file.seek(0)
        found = digest_of(_parts(file, size - len(end) + record + _END_BYTES - 2))
        return end[record + _END_BYTES :] == _SEAL + found.encode()


def _parts(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Yield the next `num_bytes` of a file in parts."""
    while num_bytes > 0 and (part := file.read(min(num_bytes, 1 << 20))):
        yield part
        num_bytes -= len(part)


def newest_good_checkpoint(folder: Path, kind: Kind) -> Path | None:
    """Return the newest intact checkpoint of a kind, or None if there is none of this kind.

    Warns about each newer one that is corrupt.

    Raises:
        CheckpointError: there are checkpoints, but all of them are corrupt.
    """
    problems = []
    for path in list_checkpoints(folder, kind):
        try:
            check_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; falling back to {path.name}", stacklevel=2)
        return path
    if problems:
        raise CheckpointError("no intact checkpoint: " + "; ".join(problems))
    return None


def load_checkpoint(
    path: Path, map_location: Any = "cpu", weights_only: bool = True
) -> dict[str, Any]:
    """Verify and load a checkpoint.

    Args:
        map_location: as in `torch.load`.
        weights_only: reject anything except tensors and plain values. All checkpoints of this
            package pass.

    Raises:
        CheckpointError: the file is corrupt, contains objects that need code to load or NaN
            weights, or its step differs from its name.
    """
    check_checkpoint(path)
    try:
        loaded: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only
        )
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {_refusal(error)}") from error
    if not isinstance(loaded, dict):
        kind = type(loaded).__name__
        raise CheckpointError(f"{path} is not a checkpoint: it contains a {kind}")
    wrong = _wrong_contents(path, loaded)
    if wrong is not None:
        raise CheckpointError(f"checkpoint {path}{wrong}")
    return loaded


def _wrong_contents(path: Path, loaded: dict[str, Any]) -> str | None:
    """Return a problem that prevents resuming (wrong step, no tensors, NaN), or None."""
    step, named = loaded.get("global_step", 0), _NAME.fullmatch(path.name)
    if not isinstance(step, int):
        return f": global_step is {step!r}, expected a number"
    if named is not None and "global_step" in loaded and step != int(named[2]):
        return f" contains step {step}, but its name has {int(named[2])}: rename it"
    state = loaded.get("state_dict", {})
    if not isinstance(state, dict):
        return f": state_dict is a {type(state).__name__}, expected tensors by name"
    for name, tensor in state.items():
        if not isinstance(name, str):
            return f": state_dict has the key {name!r}, expected a name"
        if not isinstance(tensor, Tensor):
            return f": state_dict has a {type(tensor).__name__} as {name}, expected a tensor"
        if tensor.layout != torch.strided:
            return f": {name} is sparse, expected a dense tensor"
    found = nan_among(state.items())
    return None if found is None else f": {found}, so its outputs would be NaN"


def _refusal(error: Exception) -> str:
    """Return the reason of a `torch.load` error in one line."""
    code = code_needed(error)
    if code is not None:
        return (
            f"it needs code to load ({code}); checkpoints may contain only tensors and plain values"
        )
    text = str(error).strip()
    if isinstance(error, pickle.UnpicklingError):
        # torch's first lines recommend running the code; the reason is last.
        reason = text.split("Check the documentation")[0].strip().splitlines()[-1:]
        detail = reason[0].strip() if reason and "`weights_only`" not in reason[0] else "no reason"
        return f"checkpoints may contain only tensors and plain values ({detail})"
    return text.splitlines()[0] if text else repr(error)


def save_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically, with a seal; see `replacing`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        with replacing(path) as file:
            torch.save(checkpoint, file)
            _seal(file)
    except (OSError, RuntimeError) as error:
        remedy = "free some space, or set --run.root to another disk"
        if path.is_dir():
            remedy = "a folder with that name exists; move or delete it"
        raise CheckpointError(
            f"cannot write checkpoint {path}: {_cause(error)}. Earlier checkpoints are intact; "
            f"{remedy}"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """Return the OSError behind an error of PyTorch's writer, which omits it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


# ---- averages ----------------------------------------------------------------------------------


def averaged_number(request: str) -> int | None:
    """Return the number of averaged checkpoints of a request like `average-10`, or None."""
    asked = _AVERAGE.fullmatch(request)
    return int(asked[1]) if asked else None


def average_newest(folder: Path, count: int) -> Path:
    """Write the mean of a run's newest step checkpoints; return its path.

    Numbers are averaged in float64; other tensors are those of the newest checkpoint. The file
    contains no optimiser state.

    Source: Vaswani et al., 2017, section 6.1; fairseq's average_checkpoints.

    Args:
        folder: the run's `checkpoints`.
        count: number of checkpoints to average, at least 1.

    Raises:
        CheckpointError: there are fewer, one is corrupt, or their tensors differ in name or shape.
    """
    there = list_checkpoints(folder, "step")
    if not 1 <= count <= len(there):
        raise CheckpointError(
            f"average-{count} requires {max(count, 1)} step checkpoints in {folder}, found "
            f"{len(there)}: train with --run.keep_checkpoints {max(count, 2)}"
        )
    paths = there[:count]
    newest = load_checkpoint(paths[0])
    sums = {
        name: tensor.to(torch.float64, copy=True)  # a copy, since weights can be shared
        for name, tensor in newest["state_dict"].items()
        if tensor.is_floating_point()
    }
    for path in paths[1:]:
        state = load_checkpoint(path)["state_dict"]
        for name, total in sums.items():
            if name not in state or state[name].shape != total.shape:
                raise CheckpointError(f"{path} and {paths[0]} differ in {name}: different models")
            total += state[name].double()
    means = {name: (total / count).to(newest["state_dict"][name]) for name, total in sums.items()}
    kept = {k: v for k, v in newest.items() if k not in ("optimizer_states", "lr_schedulers")}
    kept["state_dict"] = {**newest["state_dict"], **means}
    kept["averaged"] = [path.name for path in paths]
    target = folder / f"average-{count}-{step_of(paths[0]):08d}.ckpt"
    save_checkpoint(kept, target)
    return target


class CheckedCheckpointIO(CheckpointIO):
    """Checkpoint input and output for Lightning, by the functions above."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write atomically. See `save_checkpoint`."""
        if storage_options is not None:
            raise TypeError(f"storage_options is not supported, received {storage_options!r}")
        save_checkpoint(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify and load. Objects that need code are rejected unless `weights_only` is False."""
        loaded = load_checkpoint(Path(path), map_location, weights_only is not False)
        missing = ", ".join(name for name in _PARTS if name not in loaded)
        if missing:
            raise CheckpointError(f"{path} is not a training checkpoint: missing keys {missing}")
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint if it exists."""
        Path(path).unlink(missing_ok=True)


def in_task(entries: Mapping[str, Value]) -> dict[str, Value]:
    """Return entries of a model, such as its weights, under their names in a task."""
    return {MODEL + name: value for name, value in entries.items()}


def of_model(state: Mapping[str, Value]) -> dict[str, Value]:
    """Return the entries of a task's model, under their names in the model."""
    return {name.removeprefix(MODEL): v for name, v in state.items() if name.startswith(MODEL)}


def evaluated_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of a task in which the moving average, if any, replaces the model.

    Evaluations use the average if the run has one. Tensors are shared.
    """
    if not any(name.startswith(_AVERAGED_MODEL) for name in state):
        return dict(state)
    return {
        name.replace(_AVERAGED_MODEL, MODEL, 1): value
        for name, value in state.items()
        if not name.startswith(MODEL)
    }


def export_safetensors(checkpoint: Path, output: Path) -> int:
    """Write the model's weights of a checkpoint to a safetensors file; return their number.

    They are the weights that evaluations use: their moving average if the run has one. Keys are
    parameter names of the model.

    Raises:
        CheckpointError: the output exists or cannot be written; the checkpoint is corrupt or
            contains no model.
    """
    if output.exists() or output.is_symlink():
        raise CheckpointError(f"{output} exists: choose another name, or remove it")
    state = evaluated_weights(load_checkpoint(find_file(checkpoint)).get("state_dict", {}))
    weights = {name: tensor.clone().contiguous() for name, tensor in of_model(state).items()}
    if not weights:
        raise CheckpointError(f"checkpoint {checkpoint} contains no tensors named {MODEL}*")
    content = save(weights, metadata={"format": "pt"})
    with prefixed(f"cannot write {output}", OSError, to=CheckpointError), replacing(output) as file:
        file.write(content)
    return len(weights)

"""Initial weights from a checkpoint: entries with matching names and shapes.

The checkpoint can belong to another task. Missing entries keep their initialisation; a
task-specific head may have another shape, all other shapes must match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.base.files import file_digest
from lit_probattn.interop.state_dicts import read_state_dict
from lit_probattn.training.checkpoints import (
    MODEL,
    CheckpointError,
    evaluated_weights,
    find_file,
    in_task,
    load_checkpoint,
)

Shapes = tuple[tuple[int, ...], tuple[int, ...]]

_SHOWN = 6  # names per line
# End of a table's name -> meaning of its rows, and how to make them match.
_TABLES = (
    (
        "tokens.weight",
        "vocabulary size {there}, expected {here}: use the checkpoint's tokeniser "
        "(--data.init_args.tokenizer), or the data that it was trained on",
    ),
    (
        "positions.offsets.weight",
        "{there} positions, expected {here}: set the model to the same number (fine-tuning data "
        "have --data.init_args.max_positions {there}, others max_length or segment_len)",
    ),
    (
        "token_types.weight",
        "{there} token types, expected {here}: set --model.init_args.num_token_types {there}",
    ),
)
_OTHERWISE = (
    "set the sizes and the attention of the model as in that checkpoint, or convert it first "
    "(`lit-probattn convert`)"
)


@dataclass(frozen=True)
class Taken:
    """Which entries of a checkpoint were loaded.

    Args:
        source: the checkpoint.
        sha256: hash of the file.
        step: its optimiser step; None if not stored.
        taken: entries loaded into the model.
        left: entries of the file that the model does not have.
        new: entries of the model that the file does not have.
        other_shape: heads with another shape, not loaded: shape in the file, shape in the model.
    """

    source: Path
    sha256: str
    step: int | None
    taken: list[str]
    left: list[str]
    new: list[str]
    other_shape: dict[str, Shapes]

    def lines(self) -> list[str]:
        """Return lines for the user."""
        step = "" if self.step is None else f" (step {self.step})"
        lines = [f"initial weights from {self.source}{step}: {len(self.taken)} entries loaded"]
        for what, names in (
            ("unused checkpoint keys", self.left),
            ("newly initialised keys", self.new),
            (
                "newly initialised keys (other shape)",
                [self._shapes(name) for name in self.other_shape],
            ),
        ):
            if names:
                more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                shown = ", ".join(name.removeprefix(MODEL) for name in names[:_SHOWN])
                lines.append(f"  {what}: {shown}{more}")
        return lines

    def record(self) -> dict[str, Any]:
        """Return the entry of the run's record."""
        return {
            "checkpoint": str(self.source),
            "sha256": self.sha256,
            "step": self.step,
            "taken": len(self.taken),
            "left": self.left,
            "new": self.new,
            "other_shape": {name: list(map(list, s)) for name, s in self.other_shape.items()},
        }

    def _shapes(self, name: str) -> str:
        there, here = self.other_shape[name]
        return f"{name} {tuple(here)}, checkpoint {tuple(there)}"


def init_from(task: Any, path: str, tokeniser: str | None = None) -> Taken:
    """Load the matching weights of a checkpoint into a task.

    If the checkpoint has a moving average of its weights, the average is loaded, since evaluations
    use it. The task's moving average starts at the loaded weights.

    Args:
        path: a checkpoint, a run folder, or `RUN/best`, `RUN/last`; or weights as safetensors.
        tokeniser: digest of the tokeniser of this run's data, if they have one.

    Raises:
        ConfigError: the file is missing or corrupt, a shape differs, no entry matches, or its
            tokeniser differs.
    """
    if not path:
        raise ConfigError("--init_from is empty: pass a checkpoint or a run folder")
    with prefixed("--init_from", CheckpointError):
        source = find_file(Path(path))
        state, loaded = _read(source)
    _reject_other_tokeniser(source, loaded, tokeniser)
    found = _match(source, loaded.get("global_step"), state, task)
    with prefixed(f"--init_from {source}", ValueError):  # a layer can reject entries
        task.load_state_dict({n: state[n] for n in (*found.taken, *found.left)}, strict=False)
    average: Any = getattr(task, "ema", None)
    if average is not None:
        average.module.load_state_dict(task.model.state_dict())
    return found


def _read(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a file with the names of a task, and the whole content."""
    if source.suffix == ".safetensors":
        with prefixed("", ConfigError, to=CheckpointError):
            return in_task(read_state_dict(source)), {}
    loaded = load_checkpoint(source)
    if "state_dict" not in loaded:
        raise CheckpointError(f"{source} is not a checkpoint: it has no state_dict of tensors")
    # Heads that were stored separately when a transformers model was converted.
    apart = loaded.get("transformers", {}).get("other_heads", {})
    return evaluated_weights({**apart, **loaded["state_dict"]}), loaded


def _reject_other_tokeniser(source: Path, loaded: Mapping[str, Any], tokeniser: str | None) -> None:
    """Raise a ConfigError if the data of the checkpoint and of this run have other tokenisers."""
    before = [
        part["tokeniser"]
        for part in loaded.values()
        if isinstance(part, Mapping) and "tokeniser" in part
    ]
    if before and tokeniser is not None and before[0] != tokeniser:
        raise ConfigError(
            f"--init_from {source}: the checkpoint was trained with another tokeniser than the "
            "data, so ids would denote different tokens: set --data.init_args.tokenizer to its "
            "tokeniser; a learned one is in the cache of that run's data, whose folder `python -m "
            "datamodules check` prints"
        )


def _match(source: Path, step: int | None, state: Mapping[str, Tensor], task: Any) -> Taken:
    """Compare the entries of a file and a model.

    Raises:
        ConfigError: a shape differs, or no entry matches.
    """
    own: Mapping[str, Tensor] = evaluated_weights(task.state_dict())
    both = [name for name in own if name in state]
    other = {
        name: (tuple(state[name].shape), tuple(own[name].shape))
        for name in both
        if state[name].shape != own[name].shape
    }
    refused = [name for name in other if not task.is_head(name)]
    if refused:
        raise ConfigError(_refusal(source, refused, other))
    taken = [name for name in both if name not in other]
    if all(task.is_head(name) for name in taken):
        names = ", ".join(list(state)[:3])
        raise ConfigError(
            f"--init_from {source}: checkpoint and model share no names outside the heads "
            f"(checkpoint: {names}; model: {', '.join(list(own)[:3])}): pass a checkpoint of such "
            "a model"
        )
    left = [name for name in state if name not in own]
    new = [name for name in own if name not in state]
    return Taken(source, file_digest(source), step, taken, left, new, other)


def _refusal(
    source: Path,
    refused: Sequence[str],
    shapes: Mapping[str, Shapes],
) -> str:
    """Return a message with the first mismatched entry, tables first, and the remedy."""
    for ending, remedy in _TABLES:
        name = next((n for n in refused if n.endswith(ending)), None)
        if name is not None and shapes[name][0][1:] == shapes[name][1][1:]:
            there, here = (shape[0] for shape in shapes[name])
            advice = remedy.format(there=there, here=here)
            break
    else:
        name, advice = refused[0], _OTHERWISE
    there_shape, here_shape = shapes[name]
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return (
        f"--init_from {source}: {name} has shape {tuple(there_shape)}, expected "
        f"{tuple(here_shape)}{more}: {advice}"
    )

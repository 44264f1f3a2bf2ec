"""Times of a user's sweep, matched to the requested variants and sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.commands.ask.layers import Answer, Question

if TYPE_CHECKING:
    from profiling.measure.rows import ProfileRow

# Words in GPU names; other GPUs are matched by `cuda`.
GPUS = ("a100", "a10", "b200", "gh200", "h100", "h200", "l4", "l40s", "rtx", "t4", "v100")
DEVICES = ("cpu", "cuda", *GPUS)


def check_device(name: str) -> None:
    """Raise for an unknown device.

    Raises:
        ConfigError: the message suggests the nearest.
    """
    if name not in DEVICES:
        raise ConfigError(f"--device: unknown device {name!r}{nearest(name, DEVICES)}")


def rows_of(folder: Path, question: Question) -> list[ProfileRow]:
    """Return the measured times in a results folder of `lit-probattn sweep`.

    Args:
        folder: the results folder.
        question: its mask must be that of the sweep, since rows do not contain it.

    Raises:
        ConfigError: there are no rows, a file is missing or corrupt, or the mask is another one.
    """
    from profiling.measure.rows import read_rows  # pandas: half a second

    path = folder / "rows.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"--measured {folder}: missing rows.jsonl; pass the results folder of "
            "`lit-probattn sweep`"
        )
    try:
        rows = read_rows(path)
    except ConfigError as error:
        raise ConfigError(f"--measured {folder}: {error}") from error
    note = folder / "sweep.json"
    try:
        is_causal = json.loads(note.read_text(encoding="utf-8"))["model"]["is_causal"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--measured {folder}: missing or invalid sweep.json; pass the results folder of "
            "`lit-probattn sweep`"
        ) from error
    if is_causal is not question.is_causal:
        told = "causal attention: add --causal" if is_causal else "no causal mask: omit --causal"
        raise ConfigError(f"--measured {folder}: its times are of {told}")
    return [row for row in rows if row.quantity == "time" and row.status == "ok"]


def with_times(
    answers: Iterable[Answer], rows: Iterable[ProfileRow], question: Question
) -> list[Answer]:
    """Return the answers with the median times of steps at exactly these sizes."""
    times: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row.time_median_s is not None and _is_there(row, question):
            key = (row.attention_class, _options(row.attention_args, row.num_heads), row.mode)
            times[key] = row.time_median_s
    found = []
    for each in answers:
        cls = each.class_path.rpartition(".")[2]
        options = _options(json.dumps(each.options), each.num_heads)
        trained, evaluated = (times.get((cls, options, mode)) for mode in ("train", "eval"))
        found.append(replace(each, training_s=trained, inference_s=evaluated))
    return found


def _options(arguments: str, num_heads: int | None) -> str:
    options = {**json.loads(arguments), "num_heads": num_heads}
    return json.dumps(options, sort_keys=True)


def _is_there(row: ProfileRow, question: Question) -> bool:
    place = (row.model, row.embed_dim, row.seq_len, row.batch_size, row.head_dim, row.backend)
    wanted = ("attention", question.embed_dim, question.seq_len, question.batch_size)
    if place != (*wanted, question.head_dim, "auto") or row.dtype != "float32":
        return False
    same_kind = row.device.startswith(question.kind)
    words = re.split(r"\W+", row.device_name.lower())  # A10 is neither A100 nor A10G
    return same_kind and (question.device in ("cpu", "cuda") or question.device in words)

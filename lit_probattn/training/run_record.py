"""`versions.json` and `config.yaml` of a run folder; what killed and damaged runs leave in it."""

from __future__ import annotations

import itertools
import json
import platform
import re
import shlex
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_probattn.base.files import replace_text
from lit_probattn.base.provenance import RUN_PACKAGES, git_state, hardware, package_versions

FILE_NAME = "versions.json"
# Temporary files of `replacing`: those that the lock protects, and those of evaluations.
_TEMPORARY = re.compile(
    r"\.((?P<own>(step|best)-\d{8}\.ckpt|metrics\.csv|config\.yaml|versions\.json)"
    r"|(test|validate|predictions)-[\w-]+\.(json|parquet))\.\w+"
)
_ABANDONED_SECONDS = 3600.0


def write_record(
    folder: Path,
    *,
    config_text: str,
    seed: int,
    arguments: list[str],
    checkpoint: Path | None,
    job: str | None = None,
    initial_weights: dict[str, Any] | None = None,
    test_during_training: int | str | None = None,
) -> None:
    """Write `config.yaml`, and add one start to `versions.json`, which is set aside if damaged.

    Args:
        config_text: the resolved configuration.
        arguments: command line after `python -m lit_probattn`.
        checkpoint: what this start continues from.
        job: what a cluster calls the job, the same when it starts it again.
        initial_weights: what `--init_from` took, if this start has begun with it.
        test_during_training: how much of the test split is scored at every validation.

    `saved` says whether this start has written a checkpoint: not yet. `config` repeats
    `config.yaml`, which may be edited later.
    """
    start = {
        "started": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": shlex.join(["python", "-m", "lit_probattn", *arguments]),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "job": job,
        "init_from": initial_weights,
        "test_during_training": test_during_training,
        "config": config_text,
        "saved": False,
        "seed": seed,
        "python": platform.python_version(),
        "packages": package_versions(RUN_PACKAGES),
        "git": git_state(),
        "hardware": hardware(),
    }
    before = read_starts(folder)
    if not before and (folder / FILE_NAME).exists():
        set_aside(folder / FILE_NAME)
    _write_starts(folder, [*before, start])
    replace_text(folder / "config.yaml", config_text)


def add_to_last_start(folder: Path, **values: Any) -> None:
    """Add facts that are known only while the run goes on."""
    starts = read_starts(folder)
    if starts:
        starts[-1].update(values)
        _write_starts(folder, starts)


def _write_starts(folder: Path, starts: list[dict[str, Any]]) -> None:
    replace_text(folder / FILE_NAME, json.dumps({"starts": starts}, indent=2) + "\n")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded starts of a run, oldest first; none, with a warning, if damaged."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    problem = ""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
        if isinstance(starts, list) and all(isinstance(start, dict) for start in starts):
            return starts
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f" ({error})"
    warnings.warn(f"{path} is damaged{problem}; going on without what it says", stacklevel=2)
    return []


def tested_during_training(folder: Path) -> int | str | None:
    """Return how much of the test split a run has scored at its validations; None for nothing."""
    found = [start.get("test_during_training") for start in read_starts(folder)]
    return next((amount for amount in reversed(found) if amount is not None), None)


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to `<name>.damaged`, numbered if there is one already."""
    names = (path.with_name(f"{path.name}.damaged{n or ''}") for n in itertools.count())
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside


def remove_left_overs(folder: Path) -> None:
    """Remove temporary files that killed processes left in a run folder, which must be held.

    Evaluations do not hold it: what looks like theirs is removed when it is an hour old.
    """
    for path in [*folder.glob(".*"), *(folder / "checkpoints").glob(".*")]:
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or path.is_dir():
            continue
        if found["own"] or time.time() - path.lstat().st_mtime > _ABANDONED_SECONDS:
            path.unlink(missing_ok=True)

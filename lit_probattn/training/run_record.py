"""`versions.json` and `config.yaml` of a run folder; cleaning up after killed runs."""

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
from lit_probattn.configs import CONFIG

FILE_NAME = "versions.json"
# Temporary files of `replacing`: files protected by the lock, and files of evaluations.
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
    """Write `config.yaml`, and append a start to `versions.json`; a corrupt one is moved aside.

    Args:
        config_text: the resolved configuration.
        arguments: command line after `python -m lit_probattn`.
        checkpoint: checkpoint that this start resumes from.
        job: the cluster's name of the job, constant over restarts.
        initial_weights: entries loaded by `--init_from` at this start.
        test_during_training: part of the test split that is scored at every validation.

    `saved` records whether this start has written a checkpoint, initially false. `config` repeats
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
    replace_text(folder / CONFIG, config_text)


def add_to_last_start(folder: Path, **values: Any) -> None:
    """Add facts that become known during the run."""
    starts = read_starts(folder)
    if starts:
        starts[-1].update(values)
        _write_starts(folder, starts)


def _write_starts(folder: Path, starts: list[dict[str, Any]]) -> None:
    replace_text(folder / FILE_NAME, json.dumps({"starts": starts}, indent=2) + "\n")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded starts of a run, oldest first; none, with a warning, if corrupt."""
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
    warnings.warn(f"{path} is corrupt{problem}; continuing without it", stacklevel=2)
    return []


def tested_during_training(folder: Path) -> int | str | None:
    """Return the part of the test split that a run scored at its validations, or None."""
    found = [start.get("test_during_training") for start in read_starts(folder)]
    return next((amount for amount in reversed(found) if amount is not None), None)


def set_aside(path: Path) -> Path:
    """Rename a corrupt file or folder to `<name>.corrupt`, numbered if necessary."""
    names = (path.with_name(f"{path.name}.corrupt{n or ''}") for n in itertools.count())
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes from a run folder, which must be locked.

    Evaluations do not hold the lock: their files are removed only after an hour.
    """
    for path in [*folder.glob(".*"), *(folder / "checkpoints").glob(".*")]:
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or path.is_dir():
            continue
        if found["own"] or time.time() - path.lstat().st_mtime > _ABANDONED_SECONDS:
            path.unlink(missing_ok=True)

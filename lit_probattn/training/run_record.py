"""`versions.json` and `config.yaml` of a run folder: what is needed to run it again."""

from __future__ import annotations

import json
import platform
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_probattn.records.provenance import (
    RUN_PACKAGES,
    git_state,
    hardware,
    package_versions,
    replace_text,
)

FILE_NAME = "versions.json"


def write_record(
    folder: Path,
    *,
    config_text: str,
    seed: int,
    arguments: list[str],
    checkpoint: Path | None,
    job: str | None = None,
) -> None:
    """Write `config.yaml`, and add one start to `versions.json`.

    Args:
        config_text: the resolved configuration.
        arguments: command line after `python -m lit_probattn`.
        checkpoint: what this start continues from.
        job: what a cluster calls the job, the same when it starts it again.
    """
    start = {
        "started": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": shlex.join(["python", "-m", "lit_probattn", *arguments]),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "job": job,
        "seed": seed,
        "python": platform.python_version(),
        "packages": package_versions(RUN_PACKAGES),
        "git": git_state(),
        "hardware": hardware(),
    }
    _write_starts(folder, [*read_starts(folder), start])
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
    """Return the recorded starts of a run, oldest first."""
    path = folder / FILE_NAME
    if not path.is_file():
        return []
    return json.loads(path.read_text())["starts"]

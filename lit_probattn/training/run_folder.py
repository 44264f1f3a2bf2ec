"""Run folders `<root>/<name>/<version>/`: which one a command uses, and what is written there.

A folder holds `config.yaml` (resolved), `versions.json` (a record per start), `metrics.csv`,
TensorBoard events and `checkpoints/`. It belongs to one configuration: a command whose
configuration differs in more than `FREE_KEYS` gets a folder of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_probattn.training.checkpoints import (
    CheckpointError,
    check_checkpoint,
    newest_good_checkpoint,
)
from lit_probattn.training.preemption import is_restart, job_name
from lit_probattn.training.run_plan import RunFolderError, RunPlan
from lit_probattn.training.run_record import read_starts

# How far to train, on which hardware, and where files lie: these may differ between the starts of
# one run. Everything else makes it another run.
FREE_KEYS = (
    "ckpt_path",
    "weights_only",
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.plugins",
    "trainer.profiler",
    "trainer.logger",
    "trainer.log_every_n_steps",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.default_root_dir",
    "run.root",
    "run.version",
    "run.keep_checkpoints",
    "run.checkpoint_every",
    "data.init_args.num_workers",
    "data.init_args.pin_memory",
    "data.init_args.data_dir",
    "data.init_args.cache_dir",
)


@dataclass
class RunSettings:
    """Where a run is kept and when it is saved.

    Args:
        root: folder of all runs.
        name: name of the run. Default: `<task>-<attention>`, from the config files' names.
        version: name of the folder below it. Default: the next number.
        checkpoint_every: optimiser steps between checkpoints. Default: after every validation.
        keep_checkpoints: step checkpoints kept, at least 2; the best one is kept beside them.
        monitor: metric that decides which checkpoint is the best.
        monitor_mode: whether a larger (max) or smaller (min) metric is better.
    """

    root: str = "runs"
    name: str | None = None
    version: str | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    monitor: str = "val/accuracy"
    monitor_mode: Literal["max", "min"] = "max"


def versions_of(root: Path, name: str) -> list[Path]:
    """Version folders of a name, newest first."""
    base = root / name
    if not base.is_dir():
        return []
    folders = [path for path in base.iterdir() if (path / "config.yaml").is_file()]
    return sorted(folders, key=_start_time, reverse=True)


def plan_fit(
    settings: RunSettings, name: str, config: dict[str, Any], request: str | None
) -> RunPlan:
    """Choose folder and checkpoint of a training command, and create the folder.

    Args:
        settings: the `run` part of the configuration.
        name: name of the run.
        config: the resolved configuration.
        request: `--ckpt_path`: None starts afresh; `last` continues the newest version that has a
            checkpoint; `auto` continues the newest version of this configuration that has one, and
            starts afresh without; `best` or a path starts a new version from that checkpoint.
            When torchrun or SLURM has started the command again, it goes on in its own folder,
            whatever the request.

    Raises:
        RunFolderError: there is nothing to continue, or the version exists already.
        CheckpointError: all checkpoints are damaged.
    """
    root = Path(settings.root)
    begun = _plan_again(settings, name, config) if is_restart() or request == "auto" else None
    if begun is not None:
        return begun
    if request in (None, "auto"):
        return _new_folder(settings, name)
    if request != "last":
        checkpoint = find_checkpoint(settings, name, request)
        plan = _new_folder(settings, name)
        plan.checkpoint = checkpoint
        plan.notes.append(f"starting {plan.folder} from {checkpoint}")
        return plan
    source, checkpoint_or_none = _newest(_candidates(settings, name), "step")
    if source is None or checkpoint_or_none is None:
        raise RunFolderError(
            f"nothing to continue: no checkpoint in {root / name}; leave out --ckpt_path for a "
            "first start, or use --ckpt_path auto, which does either"
        )
    differences = config_differences(read_config(source), config)
    if not differences:
        note = f"continuing {source} from {checkpoint_or_none.name}"
        return RunPlan(source, checkpoint_or_none, notes=[note])
    if settings.version is not None:
        raise RunFolderError(
            f"{source} belongs to another configuration (different: {', '.join(differences)}): "
            "leave out --run.version for a new version"
        )
    plan = _new_folder(settings, name)
    plan.checkpoint = checkpoint_or_none
    plan.notes.append(
        f"the configuration differs from {source} in {', '.join(differences)}: "
        f"starting {plan.folder} from {checkpoint_or_none}"
    )
    return plan


def _plan_again(settings: RunSettings, name: str, config: dict[str, Any]) -> RunPlan | None:
    """Continue what this job has begun; without a job's name, this configuration's newest run.

    A job goes on even before its first checkpoint; then it begins again in the same folder.
    """
    job = job_name() if is_restart() else None
    for folder in _candidates(settings, name):
        known = (folder / "config.yaml").is_file()
        if not known or config_differences(read_config(folder), config):
            continue
        if job is not None and not any(start.get("job") == job for start in read_starts(folder)):
            continue
        checkpoint = newest_good_checkpoint(folder / "checkpoints", "step")
        if checkpoint is not None or job is not None:
            place = "its beginning" if checkpoint is None else checkpoint.name
            return RunPlan(folder, checkpoint, notes=[f"continuing {folder} from {place}"])
    return None


def find_checkpoint(
    settings: RunSettings, name: str, request: str, folder: Path | None = None
) -> Path:
    """Checkpoint that a request means.

    Args:
        settings: the `run` part of the configuration.
        name: name of the run.
        request: `best`, `last` or a path.
        folder: the run folder, where it is known; otherwise the newest version of the name that
            has such a checkpoint.

    Raises:
        RunFolderError: there is none.
        CheckpointError: it is damaged.
    """
    if request in ("best", "last"):
        folders = _candidates(settings, name) if folder is None else [folder]
        _, checkpoint = _newest(folders, "best" if request == "best" else "step")
        if checkpoint is None:
            place = folder or Path(settings.root) / name
            raise RunFolderError(
                f"no {request} checkpoint in {place}: train first, or give --run.name or a path"
            )
        return checkpoint
    path = Path(request)
    try:
        check_checkpoint(path)
    except CheckpointError as error:
        raise RunFolderError(f"--ckpt_path: {error}") from error
    return path


def folder_of_checkpoint(checkpoint: Path) -> Path:
    """Folder that results about a checkpoint go to: its run folder, or else its own folder."""
    parent = checkpoint.parent
    is_run = parent.name == "checkpoints" and (parent.parent / "config.yaml").is_file()
    return parent.parent if is_run else parent


def read_config(folder: Path) -> dict[str, Any]:
    """Resolved configuration of a run folder."""
    loaded = yaml.safe_load((folder / "config.yaml").read_text())
    return loaded if isinstance(loaded, dict) else {}


def config_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Keys in which two configurations differ, apart from `FREE_KEYS`."""
    old, new = _comparable(before), _comparable(now)
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    flat = flatten(config)
    steps = "model.init_args.schedule_steps"
    if flat.get(steps) is None and flat.get("model.init_args.schedule") != "constant":
        flat[steps] = flat.get("trainer.max_steps")  # a schedule as long as the run
    return {
        key: value
        for key, value in flat.items()
        if value is not None and not any(key == k or key.startswith(f"{k}.") for k in FREE_KEYS)
    }


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key; an empty mapping is a leaf."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _candidates(settings: RunSettings, name: str) -> list[Path]:
    if settings.version is None:
        return versions_of(Path(settings.root), name)
    return [Path(settings.root) / name / settings.version]


def _newest(folders: list[Path], kind: Literal["step", "best"]) -> tuple[Path | None, Path | None]:
    for folder in folders:
        checkpoint = newest_good_checkpoint(folder / "checkpoints", kind)
        if checkpoint is not None:
            return folder, checkpoint
    return None, None


def _new_folder(settings: RunSettings, name: str) -> RunPlan:
    """Create a version folder; two commands at the same time get two folders."""
    base = Path(settings.root) / name
    base.mkdir(parents=True, exist_ok=True)
    if settings.version is not None:
        folder = base / settings.version
        try:
            folder.mkdir()
        except FileExistsError as error:
            raise RunFolderError(
                f"{folder} exists: continue it with --ckpt_path last, or choose another "
                "--run.version"
            ) from error
        return RunPlan(folder, created=True)
    number = max((int(p.name) for p in base.iterdir() if p.name.isdecimal()), default=-1)
    while True:
        number += 1
        folder = base / str(number)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return RunPlan(folder, created=True)


def _start_time(folder: Path) -> tuple[str, int]:
    number = int(folder.name) if folder.name.isdecimal() else -1
    try:
        return str(read_starts(folder)[0]["started"]), number
    except (OSError, ValueError, KeyError, IndexError):
        return "", number

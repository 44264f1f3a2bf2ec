"""Run folders `<root>/<name>/<version>/`: which one a command uses, and what is written there.

All processes of a run follow one plan: the first one decides on folder and checkpoint.

A folder holds `config.yaml` (resolved), `versions.json` (a record per start), `metrics.csv`,
TensorBoard events and `checkpoints/`. It belongs to one configuration: a command whose
configuration differs in more than `FREE_KEYS` gets a folder of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl

from lit_probattn.configs import read_yaml
from lit_probattn.training.checkpoints import (
    CheckpointError,
    check_checkpoint,
    list_checkpoints,
    newest_good_checkpoint,
    step_of,
)
from lit_probattn.training.preemption import agree_on_restart, is_restart, job_name
from lit_probattn.training.run_record import read_starts

PLAN_VARIABLE = "LIT_PROBATTN_PLAN"
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


class RunFolderError(ValueError):
    """The requested run folder or checkpoint cannot be used."""


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

    def __post_init__(self) -> None:
        for key in ("name", "version"):
            value = getattr(self, key)
            plain = value is None or (value.isprintable() and value not in ("", ".", ".."))
            if not plain or set("/\\") & set(value or ""):
                raise RunFolderError(
                    f"run.{key} must be the name of one folder in run.root, in printable "
                    f"characters, received {value!r}"
                )


@dataclass
class RunPlan:
    """What a command reads and writes."""

    folder: Path  # to write to
    checkpoint: Path | None = None  # to start from
    created: bool = False  # whether the folder was made for this command
    notes: list[str] = field(default_factory=list)  # lines to tell the user

    @property
    def steps_done(self) -> int:
        """Optimiser steps of the checkpoint; 0 without one."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    def discard_if_unused(self) -> None:
        """Remove a folder that was made for a training that did not complete one step."""
        starts = read_starts(self.folder)
        trained = bool(starts) and "backends" in starts[-1]
        saved = list_checkpoints(self.folder / "checkpoints", "step")
        if self.created and not trained and not saved:
            shutil.rmtree(self.folder, ignore_errors=True)


def share_plan(trainer: pl.Trainer, make: Callable[[], RunPlan]) -> RunPlan:
    """Make a plan on the first process and give it to all.

    Processes that Lightning starts from the first one read it from their environment. Processes
    that torchrun or SLURM started agree over the process group, which is set up here already.

    Raises:
        RunFolderError: on every process, if making the plan failed for a reason the user can mend;
            or there are several nodes and nothing that started processes on all of them.
    """
    if trainer.world_size == 1:
        return make()
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and environment.creates_processes_externally:
        inherited = os.environ.get(PLAN_VARIABLE)
        if inherited is not None:
            return _decode(inherited)
        return _agree(trainer, make)
    if trainer.num_nodes > 1:
        raise RunFolderError(
            f"trainer.num_nodes is {trainer.num_nodes}, but this process was started alone: start "
            "it on every node with torchrun or SLURM"
        )
    plan = make()
    os.environ[PLAN_VARIABLE] = _encode(plan)
    return plan


def _agree(trainer: pl.Trainer, make: Callable[[], RunPlan]) -> RunPlan:
    trainer.strategy.setup_environment()
    agree_on_restart()
    answer = ("", "")
    if trainer.is_global_zero:
        try:
            answer = ("plan", _encode(make()))
        except (ValueError, RuntimeError, OSError) as error:
            answer = ("error", str(error))
    kind, text = trainer.strategy.broadcast(answer)
    if kind == "error":
        raise RunFolderError(text)
    return _decode(text)


def _encode(plan: RunPlan) -> str:
    return json.dumps(asdict(plan), default=str)


def _decode(text: str) -> RunPlan:
    plan = RunPlan(**json.loads(text))
    plan.folder = Path(plan.folder)
    plan.checkpoint = None if plan.checkpoint is None else Path(plan.checkpoint)
    return plan


def versions_of(root: Path, name: str) -> list[Path]:
    """Return the version folders of a name, newest first."""
    folders = [path.parent for path in (root / name).glob("*/config.yaml")]
    return sorted(folders, key=_start_time, reverse=True)


def plan_fit(
    settings: RunSettings, name: str, config: dict[str, Any], request: str | None
) -> RunPlan:
    """Choose folder and checkpoint of a training command, and create the folder.

    Args:
        request: `--ckpt_path`: None starts afresh; `last` continues the newest version that has a
            checkpoint; `auto` continues the newest version of this configuration that has one, and
            starts afresh without; `best` or a path starts a new version from that checkpoint.
            When torchrun or SLURM has started the command again, it goes on in its own folder,
            whatever the request.

    Raises:
        RunFolderError: there is nothing to continue, or the version exists already.
        CheckpointError: all checkpoints are damaged.
    """
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
            f"nothing to continue: no checkpoint in {Path(settings.root, name)}; leave out "
            "--ckpt_path for a first start, or use --ckpt_path auto, which does either"
        )
    differences = config_differences(read_yaml(source / "config.yaml"), config)
    if not differences:
        return _continue(source, checkpoint_or_none)
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
        own = folder / "config.yaml"
        if not own.is_file() or config_differences(read_yaml(own), config):
            continue
        if job is not None and not any(start.get("job") == job for start in read_starts(folder)):
            continue
        checkpoint = newest_good_checkpoint(folder / "checkpoints", "step")
        if checkpoint is not None or job is not None:
            return _continue(folder, checkpoint)
    return None


def _continue(folder: Path, checkpoint: Path | None) -> RunPlan:
    place = "its beginning" if checkpoint is None else checkpoint.name
    return RunPlan(folder, checkpoint, notes=[f"continuing {folder} from {place}"])


def find_checkpoint(
    settings: RunSettings, name: str, request: str, folder: Path | None = None
) -> Path:
    """Return the checkpoint that a request means.

    Args:
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
    """Return where results about a checkpoint go: its run folder, or else its own folder."""
    parent = checkpoint.parent
    is_run = parent.name == "checkpoints" and (parent.parent / "config.yaml").is_file()
    return parent.parent if is_run else parent


def config_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the keys in which two configurations differ, apart from `FREE_KEYS`."""
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
    root = Path(settings.root)
    return versions_of(root, name) if settings.version is None else [root / name / settings.version]


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
    newest = max((int(p.name) for p in base.iterdir() if p.name.isdecimal()), default=-1)
    for number in itertools.count(newest + 1):
        with contextlib.suppress(FileExistsError):
            (base / str(number)).mkdir()
            return RunPlan(base / str(number), created=True)
    raise AssertionError


def _start_time(folder: Path) -> tuple[str, int]:
    number = int(folder.name) if folder.name.isdecimal() else -1
    try:
        return str(read_starts(folder)[0]["started"]), number
    except (OSError, ValueError, KeyError, IndexError):
        return "", number

"""Run folders `<root>/<name>/<version>/`: which one a command uses, and its content.

All processes of a run follow one plan: the first process decides on folder and checkpoint.

A folder contains `config.yaml` (resolved), `versions.json` (a record per start), `metrics.csv`,
TensorBoard events and `checkpoints/`. It belongs to one configuration and one set of data: a
command that differs in more than `FREE_KEYS`, or whose data have other source files, uses another
folder. One training process at a time writes to it, and holds a lock on `.lock`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl

from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.base.locks import hold, release
from lit_probattn.configs import (
    CONFIG,
    default_argument,
    different_keys,
    flatten,
    read_text,
    read_yaml,
)
from lit_probattn.tasks.distributed import gather_objects
from lit_probattn.tasks.schedules import OPEN_ENDED, lengths_of_run
from lit_probattn.training.checkpoints import (
    CheckpointError,
    average_newest,
    averaged_number,
    check_checkpoint,
    find_file,
    list_checkpoints,
    newest_good_checkpoint,
    step_of,
)
from lit_probattn.training.preemption import agree_on_restart, is_restart, job_name
from lit_probattn.training.run_record import FILE_NAME as RECORD
from lit_probattn.training.run_record import read_starts

PLAN_VARIABLE = "LIT_PROBATTN_PLAN"
LOCK = ".lock"
# Length of training, hardware and file locations: these can differ between the starts of one run.
# All other settings define another run.
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
# The number of steps, and what follows it: see `shorter`.
STEPS, SCHEDULE = "trainer.max_steps", "model.init_args.schedule_steps"
WARMUP = "model.init_args.warmup_steps"
INTERVALS = ("trainer.val_check_interval", "run.checkpoint_every")
# Settings that can differ between the processes of one run.
_OF_A_RANK = (
    *("data.init_args.num_workers", "data.init_args.pin_memory"),
    *("data.init_args.data_dir", "data.init_args.cache_dir"),
    *("trainer.enable_progress_bar", "trainer.profiler", "run.root"),
)
# Names and SHA-256 of the source files of the data.
Sources = Callable[[], Mapping[str, str]]
# Part of a split to score.
NumBatches = int | Literal["all"]


@dataclass
class RunSettings:
    """Location of a run and its saving interval.

    Args:
        root: folder of all runs.
        name: name of the run. Default: `<task>-<attention>`, from the config files' names.
        version: name of the run's folder below `name`. Default: the next number.
        checkpoint_every: optimiser steps between checkpoints. Default: after every validation.
        keep_checkpoints: number of step checkpoints to keep, at least 2, in addition to the best.
        monitor: metric that selects the best checkpoint.
        monitor_mode: whether a larger (max) or smaller (min) metric is better.
        test_during_training: also score the test split at every validation: `all` of it, or this
            number of batches per process, logged as `test/…`. For curves only: it does not affect
            weights, cannot be used for selection, and results record it.
        init_from: checkpoint of this or another task, or a run folder, with initial weights for a
            new run; `--init_from` for short.
    """

    root: str = "runs"
    name: str | None = None
    version: str | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    monitor: str = "val/accuracy"
    monitor_mode: Literal["max", "min"] = "max"
    test_during_training: NumBatches | None = None
    init_from: str | None = None

    def __post_init__(self) -> None:
        for key in ("name", "version"):
            value = getattr(self, key)
            plain = value is None or (value.isprintable() and value not in ("", ".", ".."))
            if not plain or set("/\\") & set(value or ""):
                raise ConfigError(
                    f"run.{key} must be the name of one folder in run.root, in printable "
                    f"characters, received {value!r}"
                )
        batches = self.test_during_training
        if isinstance(batches, int) and batches < 1:
            raise ConfigError(
                "run.test_during_training must be all, or a number of batches of at least 1, "
                f"received {batches}: null disables it"
            )


@dataclass
class RunPlan:
    """Files that a command reads and writes."""

    folder: Path  # to write to
    checkpoint: Path | None = None  # to start from
    created: bool = False  # whether the folder was created for this command
    notes: list[str] = field(default_factory=list)  # lines for the user

    @property
    def steps_done(self) -> int:
        """Optimiser steps of the checkpoint; 0 without one."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    def discard_if_unused(self) -> None:
        """Remove a folder that was created for this command if no step was completed."""
        if self.created and is_unused(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)

    def release_lock(self) -> None:
        """Release the lock of the folder."""
        release(self.folder / LOCK)


def share_plan(trainer: pl.Trainer, config: dict[str, Any], make: Callable[[], RunPlan]) -> RunPlan:
    """Make a plan on the first process and share it with all.

    Processes that Lightning starts from the first one read it from their environment. Processes
    started by torchrun or SLURM receive it over the process group, which already exists.

    Raises:
        ConfigError: on every process, if the plan failed because of a user error, or the processes
            have different configurations; or there are several nodes without a launcher that starts
            processes on all of them.
    """
    if trainer.world_size == 1:
        return make()
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and environment.creates_processes_externally:
        inherited = os.environ.get(PLAN_VARIABLE)
        if inherited is not None:
            return _decode(inherited)
        return _agree(trainer, config, make)
    if trainer.num_nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes is {trainer.num_nodes}, but this process was started without a "
            "launcher: start it on every node with torchrun or SLURM"
        )
    plan = make()
    os.environ[PLAN_VARIABLE] = _encode(plan)
    return plan


def _agree(trainer: pl.Trainer, config: dict[str, Any], make: Callable[[], RunPlan]) -> RunPlan:
    trainer.strategy.setup_environment()
    _compare_ranks(gather_objects(config))
    agree_on_restart()
    answer = ("", "")
    if trainer.is_global_zero:
        try:
            answer = ("plan", _encode(make()))
        except (ValueError, RuntimeError, OSError) as error:
            answer = ("error", str(error))
    kind, text = trainer.strategy.broadcast(answer)
    if kind == "error":
        raise ConfigError(text)
    return _decode(text)


def _compare_ranks(configs: list[dict[str, Any]]) -> None:
    """Raise on every rank if configurations differ between ranks."""
    first, *others = [_without(flatten(config), _OF_A_RANK) for config in configs]
    for rank, other in enumerate(others, 1):
        if keys := different_keys(first, other):
            raise ConfigError(
                f"rank {rank} has a different configuration than rank 0 (different: "
                f"{', '.join(keys)}): start every process with the same arguments"
            )


def compare_sources(ranks: list[Mapping[str, str]]) -> None:
    """Raise on every rank if the source files of the data differ between ranks.

    Raises:
        ConfigError: they differ; the message names the rank and the files.
    """
    for rank, other in enumerate(ranks[1:], 1):
        if names := different_keys(ranks[0], other):
            raise ConfigError(
                f"rank {rank} has different data than rank 0 (different: {', '.join(names)}): "
                "provide the same files on every node, under the same path"
            )


def _encode(plan: RunPlan) -> str:
    return json.dumps(asdict(plan), default=str)


def _decode(text: str) -> RunPlan:
    plan = RunPlan(**json.loads(text))
    plan.folder = Path(plan.folder)
    plan.checkpoint = None if plan.checkpoint is None else Path(plan.checkpoint)
    return plan


def versions_of(root: Path, name: str) -> list[Path]:
    """Return the version folders of a name, newest first."""
    folders = [path.parent for path in (root / name).glob(f"*/{CONFIG}")]
    return sorted(folders, key=_start_time, reverse=True)


def plan_fit(
    settings: RunSettings,
    name: str,
    config: dict[str, Any],
    request: str | None,
    sources: Sources = dict,
) -> RunPlan:
    """Choose folder and checkpoint of a training command, and create the folder.

    Args:
        request: `--ckpt_path`: None starts a new run; `last` resumes the newest version of this
            configuration that has a checkpoint, or else starts a new version from the newest
            checkpoint with this seed; `auto` resumes the newest version of this configuration
            that has a checkpoint, or else restarts the newest version that was killed before its
            first checkpoint, or else starts a new run; `best` or a path starts a new version from
            that checkpoint. A command restarted by torchrun or SLURM resumes in its folder,
            regardless of the request.
        sources: returns the source files of the data; called if a version has recorded them.

    Raises:
        ConfigError: there is nothing to resume, the version exists already, or another process
            writes to it.
        CheckpointError: all checkpoints are corrupt.
    """
    wanted = _Wanted(config, sources)
    begun = _plan_again(settings, name, wanted) if is_restart() or request == "auto" else None
    if begun is not None:
        return begun
    if request in (None, "auto"):
        plan = _new_folder(settings, name)
        plan.notes += wanted.notes
        return plan
    if request != "last":
        checkpoint = find_checkpoint(settings, name, request)
        if checkpoint.name.startswith("average-"):
            raise ConfigError(
                f"--ckpt_path {request}: an average has no optimiser state to resume from; pass "
                "last, best or one of the averaged checkpoints"
            )
        source = folder_of_checkpoint(checkpoint)
        found = wanted.differences(source) if (source / CONFIG).is_file() else []
        return _start_from(checkpoint, source, found, settings, name)
    return _plan_last(settings, name, wanted)


@dataclass
class _Wanted:
    """The requested run, to be compared with existing versions."""

    config: dict[str, Any]
    sources: Sources
    notes: list[str] = field(default_factory=list)

    def differences(self, folder: Path) -> list[str]:
        """Return what differs from a version: configuration keys, or else data files."""
        found = config_differences(read_own_config(folder), self.config)
        if not found and (found := list(source_differences(folder, self.sources))):
            self.notes.append(f"{folder} was trained on other data (different: {', '.join(found)})")
        return found


def _plan_again(settings: RunSettings, name: str, wanted: _Wanted) -> RunPlan | None:
    """Resume the run of this job; without a job name, the newest run of this configuration.

    A run killed before its first checkpoint restarts in the same folder; without a job
    name only if no run of this configuration has a checkpoint.
    """
    job = job_name() if is_restart() else None
    begun: Path | None = None
    for folder in _candidates(settings, name):
        if not (folder / CONFIG).is_file() or wanted.differences(folder):
            continue
        starts = read_starts(folder)
        if job is not None and not any(start.get("job") == job for start in starts):
            continue
        checkpoint = newest_good_checkpoint(folder / "checkpoints", "step")
        if checkpoint is not None or job is not None:
            return _continue(folder, checkpoint)
        if begun is None and starts and all(start.get("saved") is False for start in starts):
            begun = folder
    return None if begun is None else _continue(begun, None)


def _plan_last(settings: RunSettings, name: str, wanted: _Wanted) -> RunPlan:
    """Resume this configuration's newest run, or start a new one from the newest of its seed."""
    nearest: tuple[Path, Path, list[str]] | None = None
    others: list[str] = []
    for folder in _candidates(settings, name):
        if not (folder / CONFIG).is_file():
            continue
        differences = wanted.differences(folder)
        is_other_seed = settings.version is None and "seed_everything" in differences
        if is_other_seed or (differences and nearest is not None):
            others += [folder.name] * is_other_seed
            continue
        checkpoint = newest_good_checkpoint(folder / "checkpoints", "step")
        if checkpoint is not None and not differences:
            return _continue(folder, checkpoint)
        if checkpoint is not None:
            nearest = folder, checkpoint, differences
    if nearest is None:
        seeds = f" with this seed_everything ({', '.join(others)} have others)" if others else ""
        raise ConfigError(
            f"nothing to continue: no checkpoint in {Path(settings.root, name)}{seeds}; omit "
            "--ckpt_path for a first start, or use --ckpt_path auto, which supports both"
        )
    source, checkpoint, differences = nearest
    if settings.version is not None:
        raise ConfigError(
            f"{source} belongs to another configuration (different: {', '.join(differences)}): "
            "omit --run.version to create a new version"
        )
    return _start_from(checkpoint, source, differences, settings, name)


def _start_from(
    checkpoint: Path, source: Path, differences: list[str], settings: RunSettings, name: str
) -> RunPlan:
    """Start a new version from a checkpoint of the run in `source`; note what differs from it."""
    plan = _new_folder(settings, name)
    plan.checkpoint = checkpoint
    start = f"starting {plan.folder} from {checkpoint}"
    if differences:
        start = f"the configuration differs from {source} in {', '.join(differences)}: {start}"
    plan.notes.append(start)
    return plan


def _continue(folder: Path, checkpoint: Path | None) -> RunPlan:
    """Lock an existing folder and resume from its newest checkpoint, at least `checkpoint`."""
    holder = hold(folder / LOCK)
    if holder is not None:
        raise ConfigError(
            f"{folder} is locked by {holder}: wait until that process ends, or choose "
            "another --run.name"
        )
    if [checkpoint] != list_checkpoints(folder / "checkpoints", "step")[:1]:
        checkpoint = newest_good_checkpoint(folder / "checkpoints", "step")
    try:
        checkpoint = checkpoint or _began_from(folder)
    except CheckpointError as error:
        release(folder / LOCK)
        raise ConfigError(
            f"{folder} started from a checkpoint that cannot be read ({error}): restore it, or "
            "choose another --run.version"
        ) from error
    place = "its start" if checkpoint is None else checkpoint.name
    return RunPlan(folder, checkpoint, notes=[f"resuming {folder} from {place}"])


def _began_from(folder: Path) -> Path | None:
    """Return the checkpoint that a run without saved checkpoints was started from."""
    starts = read_starts(folder)
    found = starts[-1].get("checkpoint") if starts else None
    if found is None:
        return None
    check_checkpoint(Path(found))
    return Path(found)


def find_checkpoint(
    settings: RunSettings,
    name: str,
    request: str,
    folder: Path | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Return the checkpoint that a request denotes.

    Args:
        request: `best`, `last`, `average-10` for the mean of the ten newest, or a path.
        folder: the run folder, if known; otherwise the newest version of the name that
            has such a checkpoint.
        config: versions are searched in order of their differences from it.

    Raises:
        ConfigError: no checkpoint exists.
        CheckpointError: the checkpoint is corrupt.
    """
    count = averaged_number(request)
    if request in ("best", "last") or count is not None:
        folders = _candidates(settings, name) if folder is None else [folder]
        if config is not None and len(folders) > 1:
            folders.sort(key=lambda path: len(config_differences(read_own_config(path), config)))
        checkpoint = _newest(folders, "best" if request == "best" else "step")
        if checkpoint is None:
            place = folder or Path(settings.root) / name
            if request == "best" and _newest(folders, "step") is not None:
                raise ConfigError(
                    f"no best checkpoint in {place}: the metric of run.monitor was a number in no "
                    "validation so far; --ckpt_path last selects the newest weights"
                )
            raise ConfigError(
                f"no {request} checkpoint in {place}: train first, or pass --run.name or a path"
            )
        with prefixed("--ckpt_path", CheckpointError):
            return checkpoint if count is None else average_newest(checkpoint.parent, count)
    if not request:
        raise ConfigError("--ckpt_path is empty: pass best, last, a path, or (for fit) auto")
    with prefixed("--ckpt_path", CheckpointError):
        path = find_file(Path(request))
        check_checkpoint(path)
    return path


def folder_of_checkpoint(checkpoint: Path) -> Path:
    """Return the folder for results about a checkpoint: its run folder, or else its folder."""
    parent = checkpoint.parent
    is_run = parent.name == "checkpoints" and (parent.parent / CONFIG).is_file()
    return parent.parent if is_run else parent


def read_own_config(folder: Path) -> dict[str, Any]:
    """Return the configuration that a run folder was trained with.

    It is the configuration recorded at the last start, since `config.yaml` may have been edited.

    Raises:
        ConfigError: `config.yaml` is missing or corrupt.
    """
    try:
        there = read_yaml(folder / CONFIG)
        noted = [s["config"] for s in read_starts(folder) if isinstance(s.get("config"), str)]
        return read_text(noted[-1]) if noted else there
    except ConfigError as error:
        raise ConfigError(f"{error}; restore it, or move {folder}") from error


def config_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the keys in which two configurations differ, except `FREE_KEYS`.

    An option missing from an earlier version equals its default.
    """
    old, new = _comparable(before), _comparable(now)
    return [
        key
        for key in different_keys(old, new)
        if key in old or new.get(key) != default_argument(now, key)
    ]


def source_differences(folder: Path, sources: Sources) -> dict[str, str | None]:
    """Return the source files of the data that differ from a run's, and their SHA-256.

    The value of a file that no longer exists is None. Empty if the run recorded no sources.
    """
    noted = [start["sources"] for start in read_starts(folder) if "sources" in start]
    if not noted or not noted[-1]:
        return {}
    now = sources()
    return {f"data file {name}": now.get(name) for name in different_keys(noted[-1], now)}


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    flat = flatten(config)
    length, warmup = flat.get(STEPS), flat.get(WARMUP)
    if flat.get(SCHEDULE) is None:  # follows the length of the run
        if flat.get("model.init_args.schedule") not in OPEN_ENDED:
            flat[SCHEDULE] = length
        elif length and warmup:
            flat[WARMUP] = lengths_of_run(length, None, warmup).warmup
    return _without(flat, FREE_KEYS)


def _without(flat: dict[str, Any], free: tuple[str, ...]) -> dict[str, Any]:
    """Remove keys and everything below them; a missing value equals null."""
    return {
        key: value
        for key, value in flat.items()
        if value is not None and not any(key == k or key.startswith(f"{k}.") for k in free)
    }


def shorter(config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings of a run of so many steps, by dotted key.

    The schedule ends with the run, warm-up keeps its share of the steps, and the intervals of
    validations and checkpoints are at most the length of the run. Values that are not numbers are
    unchanged: durations, and errors that the parser reports.
    """
    flat = flatten(config)
    numbers = {key: value for key, value in flat.items() if isinstance(value, int | float)}
    before = max(0, numbers.get(STEPS, 0)) or steps  # -1 means no limit
    found: dict[str, Any] = {STEPS: steps}
    if flat.get(SCHEDULE) is not None:
        found[SCHEDULE] = steps
    if numbers.get(WARMUP):
        found[WARMUP] = max(1, round(numbers[WARMUP] * min(1.0, steps / before)))
    # Validations are counted in micro-batches, checkpoints in steps.
    most = {INTERVALS[0]: steps * int(numbers.get("trainer.accumulate_grad_batches", 1))}
    found |= {key: min(numbers[key], most.get(key, steps)) for key in INTERVALS if key in numbers}
    return found


def _candidates(settings: RunSettings, name: str) -> list[Path]:
    root = Path(settings.root)
    return versions_of(root, name) if settings.version is None else [root / name / settings.version]


def _newest(folders: list[Path], kind: Literal["step", "best"]) -> Path | None:
    found = (newest_good_checkpoint(folder / "checkpoints", kind) for folder in folders)
    return next(filter(None, found), None)


def _new_folder(settings: RunSettings, name: str) -> RunPlan:
    """Create a version folder; simultaneous commands get different folders."""
    base = Path(settings.root) / name
    base.mkdir(parents=True, exist_ok=True)
    if settings.version is not None:
        folder = base / settings.version
        if not _take_new(folder):
            raise ConfigError(
                f"{folder} exists: resume it with --ckpt_path last, or choose another --run.version"
            )
        return RunPlan(folder, created=True)
    newest = max((int(p.name) for p in base.iterdir() if p.name.isdecimal()), default=0)
    for number in itertools.count(newest):
        if _take_new(base / str(number)):
            return RunPlan(base / str(number), created=True)
    raise AssertionError


def _take_new(folder: Path) -> bool:
    """Create and lock a folder, or reuse one whose run was killed before its first step."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    if not folder.is_dir() or not is_unused(folder) or hold(folder / LOCK) is not None:
        return False
    if not is_unused(folder):  # another command used it meanwhile
        release(folder / LOCK)
        return False
    (folder / RECORD).unlink(missing_ok=True)
    return True


def is_unused(folder: Path) -> bool:
    """Whether a run folder contains only files written before the first step.

    Folders without files are ignored: a failing logger can leave them.
    """
    names = {path.name for path in folder.iterdir() if not _is_bare(path)}
    names -= {name for name in names if name.startswith((".", "events.out.tfevents."))}
    return names <= {CONFIG, RECORD} and all("backends" not in s for s in read_starts(folder))


def _is_bare(path: Path) -> bool:
    """Whether a path is a folder without files at any depth."""
    return path.is_dir() and all(inside.is_dir() for inside in path.rglob("*"))


def _start_time(folder: Path) -> tuple[str, int]:
    number = int(folder.name) if folder.name.isdecimal() else -1
    try:
        return str(read_starts(folder)[0]["started"]), number
    except (OSError, ValueError, KeyError, IndexError):
        return "", number

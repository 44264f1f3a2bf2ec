"""The configuration of a run: composition, options, comparison with the published protocol."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.tables import Row, TaskEntry
from lit_probattn.configs import (
    class_of,
    compose,
    default_argument,
    different_keys,
    flatten,
    full_key,
    read_yaml,
)
from lit_probattn.models.per_layer import attention_entries
from lit_probattn.training.checkpoints import averaged_number
from lit_probattn.training.run_folder import FREE_KEYS, STEPS, shorter

ENTRY = "model.init_args.attention"  # class and arguments
ATTENTION = f"{ENTRY}.init_args"

# Settings that change results only by rounding: not a difference of protocol.
ROUNDING = ("data.init_args.eval_batch_size", "data.init_args.pad_multiple")

# Settings that do not affect results: folders, hardware; the number of steps does.
UNDECIDING = (*(key for key in FREE_KEYS if key != STEPS), "run.name", "seed_everything")

# Settings that affect results only if the evaluated checkpoint is a mean of step checkpoints.
AVERAGED = ("run.checkpoint_every",)

# Settings that a command sets for all runs, and their alternatives.
_NAMED = "the command names its runs"
RESERVED = {
    "seed_everything": "use --seeds",
    "run.name": _NAMED,
    "run.version": _NAMED,
    "run.root": "use --runs",
    "ckpt_path": "rerun the command to resume its runs",
    "weights_only": "rerun the command to resume its runs",
    "trainer.max_time": "use --steps",
}
# Settings that a command sets if the corresponding flags are used.
_PLACES = {
    "trainer.accelerator": "use --accelerator",
    "trainer.devices": "--accelerator gives each run one device; use --launch or --flags",
    "trainer.enable_progress_bar": "runs write to a log",
    "data.init_args.data_dir": "use --data_dir",
    "data.init_args.cache_dir": "use --cache_dir",
}
# Keys that `--flags` supports: they do not affect results and have no separate flag.
FREE_FLAGS = tuple(
    key
    for key in FREE_KEYS
    if key not in {*RESERVED, *_PLACES, STEPS, "trainer.plugins"} or key == "trainer.devices"
)


@dataclass(frozen=True)
class Options:
    """Changes that a command applies to all runs.

    Args:
        steps: number of optimiser steps; warm-up and schedule are scaled.
        max_seq_len: length of sequences, set by the keys in the task's `length`.
        shortened: use the task's reduced protocol.
        as_released: use attention as in the released code, if the row supports it.
        as_published: use the settings of the published runs that differ from the defaults here,
            such as selection on test data.
        settings: further settings by key for all runs, or by `task:key` for a task or pattern.
        trainer: file of configs/trainer, or None.
        start_seed: seed of the starts; None means the seed of each run.
    """

    steps: int | None = None
    max_seq_len: int | None = None
    shortened: bool = False
    as_released: bool = False
    as_published: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    trainer: str | None = None
    start_seed: int | None = None

    @property
    def shortens(self) -> bool:
        """Whether an option that reduces the protocol is set."""
        return self.shortened or self.steps is not None or self.max_seq_len is not None


def attention_file(row: Row, options: Options) -> str:
    """Return the attention file of a row."""
    return (row.as_released if options.as_released else None) or row.attention


def config_files(task: TaskEntry, row: Row, options: Options) -> list[str]:
    """Return the configuration files of a run, in the order of the command line."""
    more = [options.trainer] if options.trainer else []
    return [task.config, attention_file(row, options), *more]


def start_of(task: TaskEntry, options: Options) -> TaskEntry | None:
    """Return the task from whose model a task starts; None if it starts from random weights."""
    return None if options.shortened and task.shortened_alone else task.start


def settings_of(task: str, options: Options) -> dict[str, Any]:
    """Return the further settings of a task, by key."""
    split = [(key.rpartition(":"), value) for key, value in options.settings.items()]
    return {
        key: value
        for (pattern, colon, key), value in split
        if not colon or fnmatch.fnmatchcase(task, pattern)
    }


def refuse_unknown_tasks(tasks: Iterable[str], options: Options) -> None:
    """Reject settings of unknown tasks.

    Raises:
        ConfigError: a setting names an unknown task.
    """
    known = list(dict.fromkeys(tasks))
    for key in options.settings:
        pattern, colon, _ = key.rpartition(":")
        if colon and not fnmatch.filter(known, pattern):
            raise ConfigError(
                f"--set {key}: unknown task {pattern!r}{nearest(pattern, known)}; tasks: "
                f"{', '.join(known)}"
            )


def _refuse_reserved(keys: Iterable[str], where: str, also: Collection[str] = ()) -> None:
    """Reject settings that the command itself sets for all runs.

    Args:
        keys: dotted keys.
        where: their origin, for the message.
        also: further keys that the command sets.

    Raises:
        ConfigError: a key is reserved; the message names the alternative.
    """
    remedies = RESERVED | {key: _PLACES[key] for key in also}
    for key in keys:
        for reserved, remedy in remedies.items():
            if _is_below(key, reserved):
                raise ConfigError(f"{where} {key}: the command sets it; {remedy}")


def refuse_settings(options: Options, placed: Collection[str]) -> None:
    """Reject `--set` keys that the command itself sets for all runs.

    Args:
        options: the options, with the settings.
        placed: keys that flags of the command have set.

    Raises:
        ConfigError: a key is reserved.
    """
    for key in options.settings:
        _, colon, name = key.rpartition(":")
        _refuse_reserved([name], "--set", [*placed, "trainer.enable_progress_bar"])
        if name == STEPS and (options.steps is not None or not colon):
            raise ConfigError(f"--set {key}: the command sets it; use --steps")


def refuse_flags(words: Sequence[str], tasks: Iterable[TaskEntry] = ()) -> None:
    """Reject `--flags` that may affect results, or that the command itself sets.

    Args:
        words: the flags and their values.
        tasks: the tasks of the runs.

    Raises:
        ConfigError: a flag is not allowed, or a value has no flag.
    """
    if words and not words[0].startswith("--"):
        raise ConfigError(f"--flags: expected --KEY VALUE, received {words[0]!r}")
    named = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    keys = [full_key(name) for name in named]
    _refuse_reserved(keys, "--flags", _PLACES.keys() - FREE_FLAGS)
    averaged = [task.name for task in tasks if averaged_number(task.checkpoint) is not None]
    for key in keys:
        if averaged and key in AVERAGED:
            raise ConfigError(
                f"--flags {key}: {averaged[0]} evaluates a mean of checkpoints, which depends on "
                "this key; use --set"
            )
        if not any(_is_below(key, free) for free in FREE_FLAGS):
            instead = "--steps" if key == STEPS else "--set"
            raise ConfigError(
                f"--flags {key}: may affect results; use {instead}. --flags supports "
                f"{', '.join(FREE_FLAGS)}"
            )


def refuse_reserved_in_files(runs: Iterable[tuple[TaskEntry, Row]], options: Options) -> None:
    """Reject configuration files, tasks and rows with settings that the command sets.

    Raises:
        ConfigError: a file, task or row has such a setting.
    """
    files: set[str] = set()
    for task, row in runs:
        files.update(config_files(task, row, options))
        _refuse_reserved(task.settings, f"task {task.name}:")
        _refuse_reserved(row.overrides, f"row {row.name}:")
    for path in sorted(files):
        found = {key for key, value in flatten(read_yaml(path)).items() if value is not None}
        _refuse_reserved(sorted(found - {"seed_everything"}), f"{path}:")  # set by `fit`


def refuse_unlogged_metrics(task: TaskEntry, config: Mapping[str, Any]) -> None:
    """Reject metrics that the task does not log, if its class lists the logged scores.

    Raises:
        ConfigError: a metric is not logged; the message has the nearest name.
    """
    cls = class_of(config["model"]["class_path"])
    known: Sequence[str] = getattr(cls, "logged", ())
    for metric in task.metrics.values():
        split, _, name = metric.key.partition("/")
        if not metric.key:  # such a metric reads the report itself
            continue
        if not known or metric.command not in ("test", "validate"):
            continue
        if not any(fnmatch.fnmatchcase(*pair) for p in known for pair in ((name, p), (p, name))):
            raise ConfigError(
                f"{task.name}: {cls.__name__} does not log {split}/{name}{nearest(name, known)}; "
                f"scores: {', '.join(known)}"
            )


def _is_below(key: str, parent: str) -> bool:
    return key == parent or key.startswith(f"{parent}.")


def overrides(task: TaskEntry, row: Row, options: Options) -> dict[str, Any]:
    """Return the settings that override the files, by key; later options override earlier ones.

    Raises:
        ConfigError: the task does not support an option.
    """
    attention = {f"{ATTENTION}.{key}": value for key, value in row.set.items()}
    found = {**task.settings, **attention, **row.overrides}
    if options.as_released and row.as_released:
        found |= task.as_released
    if options.as_published:
        found |= task.published
    if options.shortened:
        if not task.shortened:
            raise ConfigError(f"{task.name} has no reduced protocol; use --steps")
        found |= {**task.shortened, **row.shortened}
    if options.max_seq_len is not None:
        if not task.length:
            raise ConfigError(f"{task.name} does not support --max_seq_len")
        for key, value in task.length.items():
            found[key] = value if isinstance(value, str) else round(value * options.max_seq_len)
    settings = settings_of(task.name, options)
    if options.steps is not None:
        files = config_files(task, row, options)
        found |= shorter(compose(files, {**found, **settings}), options.steps)
    return {**found, **settings}


def run_config(task: TaskEntry, row: Row, options: Options) -> dict[str, Any]:
    """Return the configuration of a run, without seed and folders."""
    return compose(config_files(task, row, options), overrides(task, row, options))


def published_config(task: TaskEntry, row: Row) -> dict[str, Any]:
    """Return the configuration of the published counterpart of a run."""
    plain = Options(as_published=True)
    return compose([task.config, row.attention], overrides(task, row, plain))


def deciding(config: Mapping[str, Any], checkpoint: str = "best") -> dict[str, Any]:
    """Return the settings that affect a result, by dotted key.

    Args:
        config: configuration of a run.
        checkpoint: the evaluated checkpoint. A mean also depends on the interval of checkpoints.
    """
    averaged = AVERAGED if averaged_number(checkpoint) is not None else ()
    return {
        key: value
        for key, value in flatten(config).items()
        if key in averaged or not any(_is_below(key, free) for free in UNDECIDING)
    }


def differing(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the settings other than attention in which configurations differ."""
    flat = [deciding(config) for config in configs.values()]
    keys = {key for other in flat[1:] for key in different_keys(flat[0], other)}
    return sorted(key for key in keys if not key.startswith(ENTRY))


@dataclass(frozen=True, order=True)
class Difference:
    """A setting in which a run differs from the published one."""

    key: str
    published: Any = field(compare=False)
    here: Any = field(compare=False)

    def __str__(self) -> str:
        published, here = (json.dumps(v) for v in (self.published, self.here))
        return f"`{self.key}`: published {published}, here {here}"


def differences(task: TaskEntry, row: Row, options: Options) -> list[Difference]:
    """Compare the settings of a run, including defaults, with those of the published run."""
    configs = published_config(task, row), run_config(task, row, options)
    published, here = (deciding(config, task.checkpoint) for config in configs)
    found = []
    for key in sorted(published.keys() | here.keys()):
        if key in ROUNDING:
            continue
        values = [
            _plain(flat[key] if key in flat else default_of(config, key))
            for flat, config in zip((published, here), configs, strict=True)
        ]
        if values[0] != values[1]:
            found.append(Difference(key, *values))
    return found


def switched(task: TaskEntry, options: Options) -> list[Difference]:
    """Return the settings that `as_published` replaces; `here` is the value without it."""
    if not options.as_published:
        return []
    own = compose([task.config], task.settings)
    return [Difference(key, value, setting(own, key)) for key, value in task.published.items()]


def setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting by dotted key, or its default if it is not set."""
    flat = flatten(config)
    return flat[key] if key in flat else default_of(config, key)


def attention_option(config: Mapping[str, Any], name: str) -> Any:
    """Return an option of the attention; if layers differ, all values, as in `4/8/4`.

    The default comes first, then the layers with a separate attention.
    """
    values = [_option(entry, name) for entry in _attentions(config)]
    same = all(value == values[0] for value in values)
    return values[0] if same else "/".join(map(str, values))


def _attentions(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return attention_entries(config["model"]["init_args"].get("attention") or {})


def _option(entry: Mapping[str, Any], name: str) -> Any:
    return setting({"attention": entry}, f"attention.init_args.{name}")


def draws_noise_at_eval(config: Mapping[str, Any]) -> bool | None:
    """Return whether the attention also draws noise in evaluation; None if it has no noise."""
    noisy = [
        entry for entry in _attentions(config) if _option(entry, "noise") not in (None, "none")
    ]
    return any(bool(_option(entry, "noise_at_eval")) for entry in noisy) if noisy else None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def default_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the default of a setting, or None."""
    return "32-true" if key == "trainer.precision" else default_argument(config, key)

"""Configuration files of a command, validated and ordered before parsing."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_probattn.base.allowed_code import take_flags
from lit_probattn.base.config_files import KINDS, bundle_of, file_named, find, run_stem
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.configs import (
    CONFIG,
    SIZES_OF_DATA,
    flatten,
    read_yaml,
    reject_two_tasks,
    settings_of,
    without_replaced,
)

# Short flags of `fit`; --seed is one of all commands.
_SHORT = {
    "--seed": "--seed_everything",
    "--lr": "--model.init_args.lr",
    "--init_from": "--run.init_from",
}
# Flags that accept the name of a file, by its kind; and what such a file must set.
NAMED = {
    "task": "the class of a model (model.class_path)",
    "attention": "an attention (model.init_args.attention)",
    "trainer": "a trainer",
}
NOTHING_GIVEN = (
    "no task and no attention: add --task NAME --attention NAME, for example --task "
    "tiny/lra_listops --attention smgk (`lit-probattn list tasks` and `list attention` list the "
    "names), or for an existing run --config RUN/config.yaml"
)
NO_ATTENTION = (
    "no attention variant: add --attention NAME, for example --attention softmax (`lit-probattn "
    "list attention` lists the names), or a file after the task file"
)


def prepared(arguments: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the words that the parser receives, and the contents of the configuration files.

    Raises:
        ConfigError: a file or a flag that names one is invalid, or a linked argument is given.
    """
    words = with_named_files(take_flags(arguments))
    contents = read_config_files(config_files(words))
    words = with_run_flags(words, contents.values())
    for word in words:
        if word.startswith("--"):
            reject_linked("the command line", word.partition("=")[0])
    return words, contents


def check_early(arguments: Sequence[str], help_text: str) -> None:
    """Check files and keys against the help text of the command, without importing Lightning.

    Keys in the values of options (`model.init_args`, `trainer.logger`) are left to the parser.

    Raises:
        ConfigError: see `prepared`; an unknown key; or no task or attention is set.
    """
    words, contents = prepared(arguments)
    options = list(dict.fromkeys(re.findall(r"^  (?:-\w[^-]*, )?--([\w.]+)", help_text, re.M)))
    parts = {name.rpartition(".")[0] for name in options if not name.endswith(".help")}
    values = tuple(f"{name}." for name in options if name not in parts)
    given = [word[2:].partition("=")[0] for word in words[1:] if word.startswith("--")]
    inside = [key for content in contents.values() for key, _ in settings_of(content)]
    for key in (*given, *inside):
        if key.removesuffix("+") not in options and not key.startswith(values):
            raise ConfigError(unknown_option(key, [*options, *NAMED]))
    if {"model", "data"} & {key.partition(".")[0] for key in given}:
        return  # classes may be set by flags
    if not contents:
        raise ConfigError(NOTHING_GIVEN)
    classes = [_part(content, "model").get("class_path") for content in contents.values()]
    ours = any(str(name).startswith("lit_probattn.tasks.") for name in classes)
    if ours and not any(sets_attention(content) for content in contents.values()):
        raise ConfigError(NO_ATTENTION)


def unknown_option(key: str, options: Collection[str]) -> str:
    """Return the error for an unknown key: with the nearest option, or the nearest first part."""
    first = key.partition(".")[0]
    firsts = {option.partition(".")[0] for option in options}
    hint = nearest(key, options) if first in firsts else nearest(first, firsts)
    return f"unknown key {key!r}{hint}"


def with_named_files(arguments: Sequence[str]) -> list[str]:
    """Replace `--task NAME` and similar flags by `--config PATH`.

    The task file is moved before all other files, since it sets the model class that they set
    arguments of; the others keep their order.

    Raises:
        ConfigError: no file has this name, or it cannot be read; a flag is duplicate or lacks
            a name, or its file is of another kind.
    """
    words: list[str] = []
    task: list[str] = []
    seen: set[str] = set()
    rest = iter(arguments)
    for word in rest:
        flag, equals, name = word.partition("=")
        kind = flag.removeprefix("--")
        if kind not in NAMED or not flag.startswith("--"):
            words.append(word)
            continue
        if not equals:
            name = next(rest, "")
        if kind == "trainer" and name.startswith("{"):  # inline settings
            words += [flag, name]
            continue
        if not name or name.startswith("-"):
            listed = f"`lit-probattn list {KINDS[kind][1]}` lists the names"
            raise ConfigError(f"{flag} requires a name or a path; {listed}")
        if kind in seen:
            raise ConfigError(f"duplicate {flag}; keep one, or add a file by --config")
        seen.add(kind)
        path = file_named(kind, name)
        _check_kind(kind, path)
        (task if kind == "task" else words).extend(["--config", path])
    return [*words[:1], *task, *words[1:]]


def with_run_flags(arguments: Sequence[str], contents: Iterable[Mapping[str, Any]]) -> list[str]:
    """Replace the short flags of `fit`, and `--steps`, which is the same as in `compare`.

    `--steps` also shortens warm-up, schedule and intervals (`run_folder.shorter`); flags that set
    these have precedence. Intervals of validations count the micro-batches that a flag sets.

    Args:
        arguments: the command line, with `--config` for every file.
        contents: configuration files, in order.

    Raises:
        ConfigError: `--steps` is not a positive integer, or a command that does not train has
            initial weights.
    """
    words: list[str] = []
    steps, fits = None, arguments[:1] == ["fit"]
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in ("--init_from", "--run.init_from") and not fits:
            raise ConfigError(f"{flag} applies to fit; {arguments[0]} loads weights by --ckpt_path")
        if fits and flag == "--steps":
            steps = value if equals else next(rest, "")
        elif flag in _SHORT and (fits or flag == "--seed"):
            words.append(_SHORT[flag] + equals + value)
        else:
            words.append(word)
    if steps is None:
        return words
    if not steps.isdigit() or int(steps) < 1:
        raise ConfigError(f"--steps must be at least 1, received {steps or 'nothing'}")
    from lit_probattn.training.run_folder import shorter

    merged: dict[str, Any] = {}
    for content in contents:
        merged |= flatten(content)
    merged |= _micro_batches_of(words)
    found = shorter(merged, int(steps))
    return [*words[:1], *(f"--{key}={value}" for key, value in found.items()), *words[1:]]


def _micro_batches_of(words: Sequence[str]) -> dict[str, int]:
    """Return `trainer.accumulate_grad_batches` of a command line, if it is set to a number."""
    key, found = "trainer.accumulate_grad_batches", {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        value = value if equals else following
        if flag == f"--{key}" and value.isdigit():
            found[key] = int(value)
    return found


def _check_kind(kind: str, path: str) -> None:
    """Raise for a file of another kind."""
    content = read_yaml(path)
    if not (
        (kind == "task" and sets_task(content))
        or (kind == "attention" and sets_attention(content))
        or (kind == "trainer" and "trainer" in content)
    ):
        raise ConfigError(f"--{kind} {path}: expected a file that sets {NAMED[kind]}")


def config_files(arguments: Sequence[str]) -> list[str]:
    """Return the values of --config / -c, in order."""
    return [name for _, _, name in _config_flags(arguments)]


def files_before_flags(arguments: Sequence[str]) -> list[str]:
    """Move configuration files, with their current content, directly after the command.

    The parser lets the later of file and flag win; with this order, flags always win. The parser
    opens files itself but also accepts their text, which is used for entries of a bundle, and if a
    later file replaces attention.
    """
    flags = list(arguments)
    files: list[str] = []
    named = list(_config_flags(arguments))
    contents = [read_yaml(name) for _, _, name in named]
    given = zip(named, contents, without_replaced(contents), strict=True)
    for (position, flag, name), content, used in reversed(list(given)):
        place = find(name)
        as_text = bundle_of(place) or used is not content
        files.insert(0, f"--config={yaml.safe_dump(used) if as_text else place}")
        del flags[position if flag else position - 1 : position + 1]
    return [*flags[:1], *files, *flags[1:]]


def _config_flags(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the position of each file name, the prefix of the name there, and the name."""
    for position, argument in enumerate(arguments):
        if position and arguments[position - 1] in ("--config", "-c"):
            yield position, "", argument
        elif argument.startswith("--config="):
            yield position, "--config=", argument.partition("=")[2]


def read_config_files(files: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the contents of configuration files, by the names on the command line.

    Raises:
        ConfigError: a file is missing or contains no configuration; two are task files; or the
            order is wrong.
    """
    contents: dict[str, dict[str, Any]] = {}
    for name in files:
        contents[name] = read_yaml(name)
        _check_parts(name, contents[name])
    reject_two_tasks(contents)
    _check_order(contents)
    return contents


def _check_parts(name: str, content: dict[str, Any]) -> None:
    """Raise if a part of a configuration is not a mapping, which the parser would accept."""
    for key in ("trainer", "run", "model", "data"):
        part = content.get(key, {})
        if isinstance(part, dict) or (isinstance(part, str) and key in ("model", "data")):
            continue
        wanted = "class_path and init_args" if key in ("model", "data") else "its keys"
        raise ConfigError(f"{name}: {key}: expected {wanted}, received {part!r}")
    for key, value in settings_of(content):
        if key.endswith("init_args") and value != {}:
            shown = "null" if value is None else repr(value)
            raise ConfigError(f"{name}: {key}: expected arguments by name, received {shown}")
        reject_linked(name, key)


def reject_linked(place: str, key: str) -> None:
    """Raise for an argument set by the data or the run's seed, which the parser would drop.

    Raises:
        ConfigError: the message names the key and its source.
    """
    part, _, name = key.removeprefix("--").replace(".init_args", "", 1).partition(".")
    if part == "model" and name in SIZES_OF_DATA:
        raise ConfigError(f"{place}: {key} is set by the data: remove it")
    if part in ("model", "data") and name == "seed":
        raise ConfigError(f"{place}: {key} is set by seed_everything: set that instead")


def sets_attention(content: dict[str, Any]) -> bool:
    """Return whether a file sets the attention variant."""
    return "attention" in _part(content, "model", "init_args")


def sets_task(content: dict[str, Any]) -> bool:
    """Return whether a file sets the class of the model."""
    return "class_path" in _part(content, "model")


def run_name(contents: dict[str, dict[str, Any]], model: Any) -> str:
    """Return `<task>-<attention>`, from the names of the files that set them, or else classes.

    `contents` are configuration files by name, `model` is the resolved part of the configuration.
    """
    tasks = [run_stem(name) for name, content in contents.items() if sets_task(content)]
    variants = [run_stem(name) for name, content in contents.items() if sets_attention(content)]
    task = tasks[-1] if tasks else str(model.class_path)
    attention = variants[-1] if variants else str(model.init_args.attention.class_path)
    return f"{task.rpartition('.')[2]}-{attention.rpartition('.')[2]}"


def kept_name(contents: dict[str, dict[str, Any]], name: str) -> str | None:
    """Return a note if a run keeps the name of a file although later files set its model, or None.

    `contents` are configuration files by name, `name` is the run's.
    """
    source = None
    for path, content in contents.items():
        if source is not None and (sets_task(content) or sets_attention(content)):
            return f"run.name {name} is that of {source}, {path} sets another model: see --run.name"
        if _part(content, "run").get("name") == name:
            source = path
    return None


def run_folder_of(files: Iterable[str]) -> Path | None:
    """Return the run folder whose `config.yaml` is among the files."""
    for path in map(Path, files):
        if path.name == CONFIG and (path.parent / "checkpoints").is_dir():
            return path.parent
    return None


def _part(content: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def _check_order(contents: dict[str, dict[str, Any]]) -> None:
    names = list(contents)
    tasks = [name for name in names if sets_task(contents[name])]
    early = [
        name
        for name in names
        if _part(contents[name], "model", "init_args") and not sets_task(contents[name])
    ]
    if early and tasks and names.index(early[0]) < names.index(tasks[0]):
        raise ConfigError(
            f"put the task file first: --config {tasks[0]} --config {early[0]} (the task file "
            "sets the model class that the other file sets arguments of)"
        )
    if early and not tasks:
        raise ConfigError(
            f"no task file: {early[0]} sets arguments of a model whose class is not set; start "
            "with a task, for example --task lra_listops"
        )

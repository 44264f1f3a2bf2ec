"""Configuration files of a command: read and put in order before the parser sees them."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_probattn.base.config_files import KINDS, bundle_of, file_named, find, run_stem
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import SIZES_OF_DATA, read_yaml, refuse_two_tasks, settings_of

# Flags that take the name of a file, by the kind of the file; and what such a file must set.
NAMED = {
    "task": "the class of a model (model.class_path)",
    "attention": "an attention (model.init_args.attention)",
    "trainer": "a trainer",
}


def with_named_files(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--config PATH` in place of `--task NAME` and the like.

    The task comes before all other files, as it names the model that they set arguments of; the
    others stay where they stand.

    Raises:
        ConfigError: no file has this name, or it cannot be read; a flag is given twice or without
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
        if kind == "trainer" and name.startswith("{"):  # its settings, as the parser takes them
            words += [flag, name]
            continue
        if not name or name.startswith("-"):
            listed = f"`lit-probattn list {KINDS[kind][1]}` shows the names"
            raise ConfigError(f"{flag} needs a name or a path; {listed}")
        if kind in seen:
            raise ConfigError(f"{flag} is given twice; keep one, or add a file by --config")
        seen.add(kind)
        path = file_named(kind, name)
        _check_kind(kind, path)
        (task if kind == "task" else words).extend(["--config", path])
    return [*words[:1], *task, *words[1:]]


def with_initial_weights(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--run.init_from` in place of `--init_from`.

    Raises:
        ConfigError: the command does not train.
    """
    short, whole = "--init_from", "--run.init_from"
    given = [word for word in arguments if word.partition("=")[0] in (short, whole)]
    if given and arguments[0] != "fit":
        raise ConfigError(
            f"{given[0].partition('=')[0]} is for fit; {arguments[0]} takes weights by --ckpt_path"
        )
    return [
        word.replace(short, whole, 1) if word.partition("=")[0] == short else word
        for word in arguments
    ]


def _check_kind(kind: str, path: str) -> None:
    """Refuse a file of another kind."""
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
    """Return the arguments with configuration files, as they lie today, right after the command.

    The parser lets the later of file and flag win; so flags win wherever they stand. It opens files
    itself, and takes the text of one too: that of an entry of a bundle is handed over.
    """
    flags = list(arguments)
    files: list[str] = []
    for position, flag, name in reversed(list(_config_flags(arguments))):
        place = find(name)
        given = yaml.safe_dump(read_yaml(name)) if bundle_of(place) else place
        files.insert(0, f"--config={given}")
        del flags[position if flag else position - 1 : position + 1]
    return [*flags[:1], *files, *flags[1:]]


def _config_flags(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield where a file is named, what stands before its name there, and the name."""
    for position, argument in enumerate(arguments):
        if position and arguments[position - 1] in ("--config", "-c"):
            yield position, "", argument
        elif argument.startswith("--config="):
            yield position, "--config=", argument.partition("=")[2]


def read_config_files(files: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the contents of configuration files, by the names that the user gave.

    Raises:
        ConfigError: a file is missing or holds no configuration; two are task files; one stands in
            the wrong order.
    """
    contents: dict[str, dict[str, Any]] = {}
    for name in files:
        contents[name] = read_yaml(name)
        _check_parts(name, contents[name])
    refuse_two_tasks(contents)
    _check_order(contents)
    return contents


def _check_parts(name: str, content: dict[str, Any]) -> None:
    """Refuse a part of a configuration that is not a group of keys; the parser would take it."""
    for key in ("trainer", "run", "model", "data"):
        part = content.get(key, {})
        if isinstance(part, dict) or (isinstance(part, str) and key in ("model", "data")):
            continue
        wanted = "class_path and init_args" if key in ("model", "data") else "its keys"
        raise ConfigError(f"{name}: {key} must hold {wanted}, received {part!r}")
    for key, value in settings_of(content):
        if key.endswith("init_args") and value != {}:
            shown = "null" if value is None else repr(value)
            raise ConfigError(f"{name}: {key} must hold arguments by name, received {shown}")
        refuse_linked(name, key)


def refuse_linked(place: str, key: str) -> None:
    """Refuse an argument that the data or the seed of the run decide; the parser would drop it.

    Raises:
        ConfigError: it names the key, and what decides it.
    """
    part, _, name = key.removeprefix("--").replace(".init_args", "", 1).partition(".")
    if part == "model" and name in SIZES_OF_DATA:
        raise ConfigError(f"{place}: {key} is not read, as the data decide it: leave it out")
    if part in ("model", "data") and name == "seed":
        raise ConfigError(f"{place}: {key} is not read, as seed_everything decides it: set that")


def sets_attention(content: dict[str, Any]) -> bool:
    """Return whether a file chooses the attention variant."""
    return "attention" in _part(content, "model", "init_args")


def sets_task(content: dict[str, Any]) -> bool:
    """Return whether a file names the class of the model."""
    return "class_path" in _part(content, "model")


def run_name(contents: dict[str, dict[str, Any]], model: Any) -> str:
    """Return `<task>-<attention>`, after the files that set them, or else after the classes.

    `contents` are configuration files by name, `model` is the resolved part of the configuration.
    """
    tasks = [run_stem(name) for name, content in contents.items() if sets_task(content)]
    variants = [run_stem(name) for name, content in contents.items() if sets_attention(content)]
    task = tasks[-1] if tasks else str(model.class_path)
    attention = variants[-1] if variants else str(model.init_args.attention.class_path)
    return f"{task.rpartition('.')[2]}-{attention.rpartition('.')[2]}"


def run_folder_of(files: Iterable[str]) -> Path | None:
    """Return the run folder whose `config.yaml` is among the files."""
    for path in map(Path, files):
        if path.name == "config.yaml" and (path.parent / "checkpoints").is_dir():
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
            "names the model that the other file sets arguments of)"
        )
    if early and not tasks:
        raise ConfigError(
            f"no task file: {early[0]} sets arguments of a model that no file names; start with "
            "one, for example --task lra_listops"
        )

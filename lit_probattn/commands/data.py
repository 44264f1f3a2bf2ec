"""`lit-probattn data`: prepare or check a data set, or the data set of a task."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from datamodules import REGISTRY
from datamodules.__main__ import main as data_main
from datamodules.own_data import KINDS
from lit_probattn.base.config_files import named_files
from lit_probattn.base.errors import ConfigError, reports


@reports(ConfigError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a task name is replaced by its data set and the options in its file."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return data_main(_with_task(words), lambda task: _data_of(task)[1])


def _with_task(words: list[str]) -> list[str]:
    """Replace a task name by its data set and options; names of releases are not tasks."""
    name = "".join(words[1:2])
    if name not in named_files("task") or name in set(REGISTRY) - set(KINDS.values()):
        return words
    data_set, options = _data_of(name)
    given = {word.partition("=")[0] for word in words[2:]}
    options = [option for option in options if option.partition("=")[0] not in given]
    return [words[0], data_set, *options, *words[2:]]


def _data_of(task: str) -> tuple[str, list[str]]:
    """Return the data set of a task and the options in its file."""
    from lit_probattn.configs import read_yaml

    data = read_yaml(named_files("task")[task]).get("data")
    if not isinstance(data, dict) or not isinstance(data.get("class_path"), str):
        raise ConfigError(f"task {task}: its file sets no data.class_path")
    names = {class_name: name for name, (_, class_name) in REGISTRY.items()}
    package, *_, class_name = data["class_path"].split(".")
    if package != "datamodules" or class_name not in names:
        raise ConfigError(f"task {task}: {data['class_path']} is not a registered data set")
    options = data.get("init_args") or {}
    return names[class_name], [f"--{name}={_text(value)}" for name, value in options.items()]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)

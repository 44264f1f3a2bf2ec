"""`lit-probattn data`: prepare or check a data set, or the data set of a task."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from datamodules import REGISTRY
from datamodules.__main__ import main as data_main
from lit_probattn.base.config_files import named_files
from lit_probattn.base.errors import ConfigError, reports


@reports(ConfigError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a task name is replaced by its data set and the options in its file."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return data_main(_with_task(words))


def _with_task(words: list[str]) -> list[str]:
    """Replace a task name by its data set and options."""
    if len(words) < 2 or words[1] in REGISTRY or words[1] not in named_files("task"):
        return words
    from lit_probattn.configs import read_yaml

    data = read_yaml(named_files("task")[words[1]]).get("data")
    if not isinstance(data, dict) or not isinstance(data.get("class_path"), str):
        raise ConfigError(f"task {words[1]}: its file sets no data.class_path")
    names = {class_name: name for name, (_, class_name) in REGISTRY.items()}
    package, *_, class_name = data["class_path"].split(".")
    if package != "datamodules" or class_name not in names:
        raise ConfigError(f"task {words[1]}: {data['class_path']} is not a registered data set")
    options = data.get("init_args") or {}
    written = [f"--{name}={_text(value)}" for name, value in options.items()]
    return [words[0], names[class_name], *written, *words[2:]]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)

"""A case, its message without the names of this machine, and the page of all of them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.__main__ import main as data_main
from lit_probattn.__main__ import main
from lit_probattn.base.errors import ConfigError, DataError
from tests.support.helpers import error_of
from tests.support.paths import ROOT
from tests.support.runs import arguments

_PARTS = ("commands", "values", "checkpoints", "text_files", "image_files", "series_files")
_PARTS += ("own_files", "translation_files", "translation_runs", "trajectory_files")
_PARTS += ("decision_runs", "pretrained.weights", "pretrained.tokenisers")
_PARTS += ("fine_tuning.files", "fine_tuning.runs", "pretrained.conversions", "sentences.files")


@dataclass(frozen=True)
class Case:
    """One bad input.

    Args:
        area: heading in the page.
        given: what is wrong, in a few words.
        run: makes the input in an empty folder and returns what is said about it.
    """

    area: str
    given: str
    run: Callable[[Path], str]


def all_cases() -> list[Case]:
    """Every case, in the order of the page."""
    parts = [importlib.import_module(f"tests.bad_inputs.{name}") for name in _PARTS]
    return [case for part in parts for case in part.cases()]


def message_of(case: Case, folder: Path) -> str:
    """What is said about a case; paths below `folder` begin with DIR."""
    folder.mkdir(parents=True)
    text = case.run(folder)
    return text.replace(str(folder), "DIR").replace(f"{ROOT}/", "").replace(str(ROOT), ".")


# ---- the doors ------------------------------------------------------------------------------


def command_error(
    command: list[str], door: Callable[[list[str]], int] = main, *, alone: bool = True
) -> str:
    """The line of the error on stderr of a command that fails, the only one if `alone`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return error_of(command, door, None, alone=alone)


def fit(*more: str, attention: str | None = None) -> Callable[[Path], str]:
    """A training command of the tiny Text task with wrong flags."""
    return lambda folder: command_error(
        arguments(
            "fit", folder, *(m.replace("DIR", str(folder)) for m in more), attention=attention
        )
    )


def data_command(*words: str) -> Callable[[Path], str]:
    """A command of `lit-probattn data`."""
    return lambda folder: command_error(
        [word.replace("DIR", str(folder)) for word in words], data_main
    )


def data_error(read: Callable[[Path], object]) -> Callable[[Path], str]:
    """Reading data in code, which raises an error of one line."""

    def run(folder: Path) -> str:
        try:
            read(folder)
        except (ConfigError, DataError) as error:
            text = str(error)
            assert "\n" not in text, text
            return text
        raise AssertionError("no error")

    return run


def on_folder(run: Callable[..., Any]) -> Callable[..., Callable[[Path], Any]]:
    """Decorate a function of a folder and other arguments to take the others first."""
    return lambda *args, **options: lambda folder: run(folder, *args, **options)


def in_code(read: Callable[..., object]) -> Callable[..., Callable[[Path], str]]:
    """Decorate a function that reads data in code; see `data_error` and `on_folder`."""
    return lambda *args, **options: data_error(on_folder(read)(*args, **options))


# ---- the page -------------------------------------------------------------------------------

_HEAD = """# Bad inputs, and what is said about each

Written by `python -m tests.bad_inputs --write tests/bad_inputs/messages.md`;
`tests/bad_inputs/test_bad_inputs.py` holds this page to what the code says. `DIR` stands for a
folder of the user. A command ends with exit status 2 (1 for `lit-probattn data` on wrong data)
and this one line on stderr; in code, the same text is the message of a `ValueError` or of one of
its kinds. {count} cases.
"""


def page(rows: list[tuple[Case, str]]) -> str:
    """Markdown page of cases and their messages."""
    return "\n".join([_HEAD.format(count=len(rows)), *_tables(rows)])


def _tables(rows: list[tuple[Case, str]]) -> Iterator[str]:
    for area in dict.fromkeys(case.area for case, _ in rows):
        yield f"## {area}\n"
        yield "| given | message |"
        yield "| --- | --- |"
        for case, message in rows:
            if case.area == area:
                yield f"| {table_cell(case.given)} | {table_cell(message)} |"
        yield ""


def table_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")

"""The list of studies. A new one is a module and a line here."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast


class StudyModule(Protocol):
    """What the module of a study has.

    Its docstring is the study's `--help`. `run` raises ValueError (AnalysisError, for example) for
    what a user got wrong; `options.command` is the command line, for reports.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the study's flags."""

    @staticmethod
    def run(options: argparse.Namespace) -> None:
        """Compute, and write the files."""


@dataclass(frozen=True)
class Study:
    """One subcommand.

    Args:
        name: what a user types.
        module: full name of its module, imported when it is chosen.
        summary: one line for the list of studies.
    """

    name: str
    module: str
    summary: str

    def load(self) -> StudyModule:
        """Import the module."""
        return cast(StudyModule, importlib.import_module(self.module))


STUDIES: tuple[Study, ...] = ()

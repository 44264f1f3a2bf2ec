"""The list of studies. A new one is a module and a line here."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

_HERE = "lit_probattn.analysis.studies"


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


STUDIES: tuple[Study, ...] = (
    Study("attention_maps", f"{_HERE}.maps", "maps of sequences, a picture per layer and head"),
    Study("rank", f"{_HERE}.rank", "rank distribution of maps"),
    Study("head_distance", f"{_HERE}.distance", "distances between the heads of a layer"),
    Study("spectrum", f"{_HERE}.spectrum", "spectrum of vectorised maps, components for 95 %"),
    Study("query_likelihood", f"{_HERE}.likelihood", "likelihood of queries under their keys"),
    Study("priors", f"{_HERE}.priors", "learned priors, variances, mixing weights, noise scales"),
    Study("keys", f"{_HERE}.keys", "pictures of key weights and keys"),
    Study("responsibilities", f"{_HERE}.responsibilities", "responsibilities per token, usage"),
    Study("learning_curves", f"{_HERE}.curves", "learning curves of several runs"),
    Study("report", f"{_HERE}.collect", "one report of a folder of studies"),
    Study(
        "approximate",
        "lit_probattn.analysis.approximation.study",
        "sparse and random approximations",
    ),
    Study(
        "approximate_compare",
        "lit_probattn.analysis.approximation.compare",
        "them, for several models",
    ),
    Study(
        "logit_ranks", "lit_probattn.analysis.head_size.rank_study", "ranks of logits, demand curve"
    ),
)

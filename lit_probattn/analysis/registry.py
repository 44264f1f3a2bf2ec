"""The list of studies. A new study is a module and a line here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_probattn.analysis.study import Study

_HERE = "lit_probattn.analysis"


@dataclass(frozen=True)
class Entry:
    """One study of the command."""

    name: str  # name on the command line
    module: str  # full name of its module, imported when selected
    study: str  # name of its class
    summary: str  # one line for the list of studies

    def load(self) -> type[Study]:
        """Import the study."""
        return getattr(importlib.import_module(self.module), self.study)


STUDIES = tuple(
    Entry(name, f"{_HERE}.{module}", study, summary)
    for name, module, study, summary in (
        ("attention_maps", "studies.maps", "Maps", "maps of sequences, per layer and head"),
        ("rank", "studies.rank", "Rank", "rank distribution of maps"),
        ("head_distance", "studies.distance", "Distance", "distances between heads of a layer"),
        ("spectrum", "studies.spectrum", "Spectrum", "spectrum of vectorised maps"),
        ("query_likelihood", "studies.likelihood", "Likelihood", "likelihood of queries"),
        ("priors", "studies.priors", "Priors", "learned priors, variances, mixing weights, noise"),
        ("keys", "studies.keys", "Keys", "images of key weights and keys"),
        ("responsibilities", "studies.responsibilities", "Responsibilities", "usage of components"),
        ("returns", "studies.returns", "Returns", "returns of a policy against target returns"),
        ("learning_curves", "studies.curves", "Curves", "learning curves of several runs"),
        ("translations", "translations.study", "Translations", "comparison of translation models"),
        ("report", "studies.collect", "Report", "report of a folder of studies"),
        ("approximate", "approximation.study", "Approximate", "sparse and random approximations"),
        (
            "approximate_compare",
            "approximation.compare",
            "Compare",
            "compare `approximate` results",
        ),
        ("logit_ranks", "head_size.rank_study", "LogitRanks", "ranks of logits, demand curve"),
        ("theory", "head_size.theory", "Theory", "theorems on the head size as programs"),
    )
)

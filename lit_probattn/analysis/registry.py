"""The list of studies. A new study is a module and a line here."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_probattn.analysis.study import Study

# Name on the command line -> class, which is imported when selected, and summary.
STUDIES = {
    "attention_maps": ("studies.maps:Maps", "maps of sequences, per layer and head"),
    "rank": ("studies.rank:Rank", "rank distribution of maps"),
    "head_distance": ("studies.distance:Distance", "distances between heads of a layer"),
    "spectrum": ("studies.spectrum:Spectrum", "spectrum of vectorised maps"),
    "query_likelihood": ("studies.likelihood:Likelihood", "likelihood of queries"),
    "priors": ("studies.priors:Priors", "learned priors, variances, mixing weights, noise"),
    "keys": ("studies.keys:Keys", "images of key weights and keys"),
    "responsibilities": ("studies.responsibilities:Responsibilities", "usage of components"),
    "returns": ("studies.returns:Returns", "returns of a policy against target returns"),
    "learning_curves": ("studies.curves:Curves", "learning curves of several runs"),
    "translations": ("translations.study:Translations", "comparison of translation models"),
    "approximate": ("approximation.study:Approximate", "sparse and random approximations"),
    "approximate_compare": ("approximation.compare:Compare", "compare `approximate` results"),
    "logit_ranks": ("head_size.rank_study:LogitRanks", "ranks of logits, demand curve"),
    "theory": ("head_size.theory:Theory", "theorems on the head size as programs"),
}


def load_study(name: str) -> type[Study]:
    """Import the study of this name."""
    study: type[Study] = resolve_name(f"lit_probattn.analysis.{STUDIES[name][0]}")
    return study

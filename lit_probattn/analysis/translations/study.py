"""Comparison of trained translation models: scores with intervals, curves, translations to read.

    lit-probattn analyse translations --runs softmax=runs/translation-softmax/0 \\
        smgk=runs/translation-smgk/0 gfish=runs/translation-gfish/0 --out reports/translations

All runs must have the same test set; the first is the baseline. A folder selects its best
checkpoint, or its newest one without validation; FOLDER/average-10 is the mean of the ten newest.
Each run translates the split once with its beam search in float32; the translations are stored in
--out and reused. A row that copies the source is added for comparison.

BLEU has 95 % intervals by the paired bootstrap over sentences (Koehn, 2004), which cover the
variation of the test set but not of training seeds.

Changed words are the words of the reference that are not in the source, as multisets by
sacrebleu's tokeniser 13a. Recall is the share of them in the translation, precision the share of
correct words among the translation's words that are not in the source. A copy of the source has F1
0, the reference 100.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

from lit_probattn.analysis.options import SPLITS, add_out, add_run
from lit_probattn.analysis.studies.curves import claim_of
from lit_probattn.analysis.studies.curves import draw as draw_curves
from lit_probattn.analysis.study import Study
from lit_probattn.analysis.translations.decoded import common_pairs, decode, open_runs
from lit_probattn.analysis.translations.report import Report, Row
from lit_probattn.analysis.translations.scores import Bootstrap
from lit_probattn.base.arguments import at_least
from lit_probattn.tasks.bleu import check_installed

COPY = "copying the source"
_CURVES = ("val/bleu", "val/loss")


class Translations(Study):
    """Comparison of several translation runs."""

    name, title = "translations", "Comparison of translation models"

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        text = "run folders; the first is the baseline"
        add("--runs", nargs="+", required=True, metavar="[LABEL=]FOLDER", help=text)
        add_run(parser, config=False)
        add("--split", default="test", choices=SPLITS, help="split of the data")
        text = "resampled test sets for the intervals"
        add("--resamples", type=at_least(1), default=1000, help=text)
        add("--num_shown", type=at_least(0), default=20, help="translations to read")
        text = "seed of the resamples and of the shown translations"
        add("--seed", type=at_least(0), default=0, help=text)
        add_out(parser)

    def _compute(self) -> str:
        options = self.options
        check_installed()
        runs = open_runs(options)
        pairs = common_pairs(runs, options.split)
        shown = drawn(len(pairs), options.num_shown, options.seed)
        kept = self.results.folder / "decoded"
        made = {run.label: decode(run, options.split, kept) for run in runs}
        bootstrap = Bootstrap(len(pairs), options.resamples, options.seed)
        rows = [Row(name, lines, pairs, bootstrap) for name, lines in made.items()]
        report = Report(runs, pairs, rows, Row(COPY, pairs.source, pairs, bootstrap))
        self.results.table(report.scores)
        self.results.table(report.lengths, "lengths")
        self.results.figure(report.draw_scores(), report.scores_claim())
        self.results.figure(report.draw_lengths(), report.lengths_claim(), "lengths")
        curves = pd.concat([run.metrics for run in runs], ignore_index=True)
        logged = [metric for metric in _CURVES if metric in set(curves["metric"])]
        if logged:
            claim = claim_of(curves, logged[0])
            self.results.figure(draw_curves(curves, logged), claim, "curves")
        self.results.appendix = report.reading(shown)
        return report.text(options.resamples, options.split)


def drawn(num_sentences: int, count: int, seed: int) -> list[int]:
    """Return the sorted numbers, from 1, of the sentences to read."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(num_sentences)[:count]
    return sorted((order + 1).tolist())

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

--remarks is a CSV file of a reader's remarks with the columns `sentence`, the number of the
sentence in the report, and `remark`; the report prints them below the sentences.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import pandas as pd

from lit_probattn.analysis.options import SPLITS, add_out
from lit_probattn.analysis.studies.curves import claim_of
from lit_probattn.analysis.studies.curves import draw as draw_curves
from lit_probattn.analysis.study import Study
from lit_probattn.analysis.translations.decoded import common_pairs, decode, open_runs
from lit_probattn.analysis.translations.report import Report, Row
from lit_probattn.analysis.translations.scores import Bootstrap
from lit_probattn.base.arguments import add_data, at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.tasks.bleu import check_installed

COPY = "copying the source"
_COLUMNS = ("sentence", "remark")
_CURVES = ("val/bleu", "val/loss")


class Translations(Study):
    """Comparison of several translation runs."""

    name, title = "translations", "Comparison of translation models"

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        text = "run folders; the first is the baseline"
        add("--runs", nargs="+", required=True, metavar="[LABEL=]FOLDER", help=text)
        add_data(parser)
        add("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
        add("--split", default="test", choices=SPLITS, help="split of the data")
        text = "resampled test sets for the intervals"
        add("--resamples", type=at_least(1), default=1000, help=text)
        add("--num_shown", type=at_least(0), default=20, help="translations to read")
        text = "seed of the resamples and of the shown translations"
        add("--seed", type=at_least(0), default=0, help=text)
        add(
            "--remarks", type=Path, metavar="FILE", help="CSV file with the columns sentence,remark"
        )
        add_out(parser)

    def _compute(self) -> str:
        options = self.options
        check_installed()
        remarks = {} if options.remarks is None else read_remarks(options.remarks)
        runs = open_runs(options)
        pairs = common_pairs(runs, options.split)
        shown = drawn(len(pairs), options.num_shown, options.seed)
        for number in remarks:
            if number not in shown:
                raise ConfigError(
                    f"--remarks {options.remarks}: sentence {number} is not among the shown "
                    f"ones ({', '.join(map(str, shown))}); keep --seed and --num_shown"
                )
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
        self.results.appendix = report.reading(shown, remarks)
        return report.text(options.resamples, options.split)


def drawn(num_sentences: int, count: int, seed: int) -> list[int]:
    """Return the sorted numbers, from 1, of the sentences to read."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(num_sentences)[:count]
    return sorted((order + 1).tolist())


def read_remarks(path: Path) -> dict[int, str]:
    """Read remarks by the number of their sentence.

    Raises:
        ConfigError: the file cannot be read, has other columns, or a sentence has no number or two
            remarks.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            columns, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--remarks {path}: cannot be read: {reason}") from error
    if columns != list(_COLUMNS):
        raise ConfigError(
            f"--remarks {path}: expected a CSV file with the columns {','.join(_COLUMNS)}, "
            f"received {','.join(columns) or 'nothing'}"
        )
    remarks: dict[int, str] = {}
    for row in rows:
        if len(row) != len(_COLUMNS) or not row[0].isdecimal() or int(row[0]) in remarks:
            raise ConfigError(
                f"--remarks {path}: expected a unique number and a remark, quoted if it contains "
                f"commas, received {','.join(row)}"
            )
        remarks[int(row[0])] = row[1]
    return remarks

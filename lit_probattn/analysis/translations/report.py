"""Report of the study of translations: findings, tables, figures, translations to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import label, tiles
from lit_probattn.analysis.results import describe
from lit_probattn.analysis.translations.decoded import Lines, Pairs, Run
from lit_probattn.analysis.translations.scores import (
    Bootstrap,
    bleu_of,
    buckets,
    changed_counts,
    changed_f1,
    changed_scores,
    score,
)
from lit_probattn.experiments.expectations import Estimate
from lit_probattn.records.markdown import escaped, one_line
from lit_probattn.records.tables import counted, markdown_table, span, unequal_sides
from lit_probattn.tasks.bleu import (
    BLEUForm,
    corpus_bleu,
    corpus_chrf,
    sentence_counts,
    words_13a,
)

_BUCKETS = 5
_GREY = "0.55"


class Row:
    """The scores of a model, or of copying the source.

    Args:
        name: name of the model.
        lines: its translations.
        pairs: the test set.
        bootstrap: resamples shared by all rows.

    Attributes:
        counts: counts of BLEU per sentence, by form.
        bleu: scores with their details, by form.
        scored: the same scores with resamples, by form.
        chrf, chrf_signature: chrF of running text.
        recall, precision: recall and precision of changed words, in percent.
        f1: F1 of changed words, with resamples.
    """

    def __init__(self, name: str, lines: Lines, pairs: Pairs, bootstrap: Bootstrap) -> None:
        self.name, self.lines = name, lines
        sides = {f: (lines.in_form(f), pairs.reference.in_form(f)) for f in pairs.forms}
        self.counts = {form: sentence_counts(*side, form) for form, side in sides.items()}
        self.bleu = {form: corpus_bleu(*side, form) for form, side in sides.items()}
        self.scored = {
            form: score(counts, bleu_of(form), bootstrap) for form, counts in self.counts.items()
        }
        self.chrf, self.chrf_signature = corpus_chrf(lines.text, pairs.reference.text)
        changed = changed_counts(pairs.source.text, pairs.reference.text, lines.text)
        self.recall, self.precision, _ = changed_scores(changed.sum(0))
        self.f1 = score(changed, changed_f1, bootstrap)
        self.num_changed = int(changed[:, 1].sum())


@dataclass
class Report:
    """Tables, figures and text.

    Args:
        runs: the runs, with the baseline first.
        pairs: the test set.
        rows: rows of the runs, in the same order.
        copy: the row of copying the source.
    """

    runs: Sequence[Run]
    pairs: Pairs
    rows: Sequence[Row]
    copy: Row

    @property
    def base(self) -> Row:
        """The baseline's row."""
        return self.rows[0]

    @property
    def form(self) -> BLEUForm:
        """The form of BLEU in findings and figures: that of the baseline's task."""
        own: BLEUForm = self.runs[0].trained.task.bleu_form
        return own if own in self.pairs.forms else self.pairs.forms[0]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """A row per model and form of BLEU, and for copying the source."""
        return pd.DataFrame(
            [self._entry(row, form) for form in self.pairs.forms for row in self._all_rows]
        )

    @property
    def _all_rows(self) -> list[Row]:
        return [self.copy, *self.rows]

    def _entry(self, row: Row, form: BLEUForm) -> dict[str, Any]:
        found, own = row.bleu[form], row.scored[form]
        entry: dict[str, Any] = {"form": form, "model": row.name, "bleu": found.score}
        entry |= _columns("bleu", own.interval)
        for name, other in (("copy", self.copy), ("baseline", self.base)):
            if row is not other:
                difference = own.minus(other.scored[form])
                entry |= {f"minus_{name}": difference.value}
                entry |= _columns(f"minus_{name}", difference)
        entry |= {f"precision_{n}": p for n, p in enumerate(found.precisions, 1)}
        entry |= {
            "brevity_penalty": found.brevity_penalty,
            "length_ratio": found.hypothesis_words / found.reference_words,
            "signature": found.signature,
            "chrf": row.chrf,
            "changed_recall": row.recall,
            "changed_precision": row.precision,
            "changed_f1": row.f1.value,
        }
        return entry | _columns("changed_f1", row.f1.interval)

    @cached_property
    def lengths(self) -> pd.DataFrame:
        """BLEU by length of the source, with a row per bucket and model."""
        sizes = [len(words) for words in words_13a(self.pairs.source.text)]
        return pd.DataFrame(
            [
                {
                    "source_words": name,
                    "sentences": int(members.sum()),
                    "model": row.name,
                    "bleu": bleu_of(self.form)(row.counts[self.form][members].sum(0)),
                }
                for name, members in buckets(sizes, _BUCKETS)
                for row in self._all_rows
            ]
        )

    # ---- figures -------------------------------------------------------------------------------

    def scores_claim(self) -> str:
        """Return how many models beat copying the source."""
        copied = self.copy.scored[self.form]
        beaten = sum(row.scored[self.form].minus(copied).direction > 0 for row in self.rows)
        scores = span((row.scored[self.form].value for row in self.rows), ".1f")
        return (
            f"{beaten} of {len(self.rows)} models beat copying the source "
            f"(BLEU {scores}, copying {copied.value:.1f})"
        )

    def lengths_claim(self) -> str:
        """Return the baseline's BLEU of the shortest and of the longest sources."""
        part = self.lengths[self.lengths["model"] == self.base.name]
        first, last = part.iloc[0], part.iloc[-1]
        return (
            f"BLEU of {self.base.name}: {first['bleu']:.1f} for sources of "
            f"{first['source_words']} words, {last['bleu']:.1f} for {last['source_words']}"
        )

    def draw_scores(self) -> Figure:
        """Draw BLEU and changed words with intervals, one line per model."""
        figure, axes = tiles(2, 2, 4.2, 1.2 + 0.35 * len(self._all_rows), sharey=True)
        sides = (
            (f"BLEU ({self.form})", [row.scored[self.form] for row in self._all_rows]),
            ("changed words, F1 in %", [row.f1 for row in self._all_rows]),
        )
        for axis, (title, scored) in zip(axes, sides, strict=True):
            for place, one in enumerate(scored):
                found = one.interval
                colour = _GREY if place == 0 else f"C{place - 1}"
                axis.plot([found.low, found.high], [place, place], color=colour, lw=2)
                axis.plot(found.value, place, "o", color=colour, ms=6)
            axis.axvline(scored[0].value, color=_GREY, lw=0.8, ls=":")
            axis.set_xlim(left=0)
            label(axis, title)
        axes[0].set_yticks(range(len(self._all_rows)), [row.name for row in self._all_rows])
        axes[0].invert_yaxis()
        return figure

    def draw_lengths(self) -> Figure:
        """Draw BLEU over the length of the source, one line per model."""
        figure, (axis,) = tiles(1, 1, 6.0, 3.4)
        for place, row in enumerate(self._all_rows):
            part = self.lengths[self.lengths["model"] == row.name]
            colour, line = (_GREY, ":") if place == 0 else (f"C{place - 1}", "-")
            style: Any = {"color": colour, "ls": line, "marker": "o", "ms": 4}
            axis.plot(part["source_words"], part["bleu"], label=row.name, **style)
        axis.set_ylim(bottom=0)
        label(axis, "words of the source", f"BLEU ({self.form})", legend=8)
        return figure

    # ---- text ----------------------------------------------------------------------------------

    def text(self, resamples: int, split: str) -> str:
        """Return findings and tables as Markdown."""
        parts = [
            *self._findings(),
            f"{counted(len(self.pairs), 'sentence')} of the {split} split. 95 % intervals: "
            f"paired bootstrap over sentences, {counted(resamples, 'resample')}; one training of "
            "each model, so they do not cover other seeds.",
            *self._unequal(),
            "## Scores",
            markdown_table(self._score_table()),
            "chrF and changed words are counted on running text. " + self._signatures(),
            "## Changed words",
            f"The references contain {counted(self.base.num_changed, 'word')} that are not in "
            "their sources (multisets of words by sacrebleu's tokeniser 13a). Recall: the "
            "fraction of these words in the translation. Precision: the fraction of the "
            "translation's words that are not in the source and are among them. F1 is their "
            "harmonic mean. Copying the source scores 0, the reference 100.",
            markdown_table(self._changed_table()),
            "## Other variants of BLEU",
            self._form_text(),
            "## Length",
            f"Precisions of n-grams, brevity penalty and length ratio of BLEU ({self.form}).",
            markdown_table(self._length_table()),
            "BLEU by the number of words of the source:",
            markdown_table(self._bucket_table()),
            "## Runs",
            markdown_table(self._run_table()),
            *[f"{one_line(run.label)}. {describe(run.trained)}" for run in self.runs],
        ]
        return "\n\n".join(part for part in parts if part)

    def _findings(self) -> list[str]:
        form, copied = self.form, self.copy.scored[self.form]
        gains = {row.name: row.scored[form].minus(copied) for row in self.rows}
        beaten = sum(gain.direction > 0 for gain in gains.values())
        spread = sorted(gain.value for gain in gains.values())
        first = (
            f"Finding: {beaten} of {len(self.rows)} models beat copying the source "
            f"(BLEU {copied.value:.2f}, {form}); differences from it {spread[0]:+.2f} to "
            f"{spread[-1]:+.2f}"
        )
        lines = []
        for row in self.rows:
            own, gain = row.scored[form], gains[row.name]
            line = (
                f"- {escaped(row.name)}: BLEU {own.interval.text(sign='')}; copying the source "
                f"{_BEATEN[gain.direction]}: {gain.text()}"
            )
            if row is not self.base:
                difference = own.minus(self.base.scored[form])
                verdict = "" if difference.direction else ", not distinguishable"
                line += f"; against {escaped(self.base.name)} {difference.text()}{verdict}"
            f1 = row.f1.interval
            lines.append(f"{line}; changed words F1 {f1.text(sign='')}")
        return [first, "\n".join(lines)]

    def _unequal(self) -> list[str]:
        sides: dict[str, Mapping[str, object]] = {
            run.label: {
                "checkpoint step": run.trained.step,
                "target tokens": run.target_tokens,
                "seed": run.trained.config.get("seed_everything", 0),
                **run.search,
            }
            for run in self.runs
        }
        baselines = {run.label: self.runs[0].label for run in self.runs}
        return unequal_sides(sides, baselines, "differences are not due to the attention alone")

    def _against(self, row: Row, form: BLEUForm | None = None) -> str | None:
        """Return the difference of a model from the baseline in BLEU, or in F1 of changed words."""
        if row in (self.copy, self.base):
            return None
        own, base = (one.f1 if form is None else one.scored[form] for one in (row, self.base))
        return own.minus(base).text()

    def _score_table(self) -> pd.DataFrame:
        found = []
        for row in self._all_rows:
            own = row.scored[self.form]
            copied = None if row is self.copy else own.minus(self.copy.scored[self.form]).text()
            entry = {"model": row.name, f"BLEU ({self.form})": own.interval.text(sign="")}
            away = {"− copying": copied, f"− {self.base.name}": self._against(row, self.form)}
            found.append({**entry, **away, "chrF": f"{row.chrf:.2f}"})
        return pd.DataFrame(found).dropna(axis=1, how="all")

    def _changed_table(self) -> pd.DataFrame:
        found = []
        for row in self._all_rows:
            entry = {"model": row.name, "recall": f"{row.recall:.2f}"}
            entry |= {"precision": f"{row.precision:.2f}", "F1": row.f1.interval.text(sign="")}
            found.append({**entry, f"F1 − {self.base.name}": self._against(row)})
        return pd.DataFrame(found).dropna(axis=1, how="all")

    def _form_text(self) -> str:
        others = [form for form in self.pairs.forms if form != self.form]
        if not others:
            return f"The runs tokenise differently, so only BLEU ({self.form}) is comparable."
        found = []
        for row in self._all_rows:
            entry: dict[str, Any] = {"model": row.name}
            for form in others:
                entry[form] = row.scored[form].interval.text(sign="")
                entry[f"{form} − {self.base.name}"] = self._against(row, form)
            found.append(entry)
        return markdown_table(pd.DataFrame(found).dropna(axis=1, how="all"))

    def _signatures(self) -> str:
        told = [f"{form}: `{self.base.bleu[form].signature}`" for form in self.pairs.forms]
        return f"Signatures: {'; '.join(told)}; chrF: `{self.base.chrf_signature}`."

    def _length_table(self) -> pd.DataFrame:
        part = self.scores[self.scores["form"] == self.form]
        found = pd.DataFrame({"model": part["model"]})
        for order in range(1, 5):
            found[f"{order}-gram"] = part[f"precision_{order}"].map("{:.1f}".format)
        found["brevity penalty"] = part["brevity_penalty"].map("{:.3f}".format)
        found["length ratio"] = part["length_ratio"].map("{:.3f}".format)
        return found

    def _bucket_table(self) -> pd.DataFrame:
        wide = self.lengths.pivot_table(
            index=["source_words", "sentences"], columns="model", values="bleu", sort=False
        )
        shown = wide[[row.name for row in self._all_rows]].map("{:.2f}".format).reset_index()
        return shown.rename(columns={"source_words": "source words"})

    def _run_table(self) -> pd.DataFrame:
        found = []
        for run in self.runs:
            tokens = run.target_tokens
            found.append(
                {
                    "model": run.label,
                    "parameters": f"{run.num_parameters:,}",
                    "checkpoint step": f"{run.trained.step:,}",
                    "steps trained": f"{int(run.metrics['step'].max()):,}",
                    "target tokens seen": None if tokens is None else f"{tokens:,}",
                    "search": ", ".join(f"{k} {v:g}" for k, v in run.search.items()),
                }
            )
        return pd.DataFrame(found).dropna(axis=1, how="all")

    def reading(self, shown: Sequence[int]) -> str:
        """Return sentences, by their numbers from 1, with the translations of all models."""
        if not shown:
            return ""
        lines = [
            "## Sample translations",
            "",
            f"{counted(len(shown), 'sentence')}, drawn with the seed.",
        ]
        for number in shown:
            place = number - 1
            told = {"source": self.pairs.source.text[place]}
            told["reference"] = self.pairs.reference.text[place]
            told |= {f"**{escaped(row.name)}**": row.lines.text[place] for row in self.rows}
            lines += ["", f"Sentence {number}", ""]
            lines += [f"- {name}: {escaped(text)}".rstrip() for name, text in told.items()]
        return "\n".join(lines)


_BEATEN = {1: "is beaten", 0: "is not distinguishable", -1: "is better"}


def _columns(name: str, found: Estimate) -> dict[str, float]:
    return {f"{name}_low": found.low, f"{name}_high": found.high}

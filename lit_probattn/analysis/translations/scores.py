"""Scores of translations: BLEU with bootstrap intervals, and words changed from the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lit_probattn.experiments.expectations import LEVEL, Estimate
from lit_probattn.tasks.bleu import BLEUForm, bleu_of_counts, words_13a

Counts = npt.NDArray[np.float64]


class Bootstrap:
    """Test sets drawn from the sentences with replacement, common to all models.

    Source: Koehn, 2004, paired bootstrap resampling.

    Args:
        num_sentences: number of sentences of the test set.
        num_resamples: number of drawn test sets.
        seed: seed of the draws.
    """

    def __init__(self, num_sentences: int, num_resamples: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        draws = generator.integers(num_sentences, size=(num_resamples, num_sentences))
        rows = [np.bincount(draw, minlength=num_sentences) for draw in draws]
        self._times = np.array(rows, dtype=np.float64)

    def scores(self, counts: Counts, score: Callable[[Counts], float]) -> npt.NDArray[np.float64]:
        """Return the score of all drawn test sets, (num_resamples,).

        Args:
            counts: counts to be summed over sentences, (num_sentences, n).
            score: computes the score from the sum, (n,).
        """
        return np.array([score(total) for total in self._times @ counts])


def interval(value: float, resampled: npt.NDArray[np.float64]) -> Estimate:
    """Return a score of the test set with the central 95 % over resamples."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True)
class Scored:
    """A score of one model on the test set and on resamples, which are common to all models."""

    value: float
    resampled: npt.NDArray[np.float64]

    @property
    def interval(self) -> Estimate:
        """The score with its interval."""
        return interval(self.value, self.resampled)

    def minus(self, other: Scored) -> Estimate:
        """Return the difference to another model, paired by resample."""
        return interval(self.value - other.value, self.resampled - other.resampled)


def score(counts: Counts, of: Callable[[Counts], float], bootstrap: Bootstrap) -> Scored:
    """Return the score that `of` computes from the sum of counts, (num_sentences, n)."""
    return Scored(of(counts.sum(0)), bootstrap.scores(counts, of))


# ---- changed words -----------------------------------------------------------------------------


def changed_counts(
    sources: Sequence[str], references: Sequence[str], hypotheses: Sequence[str]
) -> Counts:
    """Count the words of a translation that are not in its source, (num_sentences, 3).

    Words are multisets by sacrebleu's tokeniser 13a. With S, R and Y the words of source, reference
    and hypothesis, and multiset operations A − B and A ∩ B, the columns are

        |(R − S) ∩ (Y − S)|   correct changed words
        |R − S|               changed words of the reference
        |Y − S|               words of the hypothesis that are not in the source

    A copy of the source has Y − S = ∅ and scores 0; the reference scores 1 (100 %).

    Raises:
        ValueError: the numbers of lines differ, or sacrebleu is not installed.
    """
    rows = []
    sides = (words_13a(lines) for lines in (sources, references, hypotheses))
    for source, reference, hypothesis in zip(*sides, strict=True):
        taken = Counter(source)
        changed, new = Counter(reference) - taken, Counter(hypothesis) - taken
        rows.append([(changed & new).total(), changed.total(), new.total()])
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def changed_scores(total: Counts) -> tuple[float, float, float]:
    """Return recall, precision and F1 of a sum of `changed_counts`, (3,), in percent.

    F1 is 2 · correct / (reference + hypothesis). A score with denominator 0 is 0.
    """
    right, wanted, made = total.tolist()
    parts = ((right, wanted), (right, made), (2 * right, wanted + made))
    recall, precision, both = (100 * part / whole if whole else 0.0 for part, whole in parts)
    return recall, precision, both


def changed_f1(total: Counts) -> float:
    """Return F1 of a sum of `changed_counts`, (3,), in percent."""
    return changed_scores(total)[2]


# ---- by length ---------------------------------------------------------------------------------


def buckets(lengths: Sequence[int], count: int) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    """Return groups of sentences of similar length as (name, members), the shortest first.

    Groups have about the same size, and all sentences of a length are in one group.

    Args:
        lengths: number of words of each sentence.
        count: largest number of groups; fewer if there are fewer lengths.
    """
    sizes = np.asarray(lengths)
    ends = np.unique(np.quantile(sizes, np.arange(1, count + 1) / count, method="higher"))
    low, found = int(sizes.min()), []
    for end in ends.astype(int).tolist():
        name = f"{low}–{end}" if low < end else f"{end}"
        found.append((name, (sizes >= low) & (sizes <= end)))
        low = end + 1
    return found


def bleu_of(form: BLEUForm) -> Callable[[Counts], float]:
    """Return the function from a sum of `sentence_counts` to BLEU."""
    return lambda total: bleu_of_counts(total, form)

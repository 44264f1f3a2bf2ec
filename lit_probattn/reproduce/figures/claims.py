"""Conditions on the runs of a figure, used to judge the sentences of its paper.

A condition compares a number of one row with another row or with a value, seed by seed:

    {rows: [mgk_4, mgk_2], is: higher, than: softmax_4, value: rank}       # of a study
    {rows: [mgk_1], is: lower, than: softmax_2, curve: train/loss, at: throughout}

All rows must satisfy it; a sentence has the verdict of its weakest part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.tables import record
from lit_probattn.experiments.expectations import (
    MISSING,
    Finding,
    Printed,
    Sample,
    Sign,
    against_printed,
    combined,
    difference,
    identical,
    missing,
    sided,
)
from lit_probattn.reproduce.figures.curves import (
    Curves,
    best,
    common_steps,
    first_reaching,
    settling,
    smoothed,
)

_WORDS = {
    "throughout": "{}, mean over all logged steps",
    "best": "best {}",
    "reach": "steps until {} reaches the other row's best",
    "settled": "share of the change of {} in the last tenth of the steps",
}
_COMPARE = ("higher", "lower", "equal", "near")


@dataclass(frozen=True)
class Claim:
    """A condition on rows.

    Args:
        rows: rows that must satisfy it.
        compare: `higher` or `lower` than the compared value, `equal` to it, or `near` a printed
            value, which lies in the interval over seeds.
        than: another row, or a number.
        value: a value of the figure's studies, or a metric of the table's runs.
        than_value: name of the compared value, if it differs; without `than`, of the same row.
        curve: a logged metric, instead of a value.
        at: reduction of a curve: `throughout`, its mean over common steps, and the sign at each;
            `best`; `reach`, the steps until it is as good as the best of the other row; `settled`.
        margin: allowed shortfall relative to the other row.
    """

    rows: Sequence[str]
    compare: Literal["higher", "lower", "equal", "near"]
    than: str | float | None = None
    value: str | None = None
    than_value: str | None = None
    curve: str | None = None
    at: Literal["throughout", "best", "reach", "settled"] | None = None
    margin: float = 0.0

    @classmethod
    def read(cls, entry: Mapping[str, Any], place: str, rows: Sequence[str]) -> Claim:
        """Parse an entry of a file.

        Raises:
            ConfigError: a key is missing, a key or row is unknown, or neither or both of value and
                curve are set.
        """
        words = {("compare" if key == "is" else key): value for key, value in entry.items()}
        claim = record(cls, f"{place}: claim", words)
        if (claim.value is None) == (claim.curve is None) or (claim.curve and not claim.at):
            raise ConfigError(f"{place}: a claim needs either value, or curve and at")
        if claim.compare not in _COMPARE:
            raise ConfigError(
                f"{place}: `is` must be one of {', '.join(_COMPARE)}, received {claim.compare}"
            )
        if claim.at is not None and claim.at not in _WORDS:
            raise ConfigError(
                f"{place}: `at` must be one of {', '.join(_WORDS)}, received {claim.at}"
            )
        if claim.than is None and claim.than_value is None:
            raise ConfigError(f"{place}: a claim needs `than` or `than_value`")
        other = [claim.than] if isinstance(claim.than, str) else []
        for row in (*claim.rows, *other):
            if row not in rows:
                raise ConfigError(f"{place}: unknown row {row}; rows: {', '.join(rows)}")
        return claim

    def of_curve(self, others: Mapping[str, str]) -> Claim:
        """Return the condition with its metric replaced as in `others`."""
        return (
            self if self.curve is None else replace(self, curve=others.get(self.curve, self.curve))
        )

    @property
    def sign(self) -> Sign:
        """Sign of the claimed difference."""
        return 1 if self.compare == "higher" else -1

    def judge(
        self,
        sample: Callable[[str, str], Sample | None],
        curves: Callable[[str, str], Curves],
        label: Callable[[str], str],
    ) -> Finding:
        """Judge the condition.

        Args:
            sample: returns values over seeds by row and name of the value.
            curves: returns logged curves by row and metric.
            label: returns the label of a row.
        """
        found = []
        for row in self.rows:
            if self.curve is not None:
                found.append(self._of_curves(row, curves, label))
                continue
            assert self.value is not None
            own = sample(row, self.value)
            name, value = self._other(row), self.than_value or self.value
            is_row = not isinstance(self.than, int | float)
            base = sample(name, value) if is_row else self._constant(own)
            told = f"{label(row)}, {self.value} − "
            told += f"{label(name)}, {value}" if is_row else f"{self.than:g}"
            found.append(self._compare(own, base, told))
        return combined(found)

    def _other(self, row: str) -> str:
        return self.than if isinstance(self.than, str) else row

    def _constant(self, like: Sample | None) -> Sample | None:
        """Return the compared number as a sample with the same seeds."""
        assert isinstance(self.than, int | float)
        return None if like is None else like.constant(self.than)

    def _compare(self, own: Sample | None, base: Sample | None, words: str) -> Finding:
        if own is None or base is None:
            return missing(f"{words.rpartition(' − ')[0]}: {MISSING}")
        if self.compare == "equal":
            return identical(own, base, words)
        if self.compare == "near":
            if isinstance(self.than, int | float):
                found = against_printed(own, Printed.read(str(self.than)), 1)
            else:
                away = difference(own, base)
                found = Finding(str(away), away.near(Printed.exactly(0.0)), estimate=away)
            return replace(found, measured=f"{words}: {found.measured}")
        if self.margin:
            factor = 1 - self.sign * self.margin
            base = Sample(tuple(factor * value for value in base.values), base.seeds)
            words += f" (and {self.margin:.0%} {'less' if self.sign > 0 else 'more'})"
        told = f"{words}: means {own.mean:.4g} and {base.mean:.4g}, difference"
        return sided(own, base, self.sign, told)

    # ---- curves --------------------------------------------------------------------------------

    def _of_curves(
        self, row: str, curves: Callable[[str, str], Curves], label: Callable[[str], str]
    ) -> Finding:
        assert self.curve is not None
        assert self.at is not None
        metric, other = self.curve, self._other(row)
        own = {seed: smoothed(c, metric) for seed, c in curves(row, metric).items()}
        is_row = isinstance(self.than, str)
        base = {s: smoothed(c, metric) for s, c in curves(other, metric).items()} if is_row else {}
        words = f"{_WORDS[self.at].format(metric)}, {label(row)}"
        words += f" − {label(other)}" if is_row else f" − {self.than:g}"
        if not own or (is_row and not base):
            return missing(f"{words}: no finished run logged it")
        if self.at == "throughout":
            return self._throughout(own, base, words)
        if self.at == "reach":
            seeds = sorted(set(own) & set(base))
            if not seeds:
                return missing(f"{words}: no common seed")
            goals = {seed: best(base[seed], metric) for seed in seeds}
            first, second = (
                Sample(tuple(first_reaching(c[s], goals[s], metric) for s in seeds), tuple(seeds))
                for c in (own, base)
            )
            return self._compare(first, second, words)
        reduce: Callable[[Any], float] = settling
        if self.at == "best":
            reduce = lambda curve: best(curve, metric)  # noqa: E731
        mine = Sample(tuple(reduce(c) for c in own.values()), tuple(own))
        theirs = Sample(tuple(reduce(c) for c in base.values()), tuple(base)) if base else None
        return self._compare(mine, theirs or self._constant(mine), words)

    def _throughout(self, own: Curves, base: Curves, words: str) -> Finding:
        """Judge the mean over steps, and count the steps with the claimed sign."""
        steps = common_steps(own, base)
        if not len(steps):
            return missing(f"{words}: no common logged step")
        first, second = (
            Sample(tuple(float(c[steps].mean()) for c in part.values()), tuple(part))
            for part in (own, base)
        )
        found = self._compare(first, second, words)
        means = [sum(c[steps] for c in part.values()) / len(part) for part in (own, base)]
        right = int(((means[0] - means[1]) * self.sign > 0).sum())
        text = f"{found.measured}; true at {right} of {len(steps)} logged steps"
        always = right == len(steps)
        weaker = found.verdict == "agrees" and not always
        return replace(found, measured=text, verdict="same direction" if weaker else found.verdict)

"""Corpus BLEU in the formats that papers report; each score states its format.

`detokenised`: sacrebleu on detokenised text against the released references; scores of different
programs are comparable only with the same signature. `tokenised`: the lower-case score of
multi-bleu on the data's tokens (IWSLT'14). `compound_split`: multi-bleu on these tokens, case kept,
with hyphenated words split on both sides (WMT'14 En-De).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lit_probattn.base.arguments import check_argument

BLEUForm = Literal["detokenised", "tokenised", "compound_split"]
FORMS: tuple[BLEUForm, ...] = get_args(BLEUForm)

_HYPHEN = re.compile(r"(\S)-(\S)")
# multi-bleu: words are separated by spaces, no smoothing.
_MULTI = {"tokenize": "none", "smooth_method": "none", "force": True}
_OPTIONS: dict[BLEUForm, dict[str, Any]] = {
    "detokenised": {},
    "tokenised": {**_MULTI, "lowercase": True},
    "compound_split": {**_MULTI, "lowercase": False},
}


@dataclass(frozen=True)
class BLEUScore:
    """A BLEU score and its statistics.

    Attributes:
        score: percent.
        precisions: precisions of n-grams of 1 to 4 words, percent.
        brevity_penalty: factor for translations that are shorter than the references.
        hypothesis_words, reference_words: total number of words.
        signature: sacrebleu's; with `compounds:split` if hyphenated words are split.
    """

    form: BLEUForm
    score: float
    precisions: tuple[float, ...]
    brevity_penalty: float
    hypothesis_words: int
    reference_words: int
    signature: str

    def __str__(self) -> str:
        parts = "/".join(f"{p:.1f}" for p in self.precisions)
        return (
            f"BLEU {self.score:.2f} ({self.form}; {parts}, brevity penalty "
            f"{self.brevity_penalty:.3f}, {self.hypothesis_words} words against "
            f"{self.reference_words}) {self.signature}"
        )


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], form: BLEUForm) -> BLEUScore:
    """Score translations against one reference each.

    Source: Papineni et al., 2002; sacrebleu; multi-bleu and the compound splitting of fairseq's
    scripts.

    Args:
        hypotheses: detokenised text for `detokenised`, otherwise tokens separated by spaces.
        references: in the same format.

    Raises:
        ValueError: the numbers of lines differ or are zero, or sacrebleu is not installed.
    """
    check_argument("bleu", form, BLEUForm)
    if len(hypotheses) != len(references) or not references:
        raise ValueError(
            "BLEU requires equal numbers of translations and references, at least one: received "
            f"{len(hypotheses)} and {len(references)}"
        )
    metric = _sacrebleu().BLEU(**_OPTIONS[form])
    lines, against = (_as_compared(side, form) for side in (hypotheses, references))
    found = metric.corpus_score(lines, [against])
    signature = str(metric.get_signature())
    return BLEUScore(
        form=form,
        score=float(found.score),
        precisions=tuple(float(p) for p in found.precisions),
        brevity_penalty=float(found.bp),
        hypothesis_words=int(found.sys_len),
        reference_words=int(found.ref_len),
        signature=f"{signature}|compounds:split" if form == "compound_split" else signature,
    )


def sentence_counts(
    hypotheses: Sequence[str], references: Sequence[str], form: BLEUForm
) -> npt.NDArray[np.float64]:
    """Return the BLEU counts of every sentence; their sum gives the corpus score.

    Args:
        hypotheses, references: as for `corpus_bleu`.

    Returns:
        Shape (num_sentences, 10): matching n-grams of 1 to 4 words, total n-grams of the
        hypothesis, words of the hypothesis, words of the reference.
    """
    metric = _sacrebleu().BLEU(**_OPTIONS[form])
    sides = (_as_compared(side, form) for side in (hypotheses, references))
    found = (metric.corpus_score([line], [[against]]) for line, against in zip(*sides, strict=True))
    rows = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in found]
    return np.array(rows, dtype=np.float64).reshape(-1, 10)


def bleu_of_counts(counts: npt.NDArray[np.float64], form: BLEUForm) -> float:
    """Return the BLEU, in percent, of summed rows of `sentence_counts`, (10,)."""
    smooth = _OPTIONS[form].get("smooth_method", "exp")
    numbers = [int(count) for count in counts]
    sides = {"sys_len": numbers[8], "ref_len": numbers[9]}
    metric = _sacrebleu().BLEU
    found = metric.compute_bleu(numbers[:4], numbers[4:8], **sides, smooth_method=smooth)
    return float(found.score)


def corpus_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return chrF of detokenised text in percent, and sacrebleu's signature.

    Source: Popović, 2015; sacrebleu.
    """
    metric = _sacrebleu().CHRF()
    found = metric.corpus_score(list(hypotheses), [list(references)])
    return float(found.score), str(metric.get_signature())


def words_13a(lines: Sequence[str]) -> list[list[str]]:
    """Return the words of each line according to sacrebleu's tokeniser 13a."""
    _sacrebleu()
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokeniser = Tokenizer13a()
    return [tokeniser(line.rstrip()).split() for line in lines]


def _as_compared(lines: Sequence[str], form: BLEUForm) -> list[str]:
    return [split_compounds(line) for line in lines] if form == "compound_split" else list(lines)


def split_compounds(line: str) -> str:
    """Split hyphenated words: `a-b` becomes three words.

    >>> split_compounds("a well-known end - to - end test")
    'a well ##AT##-##AT## known end - to - end test'
    """
    return _HYPHEN.sub(r"\1 ##AT##-##AT## \2", line)


def check_installed() -> None:
    """Check that sacrebleu is installed before a run starts.

    Raises:
        ValueError: sacrebleu is not installed.
    """
    _sacrebleu()


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError as error:
        raise ValueError(
            "BLEU needs the package sacrebleu: pip install 'lit-probattn[text]'"
        ) from error
    return sacrebleu

"""From start and end scores to answers: the best spans of windows, merged per question."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Spans(NamedTuple):
    """The best spans of each window, best first; (B, n), score −inf for missing ones."""

    scores: Tensor
    first: Tensor
    last: Tensor


def best_spans(
    start: Tensor, end: Tensor, allowed: Tensor, *, count: int, max_answer_length: int
) -> Spans:
    """Return the valid spans with the largest sums of both logits.

    A span has at most `max_answer_length` tokens, all of them allowed.

    Args:
        start, end: logits, (B, N).
        allowed: tokens of the text to search, contiguous in each row; (B, N).
        count: number of spans per window.
    """
    longest = min(max_answer_length, start.shape[1])
    blocked = -math.inf
    starts = torch.where(allowed, start, blocked)
    ends = torch.where(allowed, end, blocked)
    ends = torch.nn.functional.pad(ends, (0, longest - 1), value=blocked)
    scores = starts[:, :, None] + ends.unfold(1, longest, 1)  # (B, N, longest)
    best = scores.flatten(1).topk(min(count, scores[0].numel()))
    first = best.indices // longest
    return Spans(best.values, first, first + best.indices % longest)


class Window(NamedTuple):
    """Result of a window for its question.

    Attributes:
        question: index in the split.
        null: no-answer score of the window.
        spans: score and half-open character range of the best spans.
    """

    question: int
    null: float
    spans: list[tuple[float, int, int]]


class Answer(NamedTuple):
    """Merged result of all windows of a question.

    Attributes:
        question: index in the split.
        null: minimum of the windows' no-answer scores.
        texts: distinct non-empty answers, best first.
        scores: scores of `texts`.
    """

    question: int
    null: float
    texts: list[str]
    scores: list[float]

    @property
    def text(self) -> str:
        """The best answer; empty if there is none."""
        return self.texts[0] if self.texts else ""

    @property
    def odds(self) -> float:
        """No-answer score minus the score of the best text."""
        return self.null - self.scores[0] if self.scores else math.inf


def merge(windows: Iterable[Window], contexts: Sequence[str], count: int) -> list[Answer]:
    """Return the answers of all questions with a window, in the order of their indices.

    A span in several windows, or a text at several positions, has its maximum score.

    Source: BERT (Devlin et al., 2019): the best span of all windows; its null score is the minimum.
    Departs from the source: a token can be part of an answer in every window that contains it, not
    only in the window with its maximum context.

    Args:
        contexts: text of each question, by index.
        count: number of answers per question.
    """
    found: dict[int, list[Window]] = {}
    for window in windows:
        found.setdefault(window.question, []).append(window)
    answers = []
    for question in sorted(found):
        spans = [span for window in found[question] for span in window.spans]
        spans.sort(key=lambda span: (-span[0], span[1], span[2]))
        texts: dict[str, float] = {}
        for score, begin, end in spans:
            text = contexts[question][begin:end].strip()
            if text and text not in texts and len(texts) < count:
                texts[text] = score
        null = min(window.null for window in found[question])
        answers.append(Answer(question, null, list(texts), list(texts.values())))
    return answers


def probabilities(scores: Sequence[float]) -> list[float]:
    """Return the softmax of scores."""
    if not scores:
        return []
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]

"""A question with overlapping pieces of its text that fit into a model.

A window is the question, truncated to `max_query_length` tokens, and as many tokens of the text as
fit; the next window starts `stride` tokens later, until the end of the text. Spans are located by
the character range of every token.

Source: BERT (Devlin et al., 2019) and its code for SQuAD.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lit_probattn.base.errors import DataError

Offsets = Sequence[tuple[int, int]]


class Window(NamedTuple):
    """A piece of a text.

    Args:
        first: Index of its first token in the text.
        size: Number of tokens.
    """

    first: int
    size: int

    def holds(self, span: tuple[int, int]) -> bool:
        """Whether the piece contains a span of tokens, given as first and last token."""
        return self.first <= span[0] and span[1] < self.first + self.size


class Windows(NamedTuple):
    """Sizes of windows.

    Args:
        max_length: Maximum number of tokens of question, piece and special tokens.
        num_special: Number of special tokens in a window.
        max_query_length: Maximum number of tokens of the question.
        stride: Number of tokens between the starts of consecutive pieces.
    """

    max_length: int
    num_special: int
    max_query_length: int
    stride: int

    def check(self) -> None:
        """Raise a DataError if the lengths leave no tokens for the text."""
        limit = self.max_length - self.num_special - self.max_query_length
        if limit < 1:
            raise DataError(
                f"max_length={self.max_length} leaves no tokens for the text: a question has up to "
                f"max_query_length={self.max_query_length} tokens, plus {self.num_special} special "
                "tokens; raise max_length or lower max_query_length"
            )

    def pieces(self, question: int, text: int) -> Iterator[Window]:
        """Yield the pieces of a text, at least one.

        Args:
            question: Number of tokens of the truncated question.
            text: Number of tokens of the text.
        """
        limit = self.max_length - self.num_special - question
        first = 0
        while True:
            count = min(limit, text - first)
            yield Window(first, count)
            if first + count >= text:
                return
            first += min(count, self.stride)


def token_span(offsets: Offsets, begin: int, end: int) -> tuple[int, int] | None:
    """Return the first and last token that overlap a range of characters, or None.

    Args:
        offsets: Half-open character range of each token, increasing.
        begin: First character of the range.
        end: End of the range, exclusive.
    """
    first = bisect_right(offsets, begin, key=lambda place: place[1])
    last = bisect_left(offsets, end, key=lambda place: place[0]) - 1
    return (first, last) if first <= last else None

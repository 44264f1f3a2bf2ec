"""A question and pieces of its text that fit into a model, one overlapping the next.

A window is the question, cut off after `max_query_length` tokens, and as many tokens of the text as
there is room for; the next one begins `stride` tokens later, until the text has ended. Where a
piece of a text stands is known by characters: every token has those that it was made of.

Source: BERT (Devlin et al., 2019) and its code for SQuAD.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lit_probattn.base.errors import DataError, require_at_least

__all__ = ["Window", "Windows", "token_span"]

Offsets = Sequence[tuple[int, int]]


class Window(NamedTuple):
    """A piece of a text.

    Args:
        first: Its first token among those of the text.
        size: Its tokens.
    """

    first: int
    size: int

    def holds(self, span: tuple[int, int] | None) -> bool:
        """Whether a span of tokens, its last one included, is inside."""
        return span is not None and self.first <= span[0] and span[1] < self.first + self.size


class Windows(NamedTuple):
    """How texts are cut.

    Args:
        max_length: Tokens of question, piece and special tokens.
        num_special: Special tokens among them.
        max_query_length: Tokens of the question, at most.
        stride: Tokens from one piece to the next.
    """

    max_length: int
    num_special: int
    max_query_length: int
    stride: int

    def check(self) -> None:
        """Raise a DataError for lengths that leave no room for the text."""
        require_at_least(1, max_query_length=self.max_query_length, stride=self.stride)
        room = self.max_length - self.num_special - self.max_query_length
        if room < 1:
            raise DataError(
                f"max_length={self.max_length} leaves no room for the text: a question takes up to "
                f"max_query_length={self.max_query_length} tokens, special tokens "
                f"{self.num_special}; raise max_length or lower max_query_length"
            )

    def question(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a question that are kept."""
        return ids[: self.max_query_length]

    def pieces(self, question: int, text: int) -> Iterator[Window]:
        """Yield the pieces of a text, at least one.

        Args:
            question: Tokens of the question, cut off already.
            text: Tokens of the text.
        """
        room = self.max_length - self.num_special - question
        first = 0
        while True:
            count = min(room, text - first)
            yield Window(first, count)
            if first + count >= text:
                return
            first += min(count, self.stride)


def token_span(offsets: Offsets, begin: int, end: int) -> tuple[int, int] | None:
    """Return the first and the last token that have a part of a piece of text; None if none has.

    Args:
        offsets: First character of each token and the one after its last, rising.
        begin: First character of the piece.
        end: The one after its last.
    """
    first = bisect_right(offsets, begin, key=lambda place: place[1])
    last = bisect_left(offsets, end, key=lambda place: place[0]) - 1
    return (first, last) if first <= last else None

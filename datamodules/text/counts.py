"""Numbers of words and tokens of a corpus, beside the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["TextCounts"]

_WHAT = {
    "words": "words of the vocabulary",
    "train": "tokens of the training text",
    "val": "tokens of the validation text",
    "test": "tokens of the test text",
}


@dataclass(frozen=True)
class TextCounts:
    """Counts by `words`, and by split.

    Args:
        found: Words of the vocabulary and tokens of each split, `<eos>` included.
        unknown: Tokens of each split that became `<unk>` because the vocabulary has not their word.
        published: Published counts, as far as there are any.
    """

    found: Mapping[str, int]
    unknown: Mapping[str, int]
    published: Mapping[str, int]

    def problems(self) -> Iterator[str]:
        """Yield counts that differ from the published ones, and words that became `<unk>`."""
        for name, expected in self.published.items():
            if self.found[name] != expected:
                yield f"{self.found[name]} {_WHAT[name]}, published are {expected}"
        for name, number in self.unknown.items():
            if number:
                yield (
                    f"{number} of {self.found[name]} {_WHAT[name]} are not in the vocabulary of "
                    f"{self.found['words']} words and became <unk>"
                )

    def compare(self) -> Iterator[tuple[str, bool]]:
        """Yield a line for each published number, and whether ours is equal."""
        for name, expected in self.published.items():
            equal = self.found[name] == expected
            verdict = "equal" if equal else "DIFFERENT"
            yield f"published {_WHAT[name]}: {expected}; here {self.found[name]}: {verdict}", equal

"""A rule-based language pair for tests, smoke runs and profiling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from datamodules.core.base import Generated
from datamodules.core.order import hashes
from datamodules.text.translation.coder import Method
from datamodules.text.translation.data import Translation
from datamodules.text.translation.job import LineJob
from lit_probattn.base.arguments import Count, Range, with_defaults
from lit_probattn.base.files import replace_text

_SPLITS = {"train": "train", "val": "valid", "test": "test"}
_WORDS_PER_CLAUSE = 5
_ENDINGS = {"n": "o", "a": "i", "v": "u"}  # nouns, adjectives and verbs of the target language


@with_defaults(num_val=64, num_test=64, max_tokens=512, max_length=64)
class ToyTranslation(Generated, Translation):
    """Clauses with a rule-based, word-by-word translation in another word order.

    A source clause is subject, verb, adjective, object, particle (`n3 v1 a0 n2 p`); the target
    puts the verb last and the adjective after its noun, adds an ending to each word by its part of
    speech, and repeats the particle at the start of the sentence. Pair i of a split is a pure
    function of (data_seed, split, i); no files are read.

    Args:
        num_words: Number of nouns, and twice the number of verbs and of adjectives.
        max_clauses: Maximum number of clauses per sentence.
        data_seed: Seed of the sentences.
        **kwargs: Arguments of Generated (pairs of the splits) and Translation.
    """

    task = "toy_translation"
    title = "toy translation"
    default_tokens: Method = "words"
    sets: tuple[str, ...] = (
        "path",
        "source_language",
        "target_language",
        "empty_lines",
        "max_ratio",  # both sides have the same number of words
    )

    def __init__(
        self,
        *,
        num_words: Annotated[int, Range(2)] = 12,
        max_clauses: Count = 3,
        data_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path="",
            source_language="toy",
            target_language="yot",
            empty_lines="error",
            max_ratio=None,
            **kwargs,
        )
        self._sizes = [num_words, max_clauses, data_seed]

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the sentences."""
        return {"pairs": self.num_samples, "sizes": self._sizes}

    def sources(self) -> list[Path]:
        """Return no files: the data are generated."""
        return []

    def folder_for(self, job: LineJob) -> Path:
        """Write the sentences to the job's folder."""
        for name, file in _SPLITS.items():
            pairs = list(self._pairs_of(name))
            for side, language in enumerate(self.languages):
                text = "".join(f"{pair[side]}\n" for pair in pairs)
                replace_text(job.folder / f"{file}.{language}", text, durable=True)
        return job.folder

    def _pairs_of(self, name: str) -> Iterator[tuple[str, str]]:
        num_words, max_clauses, data_seed = self._sizes
        count, width = self.num_samples[name], max_clauses * _WORDS_PER_CLAUSE + 1
        key = data_seed, list(_SPLITS).index(name)
        for row in hashes(count * width, *key).reshape(count, width).tolist():
            starts = range(1, 1 + (1 + row[0] % max_clauses) * _WORDS_PER_CLAUSE, _WORDS_PER_CLAUSE)
            yield _sentence([row[first : first + _WORDS_PER_CLAUSE] for first in starts], num_words)


def _sentence(clauses: list[list[int]], num_words: int) -> tuple[str, str]:
    """Return a sentence and its translation, from one row of numbers per clause."""
    few = max(1, num_words // 2)
    source: list[str] = []
    target: list[str] = []
    particles = 0
    for subject, verb, adjective, thing, particle in clauses:
        words = [f"n{subject % num_words}", f"v{verb % few}", f"a{adjective % few}"]
        words.append(f"n{thing % num_words}")
        order = (words[0], words[3], words[2], words[1])
        target += [word[1:] + _ENDINGS[word[0]] for word in order]
        source += words
        if particle % 2:
            source.append("p")
            particles += 1
    return " ".join(source), " ".join(["pi"] * particles + target)

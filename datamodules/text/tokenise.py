"""From text to files of token ids by a job that resumes after an interruption.

Only counting words, which comes first, starts again if it was interrupted itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError
from datamodules.core.job import Job
from datamodules.text.source import TextSource
from datamodules.text.tokens import Tokens

__all__ = ["TokenisationJob"]

# Pieces of text between two saved states: about 64 MiB.
_BLOCKS_PER_STATE = 16
_COPY_TOKENS = 4 << 20


class TokenisationJob(Job):
    """The tokenisation of some splits: int32 ids, one after the other, in a file per split.

    Args:
        sources: The text of each split.
        identity: What else the result depends on; JSON values.
    """

    def __init__(self, folder: Path, sources: dict[str, TextSource], identity: Any) -> None:
        self.sources = sources
        files = {name: source.identity() for name, source in sources.items()}
        super().__init__(folder, [identity, files])

    def tokenise(self, name: str, vocabulary: Tokens, advance: Callable[[int], None]) -> None:
        """Tokenise one split, or the rest of it; `advance` receives how much of it was read.

        Raises:
            DataError: The text is empty, or has a word that `vocabulary` does not have.
        """
        source = self.sources[name]
        with self.step(_file(name), position=0, tokens=0, unknown=0) as step:
            done = step.done
            advance(done["position"])
            for number, block in enumerate(source.blocks(done["position"]), 1):
                try:
                    ids, unknown = vocabulary.encode(block.text)
                except DataError as error:
                    raise DataError(f"{source.name}: {error}") from None
                step.file.write(ids.astype("<i4").tobytes())
                advance(block.position - done["position"])
                done["tokens"] += len(ids)
                done["unknown"] += unknown
                done["position"] = block.position
                if number % _BLOCKS_PER_STATE == 0:
                    step.save()
        if done["tokens"] == 0:
            raise DataError(f"{source.name} is empty: the {name} split needs text")

    def num_unknown(self, name: str) -> int:
        """Return how many tokens of a split stand for words that are not in the vocabulary."""
        count: int = self.counts(_file(name))["unknown"]
        return count

    def tokens(self, name: str) -> Iterator[npt.NDArray[np.int32]]:
        """Yield the ids of a split in pieces."""
        with self.path(_file(name)).open("rb") as file:
            while raw := file.read(4 * _COPY_TOKENS):
                yield np.frombuffer(raw, dtype="<i4")


def _file(name: str) -> str:
    return f"{name}.int32"

"""From text to a file of token ids, piece by piece; an interrupted job goes on where it was.

A job folder holds, for each split, the ids so far (int32, one after the other) and, in state.json,
how far the text was read. The state is written after the ids are on the disk, so what it claims is
there; ids beyond it, left by an interruption, are cut off. Only counting words, which comes first,
begins again if it was interrupted itself. A job of other files, or of another vocabulary, is begun
anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError
from datamodules.core.files import sync, write_whole
from datamodules.text.source import TextSource
from datamodules.text.tokens import Tokens

__all__ = ["TokenisationJob"]

_STATE = "state.json"
# Pieces of text between two saved states: about 64 MiB.
_BLOCKS_PER_STATE = 16
_COPY_TOKENS = 4 << 20


class TokenisationJob:
    """The tokenisation of some splits, in a folder of its own.

    Args:
        identity: What else the result depends on; plain JSON values.
    """

    def __init__(self, folder: Path, sources: dict[str, TextSource], identity: Any) -> None:
        self.folder, self.sources = folder, sources
        files = {name: source.identity() for name, source in sources.items()}
        self._identity = json.loads(json.dumps([identity, files]))
        self._state = self._resume()

    def _resume(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self.folder / _STATE).read_text())
            if state["identity"] == self._identity:
                return state
        except (OSError, ValueError, KeyError, TypeError):
            pass
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return {"identity": self._identity, "splits": {}}

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier, interrupted job left something to go on with."""
        return bool(self._state["splits"]) or "vocabulary" in self._state

    def vocabulary_text(self, make: Callable[[], str]) -> str:
        """Return the vocabulary, made by `make` unless an earlier job has made it."""
        path = self.folder / "vocabulary.txt"
        if "vocabulary" not in self._state:
            path.write_text(make(), encoding="utf-8", newline="")
            self._state["vocabulary"] = path.stat().st_size
            write_whole(self.folder / _STATE, json.dumps(self._state))
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()

    def tokenise(self, name: str, vocabulary: Tokens, advance: Callable[[int], None]) -> None:
        """Tokenise one split, or the rest of it; `advance` is told how much of it was read.

        A text that is empty, or that `vocabulary` refuses, is a DataError.
        """
        source = self.sources[name]
        done = self._state["splits"].setdefault(name, {"position": 0, "tokens": 0, "unknown": 0})
        advance(done["position"])
        path = self._path(name)
        path.touch()
        with path.open("r+b") as file:
            file.truncate(done["tokens"] * 4)
            file.seek(0, os.SEEK_END)
            for number, block in enumerate(source.blocks(done["position"]), 1):
                try:
                    ids, unknown = vocabulary.encode(block.text)
                except DataError as error:
                    raise DataError(f"{source.name}: {error}") from None
                file.write(ids.astype("<i4").tobytes())
                advance(block.position - done["position"])
                done["tokens"] += len(ids)
                done["unknown"] += unknown
                done["position"] = block.position
                if number % _BLOCKS_PER_STATE == 0:
                    sync(file)
                    write_whole(self.folder / _STATE, json.dumps(self._state))
            sync(file)
        write_whole(self.folder / _STATE, json.dumps(self._state))
        if done["tokens"] == 0:
            raise DataError(f"{source.name} is empty: the {name} split needs text")

    def num_unknown(self, name: str) -> int:
        """Tokens of a split so far whose words are not in the vocabulary."""
        count: int = self._state["splits"][name]["unknown"]
        return count

    def tokens(self, name: str) -> Iterator[npt.NDArray[np.int32]]:
        """Yield the ids of a split in pieces."""
        with self._path(name).open("rb") as file:
            while raw := file.read(4 * _COPY_TOKENS):
                yield np.frombuffer(raw, dtype="<i4")

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.int32"

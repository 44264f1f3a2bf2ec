"""Resumable jobs that consist of steps.

A job folder contains a file per step and state.json, which records how much of each file is
committed. The state is written after the file is synced to disk; data beyond the recorded size,
left by an interruption, are truncated. A job with a different identity starts over.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from datamodules.text.source import TextSource
from datamodules.text.tokens import Tokens
from lit_probattn.base.errors import DataError, prefixed
from lit_probattn.base.files import replace_text, sync

_STATE = "state.json"
# Blocks of text between two saved states: about 64 MiB.
_BLOCKS_PER_STATE = 16
_COPY_TOKENS = 4 << 20


@dataclass(frozen=True)
class Step:
    """A step in progress.

    Args:
        file: Open at the end of the committed data; append to it.
        done: Counts of the committed data as JSON values; modified in place.
        save: Commits the file and the counts.
    """

    file: BinaryIO
    done: dict[str, Any]
    save: Callable[[], None]


class Job:
    """Steps in a separate folder.

    Args:
        identity: Everything that determines the result; JSON values.
    """

    def __init__(self, folder: Path, identity: Any) -> None:
        self.folder = folder
        self._identity = json.loads(json.dumps(identity))
        self._state = self._resume()
        self.is_resumed = bool(self._state["steps"])

    def _resume(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self.folder / _STATE).read_text())
            if state["identity"] == self._identity:
                return state
        except (OSError, ValueError, KeyError, TypeError):
            pass
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        state = {"identity": self._identity, "steps": {}}
        replace_text(self.folder / _STATE, json.dumps(state), durable=True)
        return state

    def path(self, name: str) -> Path:
        """Return the path of a step's file."""
        return self.folder / name

    def counts(self, name: str) -> dict[str, Any]:
        """Return the counts of a step that has started."""
        found: dict[str, Any] = self._state["steps"][name]
        return found

    @contextmanager
    def step(self, name: str, **counts: Any) -> Iterator[Step]:
        """Start or resume a step; it is saved if the block exits without an error.

        Args:
            counts: Initial values of `done`.
        """
        done = self._state["steps"].setdefault(name, {"bytes": 0, **counts})
        self.path(name).touch()
        with self.path(name).open("r+b") as file:
            file.truncate(done["bytes"])
            file.seek(done["bytes"])

            def save() -> None:
                sync(file)
                done["bytes"] = file.tell()
                replace_text(self.folder / _STATE, json.dumps(self._state), durable=True)

            yield Step(file, done, save)
            save()

    def text(self, name: str, make: Callable[[], str]) -> str:
        """Return a text that is computed once."""
        if name not in self._state["steps"]:
            content = make().encode()
            with self.step(name) as step:
                step.file.write(content)
        return self.path(name).read_bytes().decode()

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class TokenisationJob(Job):
    """Tokenisation of several splits: consecutive int32 ids in one file per split.

    Args:
        sources: The text of each split.
        identity: Everything else that determines the result; JSON values.
    """

    def __init__(self, folder: Path, sources: dict[str, TextSource], identity: Any) -> None:
        self.sources = sources
        files = {name: source.identity() for name, source in sources.items()}
        super().__init__(folder, [identity, files])

    def tokenise(self, name: str, vocabulary: Tokens, advance: Callable[[int], None]) -> None:
        """Tokenise one split, resuming if possible; `advance` is called with the amount read.

        Raises:
            DataError: The text is empty, or contains a word that `vocabulary` does not support.
        """
        source = self.sources[name]
        with self.step(_file(name), position=0, tokens=0, unknown=0) as step:
            done = step.done
            advance(done["position"])
            for number, block in enumerate(source.blocks(done["position"]), 1):
                with prefixed(source.name, DataError, to=DataError):
                    ids, unknown = vocabulary.encode(block.text)
                step.file.write(ids.astype("<i4").tobytes())
                advance(block.position - done["position"])
                done["tokens"] += len(ids)
                done["unknown"] += unknown
                done["position"] = block.position
                if number % _BLOCKS_PER_STATE == 0:
                    step.save()
        if done["tokens"] == 0:
            raise DataError(f"{source.name} is empty: the {name} split requires text")

    def num_unknown(self, name: str) -> int:
        """Return the number of unknown tokens of a split."""
        count: int = self.counts(_file(name))["unknown"]
        return count

    def tokens(self, name: str) -> Iterator[npt.NDArray[np.int32]]:
        """Yield the ids of a split in blocks."""
        with self.path(_file(name)).open("rb") as file:
            while raw := file.read(4 * _COPY_TOKENS):
                yield np.frombuffer(raw, dtype="<i4")


def _file(name: str) -> str:
    return f"{name}.int32"

"""Work in steps that resumes after an interruption.

A job folder holds a file per step and state.json, which says how much of each file is certain. The
state is written after the file is on the disk; what a file holds beyond it, left by an
interruption, is cut off. A job with another identity starts anew.
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
from lit_probattn.base.errors import DataError
from lit_probattn.base.files import replace_text, sync

__all__ = ["Job", "Step", "TokenisationJob"]

_STATE = "state.json"
# Pieces of text between two saved states: about 64 MiB.
_BLOCKS_PER_STATE = 16
_COPY_TOKENS = 4 << 20


@dataclass(frozen=True)
class Step:
    """A step in progress.

    Args:
        file: Open at the end of what is certain; append to it.
        done: Counts that belong to it, JSON values; change them in place.
        save: Makes the file and the counts certain.
    """

    file: BinaryIO
    done: dict[str, Any]
    save: Callable[[], None]


class Job:
    """Steps in a folder of their own.

    Args:
        identity: What the result depends on; JSON values.
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
        """Return the file of a step."""
        return self.folder / name

    def counts(self, name: str) -> dict[str, Any]:
        """Return the counts of a step that has been started."""
        found: dict[str, Any] = self._state["steps"][name]
        return found

    @contextmanager
    def step(self, name: str, **counts: Any) -> Iterator[Step]:
        """Open a step, or the rest of it; it is saved when the block ends without an error.

        Args:
            counts: What `done` holds at the start.
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
        """Return a text that is made once."""
        if name not in self._state["steps"]:
            content = make().encode()
            with self.step(name) as step:
                step.file.write(content)
        return self.path(name).read_bytes().decode()

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


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

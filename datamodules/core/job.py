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

from datamodules.core.files import sync, write_whole

__all__ = ["Job", "Step"]

_STATE = "state.json"


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
        write_whole(self.folder / _STATE, json.dumps(state))
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
                write_whole(self.folder / _STATE, json.dumps(self._state))

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

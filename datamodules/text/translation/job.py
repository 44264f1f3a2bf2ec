"""Lines of text turned into other lines, piece by piece; an interrupted job goes on where it was.

A job folder holds the lines so far of each step, and in state.json how many lines and bytes of them
are certain: the state is written after the lines are on the disk, so what it claims is there, and
lines beyond it, left by an interruption, are cut off. A job of other files, or with other settings,
is begun anew.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datamodules.core.files import sync, write_whole
from datamodules.core.progress import progress

__all__ = ["LineJob", "lines_of"]

_STATE = "state.json"
_LINES_PER_STATE = 20_000


class LineJob:
    """The steps of a preparation, in a folder of its own.

    Args:
        identity: What the result depends on; plain JSON values.
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
        state = {"identity": self._identity, "steps": {}, "texts": {}}
        write_whole(self.folder / _STATE, json.dumps(state))
        return state

    def lines(
        self,
        name: str,
        source: Iterable[str],
        total: int,
        convert: Callable[[Sequence[str]], Iterable[str]],
        title: str,
    ) -> Path:
        """Convert the lines of a step, or the rest of them; return the file of the results.

        Args:
            source: All lines of the step.
            total: How many they are.
            convert: Turns some lines into as many others, none of which has a newline in it.
            title: What the progress is called.
        """
        done = self._state["steps"].setdefault(name, {"lines": 0, "bytes": 0})
        path = self.folder / f"{name}.txt"
        path.touch()
        if done["lines"] == total:
            return path
        rest = itertools.islice(source, done["lines"], None)
        with progress(title, total, "lines") as advance, path.open("r+b") as file:
            advance(done["lines"])
            file.truncate(done["bytes"])
            file.seek(done["bytes"])
            while block := list(itertools.islice(rest, _LINES_PER_STATE)):
                text = "".join(f"{line}\n" for line in convert(block)).encode()
                file.write(text)
                sync(file)
                done["lines"] += len(block)
                done["bytes"] += len(text)
                write_whole(self.folder / _STATE, json.dumps(self._state))
                advance(len(block))
        return path

    def text(self, name: str, make: Callable[[], str]) -> str:
        """Return a text that is made once."""
        path = self.folder / f"{name}.made"
        if name not in self._state["texts"]:
            path.write_text(make(), encoding="utf-8", newline="")
            self._state["texts"][name] = path.stat().st_size
            write_whole(self.folder / _STATE, json.dumps(self._state))
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a result."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")

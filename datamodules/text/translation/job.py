"""A resumable job that converts lines of text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from datamodules.text.job import Job
from lit_probattn.base.progress import progress

_LINES_PER_STATE = 20_000


class LineJob(Job):
    """The steps of a preparation, each a file of lines."""

    def lines(
        self,
        name: str,
        source: Iterable[str],
        total: int,
        convert: Callable[[Sequence[str]], Iterable[str]],
        title: str,
    ) -> Path:
        """Convert the lines of a step, resuming if possible; return the file of the results.

        Args:
            source: All lines of the step.
            total: Number of lines.
            convert: Converts lines one by one; results must not contain newlines.
            title: Title of the progress display.
        """
        file = f"{name}.txt"
        with self.step(file, lines=0) as step:
            if step.done["lines"] == total:
                return self.path(file)
            rest = itertools.islice(source, step.done["lines"], None)
            with progress(title, total, "lines") as advance:
                advance(step.done["lines"])
                while block := list(itertools.islice(rest, _LINES_PER_STATE)):
                    step.file.write("".join(f"{line}\n" for line in convert(block)).encode())
                    step.done["lines"] += len(block)
                    step.save()
                    advance(len(block))
        return self.path(file)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a result file."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")

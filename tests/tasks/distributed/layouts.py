"""One small task trained in several layouts: processes, accumulation steps, resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_probattn.cli.app import main
from tests.support.runs import arguments, in_ranks, rewound, run, write_attention

DOUBLE = ("--trainer.precision", "64-true")
NO_DROPOUT = ("--model.init_args.dropout", "0.0")  # torch's dropout differs by rank
TWO_PROCESSES = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
EVERY_STEP = ("--trainer.log_every_n_steps", "1")


def _nothing(folder: Path) -> Sequence[str]:
    return ()


def two_parts(validation_every: int) -> tuple[str, ...]:
    """Flags for steps of two parts; Lightning counts the parts between validations."""
    every = ("--trainer.val_check_interval", str(validation_every))
    return ("--trainer.accumulate_grad_batches", "2", *every)


@dataclass(frozen=True)
class Trial:
    """A task of `configs/tasks` that is trained with two keys a position, on CPUs.

    Attention dropout may stay on: it is drawn by sample, so the layout is irrelevant.

    Args:
        task: name of the configuration.
        flags: more words for every command in a folder.
        model: more words, which need no folder.
    """

    task: str
    flags: Callable[[Path], Sequence[str]] = _nothing
    model: Sequence[str] = ()

    def command(self, folder: Path, *more: str, name: str = "fit") -> list[str]:
        """Return the words of a command on the runs of a folder."""
        attention = write_attention(folder, "MGKAttention", num_components=2)
        words = (*EVERY_STEP, *self.flags(folder), *self.model, *more)
        return arguments(name, folder, *words, task=self.task, attention=attention)

    def trained(self, factory: Any, *more: str) -> Path:
        """Return the folder of a training in as many processes as the words say."""
        folder: Path = factory.mktemp("run")
        work = self.command(folder, *more)
        if "--trainer.strategy" in more:
            assert in_ranks(lambda: main(work)) == [0, 0]
        else:
            run(work)
        return folder

    def resumed(self, version: Path, step: int, folder: Path, *more: str) -> Path:
        """Resume a copy of a run from its checkpoint of `step`; return the copy's run folder."""
        copy = rewound(version, step, folder)
        run(self.command(folder, *more, "--ckpt_path", "last"))
        return copy

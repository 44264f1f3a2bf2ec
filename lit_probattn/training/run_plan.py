"""One plan for all processes of a run: the first one decides on folder and checkpoint."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_probattn.training.checkpoints import list_checkpoints, step_of
from lit_probattn.training.preemption import agree_on_restart
from lit_probattn.training.run_record import read_starts

PLAN_VARIABLE = "LIT_PROBATTN_PLAN"


class RunFolderError(ValueError):
    """The requested run folder or checkpoint cannot be used."""


@dataclass
class RunPlan:
    """What a command reads and writes.

    Args:
        folder: the folder to write to.
        checkpoint: the checkpoint to start from.
        created: whether the folder was made for this command.
        notes: lines to tell the user.
    """

    folder: Path
    checkpoint: Path | None = None
    created: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def steps_done(self) -> int:
        """Optimiser steps of the checkpoint; 0 without one."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    def discard_if_unused(self) -> None:
        """Remove a folder that was made for a training that did not complete one step."""
        starts = read_starts(self.folder)
        trained = bool(starts) and "backends" in starts[-1]
        saved = list_checkpoints(self.folder / "checkpoints", "step")
        if self.created and not trained and not saved:
            shutil.rmtree(self.folder, ignore_errors=True)


def share_plan(trainer: pl.Trainer, make: Callable[[], RunPlan]) -> RunPlan:
    """Make a plan on the first process and give it to all.

    Processes that Lightning starts from the first one read it from their environment. Processes
    that torchrun or SLURM started agree over the process group, which is set up here already.

    Raises:
        RunFolderError: on every process, if making the plan failed for a reason the user can mend;
            or there are several nodes and nothing that started processes on all of them.
    """
    if trainer.world_size == 1:
        return make()
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and environment.creates_processes_externally:
        inherited = os.environ.get(PLAN_VARIABLE)
        if inherited is not None:
            return _decode(inherited)
        return _agree(trainer, make)
    if trainer.num_nodes > 1:
        raise RunFolderError(
            f"trainer.num_nodes is {trainer.num_nodes}, but this process was started alone: start "
            "it on every node with torchrun or SLURM"
        )
    plan = make()
    os.environ[PLAN_VARIABLE] = _encode(plan)
    return plan


def _agree(trainer: pl.Trainer, make: Callable[[], RunPlan]) -> RunPlan:
    trainer.strategy.setup_environment()
    agree_on_restart()
    answer = ("", "")
    if trainer.is_global_zero:
        try:
            answer = ("plan", _encode(make()))
        except (ValueError, RuntimeError, OSError) as error:
            answer = ("error", str(error))
    kind, text = trainer.strategy.broadcast(answer)
    if kind == "error":
        raise RunFolderError(text)
    return _decode(text)


def _encode(plan: RunPlan) -> str:
    values: dict[str, Any] = {
        "folder": str(plan.folder),
        "checkpoint": None if plan.checkpoint is None else str(plan.checkpoint),
        "created": plan.created,
        "notes": plan.notes,
    }
    return json.dumps(values)


def _decode(text: str) -> RunPlan:
    values = json.loads(text)
    checkpoint = values["checkpoint"]
    return RunPlan(
        folder=Path(values["folder"]),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        created=values["created"],
        notes=values["notes"],
    )

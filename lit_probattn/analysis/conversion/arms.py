"""One arm of the study: a run's model, converted or as it was, trained on and scored on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_probattn.analysis.results import AnalysisError
from lit_probattn.attention import SoftmaxAttention
from lit_probattn.configs import class_of, instantiate, parameters_of
from lit_probattn.convert.files import find_layers
from lit_probattn.convert.model import (
    Converted,
    Target,
    convert_layers,
    layer_inputs,
    put_into,
)
from lit_probattn.training.trained import Trained

# Settings of the run's trainer that a fine-tuning keeps.
_KEPT = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


@dataclass(frozen=True)
class Arm:
    """How a side of the comparison begins and goes on.

    Args:
        name: what tables and pictures call it.
        target: what the layers are converted into. None leaves them as they are.
        annealing_steps: over which keys' norms are taken away. None does not anneal.
    """

    name: str
    target: Target | None = None
    annealing_steps: int | None = None

    def seeded(self, seed: int) -> Arm:
        """Return the arm with everything that it draws by a seed."""
        target = self.target
        if target is None or target.mixture is None:
            return self
        mixture = replace(target.mixture, seed=seed)
        return replace(self, target=replace(target, mixture=mixture))


@dataclass(frozen=True)
class Course:
    """How all arms are trained and scored.

    Args:
        steps: optimiser steps.
        eval_every: steps from one score to the next.
        metric: a metric of the validation split.
        lr: learning rate at its peak. None means the run's.
        num_batches: training batches that a conversion is fitted to.
        val_batches: batches of a score. None means all.
    """

    steps: int
    eval_every: int
    metric: str
    lr: float | None = None
    num_batches: int = 8
    val_batches: int | None = None


class _Scores(Callback):
    """Keeps the metric of every validation by the step that it was taken at."""

    def __init__(self, metric: str) -> None:
        self.metric, self.found = metric, dict[int, float]()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep it."""
        values = trainer.callback_metrics
        if self.metric not in values:
            known = ", ".join(sorted(name for name in values if name.startswith("val/")))
            raise AnalysisError(f"the task does not log {self.metric}: give --metric, of {known}")
        self.found[trainer.global_step] = float(values[self.metric])


def run_arm(
    trained: Trained, state: Mapping[str, Tensor], arm: Arm, course: Course, seed: int
) -> tuple[dict[int, float], Converted | None]:
    """Convert, train on; return the metric by step, from 0 on, and the conversion.

    Everything that is drawn follows from the seed: the order of the training data, dropout, the
    spread of shifts. The splits of the data are the run's.

    Args:
        trained: the run; its task is left as it is.
        state: weights of the checkpoint.
    """
    data = instantiate(pl.LightningDataModule, trained.config["data"])
    data.prepare_data()
    data.setup("fit")
    task = _new_task(trained, arm, course, seed)
    task.load_state_dict(dict(state))
    found = None
    with _ordered_by(data, seed):
        if arm.target is not None:
            found = _convert(task, data, arm.seeded(seed), course.num_batches)
            put_into(task, found.layers)
        scores = _Scores(course.metric)
        trainer = _trainer(trained, course, scores)
        trainer.validate(task, datamodule=data, verbose=False)
        trainer.fit(task, datamodule=data)
    return scores.found, found


def _new_task(trained: Trained, arm: Arm, course: Course, seed: int) -> Any:
    """Return a task of the run's configuration, with the arm's and the course's settings."""
    model = copy.deepcopy(trained.config["model"])
    arguments = model["init_args"]
    accepted = parameters_of(class_of(model["class_path"]))
    if "schedule_steps" not in accepted:
        raise AnalysisError(f"{model['class_path']} is not a task of lit_probattn.tasks")
    arguments |= {"seed": seed, "schedule_steps": None}
    if course.lr is not None:
        arguments["lr"] = course.lr
    task: Any = instantiate(pl.LightningModule, model)
    # The layers that are annealed come after the task.
    task.norm_annealing_steps = arm.annealing_steps
    return task


def _convert(task: Any, data: Any, arm: Arm, num_batches: int) -> Converted:
    assert arm.target is not None
    old = [part for part in task.modules() if isinstance(part, SoftmaxAttention)]
    if not old:
        raise AnalysisError("the model has no softmax attention to convert")
    state = task.state_dict()
    task.eval()
    batches = list(islice(data.train_dataloader(), num_batches))
    inputs = layer_inputs(task, find_layers(state), batches)
    found = convert_layers(state, old[0].head_dim, inputs, arm.target)
    task.train()
    return found


@contextmanager
def _ordered_by(data: Any, seed: int) -> Iterator[None]:
    """Let the training data come in the order of a seed, with the splits that they have."""
    original = data.train_dataloader

    def ordered() -> Any:
        kept, data.seed = data.seed, seed
        try:
            return original()
        finally:
            data.seed = kept

    data.train_dataloader = ordered
    try:
        yield
    finally:
        del data.train_dataloader


def _trainer(trained: Trained, course: Course, scores: Callback) -> pl.Trainer:
    given = trained.config.get("trainer") or {}
    kept = {name: given[name] for name in _KEPT if given.get(name) is not None}
    more: dict[str, Any] = {}
    if course.val_batches is not None:
        more["limit_val_batches"] = course.val_batches
    return pl.Trainer(
        **kept,
        **more,
        accelerator="gpu" if trained.device.type == "cuda" else "cpu",
        devices=[trained.device.index or 0] if trained.device.type == "cuda" else 1,
        max_steps=course.steps,
        val_check_interval=course.eval_every * kept.get("accumulate_grad_batches", 1),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,  # sums of metrics go on from a score into training
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[scores],
    )

"""A cell before it runs: data and model without a run, counts, time and memory.

Each cell's own model trains on this machine for a few steps at full length, with the attention
backends of the whole batch. Memory is a line through the peaks of one and of two samples in the
CPU's allocator, with parameters, gradients and the optimiser's two averages. Time is either
measured or modelled, and the result says which. `measured`: the median of steps, of the whole batch
or, where that takes long, of as many samples as are quick, with the busyness of the moment; the
start of each of the cell's commands; checkpoints. `flops`: three times the multiply-adds of a
forward pass, by a given speed. An evaluated sample counts as a third of a trained one; one that is
translated, as a search of its own: measured, or at a forward pass for each hypothesis of the beam;
a step of an episode that is played, as an evaluated sample, and the simulator as nothing.
Sentences and pairs of them, whose batches are counted in tokens, have PAIR_LEN tokens (a side).
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.core.base import CachedDataModule, DataModule
from datamodules.core.errors import DataError
from lit_probattn.attention.backends import Backend, Call
from lit_probattn.compare.cells import Cell
from lit_probattn.compare.protocol import setting
from lit_probattn.configs import attention_factory, class_of, link_sizes
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.search import Beam, beam_search
from lit_probattn.randomness import RandomKey
from lit_probattn.tasks import (
    DecisionMaking,
    ImageClassifier,
    LanguageModeling,
    MaskedLanguageModeling,
    PairClassifier,
    QuestionAnswering,
    SeriesClassifier,
    Translation,
)
from lit_probattn.tasks.base import Task
from lit_probattn.training.checkpoints import save_checkpoint
from profiling.cost.count import attention_layers
from profiling.measure.counters import torch_flops
from profiling.measure.memory import cpu_peak_bytes
from profiling.measure.timing import summarise, time_once, time_sides

# Steps are repeated so often; after so many seconds, no more than three times.
_ROUNDS, _MAX_SECONDS = 7, 5.0
# Tokens of a sentence, or of a side of a pair: about the mean of LM1B, IWSLT'14 and WMT'14.
PAIR_LEN = 32
# Sentences whose search is measured.
_SEARCHED = 4
# Steps of an episode in the environments of D4RL, at most; each is read like an evaluated sample.
_EPISODE_STEPS = 1000
# Batches that the line of the memory is drawn through.
_FEW = (1, 2)
# Samples are added to a measured step up to so many seconds and bytes.
_STEP_SECONDS, _STEP_BYTES = 2.0, 2 << 30


@dataclass(frozen=True)
class Prediction:
    """What a cell will take.

    Args:
        hours: training, validation and test, on one device.
        basis: how the time was found.
        peak_bytes: memory of a training step.
        macs: multiply-adds of one sample's forward pass.
        steps: optimiser steps.
        batch_size: samples of a step.
        seq_len: padded length.
    """

    hours: float
    basis: str
    peak_bytes: int
    num_parameters: int
    macs: int
    steps: int
    batch_size: int
    seq_len: int


def missing_data(data: DataModule) -> str | None:
    """Say what is missing and where it comes from; None if the data are there or generated."""
    if getattr(data, "source", None) == "generated":
        return None
    try:
        if isinstance(data, CachedDataModule):
            try:
                data.open()
                return None
            except DataError:
                if data.sources():
                    return None
        data.prepare_data()
    except DataError as error:
        return str(error)
    return None


def split_sizes(data: DataModule) -> dict[str, int]:
    """Samples of the splits that are known without reading a release: cached, else published."""
    if data.splits:
        return {name: len(split) for name, split in data.splits.items()}
    if isinstance(data, CachedDataModule):
        try:
            return {name: len(split) for name, split in data.splits_of(data.open()).items()}
        except DataError:
            pass
    generated = getattr(data, "num_samples", None)
    if getattr(data, "source", None) == "generated" and isinstance(generated, Mapping):
        return dict(generated)
    found = {name: size.num_samples for name, size in data.published.items()}
    found |= getattr(data, "published_counts", {})  # of sentence pairs
    both = found.pop("train+val", None)
    if both is not None:
        found["val"] = round(getattr(data, "val_fraction", 0.1) * both)
        found["train"] = both - found["val"]
    return found


def build_task(cell: Cell, data: DataModule) -> Task:
    """Make the LightningModule of a cell on the current default device."""
    entry = cell.config["model"]
    model = {"class_path": entry["class_path"], "init_args": dict(entry["init_args"])}
    link_sizes(model, _sizes(cell, data), data)
    arguments = {
        name: attention_factory(value["class_path"], value.get("init_args") or {})
        if isinstance(value, Mapping) and "class_path" in value
        else value
        for name, value in model["init_args"].items()
    }
    task: Task = class_of(model["class_path"])(seed=cell.seed, **arguments)
    return task


def _sizes(cell: Cell, data: DataModule) -> Mapping[str, int]:
    """Return the published sizes; of a shortened protocol those of its own data, if there are."""
    if not cell.options.shortened:
        return cell.task.sizes
    try:
        return {name: getattr(data, name, known) for name, known in cell.task.sizes.items()}
    except DataError:
        return cell.task.sizes


def seq_len(task: Task, data: DataModule) -> int:
    """Return the full length of a sample; the model knows that of series."""
    if data.batch_setting[0] == "max_tokens":
        return min(PAIR_LEN, int(data.max_seq_len))
    series = isinstance(task, SeriesClassifier)
    return int(cast(Any, task.model).max_seq_len if series else data.max_seq_len)


def make_inputs(task: Task, data: DataModule, batch: int) -> tuple[Tensor, Tensor]:
    """Return random inputs of full length and targets."""
    target = torch.zeros(batch, dtype=torch.int64)
    if isinstance(task, ImageClassifier):
        size = cast(Any, data).image_size
        return torch.randn(batch, 3, size, size), target
    if isinstance(task, DecisionMaking):  # states, actions and returns-to-go beside each other
        model = task.model
        steps = torch.randn(batch, task.context_length, model.obs_dim + model.act_dim + 1)
        return steps, steps[..., model.obs_dim : -1]
    shape: tuple[int, ...] = (batch, seq_len(task, data))
    if isinstance(task, SeriesClassifier):
        width = cast(Any, task.model).embedding.num_features
        return torch.randn(*shape, width), target
    if isinstance(task, PairClassifier):
        shape = (batch, 2, data.max_seq_len)
    if isinstance(task, Translation):
        words = min(task.model.source_vocab_size, task.model.vocab_size)
        pairs = torch.randint(4, words, (batch, 2, shape[1]))  # source and inputs
        return pairs, pairs[:, 1]
    words = getattr(task.model, "vocab_size", None) or data.vocab_size or 2
    inputs = torch.randint(1, words, shape)
    if isinstance(task, LanguageModeling):
        return inputs, inputs
    if isinstance(task, QuestionAnswering):
        return inputs, target.new_zeros(batch, 2)
    if isinstance(task, MaskedLanguageModeling):
        every = torch.arange(shape[1]) % round(1 / task.mask_probability)
        return inputs, torch.where(every == 0, inputs, IGNORE)
    return inputs, target


def training_step(task: Task, inputs: Tensor, target: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward of a batch."""
    model = cast(Any, task.model)
    key = RandomKey(0, 0, torch.arange(len(inputs)))

    def step() -> None:
        out = model(*sides(task, inputs), rng=key)
        if isinstance(task, Translation):
            loss = task.losses_of(out, target)[:, 0].mean()
        elif isinstance(task, LanguageModeling | MaskedLanguageModeling):
            loss = model.token_losses(out, target).mean()
        elif isinstance(task, QuestionAnswering):
            start, end = out
            loss = task.window_losses(start, end, target).mean()
        elif isinstance(task, DecisionMaking):
            loss = F.mse_loss(out, target)
        else:
            loss = F.cross_entropy(out, target)
        loss.backward()
        task.zero_grad(set_to_none=True)

    return step


def sides(task: Task, inputs: Tensor) -> tuple[Tensor, ...]:
    """Return what a model takes: both sides of sentence pairs, parts of steps, else the inputs."""
    if isinstance(task, DecisionMaking):
        widths = [task.model.obs_dim, task.model.act_dim, 1]
        times = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[:2])
        return *inputs.split(widths, -1), times
    return inputs.unbind(1) if isinstance(task, Translation) else (inputs,)


def rows_of_step(config: Mapping[str, Any]) -> int:
    """Samples of an optimiser step, over all accumulation steps."""
    arguments = config["data"]["init_args"]
    if "max_tokens" in arguments:
        return max(1, int(arguments["max_tokens"]) // PAIR_LEN)
    return int(arguments["batch_size"])


def set_backends(model: nn.Module, batch: int, length: int) -> None:
    """Fix every layer's backend to what a CPU training step of `batch` samples would choose."""
    for layer in attention_layers(model):
        call = Call(
            device="cpu",
            dtype=torch.float32,
            num_scores=layer.core.num_scores(batch, length, length),
            num_keys=length,
            dropout=layer.dropout > 0,
            bias_needs_grad=False,
        )
        layer.backend = cast(Backend, layer.core.pick_for(call))


def counts(cell: Cell) -> dict[str, int]:
    """Count parameters, and multiply-adds of one sample's forward pass by the equations.

    The output layer of a language model, the same for all rows, is not in the multiply-adds.
    """
    data = cell.data()
    with torch.device("meta"):
        task = build_task(cell, data).eval()
        inputs, _ = make_inputs(task, data, 1)
        for layer in attention_layers(task):
            layer.backend = layer.core.stated_backend
        model = task.model

        def forward() -> None:
            with torch.no_grad():
                model(*sides(task, inputs))

        macs = torch_flops(forward) // 2
    return {"parameters": sum(p.numel() for p in model.parameters()), "macs": macs}


def predict(cell: Cell, tflops: float | None = None) -> Prediction:
    """Predict a cell.

    Args:
        cell: the cell.
        tflops: speed for the FLOP model; None measures steps.
    """
    counted = counts(cell)
    steps = _MeasuredSteps(cell)
    peak = steps.peak_bytes()  # first: it warms up
    beside = 0.0
    if tflops is None:
        per_sample, basis = steps.seconds(peak)
        every = cell.config["run"].get("checkpoint_every") or _validation_interval(cell)
        beside = start_seconds() * (1 + len(cell.evaluations()))
        beside += save_seconds(steps.task) * (cell.max_steps // int(every))
    else:
        per_sample = 3 * 2 * counted["macs"] / (tflops * 1e12)
        basis = f"FLOP model at {tflops:g} TFLOP/s"
    training = cell.max_steps * rows_of_step(cell.config) * per_sample
    evaluation = _evaluated_seconds(cell, steps, per_sample, counted["macs"], tflops)
    return Prediction(
        hours=(beside + training + evaluation) / 3600,
        basis=basis,
        peak_bytes=peak,
        num_parameters=counted["parameters"],
        macs=counted["macs"],
        steps=cell.max_steps,
        batch_size=rows_of_step(cell.config),
        seq_len=seq_len(steps.task, steps.data),
    )


@functools.cache
def start_seconds() -> float:
    """Seconds that a command takes before its work, mostly imports; measured once."""
    begin = time.perf_counter()
    # The parser itself: the program's own `fit --help` is a stored text.
    code = "from lit_probattn.cli.app import main; main(['fit', '--help'])"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def save_seconds(task: Task) -> float:
    """Seconds that it takes to save a checkpoint: weights and the optimiser's two averages."""
    weights = task.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predicted.ckpt"
        saved = {
            "state_dict": weights,
            "averages": [{k: v.clone() for k, v in weights.items()} for _ in range(2)],
        }
        return time_once(lambda: save_checkpoint(saved, path), torch.device("cpu"))


def _evaluated_seconds(
    cell: Cell, steps: _MeasuredSteps, per_sample: float, macs: int, tflops: float | None
) -> float:
    """Seconds of all validations and of the test; splits of unknown size count as none."""
    sizes = split_sizes(steps.data)
    samples = cell.max_steps // _validation_interval(cell) * _validated(cell, sizes)
    tested = sizes.get("test", 0)
    seconds = (samples + tested) * per_sample / 3
    if isinstance(steps.task, Translation):
        search_seconds = functools.cache(steps.search_seconds)  # validation and test may be alike
        for count, size in ((samples, steps.task.val_beam_size), (tested, steps.task.beam.size)):
            if count and size and tflops is None:
                seconds += count * search_seconds(size)
            elif count and tflops is not None:
                seconds += count * size * 2 * macs / (tflops * 1e12)
    if isinstance(steps.task, DecisionMaking):
        seconds += 2 * _EPISODE_STEPS * steps.task.test_episodes * per_sample / 3  # two targets
    return seconds


def _validated(cell: Cell, sizes: Mapping[str, int]) -> int:
    """Samples of a validation, those of the test split among them where it is scored too."""
    val, test, rows = sizes.get("val", 0), sizes.get("test", 0), rows_of_step(cell.config)
    rotating = setting(cell.config, "data.init_args.parity_eval")
    during = setting(cell.config, "run.test_during_training")
    batch = setting(cell.config, "data.init_args.eval_batch_size") or rows
    tested = test if during == "all" else min(test, batch * int(during or 0))
    return (val if rotating is None else int(rotating) * rows) + tested


def _validation_interval(cell: Cell) -> int:
    """Optimiser steps between validations."""
    trainer = cell.config["trainer"]
    interval = trainer.get("val_check_interval")
    return max(1, int(interval) // _accumulation(cell)) if interval else cell.max_steps


def _accumulation(cell: Cell) -> int:
    return int(cell.config["trainer"].get("accumulate_grad_batches", 1))


class _MeasuredSteps:
    """Training steps of a cell's model, on the attention backends of the whole batch."""

    def __init__(self, cell: Cell) -> None:
        self.data = cell.data()
        self.batch = max(1, rows_of_step(cell.config) // _accumulation(cell))  # at a time
        torch.manual_seed(cell.seed)
        self.task = build_task(cell, self.data).train()
        set_backends(self.task.model, self.batch, seq_len(self.task, self.data))
        self.steps = {str(n): self.step(n) for n in _FEW}

    def step(self, batch: int) -> Callable[[], None]:
        """Return a function that runs a step of so many samples."""
        return training_step(self.task, *make_inputs(self.task, self.data, batch))

    def seconds(self, peak: int) -> tuple[float, str]:
        """Return seconds of every sample of a step, and how they were found.

        Few samples only say how many are quick: what a step costs beside its samples would count
        for each of the batch.

        Args:
            peak: bytes of a step of the whole batch.
        """
        few = _FEW[-1]
        guess = self._median(few, repeats=1) / few  # it has run before: memory came first
        count = min(_STEP_SECONDS / guess, self.batch * _STEP_BYTES / peak, self.batch)
        count = max(int(count), min(few, self.batch))
        seconds = self._median(count, repeats=_ROUNDS, warmup=1)
        of = "step" if count == self.batch else f"{count} samples of a step"
        return seconds / count, f"measured: {seconds:.3f} s per {of}"

    def _median(self, batch: int, repeats: int, warmup: int = 0) -> float:
        step = self.steps.get(str(batch)) or self.step(batch)
        times = time_sides(
            {batch: step},
            device=torch.device("cpu"),
            warmup=warmup,
            repeats=repeats,
            max_seconds=_MAX_SECONDS,
        )
        return summarise(times[batch]).median_s

    def search_seconds(self, size: int) -> float:
        """Return seconds of the search of one sentence, to its own length."""
        task = cast(Translation, self.task)
        pairs, _ = make_inputs(task, self.data, _SEARCHED)
        beam = Beam(size=size, max_length_a=1.0, max_length_b=0)
        task.eval()
        try:
            seconds = time_once(
                lambda: beam_search(task.model, pairs[:, 0], None, beam), torch.device("cpu")
            )
        finally:
            task.train()
        return seconds / _SEARCHED

    def peak_bytes(self) -> int:
        """Return the peak of a step of the whole batch, by a line through those of few."""
        one, two = (cpu_peak_bytes(step) for step in self.steps.values())
        weights = sum(p.numel() * p.element_size() for p in self.task.model.parameters())
        return one + (two - one) * (self.batch - _FEW[0]) + 3 * weights

"""The model of a run without training: data, model, inputs; counted and predicted cost.

Sentences and sentence pairs, whose batch size is in tokens, have PAIR_LEN tokens (per side).
Operations and memory exclude the output layer of a language model, which is the same for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.core.base import CachedDataModule, DataModule
from lit_probattn.attention import Attention, recorded_choices
from lit_probattn.base.errors import DataError
from lit_probattn.base.memory import StepFunction, outlined_bytes, predicted_bytes
from lit_probattn.compare.runs import Run
from lit_probattn.configs import attention_factory, class_of, default_argument, link_sizes
from lit_probattn.kernels.operator import IMPLEMENTATIONS
from lit_probattn.measure.counters import torch_flops
from lit_probattn.models.language_model import IGNORE
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

# Tokens of a sentence, or of each side of a pair: about the mean of LM1B, IWSLT'14 and WMT'14.
PAIR_LEN = 32


def loss_unit(config: Mapping[str, Any]) -> str:
    """Return the unit of the loss of a configuration's task."""
    unit: str = getattr(class_of(config["model"]["class_path"]), "loss_unit", Task.loss_unit)
    return unit


def missing_data(data: DataModule) -> str | None:
    """Return the missing files and how to get them; None if the data exist or are generated."""
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


def build_task(run: Run, data: DataModule) -> Task:
    """Build the LightningModule of a run on the current default device."""
    entry = run.config["model"]
    model = {"class_path": entry["class_path"], "init_args": dict(entry["init_args"])}
    link_sizes(model, _sizes(run, data), data)
    arguments = {
        name: attention_factory(value["class_path"], value.get("init_args") or {})
        if isinstance(value, Mapping) and "class_path" in value
        else value
        for name, value in model["init_args"].items()
    }
    task: Task = class_of(model["class_path"])(seed=run.seed, **arguments)
    return task


def _sizes(run: Run, data: DataModule) -> Mapping[str, int]:
    """Return the published sizes; with a reduced protocol those of its data, if set."""
    if not run.options.shortened:
        return run.task.sizes
    try:
        return {name: getattr(data, name, known) for name, known in run.task.sizes.items()}
    except DataError:
        return run.task.sizes


def seq_len(task: Task, data: DataModule) -> int:
    """Return the full length of a sample; for time series it is that of the model."""
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
    if isinstance(task, DecisionMaking):  # states, actions and returns-to-go, concatenated
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
    """Return the model's arguments: both sides of pairs, the parts of steps, or the inputs."""
    if isinstance(task, DecisionMaking):
        widths = [task.model.obs_dim, task.model.act_dim, 1]
        times = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[:2])
        return *inputs.split(widths, -1), times
    return inputs.unbind(1) if isinstance(task, Translation) else (inputs,)


def rows_of_step(config: Mapping[str, Any]) -> int:
    """Return the number of samples of an optimiser step, over all accumulation steps."""
    given = config["data"].get("init_args", {})
    by_tokens, by_rows = (
        given[name] if name in given else default_argument(config, f"data.init_args.{name}")
        for name in ("max_tokens", "batch_size")
    )
    return int(by_rows) if by_tokens is None else max(1, int(by_tokens) // PAIR_LEN)


def counts(run: Run) -> dict[str, int]:
    """Count parameters, and multiply-adds of the reference in one sample's forward pass.

    The multiply-adds exclude the output layer of a language model, which is equal for all rows.
    """
    data = run.data()
    with torch.device("meta"):
        task = build_task(run, data).eval()
        inputs, _ = make_inputs(task, data, 1)
        for layer in (m for m in task.modules() if isinstance(m, Attention)):
            layer.backend = layer.core.makes.stated_backend
        model = task.model

        def forward() -> None:
            with torch.no_grad():
                model(*sides(task, inputs))

        macs = torch_flops(forward) // 2
    return {"parameters": sum(p.numel() for p in model.parameters()), "macs": macs}


def step_bytes(run: Run) -> int:
    """Predict the memory of a training step on the CPU's backends with fake tensors.

    This is one micro-batch of one device: parameters, gradients, Adam's averages, activations.
    """
    data = run.data()
    parts = int(run.config["trainer"].get("accumulate_grad_batches") or 1)
    batch = max(1, rows_of_step(run.config) // parts)
    weights, chosen = 0, set()

    def note(*_: Any) -> None:
        chosen.add(list(recorded_choices().values())[-1])

    def build() -> tuple[StepFunction, list[Any]]:
        nonlocal weights
        task = build_task(run, data).train()
        weights = sum(p.numel() * p.element_size() for p in task.model.parameters())
        for layer in (m for m in task.modules() if isinstance(m, Attention)):
            layer.register_forward_hook(note)
        inputs, _ = make_inputs(task, data, batch)
        key = RandomKey(0, 0, torch.arange(batch))

        def step() -> None:
            out = cast(Any, task.model)(*sides(task, inputs), rng=key)
            found = out if isinstance(out, tuple) else (out,)
            cast(Tensor, sum(part.float().mean() for part in found)).backward()
            task.zero_grad(set_to_none=True)

        return step, [task, inputs]

    peak, resident = outlined_bytes(build, "cpu", IMPLEMENTATIONS)
    if "sdpa" in chosen:  # which stores all maps on the meta device
        peak, resident = predicted_bytes(build)
    return peak + resident + 2 * weights


def step_operations(run: Run, macs: int) -> int:
    """Return the FLOP of one optimiser step: three forward passes of 2 × `macs` per sample."""
    return 3 * 2 * macs * rows_of_step(run.config)

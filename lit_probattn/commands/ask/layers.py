"""Cost of one attention layer of every variant: parameters, operations, predicted memory."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from lit_probattn.attention import Attention, AttentionFactory
from lit_probattn.attention.call import outline
from lit_probattn.base.config_files import comment_of, file_named, find, list_attention
from lit_probattn.base.errors import ConfigError, UnsupportedError
from lit_probattn.base.files import MADE_BY, refuse_to_replace, replace_text
from lit_probattn.base.memory import (
    Resident,
    StepFunction,
    outlined_bytes,
    predicted_bytes,
    predicting,
)
from lit_probattn.configs import attention_entry, attention_factory, class_of
from lit_probattn.kernels.operator import IMPLEMENTATIONS
from lit_probattn.kernels.runtime import recording
from lit_probattn.randomness import RandomKey
from profiling.cost.exact import attention_cost

BASELINE = "softmax"
RELEASED = "as_released/"  # presets of published code
_GOOD_FOR = "Good for:"
# Predictions visit all blocks of a layer, so their time grows with the sequence length.
_MOST = 2**20


@dataclass(frozen=True)
class Question:
    """Sizes for which costs are predicted.

    Args:
        embed_dim: C.
        seq_len: N.
        num_heads: number of softmax heads; E = C / H for all variants.
        batch_size: B.
        is_causal: causal attention.
        dropout: attention dropout, equal for all variants.
        device: `cpu`, `cuda`, or a GPU name.
        equal_heads: every variant has H heads, instead of the ratio in its configuration.

    Raises:
        ConfigError: sizes are inconsistent.
    """

    embed_dim: int
    seq_len: int
    num_heads: int = 8
    batch_size: int = 8
    is_causal: bool = False
    dropout: float = 0.1
    device: str = "cpu"
    equal_heads: bool = False

    def __post_init__(self) -> None:
        for name in ("embed_dim", "seq_len", "num_heads", "batch_size"):
            flag, value = f"--{name.removesuffix('_size')}", getattr(self, name)
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, received {value}")
            if value > _MOST:
                raise ConfigError(f"{flag} must be at most {_MOST}, received {value}")
        if self.embed_dim % self.num_heads:
            fitting = [h for h in range(1, self.embed_dim + 1) if self.embed_dim % h == 0]
            near = min(fitting, key=lambda h: abs(h - self.num_heads))
            raise ConfigError(
                f"--num_heads must divide --embed_dim, received {self.num_heads} and "
                f"{self.embed_dim}; the nearest divisor is {near}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"--dropout must be in [0, 1), received {self.dropout}")

    @property
    def head_dim(self) -> int:
        """E."""
        return self.embed_dim // self.num_heads

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`."""
        return "cpu" if self.device == "cpu" else "cuda"


@dataclass(frozen=True)
class Answer:
    """Cost of a variant; None for unknown values.

    Args:
        name: name of its preset or file.
        class_path: class of the layer, with arguments `options`.
        good_for: recommendation in its configuration.
        num_heads: number of heads of the layer.
        parameters: number of parameters of one layer.
        macs: multiply-adds of one forward pass, by the equation.
        training_bytes: weights, inputs and peak memory of a step.
        inference_bytes: the same without gradients.
        backends: backends that `auto` selects in training and inference.
        training_s: measured median of a step; see `measured`.
        inference_s: the same without gradients.
        problem: reason for missing values.
    """

    name: str
    class_path: str
    options: dict[str, Any]
    good_for: str = ""
    num_heads: int | None = None
    parameters: int | None = None
    macs: int | None = None
    training_bytes: int | None = None
    inference_bytes: int | None = None
    backends: tuple[str, str] | None = None
    training_s: float | None = None
    inference_s: float | None = None
    problem: str | None = None
    uses: dict[str, list[str]] = field(default_factory=dict)


def names() -> list[str]:
    """Return the variants to compare: all but the presets of released code."""
    return [name for name in list_attention() if not name.startswith(RELEASED)]


def check_known(name: str) -> None:
    """Raise for a variant without a file, or whose class cannot be imported.

    Raises:
        ConfigError: the message gives the reason.
    """
    class_of(attention_entry(file_named("attention", name))["class_path"])


def good_for(name: str) -> str:
    """Return the recommendation in the configuration of a variant, in one line."""
    lines = comment_of(find(file_named("attention", name)))
    purposes = [
        line.removeprefix(_GOOD_FOR).strip() for line in lines if line.startswith(_GOOD_FOR)
    ]
    return " ".join(purposes)


def heads(options: Mapping[str, Any], question: Question, baseline: int) -> dict[str, int]:
    """Return the numbers of heads of a variant, by their ratio to softmax in its configuration.

    FiSH has the local heads of softmax, and global heads by the ratio in its configuration.

    Args:
        options: arguments in the configuration.
        question: requested sizes.
        baseline: number of heads in softmax's configuration.

    Raises:
        ConfigError: the result is not a whole number of heads.
    """
    own = options.get("num_heads", baseline)
    share = Fraction(1)
    found = {"num_heads": question.num_heads}
    if "num_global_heads" in options:
        share = Fraction(options["num_global_heads"], own)
        found["num_global_heads"] = max(1, math.floor(question.num_heads * share))
    elif not question.equal_heads:
        share = Fraction(own, baseline)
        count = question.num_heads * share
        if count.denominator != 1:
            raise ConfigError(f"{share} of {question.num_heads} heads is not a whole number")
        found["num_heads"] = int(count)
    return found


def answer(name: str, question: Question) -> Answer:
    """Return the cost of a variant; an error becomes its problem."""
    entry = attention_entry(file_named("attention", name))
    base = attention_entry(file_named("attention", BASELINE))["init_args"]["num_heads"]
    path, options = entry["class_path"], dict(entry["init_args"])
    known = Answer(name, path, options, good_for(name))
    try:
        options |= {**heads(options, question, base), "dropout": question.dropout}
        if (options.get("num_kv_heads") or 0) > options["num_heads"]:
            options["num_kv_heads"] = options["num_heads"]
        return _costs(known, question)
    except (ConfigError, TypeError, ValueError, NotImplementedError) as error:
        text = " ".join(str(error).split())
        return replace(known, problem=text)


def _costs(known: Answer, question: Question) -> Answer:
    with torch.device("meta"):
        layer = build(known, question)
    chosen, peaks = [], []
    for train in (True, False):
        chosen.append(choose(layer, question, train))
        peaks.append(memory(known, question, chosen[-1], train))
    return replace(
        known,
        num_heads=layer.num_heads,
        parameters=layer.count_parameters(),
        macs=question.batch_size * operations(layer, question.seq_len),
        training_bytes=peaks[0],
        inference_bytes=peaks[1],
        backends=(chosen[0], chosen[1]),
        uses=uses(known, question),
    )


def build(known: Answer, question: Question) -> Attention:
    """Return a layer of the variant on the current default device."""
    factory = _factory(known.class_path, json.dumps(known.options))
    return factory(question.embed_dim, head_dim=question.head_dim)


@functools.lru_cache(maxsize=1)
def _factory(class_path: str, options: str) -> AttentionFactory:
    """Return the factory of other commands; an answer builds three layers with it."""
    return attention_factory(class_path, json.loads(options))


def operations(layer: Attention, seq_len: int) -> int:
    """Return the multiply-adds of one sequence, from the layer's closed form or else counted."""
    try:
        return attention_cost(layer, seq_len).macs
    except UnsupportedError:
        from lit_probattn.measure.counters import torch_macs
        from profiling.cost.models import AttentionOnly

        inputs = torch.empty(1, seq_len, layer.embed_dim, device="meta")
        return torch_macs(AttentionOnly(layer), inputs).products


def choose(layer: Attention, question: Question, train: bool) -> str:
    """Return the backend that `auto` selects on the device, assuming passed self-tests."""
    core = layer.core.train(train)
    sizes = (question.batch_size, question.seq_len, question.seq_len)
    dropout = train and question.dropout > 0.0
    with predicting(question.kind):
        return core.pick(outline(core.layout, *sizes, device=question.kind, dropout=dropout))


def memory(known: Answer, question: Question, backend: str, train: bool) -> int:
    """Predict the peak memory of a step of one layer, with weights and inputs, in bytes.

    The backend runs with the device's block sizes on tensors without memory.

    Args:
        known: the variant.
        question: sizes.
        backend: the backend that runs.
        train: whether gradients are computed.
    """
    sizes = (question.batch_size, question.seq_len, question.embed_dim)

    def make() -> tuple[StepFunction, Resident]:
        layer = build(known, question).train(train)
        layer.backend = backend  # type: ignore[assignment]
        inputs = torch.empty(*sizes, requires_grad=train)

        def step() -> None:
            with torch.set_grad_enabled(train):
                out = layer(inputs, is_causal=question.is_causal, rng=RandomKey(0))
            if train:
                out.backward(torch.ones_like(out))

        return step, (layer, inputs)

    if backend == "sdpa":  # PyTorch selects its kernel by device
        return sum(predicted_bytes(make))
    with recording():
        return sum(outlined_bytes(make, question.kind, IMPLEMENTATIONS))


def uses(known: Answer, question: Question) -> dict[str, list[str]]:
    """Return the lines of Python and of YAML that use a variant."""
    words = {"num_heads": known.options["num_heads"], "head_dim": question.head_dim}
    written = attention_entry(file_named("attention", known.name))["init_args"]
    words |= {k: v for k, v in known.options.items() if k not in words and v != written.get(k)}
    arguments = ", ".join(f"{key}={value!r}" for key, value in words.items())
    options = ", ".join(f"{k}: {_yaml(v)}" for k, v in known.options.items())
    entry = f"{{class_path: {known.class_path}, init_args: {{{options}}}}}"
    sizes = f"embed_dim: {question.embed_dim}, head_dim: {question.head_dim}"
    return {
        "python": [
            "import lit_probattn",
            f'layer = lit_probattn.create("{known.name}", {question.embed_dim}, {arguments})',
        ],
        "yaml": [f"model: {{init_args: {{{sizes},", f"  attention: {entry}}}}}"],
    }


def _yaml(value: Any) -> str:
    """Format the value of an option; JSON is valid YAML."""
    return json.dumps(value) if not isinstance(value, str) else value


def sweep_text(question: Question, answers: list[Answer]) -> str:
    """Return a config of `lit-probattn sweep` that times these variants."""
    lines = [
        f"{MADE_BY} ask`: the time of one attention layer, for `ask --measured`.",
        "name: ask",
        f"model: {{kind: attention, head_dim: {question.head_dim}, is_causal: "
        f"{str(question.is_causal).lower()}}}",
        f"device: {question.kind}",
        "variants:",
    ]
    for each in answers:
        if each.problem is None:
            options = ", ".join(f"{k}: {_yaml(v)}" for k, v in each.options.items())
            lines += [
                f"  {json.dumps(each.name)}:",
                f"    attention: {{class_path: {each.class_path}, init_args: {{{options}}}}}",
            ]
    grid = {"embed_dim": question.embed_dim, "seq_len": question.seq_len}
    grid |= {"batch_size": question.batch_size}
    lines += ["grid:", *(f"  {key}: [{value}]" for key, value in grid.items())]
    lines += ["  mode: [train, eval]", "  backend: [auto]", "measure: [time]"]
    return "\n".join([*lines, "timing: {warmup: 2, repeats: 10, max_seconds: 20}"]) + "\n"


def write_sweep(path: Path, question: Question, answers: list[Answer]) -> None:
    """Write the sweep config.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    refuse_to_replace([path])
    try:
        replace_text(path, sweep_text(question, answers))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error

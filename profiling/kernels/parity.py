"""Errors of the fused kernels compared with eager code, and a training run with both.

Errors are relative to the reference in float64. Eager code is the reference with matrix products in
the kernel's precision (rounded inputs and results) and the rest in float32, as in mixed-precision
training. The root mean square error of a kernel may be at most twice that of eager code, in the
output, in the gradient of each input, and in the gradients of all parameters of a layer together:
a parameter may have only two elements, so that its error is uncertain by a fifth.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_probattn.attention import Attention, HeadCall
from lit_probattn.attention.backends import engines_of
from lit_probattn.attention.masks import Masks, make_masks
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.processes import capture
from lit_probattn.kernels.selftest import failure
from lit_probattn.randomness import AttentionDropout, RandomKey
from profiling.kernels.cases import Case, draw_heads
from profiling.measure.tasks import in_processes

BUDGET = 2.0  # error of the kernel over that of eager code
INPUTS = ("out", "query", "key", "value", "bias")  # the other tensors are a layer's parameters
TASK = "configs/tasks/tiny/lra_listops.yaml"
_SCHEDULE_STEPS = 16  # of the task
ATTENTION = tuple(f"configs/attention/{name}.yaml" for name in ("mgk", "smgk", "fish", "mlk"))

_ZERO = 1e-24  # mean square of a gradient that is 0 up to rounding in float64

# Difference of the losses of a step in float32: rounding, amplified by a few training steps.
BOUND = 1e-4


@dataclass(frozen=True)
class ParityRow:
    """Errors of the output or of the gradient of `tensor`; `rms` is root mean square."""

    case: str
    dtype: str
    tensor: str
    largest: float
    rms: float
    eager_rms: float

    @property
    def ratio(self) -> float:
        """Error of the kernel relative to eager code; 0 if both are exact."""
        return self.rms / self.eager_rms if self.eager_rms else (float("inf") if self.rms else 0.0)

    def shown(self, head_dim: int) -> dict[str, object]:
        """Return the row of the table."""
        return {
            **{"kernel": self.case, "head_dim": head_dim, "dtype": self.dtype},
            **{"tensor": self.tensor, "largest error": f"{self.largest:.1e}"},
            **{"rms error": f"{self.rms:.1e}", "rms error, eager": f"{self.eager_rms:.1e}"},
            "ratio": f"{self.ratio:.2f}",
        }


def over_budget(rows: Sequence[ParityRow]) -> list[ParityRow]:
    """Return the rows of a case above the budget; all parameters if their joint error is above."""
    parameters = [row for row in rows if row.tensor not in INPUTS]
    squares = [row.ratio**2 for row in parameters]
    together = (sum(squares) / len(squares)) ** 0.5 if squares else 0.0
    found = [row for row in rows if row.tensor in INPUTS and row.ratio > BUDGET]
    return [*found, *(parameters if together > BUDGET else [])]


@dataclass(frozen=True)
class ParityTask:
    """A case in one dtype and head size, for `parity_rows`; shapes are (queries, keys)."""

    case: Case
    dtype: torch.dtype
    device: str
    head_dim: int
    shapes: tuple[tuple[int, int], ...]

    @property
    def dtype_name(self) -> str:
        """Name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def label(self) -> str:
        """Case, dtype and head size."""
        return f"{self.case.name}, {self.dtype_name}, {self.head_dim}"

    def result(self, rows: list[ParityRow], problem: str = "") -> Compared:
        """Return its result; without rows, the problem is the reason."""
        family = kernel_family(make_layer(self.case, self.head_dim, torch.device("cpu")))
        return Compared(self.label, family, self.dtype_name, self.head_dim, rows, problem)


@dataclass(frozen=True)
class Compared:
    """Result of a task.

    Args:
        family: folder and name of its kernels.
        dtype: name of its dtype.
        rows: one per tensor; empty if the kernels or their self-test failed.
        problem: why they failed, or an empty string.
    """

    label: str
    family: str
    dtype: str
    head_dim: int
    rows: list[ParityRow]
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the self-test passed and all errors are within the budget."""
        return not self.problem and not over_budget(self.rows)


def compare(task: ParityTask) -> Compared:
    """Run the self-test of a case's kernels on a GPU, then compare their errors."""
    layer = make_layer(task.case, task.head_dim, torch.device("cpu"))
    family, sizes = kernel_family(layer), (task.head_dim, layer.value_head_dim)
    problem = failure(family, task.dtype, sizes) if task.device == "cuda" else None
    return task.result(parity_rows(task)) if problem is None else task.result([], problem)


def compare_all(tasks: Sequence[ParityTask], jobs: int) -> list[Compared]:
    """Return the result of each task, in order; see `in_processes`."""
    found = {}
    for outcome in in_processes(compare, tasks, jobs):
        task = outcome.task
        problem = outcome.problem
        found[task.label] = task.result([], problem) if problem else outcome.result
        print(f"parity: {task.label}: {found[task.label].problem or 'compared'}", flush=True)
    return [found[task.label] for task in tasks]


def kernel_family(layer: Attention) -> str:
    """Return folder and name of a layer's kernels."""
    query, key, value = draw_heads(layer, 1, 1, 1, partial(torch.zeros, device="cpu"))
    call = HeadCall(query, key, value, make_masks(1, layer.num_heads, 1, 1), rng=RandomKey(0))
    return layer.core.variant(call).kernel


class _LowProducts(TorchFunctionMode):
    """Runs matrix products in a lower precision, everything else unchanged."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            low = [x.to(self.dtype) for x in args]
            return func(*low, **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call: query, stored keys and value, masks, dropout."""

    tensors: tuple[Tensor, Tensor, Tensor]
    masks: Masks
    dropout: AttentionDropout | None
    cotangent: Tensor


def make_inputs(
    layer: Attention,
    case: Case,
    num_queries: int,
    num_keys: int,
    dtype: torch.dtype,
    seed: int,
    clear: bool = True,
) -> Inputs:
    """Return random inputs that are exact in `dtype`, on the layer's device.

    For hard inference, `clear` masks pairs whose best two components differ by less than rounding,
    since the component that gets the gradient is then undefined.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(layer.parameters()).device
    batch, heads = 2, layer.num_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    def coin(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=generator) < 0.7).to(device)

    query, key, value = draw_heads(layer, batch, num_queries, num_keys, draw)
    pairs = coin(1, heads, num_queries, num_keys) if "pairs" in case.masks else None
    if clear:
        with torch.no_grad():
            leads = layer.core.unambiguous_pairs(query, key)
        pairs = pairs if leads is None else leads if pairs is None else leads & pairs
    masks = make_masks(
        *(batch, heads, num_queries, num_keys),
        key_mask=coin(batch, num_keys) if "key" in case.masks else None,
        attn_mask=pairs,
        is_causal="causal" in case.masks,
        bias=draw(1, heads, 1, num_keys) if "bias" in case.masks else None,
    )
    dropout = None
    if "dropout" in case.masks:
        samples = torch.tensor([41, 7], device=device)
        dropout = AttentionDropout(0.3, RandomKey(3, step=5, sample_ids=samples, layer=2))
    cotangent = draw(batch, heads, num_queries, layer.value_head_dim)
    return Inputs((query, key, value), masks, dropout, cotangent)


def run_heads(layer: Attention, backend: str, call: HeadCall) -> Tensor:
    """Return the heads' output of a call on one backend, including shifts of keys and priors."""
    core = layer.core
    engines = engines_of(core.makes)
    if backend not in engines:
        raise ConfigError(
            f"{core.name} has no backend {backend!r}; expected one of {', '.join(engines)}"
        )
    return engines[backend].compute(call, core.variant(call))


def heads_and_gradients(
    layer: Attention, backend: str, inputs: Inputs, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the heads' output and the gradients of query, keys, value, parameters and bias."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs.tensors]
    names = ["query", "key", "value"]
    for name, parameter in layer.core.named_parameters():
        names.append(name)
        leaves.append(parameter)
    query, key, value = leaves[:3]
    bias = inputs.masks.bias
    if bias is not None:
        bias = bias.detach().to(dtype).requires_grad_()
        names.append("bias")
        leaves.append(bias)
    masks = replace(inputs.masks, bias=bias)
    call = HeadCall(query, key, value, masks, dropout=inputs.dropout, rng=RandomKey(3))
    out = run_heads(layer, backend, call)
    grads = torch.autograd.grad(out, leaves, inputs.cotangent.to(out.dtype))
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def make_layer(case: Case, head_dim: int, device: torch.device) -> Attention:
    """Return the layer of a case in float32, with priors that differ."""
    torch.manual_seed(0)
    layer = case.layer(head_dim, head_dim=head_dim, **{"num_heads": 2, **case.options})
    with torch.no_grad():
        for name, parameter in layer.core.named_parameters():
            if name.startswith("prior"):
                parameter.uniform_(0.2, 0.8)
    return layer.to(device)


def parity_rows(task: ParityTask) -> list[ParityRow]:
    """Return the errors of output and gradients, over all shapes (queries, keys) together."""
    case, dtype, device = task.case, task.dtype, torch.device(task.device)
    layer = make_layer(case, task.head_dim, device)
    exact_layer = make_layer(case, task.head_dim, device).double()
    squares: dict[str, list[float]] = {}
    sizes: dict[str, float] = {}
    for seed, (num_queries, num_keys) in enumerate(task.shapes):
        inputs = make_inputs(layer, case, num_queries, num_keys, dtype, seed)
        exact = heads_and_gradients(exact_layer, "reference", inputs, torch.float64)
        found = heads_and_gradients(layer, "triton", inputs, dtype)
        low: AbstractContextManager[object] = nullcontext()
        if dtype != torch.float32:
            low = _LowProducts(dtype)
        with low:
            eager = heads_and_gradients(layer, "reference", inputs, torch.float32)
        for name, truth in exact.items():
            entry = squares.setdefault(name, [0.0, 0.0, 0.0, 0])
            ours = (found[name].double() - truth).abs()
            # Eager code passes its results on in the same precision.
            plain = (eager[name].to(found[name].dtype).double() - truth).abs()
            entry[0] = max(entry[0], _finite(ours.max()))
            entry[1] += _finite(ours.square().sum())
            entry[2] += _finite(plain.square().sum())
            entry[3] += truth.numel()
            sizes[name] = sizes.get(name, 0.0) + float(truth.square().sum())
    name_of = str(dtype).removeprefix("torch.")
    # A gradient that is exactly 0, such as that of the prior of a single component, is a sum of
    # rounding errors in any code: it is compared with rounding of the queries' gradient.
    scale = (sizes["query"] / squares["query"][3]) ** 0.5
    return [
        ParityRow(
            *(case.name, name_of, tensor, top, (ours / n) ** 0.5),
            max((plain / n) ** 0.5, torch.finfo(dtype).eps * scale * (sizes[tensor] < _ZERO * n)),
        )
        for tensor, (top, ours, plain, n) in squares.items()
    ]


def _finite(value: Tensor) -> float:
    """Return a number, with NaN replaced by infinity so that comparisons fail."""
    return float(value) if bool(torch.isfinite(value)) else float("inf")


def losses(attention: str, backend: str, steps: int, device: str, folder: Path) -> list[float]:
    """Return the training loss of each step of a command-line run; ConfigError if it fails."""
    accelerator = "gpu" if device == "cuda" else "cpu"
    command = [
        *(sys.executable, "-m", "lit_probattn", "fit", "--config", TASK, "--config", attention),
        *("--model.init_args.attention.init_args.backend", backend),
        *("--trainer.accelerator", accelerator, "--trainer.devices", "1"),
        *("--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps)),
        *("--model.init_args.schedule_steps", str(max(steps, _SCHEDULE_STEPS))),
        *("--trainer.log_every_n_steps", "1", "--trainer.limit_val_batches", "1"),
        *("--run.root", str(folder), "--run.name", f"{Path(attention).stem}-{backend}"),
    ]
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    done = capture(command, env=environment)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ConfigError(f"the run with backend {backend} failed: {' '.join(last)}")
    (path,) = folder.glob(f"{Path(attention).stem}-{backend}/*/metrics.csv")
    with path.open(encoding="utf-8") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def compare_training(
    steps: int, device: str, jobs: int = 1
) -> tuple[list[dict[str, object]], bool]:
    """Train with both backends; return a row per step and whether all gaps are within BOUND."""
    backends = ("triton", "reference")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        futures = {
            (path, backend): pool.submit(losses, path, backend, steps, device, Path(folder))
            for path in ATTENTION
            for backend in backends
        }
        found = {key: future.result() for key, future in futures.items()}
    lines: list[dict[str, object]] = []
    followed = True
    for path in ATTENTION:
        kernels, exact = (found[path, backend] for backend in backends)
        followed &= len(kernels) == len(exact) == steps
        for step, (ours, theirs) in enumerate(zip(kernels, exact, strict=True), 1):
            gap = abs(ours - theirs)
            followed &= gap <= BOUND * max(1.0, theirs)
            if step <= 5 or step % 20 == 0 or step == steps:
                lines.append(
                    {
                        "attention": Path(path).stem,
                        "step": step,
                        "loss, triton": f"{ours:.6f}",
                        "loss, reference": f"{theirs:.6f}",
                        "gap": f"{gap:.1e}",
                    }
                )
    return lines, followed

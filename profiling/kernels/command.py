"""Modes of `python -m profiling kernels`; each but the speed test makes a table and a verdict."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch

from lit_probattn.base.arguments import at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.provenance import command_line, device_name
from lit_probattn.experiments.page import Made, Page, as_csv
from lit_probattn.records.markdown import one_line
from lit_probattn.records.tables import markdown_lines
from profiling.measure.tasks import default_jobs
from profiling.sweep.run import missing_device

if TYPE_CHECKING:
    from profiling.kernels.parity import ParityTask

Outcome = tuple[Page, bool]  # the report, and whether all checks passed
_NOWHERE = "none (compiled only)"

PARITY_SHAPES = {
    "cpu": [(37, 45), (29, 31), (7, 33), (33, 5)],
    "cuda": [(517, 517), (300, 1031), (129, 64)],
}
_DTYPES = ("float32", "float16", "bfloat16")


def integers(text: str) -> list[int]:
    """Parse positive integers separated by commas."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {min(found)}")
    return found


def dtypes(text: str) -> list[torch.dtype]:
    """Parse names of dtypes separated by commas; an unknown one raises an ArgumentTypeError."""
    for name in text.split(","):
        if name not in _DTYPES:
            raise argparse.ArgumentTypeError(
                f"unknown dtype {name!r}; expected some of {', '.join(_DTYPES)}"
            )
    return [getattr(torch, name) for name in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--config", help="measure the implementations in this name or file of configs/profiling"
    )
    what.add_argument(
        "--parity", action="store_true", help="compare the errors of kernels and eager code"
    )
    what.add_argument(
        "--compile-table",
        action="store_true",
        help="list registers, spills and shared memory on sm_80 and sm_90; needs no GPU",
    )
    what.add_argument(
        "--model",
        action="store_true",
        help="predict ratios to softmax from the counted work of each kernel; needs no GPU",
    )
    what.add_argument(
        "--tune", action="store_true", help="find and store launch configurations; needs a GPU"
    )
    what.add_argument(
        "--train-steps",
        type=at_least(1),
        metavar="N",
        help="train N steps of a small ListOps model with triton and with the reference",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="device (default: a GPU if available)"
    )
    parser.add_argument("--dtypes", type=dtypes, help="comma-separated, e.g. float32,bfloat16")
    parser.add_argument(
        "--cases", help="select kernels, or comparisons of --config, by parts of their names"
    )
    parser.add_argument("--head-dims", type=integers, help="head sizes, comma-separated")
    parser.add_argument("--seq-lens", type=integers, help="lengths, replacing those of the file")
    parser.add_argument("--threads", type=integers, help="threads, replacing those of the file")
    parser.add_argument(
        "--jobs",
        type=at_least(1),
        help="processes that compile kernels and compare errors, or train, at a time (default: one "
        "per core and 4 GiB of GPU memory, at most 16; 1 without a GPU)",
    )
    parser.add_argument(
        "--passes", choices=["all", "forward"], help="kernels to compile (default: all)"
    )
    parser.add_argument("--capabilities", type=integers, help="default 80,90")
    parser.add_argument(
        "--out",
        help="report folder (default: print the report). With --config, points that it contains "
        "are not measured again",
    )


# The flags that each mode supports.
_READ = {
    "config": {"dtypes", "seq_lens", "head_dims", "threads", "cases", "jobs", "out"},
    "parity": {"device", "dtypes", "cases", "head_dims", "jobs", "out"},
    "compile_table": {"dtypes", "cases", "head_dims", "passes", "capabilities", "out"},
    "model": {"head_dims", "out"},
    "tune": {"device", "dtypes", "cases", "head_dims", "out"},
    "train_steps": {"device", "jobs", "out"},
}


def refuse_flags_not_read(options: argparse.Namespace) -> None:
    """Raise a ConfigError for a flag that the mode does not support."""
    kind = next(name for name in _READ if getattr(options, name) not in (None, False))
    for name in sorted(set().union(*_READ.values()) - _READ[kind]):
        if getattr(options, name) is not None:
            useful = " or ".join(_flag(k) for k in _READ if name in _READ[k])
            raise ConfigError(f"{_flag(name)} has no effect with {_flag(kind)}, only with {useful}")
    if options.compile_table and options.dtypes and len(options.dtypes) > 1:
        raise ConfigError("--compile-table requires exactly one dtype in --dtypes")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(options: argparse.Namespace) -> Outcome:
    """Run the selected mode; return its report and verdict, or raise a ConfigError."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gone = missing_device(device)
    if gone is not None and not (options.compile_table or options.model):
        raise ConfigError(gone)
    if options.model:
        return _model(options)
    if options.compile_table:
        return _compile_table(options)
    if options.parity:
        return _parity(options, device)
    if options.tune:
        return _tune(options, device)
    return _train(options, device)


def _outcome(
    title: str, facts: list[str], rows: list[dict[str, object]], machine: str, passed: bool
) -> Outcome:
    frame = pd.DataFrame(rows)
    page = Page(
        kind="kernels",
        title=title,
        made=Made.here(command_line(), machine),
        finding=facts[-1],
        body=[*(f"- {one_line(fact)}" for fact in facts), "", *markdown_lines(frame)],
        tables={"rows": as_csv(frame)} if rows else {},
    )
    return page, passed


def _compile_table(options: argparse.Namespace) -> Outcome:
    from profiling.kernels.cases import compile_cases, named_like
    from profiling.kernels.compile import HEAD_DIMS, compile_rows, faults

    found = list(
        compile_rows(
            named_like(compile_cases(), options.cases),
            options.head_dims or HEAD_DIMS,
            options.capabilities or [80, 90],
            (options.dtypes or [torch.bfloat16])[0],
            forward_only=options.passes == "forward",
        )
    )
    wrong = faults(found)
    facts = [
        "Compiled ahead of time, without a GPU; default launch configurations, causal calls, both "
        "passes; registers and spills as the assembler reports them, per thread",
        "Forward kernels that spill, programs over the chip's shared memory, rows computed twice: "
        f"{'; '.join(wrong) or 'none'}",
    ]
    rows = [dict(vars(row)) for row in found]
    return _outcome("Kernels, compiled ahead of time", facts, rows, _NOWHERE, not wrong)


def _model(options: argparse.Namespace) -> Outcome:
    from profiling.kernels.model import BASELINE, HEAD_DIMS, fish_rows, ratio_rows

    head_dims = options.head_dims or HEAD_DIMS
    found = list(ratio_rows(head_dims))
    facts = [
        "Predicted, not measured, from counted products, exponentials and operations per pair, "
        "tiles and launches. Unit: one product of a head, 2 E FLOP per pair; not causal, "
        "bfloat16, default launch configurations",
        "First number: other operations overlap with products and exponentials; second: they do "
        "not",
        f"Ratios to {BASELINE}, with our kernels",
    ]
    page, _ = _outcome("Kernels, predicted", facts, found, _NOWHERE, True)
    lines = markdown_lines(pd.DataFrame(list(fish_rows(head_dims))))
    title = "## Hard FiSH and softmax over concatenated heads"
    return replace(page, body=[*page.body, "", title, "", *lines]), True


def _parity(options: argparse.Namespace, device: str) -> Outcome:
    from profiling.kernels.parity import BUDGET, compare_all

    usual = torch.float16 if device == "cpu" else torch.bfloat16
    tasks = parity_tasks(
        options.cases,
        options.dtypes or [torch.float32, usual],
        options.head_dims or [13 if device == "cpu" else 64],
        device,
    )
    found = compare_all(tasks, options.jobs or default_jobs(device))
    rows = [row.shown(result.head_dim) for result in found for row in result.rows]
    failed = [f"{result.label}: {result.problem}" for result in found if result.problem]
    passed = all(result.passed for result in found)
    facts = [
        f"Queries x keys: {PARITY_SHAPES[device]}; batch 2; errors are relative to the reference "
        "in float64; eager code computes matrix products in the kernel's precision",
        *failed,
        f"Errors are at most {BUDGET:g} times those of eager code, with all parameters of a "
        f"layer as one tensor: {'yes' if passed else 'NO'}",
    ]
    return _outcome("Parity of the fused kernels", facts, rows, _machine(device), passed)


def parity_tasks(
    names: str | None, dtypes: list[torch.dtype], head_dims: list[int], device: str
) -> list[ParityTask]:
    """Return the comparisons of the cases whose name contains one of `names`.

    Raises:
        ConfigError: no case has such a name, or the device cannot run kernels.
    """
    from lit_probattn.kernels.runtime import interpreted
    from profiling.kernels.cases import CASES, named_like
    from profiling.kernels.parity import ParityTask
    from profiling.kernels.triton_internals import spare_the_interpreter

    if device == "cpu" and not interpreted():
        raise ConfigError("without a GPU, kernels run in the interpreter: set TRITON_INTERPRET=1")
    if interpreted():
        spare_the_interpreter()
    return [
        ParityTask(case, dtype, device, head_dim, tuple(PARITY_SHAPES[device]))
        for dtype in dtypes
        for head_dim in head_dims
        for case in named_like(CASES, names)
    ]


def _tune(options: argparse.Namespace, device: str) -> Outcome:
    from profiling.kernels.cases import compile_cases, named_like
    from profiling.kernels.compile import HEAD_DIMS, tune

    if device != "cuda":
        raise ConfigError("tuning of launch configurations requires a GPU")
    path, rows = tune(
        options.head_dims or HEAD_DIMS,
        options.dtypes or [torch.bfloat16],
        named_like(compile_cases(), options.cases),
    )
    facts = [f"Stored in {Path(path).name}"]
    return _outcome("Launch configurations", facts, rows, _machine(device), bool(rows))


def _train(options: argparse.Namespace, device: str) -> Outcome:
    from profiling.kernels.parity import BOUND, TASK, compare_training

    jobs = options.jobs or default_jobs(device)
    rows, followed = compare_training(options.train_steps, device, jobs)
    facts = [
        f"Task: {TASK}, dropout on; {options.train_steps} steps",
        f"Every loss within {BOUND:g} of the reference's: {'yes' if followed else 'NO'}",
    ]
    return _outcome("Training with the fused kernels", facts, rows, _machine(device), followed)


def _machine(device: str) -> str:
    return f"{device_name(device)}{' (interpreter)' if device == 'cpu' else ''}"

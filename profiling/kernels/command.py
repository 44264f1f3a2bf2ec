"""What `python -m profiling kernels` does besides measuring speed: each a table, each a verdict."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

from lit_probattn.configs import ConfigError
from lit_probattn.records.provenance import command_line, device_name, git_revision, versions
from lit_probattn.records.tables import markdown_lines
from profiling.sweep.run import missing_device

PARITY_SHAPES = {
    "cpu": [(37, 45), (29, 31), (7, 33), (33, 5)],
    "cuda": [(517, 517), (300, 1031), (129, 64)],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a kernels file of configs/profiling: measure speed")
    what.add_argument(
        "--parity", action="store_true", help="errors of every kernel beside eager code's"
    )
    what.add_argument(
        "--compile-table",
        action="store_true",
        help="registers, spills and shared memory, compiled for sm_80 and sm_90; needs no GPU",
    )
    what.add_argument(
        "--tune", action="store_true", help="find and store launch configurations; needs a GPU"
    )
    what.add_argument(
        "--train-steps",
        type=int,
        metavar="N",
        help="train N steps of a small ListOps with triton and with the reference",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None, help="default: a GPU")
    parser.add_argument("--dtypes", help="comma-separated, e.g. float32,bfloat16")
    parser.add_argument("--cases", help="only kernels whose name holds one of these parts")
    parser.add_argument("--head-dims", help="comma-separated head sizes")
    parser.add_argument(
        "--passes", choices=["all", "forward"], default="all", help="kernels to compile"
    )
    parser.add_argument("--capabilities", help="comma-separated, default 80,90")
    parser.add_argument("--out", help="report folder; default prints only")


def run(options: argparse.Namespace) -> tuple[str, list[dict[str, object]], bool]:
    """Run what the flags ask for; return the report, its rows and whether it passed.

    Raises:
        ConfigError: the device is not there, or a flag has no meaning.
    """
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not options.compile_table:
        gone = missing_device(device)
        if gone is not None:
            raise ConfigError(gone)
    if options.compile_table:
        return _compile_table(options)
    if options.parity:
        return _parity(options, device)
    if options.tune:
        return _tune(options, device)
    return _train(options, device)


def write(folder: Path, text: str, rows: list[dict[str, object]]) -> None:
    """Write `report.md` and `rows.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    if rows:
        pd.DataFrame(rows).to_csv(folder / "rows.csv", index=False)


def _report(title: str, facts: list[str], rows: list[dict[str, object]]) -> str:
    lines = [f"# {title}", "", f"- Command: `{command_line()}`"]
    lines += [f"- Versions: {versions()}; revision {git_revision()}", *(f"- {f}" for f in facts)]
    return "\n".join([*lines, "", *markdown_lines(pd.DataFrame(rows))])


def _integers(text: str | None, default: tuple[int, ...]) -> list[int]:
    try:
        return list(default) if text is None else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"expected integers separated by commas, received {text!r}") from error


def _dtypes(text: str | None, default: str) -> list[torch.dtype]:
    names = (text or default).split(",")
    known = ("float32", "float16", "bfloat16")
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown dtype {name!r}; expected some of {', '.join(known)}")
    return [getattr(torch, name) for name in names]


def _compile_table(
    options: argparse.Namespace,
) -> tuple[str, list[dict[str, object]], bool]:
    from profiling.kernels.compile import (
        CAPABILITIES,
        HEAD_DIMS,
        as_dicts,
        compile_rows,
        faults,
        selected_cases,
    )

    (dtype,) = _dtypes(options.dtypes, "bfloat16")[:1]
    found = list(
        compile_rows(
            selected_cases(options.cases),
            _integers(options.head_dims, HEAD_DIMS),
            _integers(options.capabilities, CAPABILITIES),
            dtype,
            forward_only=options.passes == "forward",
        )
    )
    wrong = faults(found)
    facts = [
        "Compiled ahead of time, without a GPU; default launch configurations, causal calls, both "
        "passes; registers and spills as the assembler reports them, per thread",
        f"Forward kernels that spill, programs over the chip's shared memory: "
        f"{'; '.join(wrong) or 'none'}",
    ]
    rows = as_dicts(found)
    return _report("Kernels, compiled ahead of time", facts, rows), rows, not wrong


def _parity(options: argparse.Namespace, device: str) -> tuple[str, list[dict[str, object]], bool]:
    from lit_probattn.kernels.runtime import interpreted
    from profiling.kernels.cases import CASES
    from profiling.kernels.parity import BUDGET, parity_rows

    if device == "cpu" and not interpreted():
        raise ConfigError("without a GPU kernels run in the interpreter: set TRITON_INTERPRET=1")
    parts = (options.cases or "").split(",")
    cases = [case for case in CASES if any(part.strip() in case.name for part in parts)]
    default = "float32,float16" if device == "cpu" else "float32,bfloat16"
    rows: list[dict[str, object]] = []
    passed = bool(cases)
    for case in cases:
        for dtype in _dtypes(options.dtypes, default):
            for head_dim in _integers(options.head_dims, (13,) if device == "cpu" else (64,)):
                found = parity_rows(
                    case,
                    dtype,
                    device=torch.device(device),
                    head_dim=head_dim,
                    shapes=PARITY_SHAPES[device],
                )
                passed &= all(row.ratio <= BUDGET for row in found)
                rows += [
                    {
                        "kernel": row.case,
                        "head_dim": head_dim,
                        "dtype": row.dtype,
                        "tensor": row.tensor,
                        "largest error": f"{row.largest:.1e}",
                        "rms error": f"{row.rms:.1e}",
                        "rms error, eager": f"{row.eager_rms:.1e}",
                        "ratio": f"{row.ratio:.2f}",
                    }
                    for row in found
                ]
    facts = [
        f"Hardware: {device_name(device)}{' (interpreter)' if device == 'cpu' else ''}",
        f"Queries x keys: {PARITY_SHAPES[device]}; batch 2; the yardstick is the reference in "
        "float64, eager code has its matrix products in the kernel's precision",
        f"Errors are at most {BUDGET:g} times those of eager code: {'yes' if passed else 'NO'}",
    ]
    return _report("Parity of the fused kernels", facts, rows), rows, passed


def _tune(options: argparse.Namespace, device: str) -> tuple[str, list[dict[str, object]], bool]:
    from profiling.kernels.compile import HEAD_DIMS, selected_cases, tune

    if device != "cuda":
        raise ConfigError("launch configurations are found by measurement, which needs a GPU")
    path, rows = tune(
        _integers(options.head_dims, HEAD_DIMS),
        _dtypes(options.dtypes, "bfloat16"),
        selected_cases(options.cases),
    )
    facts = [f"Hardware: {device_name(device)}", f"Stored in {Path(path).name}"]
    return _report("Launch configurations", facts, rows), rows, bool(rows)


def _train(options: argparse.Namespace, device: str) -> tuple[str, list[dict[str, object]], bool]:
    from profiling.kernels.parity import BOUND, TASK, compare_training

    if options.train_steps < 1:
        raise ConfigError(f"--train-steps must be at least 1, received {options.train_steps}")
    rows, followed = compare_training(options.train_steps, device)
    facts = [
        f"Task: {TASK}, dropout on; {options.train_steps} steps on {device_name(device)}"
        f"{' (interpreter)' if device == 'cpu' else ''}",
        f"Every loss within {BOUND:g} of the reference's: {'yes' if followed else 'NO'}",
    ]
    return _report("Training with the fused kernels", facts, rows), rows, followed

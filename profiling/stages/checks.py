"""What the GPU reaches, and whether our kernels are right on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lit_probattn.kernels import selftest
from lit_probattn.records.provenance import device_name, git_revision, versions
from profiling.kernels.cases import CASES, Case
from profiling.kernels.command import PARITY_SHAPES
from profiling.kernels.parity import (
    ATTENTION,
    BUDGET,
    compare_training,
    heads_and_gradients,
    make_inputs,
    make_layer,
    parity_rows,
)
from profiling.kernels.speed import product_ceiling
from profiling.measure.timing import NotCapturedError, captured, lost_gpu, time_once
from profiling.stages.place import Phase, Place, verdict
from profiling.stages.units import Row, Skipped, Unit, read_units


# ---------------------------------------------------------------------- environment
def environment(place: Place) -> list[Phase]:
    """Return what notes the machine and measures its ceilings."""
    units = [
        Unit("machine", partial(_machine, place), 2),
        Unit("copy", partial(_copy_speed, place), 2),
        *(
            Unit(f"product {name}", partial(_product_speed, place, name), 3)
            for name in ("bfloat16", "float32")
        ),
    ]
    return [Phase(units)]


def _machine(place: Place) -> list[Row]:
    facts: Row = {"hardware": device_name(place.device), "versions": versions()}
    if place.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        facts |= {"capability": place.capability, "memory_bytes": memory}
    return [{**facts, "revision": git_revision(), "processes": place.cores}]


def _copy_speed(place: Place) -> list[Row]:
    device = torch.device(place.device)
    source = torch.empty(2**20 if place.rehearses else 2**32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = min(time_once(lambda: target.copy_(source), device) for _ in range(10))
    return [{"bytes_per_s": 2 * len(source) / seconds}]


def _product_speed(place: Place, dtype: str) -> list[Row]:
    speed = product_ceiling(torch.device(place.device), getattr(torch, dtype))
    return [{"dtype": dtype, "flops_per_s": speed}]


# ---------------------------------------------------------------------- checks
def families() -> list[str]:
    """Return the families of kernels that layers use."""
    found: dict[str, None] = {}
    for case in CASES:
        layer = case.layer(8, head_dim=8, **{"num_heads": 2, **case.options})
        found.update(dict.fromkeys(layer.core.kernels))
    return [*found]


def checks(place: Place) -> list[Phase]:
    """Self-tests, parity with float64, and what a training does to a layer; each on its own."""
    kinds = [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 32)]
    cases = list(CASES)
    plain = [next(c for c in CASES if name in c.name) for name in ("softmax", "mgk", "fish")]
    names = families()
    if place.rehearses:
        kinds, cases, plain = [(torch.float32, 16)], plain[:1], plain[:1]
        names = [name for name in names if name.endswith("softmax")]
    units = [
        Unit(
            f"self-test: {name}, {dtype_name(dtype)}, {size}",
            partial(_self_test, place, name, dtype, size),
            25,
        )
        for dtype, size in kinds
        for name in names
    ]
    for dtype, size in kinds:
        # IEEE float32 takes long to compile: the first cases of it.
        for case in cases[:5] if dtype == torch.float32 else cases:
            units.append(parity_unit(place, case, dtype, size))
    for what, check in BEHAVIOURS.items():
        for case in plain:
            units.append(Unit(f"{what}: {case.name}", partial(check, place, case), 20))
    return [Phase(units, place.cores)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _self_test(place: Place, family: str, dtype: torch.dtype, head_dim: int) -> list[Row]:
    """In inference mode and autocast, where a first call may be."""
    device = torch.device(place.device)
    with torch.inference_mode(), torch.autocast(place.device, torch.bfloat16):
        wrong = selftest.run(family, device, dtype, (head_dim, head_dim))
    if wrong is not None and lost_gpu(wrong):
        raise RuntimeError(wrong)
    return [{"family": family, **verdict(wrong is None, wrong)}]


def parity_unit(place: Place, case: Case, dtype: torch.dtype, head_dim: int) -> Unit:
    """Return the comparison of a case with float64, beside eager code."""
    key = f"parity: {case.name}, {dtype_name(dtype)}, {head_dim}"
    return Unit(key, partial(_parity, place, case, dtype, head_dim), 40, 6)


def _parity(place: Place, case: Case, dtype: torch.dtype, head_dim: int) -> list[Row]:
    shapes = [(7, 9)] if place.rehearses else PARITY_SHAPES["cuda"]
    device = torch.device(place.device)
    found = parity_rows(case, dtype, device=device, head_dim=head_dim, shapes=shapes)
    return [
        {**row.shown(head_dim), **verdict(row.ratio <= BUDGET, f"over {BUDGET:g} times eager's")}
        for row in found
    ]


def _calls(place: Place, case: Case) -> tuple[Any, Any, torch.dtype]:
    """Return a layer, its inputs and their dtype."""
    dtype = torch.float32 if place.rehearses else torch.bfloat16
    layer = make_layer(
        replace(case, masks=()), 16 if place.rehearses else 64, torch.device(place.device)
    )
    size = 9 if place.rehearses else 512
    return layer, make_inputs(layer, replace(case, masks=()), size, size, dtype, 0), dtype


def _same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[Row]:
    gaps = {k: float((found[k] - expected[k]).abs().max()) for k in expected}
    worst = max(gaps, key=lambda k: gaps[k])
    limit = 2e-2 * max(1.0, float(expected[worst].abs().max()))
    good = all(torch.isfinite(x).all() for x in found.values()) and gaps[worst] <= limit
    return [
        {
            "largest_gap": gaps[worst],
            **verdict(bool(good), f"{worst} differs by {gaps[worst]:.1e}"),
        }
    ]


def _strides(place: Place, case: Case) -> list[Row]:
    layer, inputs, dtype = _calls(place, case)
    expected = heads_and_gradients(layer, "triton", inputs, dtype)
    moved = tuple(x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs.tensors)
    return _same(
        heads_and_gradients(layer, "triton", replace(inputs, tensors=moved), dtype), expected
    )


def _compiled(place: Place, case: Case) -> list[Row]:
    layer, inputs, dtype = _calls(place, case)
    expected = heads_and_gradients(layer, "triton", inputs, dtype)
    compiled = torch.compile(
        heads_and_gradients, backend="eager" if place.rehearses else "inductor"
    )
    return _same(compiled(layer, "triton", inputs, dtype), expected)


def _in_a_graph(place: Place, case: Case) -> list[Row]:
    layer, inputs, dtype = _calls(place, case)
    call = partial(heads_and_gradients, layer, "triton", inputs, dtype)
    expected = call()
    try:
        replay = captured(call, torch.device(place.device))
    except NotCapturedError as error:
        if place.rehearses:
            raise Skipped(str(error)) from error
        raise
    found: Any = replay()
    torch.cuda.synchronize()
    return _same(found, expected)


BEHAVIOURS = {"strides": _strides, "torch.compile": _compiled, "CUDA graph": _in_a_graph}


def checked(place: Place) -> str:
    """Return what the checks say of the kernels, beginning with "passed" if they are right."""
    asked = {unit.key for phase in checks(place) for unit in phase.units}
    return outcome(asked, read_units(place.rows("checks")))


def outcome(asked: Set[str], every: Sequence[Row]) -> str:
    """Return what rows say of the checks that are asked for, beginning with "passed" if all are."""
    rows = [row for row in every if row["unit"] in asked]
    wrong = {row["unit"] for row in rows if row["status"] == "failed"}
    left = asked - {row["unit"] for row in rows}
    if not wrong and not left:
        return f"passed: all {len(asked)} checks of this plan"
    return f"FAILED: {len(wrong)} of {len(asked)} checks failed, {len(left)} not run"


# ---------------------------------------------------------------------- training, tests
def train(place: Place) -> list[Phase]:
    """Return trainings with kernels beside those with the reference, a process each."""
    chosen = ATTENTION[:1] if place.rehearses else ATTENTION
    units = [Unit(Path(a).stem, partial(_trained, place, a), 45, 14) for a in chosen]
    return [Phase(units, 1 if place.rehearses else len(units))]


_TINY_RUN = (
    *("--data.init_args.batch_size", "2", "--data.init_args.eval_batch_size", "2"),
    *("--trainer.num_sanity_val_steps", "0", "--model.init_args.num_layers", "1"),
)


def _trained(place: Place, attention: str) -> list[Row]:
    tiny = _TINY_RUN if place.rehearses else ()
    steps = 1 if place.rehearses else 200
    lines, followed = compare_training(steps, place.device, [attention], tiny)
    reason = "a loss differs from the reference's"
    return [{**line, **verdict(followed, reason)} for line in lines]


_TESTS = ("parity", "dense", "fish", "linear", "operators", "backend", "training")


def tests(place: Place) -> list[Phase]:
    """Return the tests of the kernels, a file in a process."""
    files = [f"tests/kernels/test_{name}.py" for name in _TESTS]
    if place.rehearses:
        files = ["tests/kernels/test_backend.py::test_launching_on_a_wrong_tensor_is_refused"]
    return [Phase([Unit(name, partial(_tested, name), 120) for name in files], place.cores)]


def _tested(name: str) -> list[Row]:
    if not Path(name.split("::")[0]).exists():
        raise Skipped(f"{name} is not here")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, name], capture_output=True, text=True, check=False)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    print(done.stdout[-4000:])
    if "No module named pytest" in done.stderr:
        raise Skipped("pytest is not installed")
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    return [{"said": last, **verdict(done.returncode == 0, last)}]

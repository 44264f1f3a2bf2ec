"""The stages of the plan, in the order of their value, and what each of them measures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lit_probattn.configs import ConfigError
from lit_probattn.kernels import selftest
from lit_probattn.records.provenance import device_name, git_revision, versions
from lit_probattn.records.tables import markdown_lines
from profiling.kernels.cases import CASES, Case, compile_cases
from profiling.kernels.command import PARITY_SHAPES, header
from profiling.kernels.config import Grid as KernelsGrid
from profiling.kernels.config import KernelsConfig, Side, TorchSdpa, load_kernels, points
from profiling.kernels.parity import (
    ATTENTION,
    BUDGET,
    compare_training,
    heads_and_gradients,
    make_inputs,
    make_layer,
    parity_rows,
)
from profiling.kernels.speed import measured_rows, place_name, product_ceiling, speed_report
from profiling.measure.rows import append_rows, repair, without, write_tables
from profiling.measure.timing import NotCapturedError, captured, time_once
from profiling.report.page import write_report
from profiling.stages.units import Row, Skipped, Unit, read_units
from profiling.stages.warm import compile_units, compiled_kernels, tuning_units
from profiling.sweep.config import SweepConfig, load_sweep
from profiling.sweep.plan import Point, make_plan
from profiling.sweep.points import measure_point
from profiling.sweep.prepared import Predictions, load_predictions
from profiling.sweep.run import cannot_fit, claim_folder


@dataclass(frozen=True)
class Place:
    """Where the plan runs.

    Args:
        out: folder of the results, with a folder per stage.
        device: "cuda", or "cpu" in a rehearsal, where everything is tiny.
        capability: of the GPU, such as 90.
        cores: processes that compile or check at a time.
    """

    out: Path
    device: str
    capability: int = 90
    cores: int = 1

    @property
    def rehearses(self) -> bool:
        """Whether this is a rehearsal on the CPU."""
        return self.device == "cpu"

    def rows(self, stage: str) -> Path:
        """Return the file of a stage's rows."""
        return self.out / stage / "units.jsonl"


@dataclass(frozen=True)
class Phase:
    """Units of a stage that run in one go, in so many processes."""

    units: Sequence[Unit]
    jobs: int = 1


Report = Callable[[Place, list[Row]], str | None]


@dataclass(frozen=True)
class Stage:
    """A stage.

    Args:
        about: what it is for, in a few words.
        minutes: after which it is ended.
        phases: what it runs, one after the other.
        report: its page from its rows; None where `phases` write it.
    """

    name: str
    about: str
    minutes: float
    phases: Callable[[Place], list[Phase]]
    report: Report

    def predicted(self, place: Place) -> tuple[float, int]:
        """Return (seconds, rows) that all units are predicted to take, on all cores."""
        phases = self.phases(place)
        seconds = sum(
            3.0 + sum(unit.seconds for unit in phase.units) / min(phase.jobs, len(phase.units))
            for phase in phases
            if phase.units
        )
        return seconds, sum(unit.rows for phase in phases for unit in phase.units)


# ---------------------------------------------------------------------- environment
def _environment(place: Place) -> list[Phase]:
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


def _checks(place: Place) -> list[Phase]:
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
            f"self-test: {name}, {_name(dtype)}, {size}",
            partial(_self_test, place, name, dtype, size),
            25,
        )
        for dtype, size in kinds
        for name in names
    ]
    for dtype, size in kinds:
        # IEEE float32 takes long to compile: the first cases of it.
        for case in cases[:5] if dtype == torch.float32 else cases:
            key = f"parity: {case.name}, {_name(dtype)}, {size}"
            units.append(Unit(key, partial(_parity, place, case, dtype, size), 40, 6))
    for what, check in BEHAVIOURS.items():
        for case in plain:
            units.append(Unit(f"{what}: {case.name}", partial(check, place, case), 20))
    return [Phase(units, place.cores)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _self_test(place: Place, family: str, dtype: torch.dtype, head_dim: int) -> list[Row]:
    """In inference mode and autocast, where a first call may be."""
    device = torch.device(place.device)
    with torch.inference_mode(), torch.autocast(place.device, torch.bfloat16):
        wrong = selftest.run(family, device, dtype, (head_dim, head_dim))
    return [{"family": family, **_verdict(wrong is None, wrong)}]


def _verdict(good: bool, reason: str | None) -> Row:
    return {"status": "ok"} if good else {"status": "failed", "reason": reason}


def _parity(place: Place, case: Case, dtype: torch.dtype, head_dim: int) -> list[Row]:
    shapes = [(7, 9)] if place.rehearses else PARITY_SHAPES["cuda"]
    device = torch.device(place.device)
    found = parity_rows(case, dtype, device=device, head_dim=head_dim, shapes=shapes)
    return [
        {**row.shown(head_dim), **_verdict(row.ratio <= BUDGET, f"over {BUDGET:g} times eager's")}
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
            **_verdict(bool(good), f"{worst} differs by {gaps[worst]:.1e}"),
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
    rows = read_units(place.rows("checks"))
    asked = {unit.key for phase in _checks(place) for unit in phase.units}
    wrong = {row["unit"] for row in rows if row["status"] == "failed"}
    left = asked - {row["unit"] for row in rows}
    if not wrong and not left:
        return f"passed: all {len(asked)} checks of this plan"
    return f"FAILED: {len(wrong)} of {len(asked)} checks failed, {len(left)} not run"


# ---------------------------------------------------------------------- speed of kernels
def kernels_config(place: Place, name: str) -> KernelsConfig:
    """Return a kernels file; in a rehearsal, one tiny point of a few sides on the CPU."""
    config = load_kernels(f"configs/profiling/{name}.yaml")
    if not place.rehearses:
        return config
    every = {
        k: v.model_copy(update={"seq_lens": None, "head_dims": None, "dtypes": None})
        for k, v in config.sides.items()
    }
    library = {k: Side(torch_sdpa=TorchSdpa(num_heads=8)) for k, v in every.items() if v.torch_sdpa}
    ours = {k: v for k, v in every.items() if v.attention is not None}
    fused = [k for k, v in ours.items() if v.backend == "triton"][:2]
    eager = [k for k, v in ours.items() if v.backend == "reference"][:1]
    sides = {**dict([*library.items()][:1]), **{k: ours[k] for k in (*eager, *fused)}}
    compared = [c for c in config.comparisons if c.side in sides and c.against in sides]
    grid = KernelsGrid(tokens=16, seq_lens=[16], head_dims=[16], modes=["train"])
    tiny = {"device": "cpu", "dtype": "float32", "warmup": 0, "repeats": 1, "grid": grid}
    return config.model_copy(update={"sides": sides, "comparisons": compared, **tiny})


def _speed(name: str, grids: slice, place: Place) -> list[Phase]:
    """The points of some grids, after their kernels have been compiled on all cores."""
    config = kernels_config(place, name)
    phases = []
    every = config.grid[grids] if isinstance(config.grid, list) else [config.grid]
    for grid in every:
        here = points(config.model_copy(update={"grid": grid}))
        phases.append(Phase(compile_units(here, place.capability), place.cores))
        phases.append(Phase([_point_unit(point, place) for point in here]))
    return phases


def _point_unit(point: KernelsConfig, place: Place) -> Unit:
    seconds = sum(_side_seconds(point, name) for name in point.sides)
    rows = len(point.sides) + len(point.comparisons)
    return Unit(place_name(point), partial(_timed, point, place), seconds, rows)


def _side_seconds(point: KernelsConfig, name: str) -> float:
    """Predict the seconds of a side: calls times products over a speed to be expected."""
    side = point.sides[name]
    fused = side.torch_sdpa is not None or side.backend in ("triton", "sdpa")
    speed = (2e14 if fused else 4e13) / (8 if point.dtype == "float32" else 1)
    passes = 3.5 if point.mode == "train" else 1.0
    flops = 32 * point.batch_size * point.seq_len**2 * point.head_dim * passes
    calls = 2 * (point.warmup + point.repeats) + 8
    return 0.3 + calls * (flops / speed + 1e-3) + (30 if side.backend == "flex" else 0)


def _timed(point: KernelsConfig, place: Place) -> list[Row]:
    before = compiled_kernels()
    rows = measured_rows(point, _ceiling(place), True)
    # Kernels that were compiled only now were missed by the stage's own compiling.
    return [*rows, {"place": place_name(point), "compiled_late": compiled_kernels() - before}]


def _ceiling(place: Place) -> float:
    rows = read_units(place.rows("environment"))
    found = [
        row["flops_per_s"]
        for row in rows
        if row.get("dtype") == "bfloat16" and "flops_per_s" in row
    ]
    return float(found[-1]) if found else float("nan")


def _hardware(place: Place) -> str:
    found = [r["hardware"] for r in read_units(place.rows("environment")) if "hardware" in r]
    return f"{found[-1]}{' (interpreter)' if place.rehearses else ''}" if found else "not noted"


def _speed_page(name: str, place: Place, rows: list[Row]) -> str:
    tests = checked(place)
    measured = [row for row in rows if "place" in row and "compiled_late" not in row]
    if not tests.startswith("passed"):
        measured = [row for row in measured if "comparison" not in row]
    late = sum(row.get("compiled_late", 0) for row in rows)
    page = speed_report(
        kernels_config(place, name), measured, _ceiling(place), tests, _hardware(place)
    )
    return f"{page}\n\nKernels that were compiled while sides were timed: {late}."


# ---------------------------------------------------------------------- sweeps
def sweep_config(place: Place, name: str) -> SweepConfig:
    """Return a sweep; of one tiny place per variant on the CPU in a rehearsal."""
    config = load_sweep(f"configs/profiling/{name}.yaml")
    if not place.rehearses:
        return config
    content = config.model_dump(mode="json")
    content["model"] |= {"head_dim": 16, "head_dim_divisor": None, "num_layers": 1}
    content["model"] |= {"mlp_dim": 24, "vocab_size": 53}
    content["grid"] |= {"embed_dim": [32], "seq_len": [16], "batch_size": [1], "dtype": ["float32"]}
    content["grid"]["mode"] = content["grid"]["mode"][-1:]
    kept = [name for name, v in config.variants.items() if v.baseline is None][:2]
    content["variants"] = {name: content["variants"][name] for name in kept}
    if content["report"]:
        content["report"]["paper"] = []  # sentences are of the whole grid
    content |= {"device": "cpu", "timing": {"warmup": 0, "repeats": 2}}
    return SweepConfig.model_validate(content)


def _sweep(name: str, stage: str, place: Place) -> list[Phase]:
    config = sweep_config(place, name)
    folder = place.out / stage / "sweep"
    known = load_predictions(f"configs/profiling/{name}.yaml", "cuda")
    units = [
        Unit(point.point_id, partial(_swept, config, folder, known, point), _seconds(point, known))
        for point in make_plan(config, Path.cwd())
    ]
    return [Phase(units)]


def _seconds(point: Point, known: Predictions) -> float:
    """Predict the seconds of a point from its prepared count."""
    found = known.of(point)
    macs = 0 if found is None or found.macs is None else found.macs
    speed = 3e13 if point.dtype == "float32" else 1e14
    calls = (
        4 if point.quantity == "memory" else 1 + point.timing["warmup"] + point.timing["repeats"]
    )
    longest = point.timing.get("max_seconds", 60.0)
    return 0.4 + min(calls * (2 * macs / speed + 2e-3), longest + 2.0)


def _swept(config: SweepConfig, folder: Path, known: Predictions, point: Point) -> list[Row]:
    """Measure a point of a sweep here; its rows go to the sweep's own file."""
    found = known.of(point)
    predicted = None if found is None else found.memory
    rows = cannot_fit(point, predicted) or measure_point(point, predicted)
    claim_folder(config, folder)
    path = folder / "rows.jsonl"
    without(path, repair(path), {point.point_id})
    append_rows(path, rows)
    first = rows[0]
    reason = f"{point.label}: {first.reason}"
    if first.status == "skipped" or any(
        text in reason for text in ("cannot hold heads", "out of memory")
    ):
        raise Skipped(reason)
    if first.status != "ok":
        raise RuntimeError(reason)
    macs = None if found is None else found.macs
    values = ("peak_memory_bytes", "time_median_s", "time_p20_s", "time_p80_s")
    row: Row = {
        "point": point.label,
        "macs": macs,
        **{name: getattr(first, name) for name in values},
    }
    if first.time_median_s and macs:
        row["flops_per_s"] = 2 * macs / first.time_median_s
    if first.peak_memory_bytes and predicted is not None:
        row["predicted_over_measured"] = predicted[0] / first.peak_memory_bytes
    return [row]


def _sweep_page(name: str, stage: str, place: Place, rows: list[Row]) -> str | None:
    folder = place.out / stage / "sweep"
    if not (folder / "rows.jsonl").exists():
        return None
    write_tables(repair(folder / "rows.jsonl"), folder)
    write_report(sweep_config(place, name), folder, place.out / stage)
    return None


# ---------------------------------------------------------------------- training, tests, tuning
def _train(place: Place) -> list[Phase]:
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
    return [{**line, **_verdict(followed, reason)} for line in lines]


_TESTS = ("parity", "dense", "fish", "linear", "operators", "backend", "training")


def _tests(place: Place) -> list[Phase]:
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
    return [{"said": last, **_verdict(done.returncode == 0, last)}]


def _tuning(place: Place) -> list[Phase]:
    """Candidates are compiled on all cores before the GPU times them."""
    cases, sizes = tuned_cases(), [64, 128]
    if place.rehearses:
        cases, sizes = cases[:1], sizes[:1]
    dtype, capability = torch.bfloat16, place.capability
    units = [
        Unit(f"{case.name}, {size}", partial(_tuned, place, case, size), 20, 3)
        for size in sizes
        for case in cases
    ]
    return [
        Phase(tuning_units(cases, sizes, dtype, capability), place.cores),
        Phase(units),
    ]


def tuned_cases() -> list[Case]:
    """Return the cases that are tuned; tiles of FiSH and chunks of linear attention are planned."""
    left_out = ("dropout", "linear", "fish")
    return [case for case in compile_cases() if not any(word in case.name for word in left_out)]


def _tuned(place: Place, case: Case, head_dim: int) -> list[Row]:
    from profiling.kernels.compile import tune

    if place.rehearses:
        raise Skipped("launch configurations are found by measurement, which needs a GPU")
    path, lines = tune([head_dim], [torch.bfloat16], [case])
    kept = place.out / "tuning" / Path(path).name
    kept.write_bytes(Path(path).read_bytes())
    return lines or [{"status": "failed", "reason": "no candidate ran"}]


# ---------------------------------------------------------------------- pages
def table_page(title: str, place: Place, rows: Iterable[Row]) -> str:
    """Return a page with the rows as tables, one per set of columns."""
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        shown = {k: v for k, v in row.items() if k != "session"}
        tables.setdefault(tuple(shown), []).append(shown)
    lines = header(title, [f"Hardware: {_hardware(place)}"])
    for table in tables.values():
        lines += ["", *markdown_lines(pd.DataFrame(table).astype(object).fillna("–"))]
    return "\n".join(lines)


def _kernel_stage(
    name: str, config: str, about: str, minutes: float, first: int = 0, last: int | None = None
) -> Stage:
    phases = partial(_speed, config, slice(first, last))
    return Stage(name, about, minutes, phases, partial(_speed_page, config))


def _sweep_stage(name: str, config: str, about: str, minutes: float) -> Stage:
    return Stage(
        name, about, minutes, partial(_sweep, config, name), partial(_sweep_page, config, name)
    )


def _table_stage(
    name: str, about: str, minutes: float, phases: Callable[[Place], list[Phase]]
) -> Stage:
    return Stage(name, about, minutes, phases, partial(table_page, about))


STAGES = (
    _table_stage("environment", "Versions, and what the GPU reaches", 1, _environment),
    _table_stage("checks", "Whether the kernels are right", 6, _checks),
    _kernel_stage("speed", "kernels_cuda", "Softmax, MGK and sMGK, with gates", 8, 0, 2),
    _kernel_stage("speed_fish", "kernels_fish_cuda", "FiSH and linear attention, with gates", 6),
    _kernel_stage("memory", "kernels_memory_cuda", "Memory of a step over N", 3),
    _sweep_stage("table7", "mgk_table7_cuda", "MGK, Table 7", 3),
    _sweep_stage("lm", "lm_cuda", "The language model over D and N", 8),
    _sweep_stage("lm_fish", "lm_fish_cuda", "The language model with FiSH over D", 4),
    _table_stage("train", "Losses with kernels and with the reference", 4, _train),
    _sweep_stage("attention", "attention_cuda", "One layer over D and N", 8),
    _sweep_stage("lm_long", "lm_long_cuda", "The language model, N of 128 and 8192", 8),
    _sweep_stage("lm_wide", "lm_wide_cuda", "The language model, D of 4096", 8),
    _kernel_stage("speed_more", "kernels_cuda", "Other lengths, heads of 32, float32", 8, 2),
    _table_stage("tests", "The tests of the kernels", 8, _tests),
    _table_stage("tuning", "The fastest launch configurations", 8, _tuning),
)


def stages_named(names: Sequence[str]) -> list[Stage]:
    """Return stages in the order of the plan, all without names; unknown ones are a ConfigError."""
    known = [stage.name for stage in STAGES]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ConfigError(f"unknown stage {wrong[0]!r}; expected some of: {' '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]

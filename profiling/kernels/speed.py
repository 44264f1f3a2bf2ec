"""`python -m profiling kernels`: compare implementations of attention in one run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lit_probattn.base.errors import ConfigError, UnsupportedError
from lit_probattn.base.processes import capture
from lit_probattn.base.provenance import command_line, device_name, git_revision, versions
from lit_probattn.base.rows import RowStore
from lit_probattn.experiments.page import Made, Page, as_csv, image
from lit_probattn.kernels.cpu import selftest
from lit_probattn.measure.counters import torch_flops
from lit_probattn.measure.memory import peak_bytes
from lit_probattn.measure.timing import (
    captured,
    lost_gpu,
    quantile,
    round_ratios,
    spread,
    time_sides,
)
from lit_probattn.records.markdown import one_line
from lit_probattn.records.tables import counted, markdown_lines, span
from profiling.kernels.ahead import compile_ahead
from profiling.kernels.bound import measured_rates, product_rate
from profiling.kernels.command import parity_tasks
from profiling.kernels.config import Comparison, KernelsConfig, Side, points
from profiling.kernels.figure import time_figure
from profiling.kernels.parity import BUDGET, ParityRow, compare_all
from profiling.kernels.sides import side_family, side_function, side_work
from profiling.measure.tasks import default_jobs
from profiling.sweep.run import missing_device


@dataclass(frozen=True)
class SideResult:
    """Measurements of one side.

    Args:
        eager: seconds of calls from Python, by round.
        graph: seconds of CUDA graph replays; None without a graph.
        note: the reason why there is no graph.
        bound: lower bound on the seconds (`profiling.kernels.bound`), on a CPU in float32 or
            bfloat16.
    """

    eager: list[float]
    graph: list[float] | None
    peak_memory_bytes: int
    flops: int | None = None
    note: str = ""
    bound: float | None = None

    @property
    def best(self) -> list[float]:
        """Seconds of the graph replays, or of calls from Python without a graph."""
        return self.eager if self.graph is None else self.graph

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s of matrix products, by the median time."""
        return None if self.flops is None else self.flops / quantile(self.best, 0.5)


@dataclass(frozen=True)
class Checked:
    """What was compared before the measurement.

    Args:
        passed: whether everything agreed.
        summary: result in one line.
        wrong: families and dtypes that failed, whose sides are not compared; None means all sides.
        rows: errors per tensor.
    """

    passed: bool
    summary: str
    wrong: frozenset[tuple[str, str]] | None = frozenset()
    rows: Sequence[Mapping[str, Any]] = ()

    def trusts(self, side: Side, config: KernelsConfig) -> bool:
        """Return whether a side may be compared at a point."""
        if self.wrong is None:
            return False
        is_kernel = side.attention is not None and side.backend in ("triton", "auto")
        if not (self.wrong and is_kernel):
            return True
        return (side_family(side, config), config.dtype) not in self.wrong


def parity(
    config: KernelsConfig, root: Path, jobs: int = 1, store: RowStore[dict[str, Any]] | None = None
) -> Checked:
    """Compare errors of kernels, or run the parity tests of the config, and return the result.

    Stored comparisons are not repeated, except those that failed.
    """
    if config.parity is not None:
        tasks = [
            task
            for dtype, head_dims in config.parity.head_dims.items()
            for task in parity_tasks(
                config.parity.cases, [getattr(torch, dtype)], head_dims, config.device
            )
        ]
        kept = {row["label"]: row for row in (store.rows if store else []) if row["passed"]}
        missing = [task for task in tasks if task.label not in kept]
        for result in compare_all(missing, jobs):
            row = {**asdict(result), "passed": result.passed}
            kept[result.label] = row
            if store is not None:
                store.add(row)
        return checked([kept[task.label] for task in tasks])
    if not config.parity_tests:
        return Checked(False, "the file names no parity tests", None)
    missing_files = [t for t in config.parity_tests if not (root / t.split("::")[0]).exists()]
    if missing_files:
        return Checked(False, f"parity tests not found: {', '.join(missing_files)}", None)
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", *config.parity_tests]
    done = capture(command, cwd=root)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    summary = lines[-1] if lines else f"pytest exit status {done.returncode}"
    passed = done.returncode == 0
    return Checked(passed, summary, frozenset() if passed else None)


def checked(rows: Sequence[Mapping[str, Any]]) -> Checked:
    """Return the result of stored comparisons of kernels."""
    wrong = [row for row in rows if not row["passed"]]
    said = f"{len(rows) - len(wrong)} of {len(rows)} cases within {BUDGET:g} times the error of "
    said += "eager code" + "".join(
        f"; {row['label']}: {row['problem'] or 'larger errors'}" for row in wrong
    )
    shown = [ParityRow(**tensor).shown(row["head_dim"]) for row in rows for tensor in row["rows"]]
    families = frozenset((row["family"], row["dtype"]) for row in wrong)
    return Checked(not wrong, said, families, shown)


def measure(config: KernelsConfig) -> tuple[dict[str, SideResult], dict[str, str]]:
    """Time all sides in turns and measure peak memory; also return why a side did not run.

    On a GPU, a CUDA graph is replayed, without Python; calls from Python are timed afterwards.
    Without a GPU only calls are timed. A RuntimeError names the side after which the GPU failed
    (`lost_gpu`).
    """
    device = torch.device(config.device)
    functions, replays, memory, flops = {}, {}, {}, {}
    failed: dict[str, str] = {}
    notes: dict[str, str] = {}
    for name, side in config.sides.items():
        try:
            function = side_function(side, config)
            function()
            memory[name] = peak_bytes(function, device)
            runs_library = device.type == "cpu" and side.backend in ("native", "auto")
            uncounted = runs_library or side.backend == "flex"  # compiled code
            flops[name] = None if uncounted else _flops(function)
            replays[name] = captured(function, device)
        except UnsupportedError as error:
            notes[name] = f"eager only: {error}"
        except torch.OutOfMemoryError:
            failed[name] = "out of memory"
            continue
        except ConfigError:
            raise
        except Exception as error:  # sizes that a backend does not support; compilers raise any
            reason = str(error).partition("\n")[0]
            if lost_gpu(error):
                raise RuntimeError(f"{name}: {reason}") from error
            failed[name] = reason[:80]
            continue
        functions[name] = function
    names = ("warmup", "repeats", "max_seconds")
    limits: dict[str, Any] = {name: getattr(config, name) for name in names}
    graphs = time_sides(replays, device=device, **limits)
    replays.clear()  # the graphs keep the memory of their calls
    eager = time_sides(functions, device=device, **limits)
    results = {
        name: SideResult(
            *(eager[name], graphs.get(name), memory[name], flops[name], notes.get(name, "")),
            bound=_bound(config, name),
        )
        for name in functions
    }
    return results, failed


def _bound(config: KernelsConfig, name: str) -> float | None:
    if (config.device, config.scope) != ("cpu", "attention"):
        return None
    if config.dtype not in ("float32", "bfloat16"):
        return None
    work = side_work(config.sides[name], config)
    if work is None or selftest.failure() is not None:
        return None
    threads = config.num_threads or torch.get_num_threads()
    return work.seconds(threads, getattr(torch, config.dtype))


def _flops(function: Callable[[], object]) -> int | None:
    try:
        return torch_flops(function)
    except UnsupportedError:
        return None


def run_kernels(
    config: KernelsConfig, root: Path, folder: Path | None = None, jobs: int | None = None
) -> tuple[Page, bool]:
    """Check the kernels and measure; return the report and whether all bounds hold.

    Kernels that fail are timed, but not compared. Results are stored in `folder`, if given, and
    not measured again.

    Args:
        config: the file.
        root: folder to which paths in the config are relative.
        folder: report folder.
        jobs: processes that compile and compare at the same time; None means `default_jobs`.

    Raises:
        ConfigError: the device is not available, or a side cannot be built.
    """
    gone = missing_device(config.device)
    if gone is not None:
        raise ConfigError(gone)
    if jobs is not None and config.parity is None and config.device != "cuda":
        raise ConfigError("jobs has no effect: the file compares and compiles no kernels")
    jobs = jobs or default_jobs(config.device)
    compared = None if folder is None else open_store(config, folder, "parity.jsonl", "label")
    result = parity(config, root, jobs, compared)
    print(f"parity: {result.summary}", flush=True)
    wrong = None if result.wrong is None else sorted(result.wrong)
    store = (
        None if folder is None else open_store(config, folder, "points.jsonl", "place", wrong=wrong)
    )
    if jobs > 1 and config.device == "cuda":
        done = {row["place"] for row in (store.rows if store else [])}
        for problem in compile_ahead(
            [point for point in points(config) if place_name(point) not in done], jobs
        ):
            print(f"not compiled: {problem}", flush=True)
    rows = [row for point in points(config) for row in point_rows(point, result, store)]
    passed = result.passed and not any(row.get("holds") is False for row in rows)
    tests = f"{'passed' if result.passed else 'FAILED'}: {result.summary}"
    page = speed_report(config, rows, tests, device_name(config.device))
    if result.rows:
        page = replace(page, tables={**page.tables, "parity": as_csv(pd.DataFrame(result.rows))})
    return page, passed


# Keys that identify a point of a file.
_POINT = {"dtype", "head_dim", "seq_len", "batch_size", "is_causal", "mode", "scope", "num_threads"}


def open_store(
    config: KernelsConfig, folder: Path, name: str, key: str, **more: Any
) -> RowStore[dict[str, Any]]:
    """Open a file of results; those of other sides, devices, code or `more` are dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    given = config.model_dump(exclude={"grid", "parity_tests", "parity", "figure", *_POINT})
    for side, named in config.sides.items():
        if named.attention is not None:  # its file may change after a measurement
            given["sides"][side]["attention"] = named.attention.resolve(Path.cwd())
    machine = {"device": device_name(config.device), "versions": versions()}
    settings = {**given, **machine, "revision": git_revision(), **more}
    return RowStore(
        *(folder / name, dict[str, Any], (key,)),
        settings=settings,
        is_final=lambda row: bool(row.get("passed", True)),
    )


def point_rows(
    config: KernelsConfig, result: Checked, store: RowStore[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the stored rows of a point, or `measured_rows` with the threads of the point."""
    place = place_name(config)
    kept = [row["rows"] for row in (store.rows if store else []) if row["place"] == place]
    if kept:
        return list(kept[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(config.num_threads or threads)
    try:
        print(f"measuring {place}", flush=True)
        device, dtype = torch.device(config.device), getattr(torch, config.dtype)
        ceiling = product_rate(device, dtype, 8192 if device.type == "cuda" else 512)
        rows = measured_rows(config, ceiling, result)
    finally:
        torch.set_num_threads(threads)
    if store is not None:
        store.add({"place": place, "rows": rows})
    return rows


def place_name(config: KernelsConfig) -> str:
    """Return the heading of a point, which identifies it."""
    passes = {
        "train": "forward + backward",
        "eval": "forward",
        "decode": "one query over N keys",
    }[config.mode]
    passes += ", layer with projections" if config.scope == "layer" else ""
    causal = ", causal" if config.is_causal else ""
    sizes = f"N = {config.seq_len}, head size {config.head_dim}, batch {config.batch_size}"
    threads = "" if config.num_threads is None else f", {counted(config.num_threads, 'thread')}"
    return f"{sizes}, {config.dtype}, {passes}{causal}{threads}"


def measured_rows(config: KernelsConfig, ceiling: float, result: Checked) -> list[dict[str, Any]]:
    """Measure one point; return a row per side, and per comparison of sides that may be trusted.

    `ceiling` is the FLOP/s of a large matrix product in the dtype and with the threads of the
    point.
    """
    results, failed = measure(config)
    place = {"place": place_name(config)}
    rows: list[dict[str, Any]] = [
        {**place, "side": name, **_side_row(one, ceiling)} for name, one in results.items()
    ]
    rows += [{**place, "side": name, "failed": reason} for name, reason in failed.items()]
    trusted = {name for name in results if result.trusts(config.sides[name], config)}
    rows += [
        {**place, "comparison": c.name, **_compare(c, config, results)}
        for c in config.comparisons
        if c.side in trusted and c.against in trusted
    ]
    return rows


def _side_row(result: SideResult, ceiling: float) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, seconds in (("graph", result.graph), ("eager", result.eager)):
        found = None if seconds is None else spread(f"{name}_s", seconds)
        row |= (
            dict.fromkeys((f"{name}_s", f"{name}_s_p20", f"{name}_s_p80"))
            if found is None
            else found
        )
    speed = result.flops_per_s
    row |= {"calls": len(result.best), "peak_memory_bytes": result.peak_memory_bytes}
    row |= {"flops": result.flops, "flops_per_s": speed, "note": result.note}
    bound = result.bound
    row["of_bound"] = None if bound is None else quantile(result.best, 0.5) / bound
    row |= {"ceiling_flops_per_s": ceiling, "bound_s": bound}
    return {**row, "of_ceiling": None if speed is None else speed / ceiling}


def _compare(
    comparison: Comparison, config: KernelsConfig, results: dict[str, SideResult]
) -> dict[str, Any]:
    """Return the ratios of two sides within rounds, and whether their bounds hold.

    Graphs are compared with graphs. If a side has none, calls from Python are compared; bounds on
    time then do not apply to a GPU, since Python would dominate.
    """
    side, against = results[comparison.side], results[comparison.against]
    by_graph = side.graph is not None and against.graph is not None
    seconds = (side.graph, against.graph) if by_graph else (side.eager, against.eager)
    rounds = round_ratios(*(x or [] for x in seconds))
    ratio = quantile(rounds, 0.5)
    memory = side.peak_memory_bytes / against.peak_memory_bytes
    tflops = None if side.graph is None else (side.flops_per_s or 0.0) / 1e12
    timed = by_graph or config.device == "cpu"
    is_predicted = config.mode == "train" and not config.is_causal
    verdicts = []
    for bounds in comparison.bounds(config):
        verdicts += [
            _verdict("time ≤", bounds.max_time_ratio, ratio if timed else None),
            _verdict("time ≥", bounds.min_time_ratio, ratio if timed else None),
            _verdict("memory ≤", bounds.max_memory_ratio, memory),
            _verdict("TFLOP/s ≥", bounds.min_tflops, tflops),
        ]
    asked = [verdict for verdict in verdicts if verdict is not None]
    return {
        **spread("time_ratio", rounds),
        "memory_ratio": memory,
        "timed": "graph" if by_graph else "eager",
        "predicted": comparison.predicted.get(config.head_dim, "") if is_predicted else "",
        "required": ", ".join(text for text, _ in asked),
        "holds": all(holds for _, holds in asked) if asked else None,
    }


def _verdict(name: str, bound: float | None, value: float | None) -> tuple[str, bool] | None:
    """Return the requirement and whether it holds; None if there is none or it was not measured."""
    if bound is None or value is None:
        return None
    return f"{name} {bound:g}", value <= bound if name.endswith("≤") else value >= bound


def speed_report(
    config: KernelsConfig,
    rows: Sequence[Mapping[str, Any]],
    tests: str,
    hardware: str,
) -> Page:
    """Return the report of measured rows, one section per point.

    Args:
        config: the file.
        rows: rows of `measured_rows` for any number of points.
        tests: result of the parity tests.
        hardware: the device and its processor.
    """
    missed = [row for row in rows if row.get("holds") is False]
    ceilings = [row["ceiling_flops_per_s"] / 1e12 for row in rows if "ceiling_flops_per_s" in row]
    facts = [
        f"Random data; {config.dtype} and attention without projections unless the heading differs",
        f"Implementations alternate, after {config.warmup} warm-up calls each; medians with 20 % "
        "and 80 % quantiles. On a GPU: replays of a CUDA graph, and calls from Python in a "
        "separate column",
        f"A large matrix product, in the dtype and with the threads of the point, reaches "
        f"{span(ceilings)} TFLOP/s",
        "TFLOP/s: executed products, 2 FLOP per multiply-add, not halved by causal masks",
        f"Parity tests: {tests}",
    ]
    if any(row.get("of_bound") for row in rows):
        rates = measured_rates()
        facts.append(
            "Bound: counted products, exponentials and draws at the measured rates of one core, "
            f"{rates.products / 1e9:.0f} GFLOP/s, {rates.exponentials / 1e9:.2f} G "
            f"exponentials/s, {rates.normals / 1e9:.2f} G normal draws/s"
        )
    gates = [row for row in rows if row.get("holds") is not None]
    if gates:
        facts.append(f"Bounds: {len(gates) - len(missed)} of {len(gates)} hold")
    facts += [f"MISSED: {row['comparison']} at {row['place']}: {_ratio(row)}" for row in missed]
    facts += _slower(rows)
    lines = [f"- {one_line(fact)}" for fact in facts]
    # The finding and the figure cover the points in the mode of the file.
    main = {place_name(point) for point in points(config) if point.mode == config.mode}
    shown = [row for row in rows if row["place"] in main] or rows
    found, figures = finding(config, shown), {}
    lines += ["", f"Finding: {found}"] if found else []
    if found:
        figures["time_ratio"] = time_figure(config, shown)
        lines += ["", image("time_ratio")]
    for place in dict.fromkeys(row["place"] for row in rows):
        here = [row for row in rows if row["place"] == place]
        lines += ["", f"## {place}", ""]
        sides = [_side_line(row) for row in here if "eager_s" in row]
        lines += markdown_lines(pd.DataFrame(sides)) if sides else []
        lines.append("")
        lines += [f"{row['side']} did not run: {row['failed']}" for row in here if "failed" in row]
        lines.append("")
        any_predicted = any(row.get("predicted") for row in rows)
        compared = [_ratio_line(row, any_predicted) for row in here if "comparison" in row]
        if compared:
            lines += markdown_lines(pd.DataFrame(compared))
        elif config.comparisons and not tests.startswith("passed"):
            lines.append("No ratios, since the parity tests did not pass.")
    return Page(
        kind="kernels",
        title="Comparison of attention implementations",
        made=Made.here(command_line(), hardware),
        finding=found,
        body=lines,
        tables={"rows": as_csv(pd.DataFrame(rows))},
        figures=figures,
    )


def finding(config: KernelsConfig, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the range of each comparison that the file's figure shows; empty if there is none."""
    names = dict.fromkeys(name for row in config.figure.values() for name in row.values())
    told = []
    for name in names:
        found = [row["time_ratio"] for row in rows if row.get("comparison") == name]
        if found:
            told.append(f"{name} {min(found):.2f} to {max(found):.2f}")
    sides = dict.fromkeys(c.against for c in config.comparisons if c.name in names)
    if not told:
        return ""
    places = counted(len({row["place"] for row in rows}), "point")
    return f"time relative to {' or '.join(sides)}, at {places}: {', '.join(told)}."


def _slower(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per comparison with time ratios above 1, timed by graphs."""
    timed = [row for row in rows if row.get("timed") == "graph"]
    lines = []
    for name in dict.fromkeys(row["comparison"] for row in timed):
        mine = [row for row in timed if row["comparison"] == name]
        above = [row for row in mine if row["time_ratio"] > 1]
        if above:
            worst = max(above, key=lambda row: row["time_ratio"])
            lines.append(
                f"Above 1: {name} at {len(above)} of {counted(len(mine), 'point')}, at most "
                f"{worst['time_ratio']:.2f} at {worst['place']}"
            )
    return lines


def _ratio(row: Mapping[str, Any]) -> str:
    return (
        f"time ratio {row['time_ratio']:.3f} "
        f"({row['time_ratio_p20']:.3f} – {row['time_ratio_p80']:.3f}), memory ratio "
        f"{row['memory_ratio']:.4f}{', required: ' if row['required'] else ''}{row['required']}"
    )


def _side_line(row: Mapping[str, Any]) -> dict[str, object]:
    def time(name: str) -> str:
        if row[name] is None:
            return "–"
        low, high = (row[f"{name}_{end}"] * 1e3 for end in ("p20", "p80"))
        return f"{row[name] * 1e3:.3f} ({low:.3f} – {high:.3f})"

    speed = row["flops_per_s"]
    return {
        "side": row["side"],
        "graph (ms)": time("graph_s"),
        "eager (ms)": time("eager_s"),
        "calls": row["calls"],
        "TFLOP/s": "–" if speed is None else f"{speed / 1e12:.3g}",
        "of ceiling": "–" if speed is None else f"{row['of_ceiling']:.0%}",
        "time / bound": "–" if row["of_bound"] is None else f"{row['of_bound']:.2f}",
        "peak memory (MiB)": f"{row['peak_memory_bytes'] / 2**20:.1f}",
        "note": row["note"],
    }


def _ratio_line(row: Mapping[str, Any], any_predicted: bool) -> dict[str, object]:
    verdict = {True: "yes", False: "NO", None: "–"}[row["holds"]]
    return {
        "comparison": row["comparison"],
        "time ratio": f"{row['time_ratio']:.3f} ({row['time_ratio_p20']:.3f} – "
        f"{row['time_ratio_p80']:.3f})",
        "timed": row["timed"],
        **({"predicted": row["predicted"] or "–"} if any_predicted else {}),
        "memory ratio": f"{row['memory_ratio']:.4f}",
        "required": row["required"] or "–",
        "holds": verdict,
    }

"""`python -m profiling kernels`: the implementations of attention side by side, in one run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_probattn.attention import Attention, HeadCall, MGKAttention
from lit_probattn.attention.masks import make_masks
from lit_probattn.configs import ConfigError, build_attention
from lit_probattn.randomness import AttentionDropout, RandomKey
from lit_probattn.records.provenance import device_name, git_revision, versions
from lit_probattn.records.rows import RowStore
from lit_probattn.records.tables import markdown_lines
from profiling.kernels.cases import draw_heads
from profiling.kernels.command import header
from profiling.kernels.config import Comparison, KernelsConfig, Side, TorchSdpa, points
from profiling.kernels.parity import run_heads
from profiling.measure.counters import UncountedOperationError, torch_flops
from profiling.measure.memory import peak_bytes
from profiling.measure.timing import Timing, quantile, summarise, time_once, time_sides
from profiling.sweep.run import missing_device

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def side_function(side: Side, config: KernelsConfig) -> Callable[[], list[Tensor]]:
    """Return a function that runs a side once, forward or forward and backward.

    Only attention itself is inside: no projections. Keys are shifted, expanded and combined with
    priors inside, as in the layer, and parameters get their gradients. Backend `auto` is what a
    layer would choose. An attention that cannot be built is a ConfigError.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    generator = torch.Generator(device).manual_seed(config.seed)
    train = config.mode == "train"

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    parameters: list[Tensor] = []
    if side.torch_sdpa is not None:
        shape = (config.batch_size, side.torch_sdpa.num_heads, config.seq_len, config.head_dim)
        inputs = [make(*shape).requires_grad_() for _ in range(3)]
        forward = partial(_sdpa, side.torch_sdpa, inputs, config.is_causal)
    else:
        assert side.attention is not None
        class_path, init_args = side.attention.resolve(Path.cwd())
        layer = build_attention(class_path, init_args, config.head_dim, config.head_dim)
        layer.to(device=device, dtype=dtype).train(train)
        found = draw_heads(layer, config.batch_size, config.seq_len, config.seq_len, make)
        inputs = [x.contiguous().requires_grad_() for x in found]
        parameters = list(layer.core.parameters())
        dropout = None
        if layer.dropout and train:
            dropout = AttentionDropout(layer.dropout, RandomKey(config.seed))
        sizes = (config.batch_size, layer.num_heads, config.seq_len, config.seq_len)
        masks = make_masks(*sizes, is_causal=config.is_causal)
        query, key, value = inputs
        call = HeadCall(query, key, value, masks, dropout=dropout, rng=RandomKey(config.seed))
        if side.backend == "flex":
            forward = partial(_flex, layer, call)
        else:
            chosen = layer.core.pick(call) if side.backend == "auto" else side.backend
            forward = partial(run_heads, layer, chosen, call)
    with torch.no_grad():
        grad_out = make(*forward().shape)

    def run() -> list[Tensor]:
        if not train:
            with torch.no_grad():
                return [forward()]
        out = forward()
        return [out, *torch.autograd.grad(out, [*inputs, *parameters], grad_out.to(out.dtype))]

    return run


def _sdpa(sdpa: TorchSdpa, inputs: list[Tensor], is_causal: bool) -> Tensor:
    chosen = _SDPA.get(sdpa.backend)
    with nullcontext() if chosen is None else sdpa_kernel([chosen]):
        query, key, value = inputs
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _flex(layer: Attention, call: HeadCall) -> Tensor:
    """FlexAttention over the expanded keys; for comparison only, layers have no such backend."""
    from profiling.kernels.flex import mgk_flex

    if not isinstance(layer, MGKAttention) or layer.core.e_step == "hard":
        raise ConfigError(f"flex serves soft MGK only, received {layer.core.variant}")
    core = layer.core
    return mgk_flex(
        *(call.query, core.components(call.key), call.value),
        precision=1.0 / core.variance(),
        offset=None if core.prior is None else core.prior(call.key.shape[-2]),
        gaussian=core.score == "gaussian",
        equal_precision=core.variance.is_equal,
        is_causal=call.masks.is_causal,
    )


@dataclass(frozen=True)
class SideResult:
    """What was measured of one side."""

    timing: Timing
    seconds: list[float]
    peak_memory_bytes: int
    flops: int | None = None


def parity(config: KernelsConfig, root: Path) -> tuple[bool, str]:
    """Run the parity tests that the config names; return whether they passed and the last line."""
    if not config.parity_tests:
        return False, "no parity tests are named"
    missing = [t for t in config.parity_tests if not (root / t.split("::")[0]).exists()]
    if missing:
        return False, f"parity tests not found: {', '.join(missing)}"
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", *config.parity_tests]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return done.returncode == 0, lines[-1] if lines else f"pytest exit status {done.returncode}"


def measure(config: KernelsConfig) -> tuple[dict[str, SideResult], dict[str, str]]:
    """Time every side in turns and take its peak memory; also say why a side could not run."""
    device = torch.device(config.device)
    functions, memory, flops, failed = {}, {}, {}, {}
    for name, side in config.sides.items():
        if side.max_seq_len is not None and config.seq_len > side.max_seq_len:
            failed[name] = f"left out beyond {side.max_seq_len} tokens"
            continue
        try:
            function = side_function(side, config)
            function()
            memory[name] = peak_bytes(function, device)
            flops[name] = _flops(function)
            functions[name] = function
        except torch.OutOfMemoryError:
            failed[name] = "out of memory"
        except RuntimeError as error:  # a backend that does not take these sizes
            failed[name] = str(error).splitlines()[0][:80]
    times = time_sides(
        functions,
        device=device,
        warmup=config.warmup,
        repeats=config.repeats,
        max_seconds=config.max_seconds,
    )
    results = {
        name: SideResult(summarise(seconds), seconds, memory[name], flops[name])
        for name, seconds in times.items()
    }
    return results, failed


def _flops(function: Callable[[], object]) -> int | None:
    try:
        return torch_flops(function)
    except UncountedOperationError:
        return None


def product_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a large square matrix product on random data, the best of a few."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    function = partial(torch.matmul, a, b)
    function()
    return 2 * size**3 / min(time_once(function, device) for _ in range(10))


_POINT = ("head_dim", "seq_len", "batch_size", "is_causal", "mode", "num_threads")


def _point(config: KernelsConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _POINT}


def open_store(config: KernelsConfig, folder: Path) -> RowStore:
    """Return the measured points of a folder; those of other sides or other code are dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    given = config.model_dump(exclude={"grid", "comparisons", "parity_tests", *_POINT})
    settings = {**given, "revision": git_revision(), "versions": versions()}
    return RowStore(folder / "points.jsonl", settings, _POINT)


def measure_once(
    config: KernelsConfig, store: RowStore | None
) -> tuple[dict[str, SideResult], dict[str, str]]:
    """Return `measure` with the threads of the point, or what the store has of it."""
    point = _point(config)
    row = next((r for r in store.rows if _point_of(r) == point), None) if store else None
    if row is None:
        threads = torch.get_num_threads()
        torch.set_num_threads(config.num_threads or threads)
        try:
            results, failed = measure(config)
        finally:
            torch.set_num_threads(threads)
        row = {**point, "failed": failed, "sides": {n: asdict(r) for n, r in results.items()}}
        if store is not None:
            store.add(row)
    return {n: _result(side) for n, side in row["sides"].items()}, row["failed"]


def _point_of(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in _POINT}


def _result(side: dict[str, Any]) -> SideResult:
    return SideResult(
        summarise(side["seconds"]), **{k: v for k, v in side.items() if k != "timing"}
    )


def run_kernels(config: KernelsConfig, root: Path, folder: Path | None = None) -> tuple[str, bool]:
    """Run the parity tests, then measure; return the report and whether all bounds hold.

    When the tests are red there are times of every side but no ratio between them. Points are kept
    in `folder`, where there is one, and not measured again.

    Raises:
        ConfigError: the device is not there, or a side cannot be built.
    """
    gone = missing_device(config.device)
    if gone is not None:
        raise ConfigError(gone)
    green, summary = parity(config, root)
    ceiling = product_ceiling(torch.device(config.device), getattr(torch, config.dtype))
    facts = [
        f"Random data, {config.dtype}; attention alone, no projections",
        f"Sides take turns; {config.warmup} warm-up calls each; median and 20 %, 80 % quantiles",
        f"Hardware: {device_name(config.device)}; a large matrix product reaches "
        f"{ceiling / 1e12:.3g} TFLOP/s",
        "TFLOP/s: products that run, 2 per multiply-add, causal masks halve nothing",
        f"Parity tests: {'passed' if green else 'FAILED'}: {summary}",
    ]
    lines = header("Implementations of attention side by side", facts)
    passed = green
    store = None if folder is None else open_store(config, folder)
    for point in points(config):
        section, holds = _section(point, ceiling, green, store)
        lines += section
        passed &= holds
    return "\n".join(lines), passed


def _section(
    config: KernelsConfig, ceiling: float, green: bool, store: RowStore | None
) -> tuple[list[str], bool]:
    """Measure one point; return its part of the report and whether its bounds hold."""
    results, failed = measure_once(config, store)
    threads = "" if config.num_threads is None else f", {config.num_threads} threads"
    passes = "forward + backward" if config.mode == "train" else "forward"
    lines = [
        "",
        f"## N = {config.seq_len}, head size {config.head_dim}, batch {config.batch_size}, "
        f"{passes}{', causal' if config.is_causal else ''}{threads}",
        "",
        *markdown_lines(pd.DataFrame([_side_line(n, r, ceiling) for n, r in results.items()])),
        "",
        *(f"{name} did not run: {reason}" for name, reason in failed.items()),
        "",
    ]
    if not green:
        return [*lines, "No ratios: the parity tests did not pass, so speed says nothing."], False
    compared = [
        _compare(c, results)
        for c in config.comparisons
        if c.side in results and c.against in results
    ]
    lines += markdown_lines(pd.DataFrame([line for line, _ in compared]))
    return lines, all(passed for _, passed in compared)


def _side_line(name: str, result: SideResult, ceiling: float) -> dict[str, object]:
    timing = result.timing
    speed = None if result.flops is None else result.flops / timing.median_s
    return {
        "side": name,
        "median (ms)": f"{timing.median_s * 1e3:.3f}",
        "p20 – p80 (ms)": f"{timing.p20_s * 1e3:.3f} – {timing.p80_s * 1e3:.3f}",
        "calls": timing.repeats,
        "TFLOP/s": "–" if speed is None else f"{speed / 1e12:.3g}",
        "of ceiling": "–" if speed is None else f"{speed / ceiling:.0%}",
        "peak memory (MiB)": f"{result.peak_memory_bytes / 2**20:.1f}",
    }


def _compare(
    comparison: Comparison, results: dict[str, SideResult]
) -> tuple[dict[str, object], bool]:
    """Return one line of the comparison and whether its bounds hold; ratios are taken per round."""
    side, against = results[comparison.side], results[comparison.against]
    rounds = [a / b for a, b in zip(side.seconds, against.seconds, strict=True)]
    time_ratio = quantile(rounds, 0.5)
    memory_ratio = side.peak_memory_bytes / against.peak_memory_bytes
    bounds = {
        "time": (time_ratio, comparison.max_time_ratio),
        "memory": (memory_ratio, comparison.max_memory_ratio),
    }
    passed = all(bound is None or value <= bound for value, bound in bounds.values())
    limits = [f"{what} ≤ {bound:g}" for what, (_, bound) in bounds.items() if bound is not None]
    spread = " – ".join(f"{quantile(rounds, share):.3f}" for share in (0.2, 0.8))
    line: dict[str, object] = {
        "comparison": comparison.name,
        "time ratio": f"{time_ratio:.3f} ({spread})",
        "memory ratio": f"{memory_ratio:.4f}",
        "required": ", ".join(limits) or "–",
        "holds": ("yes" if passed else "NO") if limits else "–",
    }
    return line, passed

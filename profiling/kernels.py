"""`python -m profiling kernels`: the implementations of attention side by side, in one run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_probattn.attention import Attention
from lit_probattn.attention.masks import make_masks
from lit_probattn.randomness import AttentionDropout, RandomKey
from profiling.builders import ConfigError, build_attention
from profiling.environment import command_line, device_name, git_revision, versions
from profiling.kernels_config import Comparison, KernelsConfig, Side
from profiling.memory import peak_bytes
from profiling.report_tables import markdown_table
from profiling.sweep import missing_device
from profiling.timing import Timing, quantile, summarise, time_sides


@dataclass(frozen=True)
class SideResult:
    """What was measured of one side."""

    timing: Timing
    seconds: list[float]
    peak_memory_bytes: int


def heads_of(
    layer: Attention, batch: int, seq_len: int, make: Callable[..., Tensor]
) -> list[Tensor]:
    """Return random query, stored keys and value of a layer, as its projections would give."""

    def split(width: int, num_heads: int) -> Tensor:
        return make(batch, seq_len, width).unflatten(-1, (num_heads, -1)).transpose(1, 2)

    query = split(layer.num_query_heads * layer.head_dim, layer.num_query_heads)
    key = layer.split_keys(make(batch, seq_len, layer.key_width))
    value = split(layer.num_value_heads * layer.value_head_dim, layer.num_value_heads)
    return [x.contiguous().requires_grad_() for x in (query, key, value)]


def side_function(side: Side, config: KernelsConfig) -> Callable[[], list[Tensor]]:
    """Return a function that runs a side once, forward or forward and backward.

    Only attention itself is inside: no projections. Keys are shifted, expanded and combined with
    priors inside, as in the layer, and parameters get their gradients.

    Raises:
        ConfigError: the attention cannot be built.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    generator = torch.Generator(device).manual_seed(config.seed)
    train = config.mode == "train"

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    if side.torch_sdpa is not None:
        shape = (config.batch_size, side.torch_sdpa.num_heads, config.seq_len, config.head_dim)
        inputs = [make(*shape).requires_grad_() for _ in range(3)]
        parameters: list[Tensor] = []

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(
                inputs[0], inputs[1], inputs[2], is_causal=config.is_causal
            )
    else:
        assert side.attention is not None
        class_path, init_args = side.attention.resolve(Path.cwd())
        layer = build_attention(class_path, init_args, config.head_dim, config.head_dim)
        layer.to(device=device, dtype=dtype).train(train)
        inputs = heads_of(layer, config.batch_size, config.seq_len, make)
        projections = {
            id(p) for m in layer.children() if "Linear" in type(m).__name__ for p in m.parameters()
        }
        parameters = [p for p in layer.parameters() if id(p) not in projections]
        forward = _attention_call(layer, side.backend, inputs, config)
    with torch.no_grad():
        grad_out = make(*forward().shape)

    def run() -> list[Tensor]:
        if not train:
            with torch.no_grad():
                return [forward()]
        out = forward()
        return [out, *torch.autograd.grad(out, [*inputs, *parameters], grad_out.to(out.dtype))]

    return run


def _attention_call(
    layer: Attention, backend: str, inputs: list[Tensor], config: KernelsConfig
) -> Callable[[], Tensor]:
    if backend not in layer.backends:
        raise ConfigError(
            f"{layer.variant} has no backend {backend!r}; expected one of "
            f"{', '.join(layer.backends)}"
        )
    dropout = None
    if layer.dropout and config.mode == "train":
        dropout = AttentionDropout(layer.dropout, RandomKey(config.seed))
    query, key, value = inputs
    batch, heads, length = query.shape[:3]
    masks = make_masks(batch, heads, length, value.shape[2], is_causal=config.is_causal)

    def forward() -> Tensor:
        arguments = layer.score_arguments(length)
        arguments.update(layer.random_arguments(RandomKey(config.seed), 0))
        keys = layer.keys_for(backend, key)
        return layer.run(
            *(backend, query, keys, value),
            masks=masks,
            dropout=dropout,
            arguments=arguments,
            cache=None,
        )

    return forward


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


def measure(config: KernelsConfig) -> dict[str, SideResult]:
    """Time every side in turns and take the peak memory of one call of each."""
    device = torch.device(config.device)
    functions = {name: side_function(side, config) for name, side in config.sides.items()}
    memory = {}
    for name, function in functions.items():
        function()
        memory[name] = peak_bytes(function, device)
    times = time_sides(
        functions,
        device=device,
        warmup=config.warmup,
        repeats=config.repeats,
        max_seconds=config.max_seconds,
    )
    return {
        name: SideResult(summarise(seconds), seconds, memory[name])
        for name, seconds in times.items()
    }


def run_kernels(config: KernelsConfig, root: Path) -> tuple[str, bool]:
    """Run the parity tests, then measure; return the report and whether all bounds hold.

    When the tests are red there are times of every side but no ratio between them.

    Raises:
        ConfigError: the device is not there, or a side cannot be built.
    """
    gone = missing_device(config.device)
    if gone is not None:
        raise ConfigError(gone)
    green, summary = parity(config, root)
    results = measure(config)
    length = f"N = {config.seq_len}, head size {config.head_dim}, batch {config.batch_size}"
    passes = "forward + backward" if config.mode == "train" else "forward"
    lines = [
        "# Implementations of attention side by side",
        "",
        f"- Command: `{command_line()}`",
        f"- Random data, {config.dtype}, {length}, {passes}"
        f"{', causal' if config.is_causal else ''}; attention alone, no projections",
        f"- Sides take turns; {config.warmup} warm-up calls each; median and 20 %, 80 % quantiles",
        f"- Hardware: {device_name(config.device)}",
        f"- Versions: {versions()}; revision {git_revision()}",
        f"- Parity tests: {'passed' if green else 'FAILED'}: {summary}",
        "",
        *markdown_table(pd.DataFrame([_side_line(n, r) for n, r in results.items()])),
        "",
    ]
    if not green:
        lines.append("No ratios: the parity tests did not pass, so speed says nothing.")
        return "\n".join(lines), False
    compared = [_compare(c, results) for c in config.comparisons]
    lines += markdown_table(pd.DataFrame([line for line, _ in compared]))
    return "\n".join(lines), all(passed for _, passed in compared)


def _side_line(name: str, result: SideResult) -> dict[str, object]:
    timing = result.timing
    return {
        "side": name,
        "median (ms)": f"{timing.median_s * 1e3:.1f}",
        "p20 – p80 (ms)": f"{timing.p20_s * 1e3:.1f} – {timing.p80_s * 1e3:.1f}",
        "calls": timing.repeats,
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
    bounds = [
        (time_ratio, comparison.max_time_ratio),
        (memory_ratio, comparison.max_memory_ratio),
    ]
    passed = all(bound is None or value <= bound for value, bound in bounds)
    limits = [
        f"{what} ≤ {bound:g}"
        for what, bound in zip(("time", "memory"), (b for _, b in bounds), strict=True)
        if bound is not None
    ]
    spread = " – ".join(f"{quantile(rounds, share):.3f}" for share in (0.2, 0.8))
    line: dict[str, object] = {
        "comparison": comparison.name,
        "time ratio": f"{time_ratio:.3f} ({spread})",
        "memory ratio": f"{memory_ratio:.4f}",
        "required": ", ".join(limits) or "–",
        "holds": ("yes" if passed else "NO") if limits else "–",
    }
    return line, passed

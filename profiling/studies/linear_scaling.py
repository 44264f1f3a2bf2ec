"""Time and memory of causal linear attention over the length, beside PyTorch's fused softmax.

    python -m profiling.linear_scaling --mode forward_backward --output scaling.csv

Softmax and linear attention with 8 heads, MLK and sMLK with 4, head size 32, width 64, one sequence
(the sizes of the Long Range Arena experiments); projections included. All sides run in turns in one
process; the table gives medians with 20 % and 80 % quantiles, the exponent of a straight line
through log time over log length, and the speed-up over softmax at each length.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lit_probattn.attention import Attention, LinearAttention, MLKAttention, SoftmaxAttention
from profiling.measure.memory import cpu_peak_bytes
from profiling.measure.timing import summarise, time_sides

LENGTHS = (1024, 2048, 4096, 8192, 16384)
WIDTH, HEAD = 64, 32


def build_sides(device: torch.device) -> dict[str, Attention]:
    """Return the layers by name: same head size, half the heads for mixtures."""
    layers: dict[str, Attention] = {
        "softmax (fused)": SoftmaxAttention(WIDTH, 8, head_dim=HEAD, backend="sdpa"),
        "linear": LinearAttention(WIDTH, 8, head_dim=HEAD, backend="blockwise"),
        "mlk": MLKAttention(WIDTH, 4, head_dim=HEAD, backend="blockwise"),
        "smlk": MLKAttention(WIDTH, 4, head_dim=HEAD, backend="blockwise", shifted_keys=True),
    }
    return {name: layer.to(device) for name, layer in layers.items()}


def make_call(layer: Attention, x: torch.Tensor, mode: str) -> Callable[[], object]:
    """Return one forward pass, or one forward and backward pass, over `x`."""

    def forward() -> object:
        with torch.no_grad():
            return layer(x, is_causal=True)

    def forward_backward() -> object:
        layer.zero_grad(set_to_none=True)
        layer(x, is_causal=True).square().mean().backward()
        return None

    return forward if mode == "forward" else forward_backward


def fitted_exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through log value over log length.

    Raises:
        ValueError: fewer than two lengths, or a value that is not positive.
    """
    if len(lengths) < 2 or min(values) <= 0:
        raise ValueError(
            f"an exponent needs two lengths and positive values, received {list(lengths)} and "
            f"{list(values)}"
        )
    xs, ys = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def measure(
    lengths: Sequence[int], mode: str, repeats: int, device: torch.device
) -> list[dict[str, object]]:
    """Return one row per side and length: seconds and, on the CPU, peak bytes above the input."""
    layers = build_sides(device)
    calls = {
        (name, length): make_call(layer, torch.randn(1, length, WIDTH, device=device), mode)
        for length in lengths
        for name, layer in layers.items()
    }
    # Lengths take turns as well: a busy minute must not bend the line through them.
    named = {f"{name} {length}": call for (name, length), call in calls.items()}
    times = time_sides(named, device=device, warmup=1, repeats=repeats)
    rows: list[dict[str, object]] = []
    for (name, length), call in calls.items():
        timing = summarise(times[f"{name} {length}"])
        rows.append(
            {
                "side": name,
                "seq_len": length,
                "mode": mode,
                "device": device.type,
                "num_threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "median_s": timing.median_s,
                "p20_s": timing.p20_s,
                "p80_s": timing.p80_s,
                "repeats": timing.repeats,
                "peak_memory_bytes": cpu_peak_bytes(call) if device.type == "cpu" else None,
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Format the rows, the exponents and the speed-ups over softmax."""
    sides = list(dict.fromkeys(str(row["side"]) for row in rows))
    softmax = {
        row["seq_len"]: float(str(row["median_s"])) for row in rows if row["side"] == sides[0]
    }
    lines = ["side             length    median s  (p20 - p80)            MiB   x softmax"]
    for row in rows:
        seconds = float(str(row["median_s"]))
        peak = row["peak_memory_bytes"]
        memory = "-" if peak is None else f"{int(str(peak)) / 2**20:.1f}"
        lines.append(
            f"{row['side']:16} {row['seq_len']:6} {seconds:11.5f}  ({row['p20_s']:.5f} - "
            f"{row['p80_s']:.5f}) {memory:>10} {softmax[row['seq_len']] / seconds:8.2f}"
        )
    for side in sides:
        mine = [row for row in rows if row["side"] == side]
        lengths = [int(str(row["seq_len"])) for row in mine]
        if len(lengths) < 2:
            continue
        line = f"{side:16} exponent of time "
        line += f"{fitted_exponent(lengths, [float(str(r['median_s'])) for r in mine]):.3f}"
        if all(row["peak_memory_bytes"] is not None for row in mine):
            peaks = [float(str(r["peak_memory_bytes"])) for r in mine]
            line += f", of memory {fitted_exponent(lengths, peaks):.3f}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.linear_scaling",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--mode", choices=("forward", "forward_backward"), default="forward")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls per side and length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; 1 on a machine that is shared")
    parser.add_argument("--output", type=Path, help="also write the rows to this CSV file")
    options = parser.parse_args(arguments)
    if min(options.lengths) < 1 or options.repeats < 1:
        parser.error("--lengths and --repeats must be at least 1")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = measure(options.lengths, options.mode, options.repeats, torch.device(options.device))
    print(table(rows))
    if options.output is not None:
        with options.output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

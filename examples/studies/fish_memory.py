"""Peak memory of FiSH on the CPU, blockwise compared with the reference, which stores all maps.

    python -m examples.studies.fish_memory                   # N = 4096: the reference needs 4 GB
    python -m examples.studies.fish_memory --seq_len 1024 --variants gfish mish

One layer of the WikiText model (C = 128, E = 16, H = 8, G = 2), forward and backward of one
sequence with attention noise. The exit status is 1 if a ratio is above `--max_ratio`.

Expected result at N = 4096: fish 30 MiB of 3331 MiB (0.009), gfish 40 MiB of 3843 MiB (0.010).
"""

from __future__ import annotations

import argparse
import warnings

import pandas as pd
import torch

from lit_probattn.base.arguments import at_least
from lit_probattn.configs import attention_entry, build_attention
from lit_probattn.measure.memory import cpu_peak_bytes
from lit_probattn.randomness import RandomKey
from profiling.study import Report, add_seed, command, shown

VARIANTS = ("fish", "hard_fish", "gfish", "hard_gfish", "mish", "hard_mish")


def layer_peak_bytes(variant: str, backend: str, options: argparse.Namespace) -> int:
    """Return the peak memory of a layer's training step above the memory before it, in bytes."""
    entry = attention_entry(f"configs/attention/{variant}.yaml")
    sizes = {"num_heads": 8, "num_global_heads": options.num_global_heads, "bias": False}
    changes = {**sizes, "dropout": 0.0, "backend": backend}
    layer = build_attention(entry["class_path"], {**entry["init_args"], **changes}, 128, 16)
    x = torch.randn(1, options.seq_len, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cpu_peak_bytes(lambda: layer(x, rng=RandomKey(0)).sum().backward())


def run(options: argparse.Namespace) -> Report:
    """Measure every variant with both backends."""
    rows = pd.DataFrame({"variant": options.variants})
    for backend in ("blockwise", "reference"):
        peaks = [layer_peak_bytes(variant, backend, options) for variant in rows["variant"]]
        rows[f"{backend}_bytes"] = peaks
    rows["memory_over_reference"] = rows["blockwise_bytes"] / rows["reference_bytes"]
    return Report(
        "Peak memory of FiSH, blockwise and materialised",
        rows,
        {f"One layer, one sequence of {options.seq_len}, both passes": shown(rows, "variant")},
        passed=bool((rows["memory_over_reference"] <= options.max_ratio).all()),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_seed(parser)
    add = parser.add_argument
    add("--seq_len", type=at_least(1), default=4096, help="N")
    add("--num_global_heads", type=at_least(1), default=2, help="G, of 8 local heads")
    text = "files of configs/attention"
    add("--variants", nargs="+", default=["fish", "gfish"], choices=VARIANTS, help=text)
    text = "largest ratio of blockwise to reference that passes"
    add("--max_ratio", type=float, default=0.1, help=text)


main = command(__name__, __doc__, run, _add_options)

"""Peak memory of FiSH, blockwise against the materialising reference, to the byte on the CPU.

    python -m profiling.fish_memory                        # N = 4096: the reference needs 4 GB
    python -m profiling.fish_memory --seq_len 1024 --variants gfish mish

One layer of the WikiText model (C = 128, E = 16, H = 8, G = 2), forward and backward of one
sequence, attention noise drawn. Exit status 1 if a ratio is above `--max_ratio`.

Expected at N = 4096: fish 30 MiB of 3331 MiB (0.009), gfish 40 MiB of 3843 MiB (0.010).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch

from lit_probattn.attention import FiSHAttention
from lit_probattn.attention.backends import Backend
from lit_probattn.randomness import RandomKey
from profiling.measure.memory import cpu_peak_bytes

VARIANTS: dict[str, dict[str, Any]] = {
    "fish": {},
    "hard_fish": {"noise": "none"},
    "gfish": {"mixer": "mlp"},
    "hard_gfish": {"mixer": "mlp", "noise": "none"},
    "mish": {"mixer": "shared", "noise": "local_global", "sigma_shape": "scalar"},
    "hard_mish": {"mixer": "shared", "noise": "none"},
}


def layer_peak_bytes(variant: str, backend: Backend, seq_len: int, num_global_heads: int) -> int:
    """Return the peak of one training step of a layer above what is live before, in bytes."""
    layer = FiSHAttention(
        *(128, 8),
        head_dim=16,
        num_global_heads=num_global_heads,
        bias=False,
        backend=backend,
        **VARIANTS[variant],
    )
    x = torch.randn(1, seq_len, 128)

    def step() -> None:
        layer(x, rng=RandomKey(0)).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cpu_peak_bytes(step)


def main(arguments: list[str] | None = None) -> int:
    """Print one line per variant; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.fish_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seq_len", type=int, default=4096, help="N")
    parser.add_argument("--num_global_heads", type=int, default=2, help="G, of 8 local heads")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["fish", "gfish"])
    parser.add_argument("--max_ratio", type=float, default=0.1, help="blockwise / reference")
    options = parser.parse_args(arguments)
    worst = 0.0
    print(f"{'variant':12} {'blockwise MiB':>14} {'reference MiB':>14} {'ratio':>7}")
    for variant in options.variants:
        peaks = [
            layer_peak_bytes(variant, backend, options.seq_len, options.num_global_heads) / 2**20
            for backend in ("blockwise", "reference")
        ]
        worst = max(worst, peaks[0] / peaks[1])
        print(f"{variant:12} {peaks[0]:14.1f} {peaks[1]:14.1f} {peaks[0] / peaks[1]:7.4f}")
    return int(worst > options.max_ratio)


if __name__ == "__main__":
    sys.exit(main())

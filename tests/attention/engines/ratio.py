"""CPU time beside another revision: `python -m tests.attention.engines.ratio ROOT [--seq-lens …]`.

ROOT is a worktree of the other revision. Forward and backward of layers in training, `auto`, one
thread, processor time. One process a revision; both are alive and take turns, so that a pair of
times is of the same moment. The median and the quartiles of the pairs' ratios are printed, this
revision over the other; below 1 this one is faster. Quiet cores are the caller's business.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.attention.variants import shipped_variants
from tests.support.paths import ROOT

EMBED, HEAD = 256, 32
TOKENS = 2048  # of a batch
NAMES = (
    *("softmax", "mgk", "smgk", "hard_fish", "fish", "gfish"),
    *("linear", "mlk", "ast", "polynomial"),
)

_CHILD = """
import importlib, json, sys, time, torch
torch.set_num_threads(1)
cls, options, causal, sizes = json.loads(sys.argv[1])
torch.manual_seed(0)
layer = getattr(importlib.import_module("lit_probattn.attention"), cls)(sizes[2], **options)
x = torch.randn(*sizes, requires_grad=True)
for line in sys.stdin:
    begin = time.process_time()
    for _ in range(int(line)):
        layer(x, is_causal=causal).sum().backward()
    print(time.process_time() - begin, flush=True)
"""


def timed(child: subprocess.Popen[str], calls: int) -> float:
    """Return seconds of a processor that a child takes for some calls."""
    pipes: tuple[IO[str] | None, IO[str] | None] = child.stdin, child.stdout
    assert pipes[0] is not None
    assert pipes[1] is not None
    pipes[0].write(f"{calls}\n")
    pipes[0].flush()
    return float(pipes[1].readline())


def ratios(
    roots: Sequence[Path], name: str, causal: bool, seq_len: int, rounds: int
) -> list[float]:
    """Return the ratios of pairs of a layer, the second root over the first, sorted.

    A round has about a quarter of a second of each; the first is thrown away.
    """
    cls, options = shipped_variants()[name]
    options = {**options, "head_dim": HEAD}
    what = cls.__name__, options, causal, [max(1, TOKENS // seq_len), seq_len, EMBED]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(what)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for root in roots
    ]
    try:
        for child in children:
            timed(child, 2)
        calls = max(1, round(0.25 / timed(children[0], 1)))
        pairs = []
        for number in range(rounds + 1):
            order = children if number % 2 else children[::-1]
            found = {child: timed(child, calls) for child in order}
            pairs.append(found[children[1]] / found[children[0]])
    finally:
        for child in children:
            child.kill()
            child.wait()
    return sorted(pairs[1:])


def main() -> None:
    """Print a row a layer and length."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path, help="worktree of the other revision")
    parser.add_argument("--names", nargs="+", default=NAMES, choices=sorted(shipped_variants()))
    parser.add_argument("--seq-lens", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    roots = options.root.resolve(), ROOT
    print("| layer | N | median | quartiles |\n| --- | --- | --- | --- |")
    for seq_len in options.seq_lens:
        for name in options.names:
            found = ratios(roots, name, options.causal, seq_len, options.rounds)
            low, middle, high = statistics.quantiles(found, n=4)
            row = f"{middle:.2f} | {low:.2f} to {high:.2f}"
            print(f"| {name} | {seq_len} | {row} |", flush=True)


if __name__ == "__main__":
    main()

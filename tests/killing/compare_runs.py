"""`python -m tests.killing.compare_runs A B`: whether two runs ended alike, bit for bit.

A and B are folders of runs with one run each. Compared are the newest step checkpoints (weights,
buffers, optimiser state) and the logged losses and metrics.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lit_probattn.training.run_record import read_starts
from tests.support.runs import fingerprint, metrics, newest_state


def main(arguments: list[str]) -> int:
    """Print both fingerprints; the exit status is 0 if they are equal."""
    folders = []
    for root in arguments:
        (folder,) = Path(root).glob("*/*")
        folders.append(folder)
    marks = [fingerprint(folder) for folder in folders]
    for root, folder, mark in zip(arguments, folders, marks, strict=True):
        step, starts = newest_state(folder)["global_step"], len(read_starts(folder))
        print(f"{Path(root).name}: step {step}, {starts} start(s), sha256 {mark[:16]}")
    rows = [metrics(folder) for folder in folders]
    if marks[0] != marks[1] or rows[0] != rows[1]:
        print("DIFFERENT")
        return 1
    print(f"identical, bit for bit; {len(rows[0])} logged rows equal")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Print, for every kind of token, the hash of its token stream, and what making it took.

    python -m tests.datamodules.text.streams FOLDER [KIND ...]

FOLDER holds `running.txt`, `labelled.csv` (text, label), `pairs.csv` (first, second, label), and
`de-en/`, plain parallel text. Each kind runs in a process of its own, so that its peak memory is
its own. The hash is SHA-256 over the token arrays of the cache that the data module writes, so it
can be compared between revisions.
"""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from datamodules import (
    LM1B,
    LabelledTexts,
    OwnText,
    PretrainingText,
    TextPairs,
    Translation,
)
from datamodules.core.base import DataModule

KINDS: dict[str, Callable[[Path], DataModule]] = {
    **{
        f"running {unit}": lambda folder, unit=unit: OwnText(
            path=str(folder / "running.txt"), tokens=unit, vocab_limit=4000
        )
        for unit in ("bytes", "characters", "words", "subwords")
    },
    **{
        f"labelled {unit}": lambda folder, unit=unit: LabelledTexts(
            path=str(folder / "labelled.csv"), tokens=unit, vocab_limit=4000
        )
        for unit in ("bytes", "characters", "words", "subwords")
    },
    **{
        f"pairs {kind}": lambda folder, kind=kind: TextPairs(
            path=str(folder / "pairs.csv"), tokens=kind, vocab_limit=4000
        )
        for kind in ("wordpiece", "bpe")
    },
    **{
        f"pretraining {kind}": lambda folder, kind=kind: PretrainingText(
            path=str(folder / "running.txt"), tokens=kind, vocab_limit=4000
        )
        for kind in ("wordpiece", "bpe")
    },
    **{
        f"translation {tokens}": lambda folder, tokens=tokens: Translation(
            path=str(folder / "de-en"), tokens=tokens, merges=2000
        )
        for tokens in ("subwords", "words")
    },
    "sentences": lambda folder: LM1B(
        "other",
        subwords=2000,
        val_fraction=0.05,
        test_fraction=0.05,
        data_dir=str(folder / "lines"),
    ),
}


def stream_hash(cache: Path) -> tuple[str, int]:
    """Return SHA-256 over the integer arrays below a folder of caches, and their numbers."""
    digest, count = hashlib.sha256(), 0
    for path in sorted(cache.rglob("*.npy"), key=lambda path: path.name):
        array = np.load(path, mmap_mode="r")
        if array.dtype.kind in "iu" and array.dtype != np.uint8:
            digest.update(path.name.encode() + np.ascontiguousarray(array, np.int64).tobytes())
            count += array.size
    return digest.hexdigest(), count


def measure(kind: str, folder: Path) -> str:
    """Make the cache of a kind; return a line of results."""
    with tempfile.TemporaryDirectory() as cache:
        data = KINDS[kind](folder)
        data.cache_dir = Path(cache)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        data.prepare_data()
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        found, count = stream_hash(Path(cache))
    return f"{kind:24} {count:>10} {seconds:8.2f} s {peak / 1024:8.0f} MB  {found[:32]}"


def main(words: list[str]) -> int:
    """Measure all kinds, or those that are named."""
    folder, kinds = Path(words[0]), words[1:]
    if os.environ.get("ONE_KIND"):
        print(measure(kinds[0], folder), flush=True)
        return 0
    for kind in kinds or KINDS:
        command = [sys.executable, "-m", "tests.datamodules.text.streams", str(folder), kind]
        subprocess.run(command, env={**os.environ, "ONE_KIND": "1"}, check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

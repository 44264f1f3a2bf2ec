"""Small made corpora."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from datamodules import WikiText103

NAMES = ("train", "valid", "test")


def lines(count: int, seed: int, words: int = 40) -> list[str]:
    """Lines as in the release: blanks around the words, some without a word."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        picked = [f"w{int(draw.paretovariate(0.7)) % words}" for _ in range(draw.randint(0, 12))]
        made.append(f" {' '.join(['<unk>', *picked])} \n" if picked else " \n")
    return made


def write(folder: Path, pattern: str = "wiki.{}.tokens", **texts: str) -> Path:
    """Write three splits; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(NAMES):
        text = texts.get(name, "".join(lines(60 if name == "train" else 20, number)))
        (folder / pattern.format(name)).write_bytes(text.encode())
    return folder


def data(folder: Path, **options: Any) -> WikiText103:
    """The DataModule over a folder, as any text."""
    small = {"corpus": "other", "segment_len": 7, "batch_size": 4}
    return WikiText103(data_dir=str(folder), **{**small, **options})


def expected_ids(text: str, vocabulary: list[str]) -> list[int]:
    """Ids by the rule, line by line: strip, split, append <eos>."""
    ids = {word: i for i, word in enumerate(vocabulary)}
    found = []
    for line in text.splitlines():
        found += [ids.get(word, ids.get("<unk>")) for word in [*line.strip().split(), "<eos>"]]
    return found

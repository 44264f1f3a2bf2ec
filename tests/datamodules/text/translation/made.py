"""Small parallel text in every layout, written by the tests themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

_GERMAN = ("der", "Hund", "sieht", "die", "Katze", "läuft")
_GERMAN += ("schnell", "Haus", "hat", "groß", "nicht")
_ENGLISH = ("the", "dog", "sees", "a", "cat", "runs", "quickly", "house", "is", "big", "not")


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Sentences of 2 to 12 words with a full stop, word for word; the English ones vary more."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        places = generator.integers(0, len(_GERMAN), generator.integers(2, 13)).tolist()
        extra = generator.integers(0, 4)
        german = " ".join(_GERMAN[place] for place in places) + f" {number % 7}."
        english = " ".join([*(_ENGLISH[p] for p in places), *["really"] * int(extra)])
        found.append((german, english + f" {number % 7}."))
    return found


def write(folder: Path, sizes: tuple[int, int, int] = (60, 9, 7), **texts: str) -> Path:
    """Write the layout of fairseq; `texts` replaces files, by names such as `train_de`."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, size) in enumerate(zip(("train", "valid", "test"), sizes, strict=True)):
        for language, lines in zip(("de", "en"), zip(*pairs(size, seed), strict=True), strict=True):
            text = "".join(f"{line}\n" for line in lines)
            place = folder / f"{name}.{language}"
            place.write_text(texts.get(f"{name}_{language}", text), encoding="utf-8")
    return folder


def write_iwslt(folder: Path, num_train: int = 100) -> Path:
    """Write the release of IWSLT'14 as it is unpacked: tags and XML; tests of 3 lines each."""
    folder.mkdir(parents=True, exist_ok=True)
    train = pairs(num_train, 5)
    for side, language in enumerate(("de", "en")):
        lines = ["<url>http://www.ted.com/talks/x</url>", "<keywords>talks, x</keywords>"]
        lines += ["<speaker>A. Speaker</speaker>", "<talkid>1</talkid>"]
        lines += ["<title>Ein Thema &amp; mehr</title>", "<description>TED Talk: x</description>"]
        lines += [f" {pair[side]} " for pair in train]
        (folder / f"train.tags.de-en.{language}").write_text("\n".join(lines) + "\n", "utf-8")
        names = ("TED.dev2010", "TED.tst2010", "TED.tst2011", "TED.tst2012", "TEDX.dev2012")
        for seed, name in enumerate(names, 20):
            segments = "".join(
                f'<seg id="{number}"> {name} {pair[side]} it’s </seg>\n'
                for number, pair in enumerate(pairs(3, seed), 1)
            )
            kind = "srcset" if language == "de" else "refset"
            text = f'<?xml version="1.0" encoding="UTF-8"?>\n<mteval>\n<{kind}>\n<doc docid="1">\n'
            text += f"<title>not this</title>\n{segments}</doc>\n</{kind}>\n</mteval>\n"
            (folder / f"IWSLT14.{name}.de-en.{language}.xml").write_text(text, "utf-8")
    return folder


def strange_line(folder: Path, name: str, number: int, line: bytes) -> None:
    """Replace line `number` (from 1) of a file."""
    lines = (folder / name).read_bytes().split(b"\n")
    lines[number - 1] = line
    (folder / name).write_bytes(b"\n".join(lines))


def flat(batches: list[list[tuple[int, int]]]) -> list[int]:
    """The pairs of some batches."""
    return [pair for pair, _ in itertools.chain.from_iterable(batches)]

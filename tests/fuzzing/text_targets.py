"""Readers of text, each beside an independent reading of what they accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from datamodules.lra.aan import MAX_TEXT_BYTES, read_pairs
from datamodules.lra.listops_generator import TOKENS
from datamodules.lra.listops_release import read_split
from datamodules.lra.pathfinder_release import read_entries
from datamodules.series.ts_file import read_ts
from datamodules.text.learn import learn_words
from datamodules.text.source import PlainText
from datamodules.text.token_files import read_words
from datamodules.text.tokens import Tokens
from tests.datamodules.lra.files import pair_lines
from tests.datamodules.lra.test_listops_release import GOOD, HEADER, NESTED
from tests.datamodules.series.test_ts_file import GOOD as GOOD_TS
from tests.fuzzing.targets import reader
from tests.support.listops import to_line


def _silent(_: int) -> None:
    """No progress."""


# ---- ListOps --------------------------------------------------------------------------------


def _value(words: list[str]) -> int:
    """Value of an expression without parentheses, by recursion; ValueError if it is none."""
    token = words.pop(0)
    if token.isdigit():
        return int(token)
    arguments = []
    while words[0] != "]":
        arguments.append(_value(words))
    words.pop(0)
    ordered = sorted(arguments)
    n = len(ordered)
    operations = {
        "[MIN": lambda: ordered[0],
        "[MAX": lambda: ordered[-1],
        "[MED": lambda: int(np.median(ordered)),
        "[SM": lambda: sum(ordered) % 10,
    }
    if not n:
        raise ValueError("no arguments")
    return operations[token]()


@reader(
    "listops",
    "basic_train.tsv",
    (HEADER + GOOD + NESTED + GOOD).encode(),
    [token.encode() for token in TOKENS[1:]] + [b"( ", b" )", b"\t", b"\r\n"],
    lambda path: read_split(path, _silent),
)
def listops(path: Path, found: tuple[Any, Any]) -> None:
    """Accepted lines have their value, and hold the words of the file."""
    tokens, targets = found
    lines = path.read_bytes().decode("utf-8-sig").rstrip("\n").split("\n")[1:]
    assert len(lines) == len(targets)
    for line, ids, target in zip(lines, tokens, targets, strict=True):
        source, _, value = line.rstrip("\r").partition("\t")
        words = [word for word in source.split() if word not in "()"]
        assert [TOKENS[i] for i in ids] == words
        rest = list(words)
        assert _value(rest) == target == int(value)
        assert not rest
        to_line(ids.tobytes())


# ---- Retrieval ------------------------------------------------------------------------------


@reader(
    "retrieval",
    "new_aan_pairs.train.tsv",
    b"".join(pair_lines(4, 3)),
    [b"\t", b"0.0", b"1.0", b"\r\n", b"nan", b"1e0"],
    lambda path: list(read_pairs(path, _silent)),
)
def retrieval(path: Path, pairs: list[Any]) -> None:
    """Accepted lines are their five columns."""
    content = path.read_bytes()
    lines = content.split(b"\n")[: content.count(b"\n") + (not content.endswith(b"\n"))]
    assert len(lines) == len(pairs)
    for line, pair in zip(lines, pairs, strict=True):
        label, _, _, *texts = line.removesuffix(b"\r").split(b"\t")
        assert label.strip() in (b"0.0", b"1.0", b"0", b"1", b"0.", b"1.", b".0") or float(
            label
        ) in (0, 1)
        assert pair.target == float(label)
        assert pair.texts == tuple(text[:MAX_TEXT_BYTES] for text in texts)


# ---- `.ts` ----------------------------------------------------------------------------------

_TS_WORDS = [b"@missing true\n", b"@equalLength true\n", b"?", b"NaN", b",", b":", b"1e39", b"inf"]
_TS_WORDS += [b"@data\n", b"Up", b"#", b"\xef\xbb\xbf", b"\r\n", b"@dimensions 3\n", b"\xc2\x85"]


@reader(
    "ts",
    "Tiny_TRAIN.ts",
    (GOOD_TS + "1,2.5:3,-4:Up\n0:1e-3:Down\n").encode(),
    _TS_WORDS,
    read_ts,
)
def ts(path: Path, found: Any) -> None:
    """Accepted series are the numbers of the file, and labels are spelled as in its header."""
    text = path.read_bytes().decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    start = next(i for i, line in enumerate(text) if line.strip().lower() == "@data")
    head = [line.split() for line in text[:start]]
    classes = {
        name for words in head if words[:1] and "label" in words[0].lower() for name in words[2:]
    }
    lines = text[start + 1 :]
    lines = lines[:-1] if lines[-1] == "" else lines
    assert len(lines) == len(found.series)
    for line, series, label in zip(lines, found.series, found.labels, strict=True):
        *dimensions, own = line.split(":")
        assert own.strip().lower() == label.lower()
        assert label in classes
        numbers = [[_number(v) for v in dimension.split(",")] for dimension in dimensions]
        np.testing.assert_array_equal(series, np.array(numbers, dtype=np.float32).T)


def _number(text: str) -> float:
    return float("nan") if text.strip().lower() in ("?", "nan") else float(text)


# ---- token files ----------------------------------------------------------------------------

_TEXT = " the <unk> the cat \n \n = sat = \ncat é 日 the \n".encode()
_TEXT_WORDS = [b"<eos>", b"<unk>", b"\r\n", b"\r", b"\xc2\x85", b"\xe2\x80\xa8", b"\x1c", b"\x00"]
_TEXT_WORDS += [b"\xef\xbb\xbf", b"\xff"]


def _encoded(path: Path) -> tuple[Any, Any, int]:
    text = "".join(block.text for block in PlainText((path,)).blocks())
    words = learn_words([text])
    return words, *words.encode(text)


@reader("tokens", "wiki.train.tokens", _TEXT, _TEXT_WORDS, _encoded)
def tokens(path: Path, found: tuple[Any, Any, int]) -> None:
    """Accepted text comes back from its ids, line by line."""
    words, ids, unknown = found
    raw = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    lines = raw.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    expected = [word for line in lines for word in (*line.split(), "<eos>")]
    assert [words.words[i] for i in ids] == expected
    assert unknown == 0


_VOCABULARY = b"<eos>\n<unk>\nthe\ncat\n\xe6\x97\xa5\n"


@reader("vocabulary", "vocabulary.txt", _VOCABULARY, _TEXT_WORDS, read_words)
def vocabulary(path: Path, found: Any) -> None:
    """Accepted words are the lines of the file."""
    raw = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    assert found.words == raw.removesuffix("\n").split("\n")
    assert len(set(found.words)) == len(found)
    assert Tokens.from_text(found.text).words == found.words


# ---- Pathfinder's lists ---------------------------------------------------------------------


@reader(
    "pathfinder",
    "metadata/0.npy",
    b"imgs/0 sample_0.png 0 1 1.8 14\nimgs/0 sample_1.png 1 0 1.8 14\n",
    [b"../", b"/etc", b" 2 ", b"\x93NUMPY", b"\x00"],
    lambda path: read_entries(path.parents[1], [path]),
)
def pathfinder(path: Path, entries: list[Any]) -> None:
    """Accepted lines name a picture inside the release and its label."""
    folder = path.parents[1]
    for entry in entries:
        assert entry.label in (0, 1)
        assert folder in entry.path.parents
        assert ".." not in entry.path.parts

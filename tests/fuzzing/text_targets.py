"""Readers of text, each beside an independent reading of what they accept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from datamodules.lra.aan import MAX_TEXT_BYTES, read_pairs
from datamodules.lra.listops_generator import TOKENS
from datamodules.lra.listops_release import read_split
from datamodules.lra.pathfinder_release import read_entries
from datamodules.series.ts_file import read_ts
from datamodules.text.learn import learn_words
from datamodules.text.source import PlainText
from datamodules.text.token_files import read_words
from datamodules.text.tokens import Tokens
from lit_probattn.base.errors import DataError
from tests.datamodules.lra.files import pair_lines
from tests.datamodules.lra.test_listops_release import GOOD, HEADER, NESTED
from tests.datamodules.series.test_ts_file import GOOD as GOOD_TS
from tests.fuzzing.mutations import Edit, apply, edits
from tests.fuzzing.targets import Target, one_line
from tests.support.listops import to_line


def _silent(_: int) -> None:
    """No progress."""


# ---- ListOps --------------------------------------------------------------------------------

_LISTOPS = (HEADER + GOOD + NESTED + GOOD).encode()
_LISTOPS_WORDS = [token.encode() for token in TOKENS[1:]] + [b"( ", b" )", b"\t", b"\r\n"]


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


def check_listops(changes: list[Edit], folder: Path) -> str:
    """Accepted lines have their value, and hold the words of the file."""
    path = folder / "basic_train.tsv"
    path.write_bytes(apply(_LISTOPS, changes))
    try:
        tokens, targets = read_split(path, _silent)
    except DataError as error:
        return one_line(error)
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
    return "accepted"


# ---- Retrieval ------------------------------------------------------------------------------

_PAIRS = b"".join(pair_lines(4, 3))


def check_pairs(changes: list[Edit], folder: Path) -> str:
    """Accepted lines are their five columns."""
    path = folder / "new_aan_pairs.train.tsv"
    path.write_bytes(apply(_PAIRS, changes))
    try:
        pairs = list(read_pairs(path, _silent))
    except DataError as error:
        return one_line(error)
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
    return "accepted"


# ---- `.ts` ----------------------------------------------------------------------------------

_TS = (GOOD_TS + "1,2.5:3,-4:Up\n0:1e-3:Down\n").encode()
_TS_WORDS = [b"@missing true\n", b"@equalLength true\n", b"?", b"NaN", b",", b":", b"1e39", b"inf"]
_TS_WORDS += [b"@data\n", b"Up", b"#", b"\xef\xbb\xbf", b"\r\n", b"@dimensions 3\n", b"\xc2\x85"]


def check_ts_file(changes: list[Edit], folder: Path) -> str:
    """Accepted series are the numbers of the file, and labels are spelled as in its header."""
    path = folder / "Tiny_TRAIN.ts"
    path.write_bytes(apply(_TS, changes))
    try:
        found = read_ts(path)
    except DataError as error:
        return one_line(error, path)
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
    return "accepted"


def _number(text: str) -> float:
    return float("nan") if text.strip().lower() in ("?", "nan") else float(text)


# ---- token files ----------------------------------------------------------------------------

_TEXT = " the <unk> the cat \n \n = sat = \ncat é 日 the \n".encode()
_TEXT_WORDS = [b"<eos>", b"<unk>", b"\r\n", b"\r", b"\xc2\x85", b"\xe2\x80\xa8", b"\x1c", b"\x00"]
_TEXT_WORDS += [b"\xef\xbb\xbf", b"\xff"]


def check_tokens(changes: list[Edit], folder: Path) -> str:
    """Accepted text comes back from its ids, line by line."""
    path = folder / "wiki.train.tokens"
    path.write_bytes(apply(_TEXT, changes))
    source = PlainText((path,))
    try:
        text = "".join(block.text for block in source.blocks())
        words = learn_words([text])
        ids, unknown = words.encode(text)
    except DataError as error:
        return one_line(error, path)
    raw = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    lines = raw.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    expected = [word for line in lines for word in (*line.split(), "<eos>")]
    assert [words.words[i] for i in ids] == expected
    assert unknown == 0
    return "accepted"


def check_vocabulary(changes: list[Edit], folder: Path) -> str:
    """Accepted words are the lines of the file."""
    path = folder / "vocabulary.txt"
    path.write_bytes(apply(b"<eos>\n<unk>\nthe\ncat\n\xe6\x97\xa5\n", changes))
    try:
        found = read_words(path)
    except DataError as error:
        return one_line(error, path)
    raw = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    assert found.words == raw.removesuffix("\n").split("\n")
    assert len(set(found.words)) == len(found)
    assert Tokens.from_text(found.text).words == found.words
    return "accepted"


# ---- Pathfinder's lists ---------------------------------------------------------------------

_LIST = b"imgs/0 sample_0.png 0 1 1.8 14\nimgs/0 sample_1.png 1 0 1.8 14\n"


def check_list(changes: list[Edit], folder: Path) -> str:
    """Accepted lines name a picture inside the release and its label."""
    path = folder / "metadata" / "0.npy"
    path.parent.mkdir()
    path.write_bytes(apply(_LIST, changes))
    try:
        entries = read_entries(folder, [path])
    except DataError as error:
        return one_line(error)
    for entry in entries:
        assert entry.label in (0, 1)
        assert folder in entry.path.parents
        assert ".." not in entry.path.parts
    return "accepted"


def targets() -> Iterator[Target]:
    """All of them."""

    def target(name: str, words: list[bytes], check: Any) -> Target:
        inputs: st.SearchStrategy[Any] = edits(words)
        return Target(name, inputs, check)

    yield target("listops", _LISTOPS_WORDS, check_listops)
    yield target("retrieval", [b"\t", b"0.0", b"1.0", b"\r\n", b"nan", b"1e0"], check_pairs)
    yield target("ts", _TS_WORDS, check_ts_file)
    yield target("tokens", _TEXT_WORDS, check_tokens)
    yield target("vocabulary", _TEXT_WORDS, check_vocabulary)
    yield target("pathfinder", [b"../", b"/etc", b" 2 ", b"\x93NUMPY", b"\x00"], check_list)

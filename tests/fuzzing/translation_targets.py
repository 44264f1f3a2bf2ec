"""Parallel text, BPE codes and dictionaries, each beside what its file says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from datamodules.text.translation.bpe import Codes, joined
from datamodules.text.translation.dictionary import SPECIALS, Dictionary
from datamodules.text.translation.files import Lines, Pair, check_pair
from datamodules.text.translation.preparation import read_codes, read_text
from lit_probattn.base.errors import DataError
from tests.fuzzing.mutations import Edit, apply, edits
from tests.fuzzing.targets import Target, one_line

_GERMAN = "Der Hund läuft.\nDas Haus war groß.\nNein @-@ nicht.\n".encode()
_ENGLISH = "The dog runs.\nThe house is big.\nNo @-@ not.\n"
_CODES = b"#version: 0.2\nt h\nth e</w>\no u\n"
_DICTIONARY = b"the 12\nhou@@ 3\n&apos;s 2\nmadeupword0000 0\n"


def check_parallel(changes: list[Edit], folder: Path) -> str:
    """Accepted sides have as many lines as newlines say, and each line is the file's."""
    german, english = folder / "train.de", folder / "train.en"
    german.write_bytes(apply(_GERMAN, changes))
    english.write_text(_ENGLISH, "utf-8")
    pair = Pair(Lines((german,)), Lines((english,)))
    try:
        full, _ = check_pair(pair, "drop")
    except DataError as error:
        return one_line(error)
    raw = german.read_bytes().decode("utf-8-sig")
    expected = raw.removesuffix("\n").split("\n")
    assert len(full) == len(expected) == 3
    found = list(pair.source)
    assert [line.split() for line in found] == [line.split() for line in expected]
    assert full.tolist() == [bool(line.strip()) for line in expected]
    return "accepted"


def check_codes(changes: list[Edit], folder: Path) -> str:
    """Accepted codes cut words into pieces that give them back, and are stored as they were."""
    path = folder / "code"
    path.write_bytes(apply(_CODES, changes))
    try:
        codes = read_codes(path)
    except DataError as error:
        return one_line(error)
    text = "the house thee t h x"
    assert joined(codes.cut(text).split()) == text
    again = Codes.from_text(codes.text, "code")
    assert again.merges == codes.merges
    assert again.end_is_symbol == codes.end_is_symbol
    return "accepted"


def check_dictionary(changes: list[Edit], folder: Path) -> str:
    """Accepted dictionaries have each piece once, in the order of the lines."""
    path = folder / "dict.en.txt"
    path.write_bytes(apply(_DICTIONARY, changes))
    try:
        found = Dictionary.from_text(read_text(path), str(path))
    except DataError as error:
        return one_line(error)
    pieces = found.pieces[len(SPECIALS) :]
    assert len(set(pieces)) == len(pieces) == len(found) - len(SPECIALS)
    for number, piece in enumerate(pieces, len(SPECIALS)):
        assert found.ids([piece]).tolist() == [number, 2]
    assert Dictionary.from_text(found.text, "again").counts == found.counts
    return "accepted"


def targets() -> Iterator[Target]:
    """All of them."""
    words = [b"\n", b"\r\n", b"\r", b" ", "\u2028".encode(), b"\x0c", b"\xff", b"@@ ", b"\x00"]
    yield Target("parallel", edits(words), check_parallel)
    yield Target("codes", edits([*words, b"</w>", b"#version: 0.1", b" 7"]), check_codes)
    yield Target(
        "dictionary", edits([*words, b"<unk> 1\n", b" #fairseq:overwrite"]), check_dictionary
    )

"""Parallel text, BPE codes and dictionaries, each beside what its file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.core.files import read_text
from datamodules.text.translation.bpe import Codes, joined
from datamodules.text.translation.dictionary import SPECIALS, Dictionary
from datamodules.text.translation.files import Lines, Pair, check_pair
from datamodules.text.translation.preparation import read_codes
from tests.fuzzing.targets import reader

_GERMAN = "Der Hund läuft.\nDas Haus war groß.\nNein @-@ nicht.\n".encode()
_ENGLISH = "The dog runs.\nThe house is big.\nNo @-@ not.\n"
_CODES = b"#version: 0.2\nt h\nth e</w>\no u\n"
_DICTIONARY = b"the 12\nhou@@ 3\n&apos;s 2\nmadeupword0000 0\n"
_WORDS = [b"\n", b"\r\n", b"\r", b" ", "\u2028".encode(), b"\x0c", b"\xff", b"@@ ", b"\x00"]


def _checked(german: Path) -> tuple[Any, Pair]:
    english = german.with_suffix(".en")
    english.write_text(_ENGLISH, "utf-8")
    pair = Pair(Lines((german,)), Lines((english,)))
    return check_pair(pair, "drop")[0], pair


@reader("parallel", "train.de", _GERMAN, _WORDS, _checked)
def parallel(path: Path, found: tuple[Any, Pair]) -> None:
    """Accepted sides have as many lines as newlines say, and each line is the file's."""
    full, pair = found
    raw = path.read_bytes().decode("utf-8-sig")
    expected = raw.removesuffix("\n").split("\n")
    assert len(full) == len(expected) == 3
    assert [line.split() for line in pair.source] == [line.split() for line in expected]
    assert full.tolist() == [bool(line.strip()) for line in expected]


@reader("codes", "code", _CODES, [*_WORDS, b"</w>", b"#version: 0.1", b" 7"], read_codes)
def codes(path: Path, codes: Codes) -> None:
    """Accepted codes cut words into pieces that give them back, and are stored as they were."""
    text = "the house thee t h x"
    assert joined(codes.cut(text).split()) == text
    again = Codes.from_text(codes.text, "code")
    assert again.merges == codes.merges
    assert again.end_is_symbol == codes.end_is_symbol


@reader(
    "dictionary",
    "dict.en.txt",
    _DICTIONARY,
    [*_WORDS, b"<unk> 1\n", b" #fairseq:overwrite"],
    lambda path: Dictionary.from_text(read_text(path), str(path)),
)
def dictionary(path: Path, found: Dictionary) -> None:
    """Accepted dictionaries have each piece once, in the order of the lines."""
    pieces = found.pieces[len(SPECIALS) :]
    assert len(set(pieces)) == len(pieces) == len(found) - len(SPECIALS)
    for number, piece in enumerate(pieces, len(SPECIALS)):
        assert found.ids([piece]).tolist() == [number, 2]
    assert Dictionary.from_text(found.text, "again").counts == found.counts

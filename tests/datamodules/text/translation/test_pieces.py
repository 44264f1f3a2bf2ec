"""BPE codes, dictionaries, and what is stored of both."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from datamodules import Translation
from datamodules.text.translation.bpe import Codes, joined
from datamodules.text.translation.coder import TextCoder
from datamodules.text.translation.dictionary import UNK, Dictionary
from tests.datamodules.text.translation import made

LINES = [side for pair in made.pairs(80, 3) for side in pair]


def cut_by_hand(word: str, merges: list[tuple[str, str]], end: list[str]) -> list[str]:
    """Apply one merge after the other in their order, each wherever it fits from the left."""
    symbols = [*word[:-1], word[-1] + "</w>"] if not end else [*word, *end]
    for first, second in merges:
        place = 0
        while place < len(symbols) - 1:
            if (symbols[place], symbols[place + 1]) == (first, second):
                symbols[place : place + 2] = [first + second]
            place += 1
    text = [symbol.replace("</w>", "") for symbol in symbols]
    return [piece for piece in text if piece]


@pytest.mark.parametrize("end", [[], ["</w>"]])
def test_words_are_cut_as_by_hand(end: list[str]) -> None:
    codes = Codes.learn(lambda: LINES, 60)
    merges = codes.merges
    if end:  # version 0.1 has the end of the word as a symbol
        merges = [("h", "o"), ("ho", "u"), ("u", "s"), ("e", "</w>"), ("s", "e</w>")]
        codes = Codes.from_text("".join(f"{a} {b}\n" for a, b in merges), "codes")
    words = sorted({word for line in LINES for word in line.split()} | {"unseen", "x", "eee"})
    for word in words:
        pieces = codes.cut(word).split()
        assert [piece.removesuffix("@@") for piece in pieces] == cut_by_hand(word, merges, end)
        assert all(piece.endswith("@@") for piece in pieces[:-1])
        assert joined(pieces) == word
    cut = [codes.cut(line) for line in LINES]
    assert [joined(line.split()) for line in cut] == LINES
    assert any("@@ " in line for line in cut)


def test_merges_are_learned_by_frequency() -> None:
    words = Counter(word for line in LINES for word in line.split())
    symbols = {word: (*word[:-1], word[-1] + "</w>") for word in words}
    codes = Codes.learn(lambda: LINES, 40)
    assert len(codes.merges) == 40
    for merge in codes.merges:
        counts: Counter[tuple[str, str]] = Counter()
        for word, pieces in symbols.items():
            for pair in pairwise(pieces):
                counts[pair] += words[word]
        assert counts[merge] == max(counts.values())  # whichever of those that are equal
        for word, pieces in symbols.items():
            merged: list[str] = []
            for piece in pieces:
                if merged and (merged[-1], piece) == merge:
                    merged[-1] += piece
                else:
                    merged.append(piece)
            symbols[word] = tuple(merged)


def test_codes_of_others_are_read() -> None:
    text = "#version: 0.2\nt h\nth e</w>\n"
    assert Codes.from_text(text, "code").cut("the other") == "the o@@ th@@ e@@ r"
    assert Codes.from_text(text, "code").text == text
    fast = "t h 120\nth e</w> 90\n"
    assert Codes.from_text(fast, "code").cut("the other") == "the o@@ th@@ e@@ r"
    first = Codes.from_text("#version: 0.2\na b\nb c</w>\na b\n", "code")
    assert first.cut("abc") == "ab@@ c"  # the first of equal lines counts


def test_dictionary_file_of_fairseq() -> None:
    text = "the 12\nhou@@ 3\n&apos;s 2\nmadeupword0000 0\n"
    found = Dictionary.from_text(text, "dict.en.txt")
    assert found.ids(["hou@@", "se", "the"]).tolist() == [5, UNK, 4, 2]
    assert found.words([0, 5, 4, 1, 2, 6]) == ["hou@@", "the"]
    assert found.text == text
    assert len(found) == 8
    for special in ("<s>", "<pad>", "</s>", "<unk>"):  # words of a text, not what they look like
        assert found.ids([special]).tolist() == [UNK, 2]
    again = Dictionary.from_text("<unk> 3 #fairseq:overwrite\nthe 1\n", "dict.en.txt")
    assert again.ids(["the"]).tolist()[0] == 5
    assert Dictionary.from_text(again.text, "dict.en.txt") == again


@pytest.mark.parametrize("always", [(), ("w2", "x", "y")], ids=["none kept", "three kept"])
@pytest.mark.parametrize("most", [7, 8, 9, 13, 16, 19, None])
def test_a_limited_dictionary_has_what_is_kept_and_the_most_frequent(always, most) -> None:
    counts = {f"w{n}": 1 + n * n for n in range(11)}
    lines = [[piece] * count for piece, count in counts.items()]
    found = Dictionary.count(lines, always, most)
    real = [piece for piece in found.counts if not piece.startswith("madeup")]
    assert len(found) == most or len(found) % 8 == 0
    assert len(found) <= (most or 24)
    assert real == sorted(real, key=lambda piece: -counts.get(piece, 0))
    num_others = (most or 24) - 4 - len(always)
    others = sorted((piece for piece in counts if piece not in always), key=counts.get)
    assert set(real) == {*always, *others[::-1][:num_others]}


def test_everything_of_the_coder_is_stored(tmp_path: Path) -> None:
    folder = made.write(tmp_path / "text")
    for method in ("subwords", "moses_bpe", "words"):
        module = Translation(path=str(folder), tokens=method, merges=40)
        coder = TextCoder.from_text(module.coder.text)
        line = "der Hund hat 3."
        assert coder.text == module.coder.text
        assert coder.encode([line]) == module.encode([line])
        ids = coder.target.ids(
            coder.cutter.pieces([coder.cutter.words("a dog 3.", "target")])[0].split()
        )
        assert coder.detokenise(ids) == "a dog 3."

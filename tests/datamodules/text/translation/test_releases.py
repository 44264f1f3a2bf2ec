"""IWSLT'14 and WMT'14: their files as they are released, prepared as published."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from datamodules import IWSLT14, WMT14
from datamodules.__main__ import main
from datamodules.text.translation.moses import Moses
from tests.datamodules.text.translation import made

_XML_ORDER = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def opened(module):
    module.prepare_data()
    module.setup()
    return module


def iwslt(folder: Path, **options) -> IWSLT14:
    return opened(IWSLT14(data_dir=str(folder), **{"merges": 50, "max_tokens": 256, **options}))


def by_hand(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """The published preparation, written out: tags, words, cleaning, lower case, every 23rd."""
    sides = []
    for language in ("de", "en"):
        lines = (folder / f"train.tags.de-en.{language}").read_text("utf-8").splitlines()
        lines = [line for line in lines if not re.search("<url>|<talkid>|<keywords>", line)]
        lines = [re.sub("</?(title|description)>", "", line) for line in lines]
        sides.append([Moses(language).words(line) for line in lines])
    train = []
    for german, english in zip(*sides, strict=True):
        counts = len(german.split()), len(english.split())
        if min(counts) >= 1 and max(counts) <= 175 and max(counts) / min(counts) <= 1.5:
            train.append((german.lower(), english.lower()))
    tests = []
    for name in _XML_ORDER:
        both = []
        for language in ("de", "en"):
            text = (folder / f"IWSLT14.{name}.de-en.{language}.xml").read_text("utf-8")
            segments = re.findall(r'<seg id="\d+">\s*(.*?)\s*</seg>', text.replace("’", "'"))
            both.append([Moses(language, lower=True).words(line) for line in segments])
        tests += list(zip(*both, strict=True))
    return {
        "train": [pair for number, pair in enumerate(train, 1) if number % 23],
        "val": [pair for number, pair in enumerate(train, 1) if not number % 23],
        "test": tests,
    }


@pytest.fixture(scope="module")
def german(tmp_path_factory) -> IWSLT14:
    """IWSLT'14 from German, with a cache beside it."""
    folder = tmp_path_factory.mktemp("iwslt")
    made.write_iwslt(folder / "de-en")
    return iwslt(folder, cache_dir=str(folder / "cache"))


def test_iwslt_is_prepared_as_published(german: IWSLT14) -> None:
    expected, module = by_hand(german.data_dir / "de-en"), german
    assert 0 < len(expected["train"]) < 90  # some were cleaned away
    for name, pairs in expected.items():
        split = module.split(name)
        assert len(split) == len(pairs)
        for place, (source, english) in enumerate(pairs):
            if name != "test":  # it has characters that training lacks
                assert module.tokenised(split[place].target) == english
            pieces = module.coder.cutter.pieces([source])[0].split()
            assert split[place].source.tolist() == module.coder.source.ids(pieces).tolist()
    assert module.tokenised_references("test") == [english for _, english in expected["test"]]
    assert module.references("test")[3].startswith("TEDX.dev2012 ")
    assert module.references("test")[3].endswith(" it's")


def test_iwslt_reads_the_archive(german: IWSLT14, tmp_path: Path, capsys) -> None:
    with tarfile.open(tmp_path / "de-en.tgz", "w:gz") as archive:
        archive.add(german.data_dir / "de-en", arcname="de-en")
    options = ["iwslt14", "--data_dir", str(tmp_path), "--merges=50", "--max_tokens=256"]
    assert main(["prepare", *options]) == 0
    assert main(["check", *options]) == 1  # it is not the whole release
    out = capsys.readouterr().out
    for name, published in (("train", 160239), ("val", 7283), ("test", 6750)):
        assert f"published pairs of {name}: {published}; here " in out
    assert "here 15: DIFFERENT" in out
    assert "padding in training batches: " in out
    assert "test pair 3: " in out
    assert iwslt(tmp_path).coder.text == german.coder.text


def test_iwslt_in_the_other_direction(german: IWSLT14) -> None:
    back = iwslt(german.data_dir, source_language="en", target_language="de")
    assert back.source_lines("test") == german.references("test")
    assert len(back.split("val")) == len(german.split("val"))


def test_iwslt_prepared_by_the_script_is_not_cleaned_again(tmp_path: Path) -> None:
    folder = made.write(
        tmp_path / "iwslt14.tokenized.de-en",
        train_de="ein@@ s zwei drei vier\n" * 3,
        train_en="one\n" * 3,
    )
    (folder / "code").write_text("#version: 0.2\ne i\n", "utf-8")
    module = iwslt(tmp_path)
    assert len(module.split("train")) == 3
    assert len(module.split("val")) == 9


# ---- WMT'14 --------------------------------------------------------------------------------------

_PIECES = {
    "train": "train.tok.clean.bpe.32000",
    "valid": "newstest2013.tok.bpe.32000",
    "test": "newstest2014.tok.bpe.32000",
}


def wmt(folder: Path, **options) -> WMT14:
    return opened(WMT14(data_dir=str(folder), **{"max_tokens": 256, **options}))


def write_pieces(folder: Path) -> Path:
    """The prepared release: pieces with @@, codes and a vocabulary beside them."""
    made.write(folder)
    for name, stem in _PIECES.items():
        for language in ("de", "en"):
            text = (folder / f"{name}.{language}").read_text("utf-8")
            pieces = text.replace("Hu", "Hu@@ ").replace("hou", "hou@@ ").replace(".", " .")
            (folder / f"{stem}.{language}").write_text(pieces, "utf-8")
            (folder / f"{name}.{language}").unlink()
    (folder / "bpe.32000").write_text("#version: 0.2\nH u\nh o\nho u\n", "utf-8")
    (folder / "vocab.bpe.32000").write_text("<unk>\nder\n", "utf-8")
    return folder


def test_wmt_pieces_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "wmt16_en_de_bpe32k")
    module = wmt(tmp_path, dictionary_limit=24)
    assert [len(module.split(name)) for name in ("train", "val", "test")] == [60, 9, 7]
    assert module.coder.cutter.method == "prepared"
    assert module.coder.source is module.coder.target
    assert module.vocab_size == 24
    first = (folder / f"{_PIECES['test']}.de").read_text("utf-8").splitlines()[0]
    assert module.tokenised_references("test")[0] == first.replace("@@ ", "")
    assert "@@" not in module.references("test")[0]
    assert module.references("test")[0].endswith(".")
    assert not module.references("test")[0].endswith(" .")


def test_wmt_says_what_was_published(tmp_path: Path) -> None:
    lines = list(wmt(write_pieces(tmp_path)).compare_sizes())
    assert lines == [
        ("published pairs of train: about 4.5 million; here 60: DIFFERENT", False),
        ("published pairs of val: 3000; here 9: DIFFERENT", False),
        ("published pairs of test: 3003; here 7: DIFFERENT", False),
    ]


def test_wmt_archive_equals_its_folder(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "text")
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "wmt16_en_de.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname=".")
    packed = wmt(tmp_path / "data")
    assert packed.coder.text == wmt(folder).coder.text
    assert packed.encode(["the house"])[0][-1] == 2


def test_wmt_raw_text(tmp_path: Path) -> None:
    """Corpora one after the other; hyphens are words; cleaning counts pieces; SGML is read."""
    made.write(tmp_path / "made")
    corpora = {"training/europarl-v7": 0, "commoncrawl": 20, "training/news-commentary-v9": 40}
    (tmp_path / "training").mkdir()
    for language in ("de", "en"):
        lines = (tmp_path / "made" / f"train.{language}").read_text("utf-8").splitlines()
        for name, first in corpora.items():
            text = "".join(f"{line}\n" for line in lines[first : first + 20])
            (tmp_path / f"{name}.de-en.{language}").write_text(text, "utf-8")
        valid = (tmp_path / "made" / f"valid.{language}").read_text("utf-8")
        (tmp_path / f"newstest2013.{language}").write_text(valid, "utf-8")
        role = "src" if language == "en" else "ref"
        first = "Ein well-known Haus." if language == "de" else "A well-known house."
        segments = f'<hl>\n<seg id="1">{first}</seg>\n</hl>\n<p>\n<seg id="2">b</seg>\n'
        place = tmp_path / f"newstest2014-deen-{role}.{language}.sgm"
        place.write_text(f'<refset setid="x">\n{segments}</p>\n', "utf-8")
    module = wmt(tmp_path, merges=40, max_words=25, max_ratio=1.6)
    assert module.tokenised_references("test") == ["Ein well @-@ known Haus .", "b"]
    assert module.references("test") == ["Ein well-known Haus.", "b"]
    pieces = [len(module.split("train")[i].source) - 1 for i in range(len(module.split("train")))]
    assert 0 < len(pieces) < 60
    assert max(pieces) <= 25

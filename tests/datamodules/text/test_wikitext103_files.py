"""The forms in which WikiText is passed on, and files that are not as they should be."""

from __future__ import annotations

import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_probattn.base.errors import DataError, MissingDataError
from tests.datamodules.text import made as made_text


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Text of each split, by the names in files, and what the plain release gives."""
    folder = made_text.write(tmp_path_factory.mktemp("plain"))
    texts = {
        name: (folder / f"wiki.{name}.tokens").read_text(encoding="utf-8")
        for name in made_text.NAMES
    }
    return texts, contents(made_text.data(folder, cache_dir=str(folder / "cache")))


@pytest.fixture
def texts(plain):
    return plain[0]


def contents(module):
    module.prepare_data()
    cache = module.open()
    tokens = [cache.array(f"{name}_tokens").tolist() for name in ("train", "val", "test")]
    return [module.vocabulary.digest, *tokens]


def write_shards(folder, texts, names, ending):
    folder.mkdir(parents=True)
    for (_, text), name in zip(texts.items(), names, strict=True):
        rows = [row + ending for row in text.split("\n")[:-1]]
        # Empty lines have no newline in the published shards.
        rows = [row if row.strip() else "" for row in rows]
        half = len(rows) // 2
        for number, part in enumerate((rows[:half], rows[half:])):
            path = folder / name.format(number)
            path.parent.mkdir(exist_ok=True)
            pq.write_table(pa.table({"text": part}), path, row_group_size=7)


def write_zip(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "wikitext-103-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"wikitext-103/wiki.{name}.tokens", text)


def write_ends(newline):
    """Other line ends, a byte-order mark, and no line end at the end of the training text."""

    def write(folder, texts):
        other = {name: "\ufeff" + text.replace("\n", newline) for name, text in texts.items()}
        made_text.write(folder, **{**other, "train": other["train"].removesuffix(newline)})

    return write


SPLITS = ("train", "validation", "test")
FLAT = [f"{name}-{{:05d}}-of-00002.parquet" for name in SPLITS]
NESTED = [f"{name}/{{:04d}}.parquet" for name in SPLITS]
HUB = "wikitext/wikitext-103-v1"
FORMS = {
    "older names": lambda folder, texts: made_text.write(folder, "{}.txt", **texts),
    "zip": write_zip,
    "shards": lambda folder, texts: write_shards(folder / HUB, texts, FLAT, "\n"),
    "shards of folders": lambda folder, texts: write_shards(folder / HUB, texts, NESTED, ""),
    "Windows": write_ends("\r\n"),
    "old Mac": write_ends("\r"),
}


@pytest.mark.parametrize("block_bytes", [None, 3])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_tokens(tmp_path, plain, monkeypatch, form, block_bytes):
    if block_bytes is not None:
        monkeypatch.setattr("datamodules.text.source._BLOCK_BYTES", block_bytes)
    FORMS[form](tmp_path / "new", plain[0])
    assert contents(made_text.data(tmp_path / "new", corpus="wikitext-103")) == plain[1]


def test_a_missing_shard_is_named(tmp_path, texts):
    write_shards(tmp_path / "hub", texts, FLAT, "\n")
    (tmp_path / "hub" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(
        MissingDataError, match=r"train-00000-of-00002.parquet, but missing shard 00001"
    ):
        made_text.data(tmp_path / "hub").prepare_data()


def test_parquet_of_something_else(tmp_path, texts):
    made_text.write(tmp_path, "{}-0.parquet")
    with pytest.raises(DataError, match="is not a Parquet file"):
        made_text.data(tmp_path).prepare_data()
    for name in made_text.NAMES:
        pq.write_table(pa.table({"line": ["a"]}), tmp_path / f"{name}-0.parquet")
    with pytest.raises(DataError, match="column `text` of strings, received line: string"):
        made_text.data(tmp_path).prepare_data()


def test_words_are_split_at_blanks_of_any_kind_but_lines_are_not(tmp_path):
    text = "a\u00a0b\u2028c\x0bd\x85e\n"
    module = made_text.data(made_text.write(tmp_path, train=text, valid=text, test=text))
    assert contents(module)[1] == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_without_end_is_named(tmp_path, texts, monkeypatch, packed):
    monkeypatch.setattr("datamodules.text.source.MOST_LINE_BYTES", 3000)
    monkeypatch.setattr("datamodules.text.source._BLOCK_BYTES", 100)
    texts = {**texts, "test": "short\n" + 5000 * "a"}
    module = made_text.data(tmp_path / "new", corpus="wikitext-103")
    write_zip(tmp_path / "new", texts) if packed else made_text.write(tmp_path / "new", **texts)
    with pytest.raises(DataError, match=r"line 2: longer than 3000 bytes; split the text into"):
        module.prepare_data()


def test_subwords(tmp_path):
    pytest.importorskip("tokenizers")
    text = "the lower lowest low é 日\n\nlow lower the\n"
    made_text.write(tmp_path, train=text * 20, valid=text, test=text)
    module = made_text.data(tmp_path, subwords=270)
    assert module.vocab_size == 270
    ids = module.open().array("test_tokens").tolist()
    assert module.decode(ids) == text
    stored = tmp_path / "tokenizer.json"
    stored.write_text(module.vocabulary.tokenizer.to_str(), encoding="utf-8")
    again = made_text.data(tmp_path, tokenizer_file=str(stored))
    again.prepare_data()
    assert again.open().array("test_tokens").tolist() == ids

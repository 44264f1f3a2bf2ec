"""The forms in which WikiText is passed on, and files that are not as they should be."""

from __future__ import annotations

import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.__main__ import main
from lit_probattn.base.errors import DataError, MissingDataError
from tests.datamodules.text import made as made_text


@pytest.fixture
def texts(tmp_path):
    """Text of each split, by the names in files."""
    folder = made_text.write(tmp_path / "plain")
    return {
        name: (folder / f"wiki.{name}.tokens").read_text(encoding="utf-8")
        for name in made_text.NAMES
    }


@pytest.fixture
def expected(tmp_path, texts):
    module = made_text.data(tmp_path / "plain")
    module.prepare_data()
    return contents(module)


def contents(module):
    cache = module.open()
    return [module.vocabulary.digest] + [
        cache.array(f"{name}_tokens").tolist() for name in ("train", "val", "test")
    ]


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


def test_older_names(tmp_path, texts, expected):
    module = made_text.data(made_text.write(tmp_path / "old", "{}.txt", **texts))
    assert (module.prepare_data(), contents(module))[1] == expected


def test_zip_of_the_release(tmp_path, texts, expected):
    with zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"wikitext-103/wiki.{name}.tokens", text)
    module = made_text.data(tmp_path, corpus="wikitext-103")
    assert (module.prepare_data(), contents(module))[1] == expected


@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize(
    "names",
    [
        [f"{n}-{{:05d}}-of-00002.parquet" for n in ("train", "validation", "test")],
        [f"{n}/{{:04d}}.parquet" for n in ("train", "validation", "test")],
    ],
)
def test_parquet_shards(tmp_path, texts, expected, names, ending):
    folder = tmp_path / "hub" / "wikitext" / "wikitext-103-v1"
    write_shards(folder, texts, names, ending)
    module = made_text.data(tmp_path / "hub", corpus="wikitext-103")
    assert (module.prepare_data(), contents(module))[1] == expected


def test_a_missing_shard_is_named(tmp_path, texts):
    names = [f"{n}-{{:05d}}-of-00002.parquet" for n in ("train", "validation", "test")]
    write_shards(tmp_path / "hub", texts, names, "\n")
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


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_line_ends_and_byte_order_mark_change_nothing(tmp_path, texts, expected, newline):
    other = {name: "\ufeff" + text.replace("\n", newline) for name, text in texts.items()}
    other["train"] = other["train"].removesuffix(newline)
    module = made_text.data(made_text.write(tmp_path / "other", **other))
    assert (module.prepare_data(), contents(module))[1] == expected


def test_pieces_change_nothing(tmp_path, texts, expected, monkeypatch):
    from datamodules.text import source as text_source

    monkeypatch.setattr(text_source, "_BLOCK_BYTES", 3)
    windows = {name: text.replace("\n", "\r\n") for name, text in texts.items()}
    module = made_text.data(made_text.write(tmp_path / "pieces", **windows))
    assert (module.prepare_data(), contents(module))[1] == expected


def test_words_are_split_at_blanks_of_any_kind_but_lines_are_not(tmp_path):
    text = "a\u00a0b\u2028c\x0bd\x85e\n"
    module = made_text.data(made_text.write(tmp_path, train=text, valid=text, test=text))
    module.prepare_data()
    assert contents(module)[1] == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_without_end_is_named(tmp_path, texts, monkeypatch, packed):
    monkeypatch.setattr("datamodules.text.source.MOST_LINE_BYTES", 3000)
    monkeypatch.setattr("datamodules.text.source._BLOCK_BYTES", 100)
    texts = {**texts, "test": "short\n" + 5000 * "a"}
    module = made_text.data(tmp_path / "new", corpus="wikitext-103")
    (tmp_path / "new").mkdir()
    if not packed:
        made_text.write(tmp_path / "new", **texts)
    else:
        with zipfile.ZipFile(tmp_path / "new/wikitext-103-v1.zip", "w") as archive:
            for name, text in texts.items():
                archive.writestr(f"wikitext-103/wiki.{name}.tokens", text)
    with pytest.raises(DataError, match=r"line 2: longer than 3000 bytes; split the text into"):
        module.prepare_data()


def test_empty_split(tmp_path):
    made_text.write(tmp_path, valid="")
    with pytest.raises(DataError, match=r"wiki.valid.tokens is empty: the val split requires text"):
        made_text.data(tmp_path).prepare_data()


def test_a_byte_that_is_not_utf8_is_located(tmp_path):
    made_text.write(tmp_path)
    (tmp_path / "wiki.test.tokens").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(DataError, match=r"wiki.test.tokens, line 2: byte 9 is not UTF-8"):
        made_text.data(tmp_path).prepare_data()


def test_nothing_and_half_a_release(tmp_path):
    with pytest.raises(MissingDataError, match=r"Salesforce/wikitext, folder wikitext-103-v1"):
        made_text.data(tmp_path, corpus="wikitext-103").prepare_data()
    made_text.write(tmp_path)
    (tmp_path / "wiki.valid.tokens").unlink()
    with pytest.raises(
        MissingDataError, match=r"found .*wiki.train.tokens, but missing .*wiki.valid.tokens"
    ):
        made_text.data(tmp_path).prepare_data()


def test_damaged_and_raw_archives(tmp_path):
    path = tmp_path / "wikitext-103-v1.zip"
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match="is not a zip archive"):
        made_text.data(tmp_path, corpus="wikitext-103").prepare_data()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("wikitext-103-raw/wiki.train.raw", "text")
    with pytest.raises(DataError, match=r"missing wiki.train.tokens.*not the raw one"):
        made_text.data(tmp_path, corpus="wikitext-103").prepare_data()


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


def test_two_vocabularies_are_refused(tmp_path):
    with pytest.raises(DataError, match="vocab_file and subwords are set"):
        made_text.data(tmp_path, vocab_file="a", subwords=300)


def test_command_prepares_and_checks(tmp_path, capsys):
    made_text.write(tmp_path)
    options = ["--data_dir", str(tmp_path), "--batch_size", "4", "--segment_len", "7"]
    assert main(["prepare", "wikitext103", *options]) == 0
    assert "tokens with <eos>, 0 unknown" in capsys.readouterr().out
    assert main(["check", "wikitext103", *options]) == 1
    out = capsys.readouterr().out
    assert "published words of the vocabulary: 267735; here" in out
    assert "DIFFERENT" in out
    assert main(["check", "wikitext103", *options, "--corpus", "other"]) == 1, "another cache"

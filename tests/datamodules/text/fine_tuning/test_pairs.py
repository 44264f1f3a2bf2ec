"""MultiNLI, SST-2, QNLI as they are released, and tables of one's own."""

from __future__ import annotations

import json

import pytest

from datamodules import LabelledTexts, TextPairs
from datamodules.text.fine_tuning.corpora import CORPORA, read_corpus
from lit_probattn.base.errors import DataError
from tests.datamodules.text.fine_tuning import made


def data_of(folder, corpus="own", **options) -> TextPairs:
    options = {"cache_dir": str(folder / "cache"), "vocab_limit": 200, "batch_size": 4, **options}
    data = TextPairs(path=str(folder), corpus=corpus, **options)
    data.setup()
    return data


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".tsv"])
def test_multinli(ending, tmp_path):
    data = data_of(made.write_mnli(tmp_path / "x", ending), "mnli")
    assert data.classes == ["entailment", "neutral", "contradiction"]
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [24, 8, 8]
    assert len(data.notes) == 2
    assert "rows without a label (-) skipped: 1" in data.notes[0]
    assert data.split("train").targets.tolist() == [n % 3 for n in range(24)]
    assert not data.select_on_test
    assert "went to" in data.shown("val", 0)
    assert " | " in data.shown("val", 0)


def test_sst2_keeps_quotes_and_has_one_text(tmp_path):
    data = data_of(made.write_sst2(tmp_path / "x"), "sst2")
    assert data.classes == ["negative", "positive"]
    assert data.select_on_test
    assert data.shown("train", 3) == 'a " train film 3 that shines'
    sample = data.split("train")[3]
    assert sample.second == len(sample.values)
    assert sample.target == 1


def test_qnli(tmp_path):
    data = data_of(made.write_qnli(tmp_path / "x"), "qnli")
    assert data.classes == ["entailment", "not_entailment"]
    assert data.shown("train", 1) == "where is bjorn? | chloe is in oslo 1."


def test_one_table_of_ones_own(tmp_path):
    rows = [
        {"premise": f"it rains {i}", "hypothesis": f"it is wet {i % 5}", "label": i % 2}
        for i in range(60)
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_of(tmp_path)
    assert data.classes == ["0", "1"]
    assert sum(len(data.split(name)) for name in ("train", "val", "test")) == 60
    assert " | it is wet" in data.shown("train", 0)
    assert "texts from columns 'premise' and 'hypothesis', labels from 'label'" in data.notes[0]
    one = data_of(tmp_path, first_column="hypothesis", allow_overlap=True)
    assert one.shown("train", 0).startswith("it is wet")
    assert "|" not in one.shown("train", 0)
    two = data_of(tmp_path, first_column="hypothesis", second_column="premise", allow_overlap=True)
    assert two.shown("train", 0).startswith("it is wet")
    assert "| it rains" in two.shown("train", 0)


def test_the_longer_text_is_cut(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(
        "text1,text2,label\n"
        + "".join(f"{'one ' * 30}{i},two words {i},{'ab'[i % 2]}\n" for i in range(20))
    )
    data = data_of(tmp_path, max_length=16)
    sample = data.split("train")[0]
    assert len(sample.values) == 16
    assert data.decode(sample.values[sample.second :]).startswith("two words")
    assert data.split("train").num_cut == len(data.split("train"))


def test_roberta_has_two_separators_and_one_type(tmp_path):
    data = data_of(made.write_qnli(tmp_path / "x"), "qnli", tokens="bpe", vocab_limit=300)
    sample, ends = data.split("train")[0], data.tokeniser.separator
    assert sample.values[sample.second - 2 : sample.second].tolist() == [ends, ends]
    assert data.num_token_types == 1
    assert not next(iter(data.val_dataloader()))["token_types"].any()


def test_options_that_have_no_effect_are_refused(tmp_path):
    folder = made.write_mnli(tmp_path / "x")
    with pytest.raises(DataError, match="first_column applies to corpus=own, received corpus=mnli"):
        data_of(folder, "mnli", first_column="sentence1")


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\tlabel\nthe dogs ran\t0\t1\n")
    with pytest.raises(DataError, match=r"train\.tsv: duplicate column 'label'"):
        read_corpus(CORPORA["sst2"], path)


def test_tokens_of_running_text_are_no_tokeniser_of_an_encoder(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("text,label\n" + "".join(f"it rains {i},{'ab'[i % 2]}\n" for i in range(40)))
    words = LabelledTexts(path=str(path), tokens="words", cache_dir=str(tmp_path / "words"))
    words.prepare_data()
    folder = words.open().folder
    with pytest.raises(DataError, match=rf"{folder}: .* set tokenizer"):
        TextPairs(path=str(path), tokenizer=str(folder), cache_dir=str(tmp_path)).prepare_data()

"""Sequences for masked language models: what is in them, what is not, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from datamodules import MaskedText, OwnText, TextPairs
from datamodules.text.masked_text import MaskedSplit
from lit_probattn.base.errors import DataError
from tests.datamodules.text import made as made_text
from tests.datamodules.text.fine_tuning import made
from tests.datamodules.text.made import encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_text.write(tmp_path_factory.mktemp("text"))


def data(folder, **options) -> MaskedText:
    small = {"corpus": "other", "segment_len": 9, "batch_size": 4}
    small["cache_dir"] = str(folder / ".cache")  # one for all tests
    return MaskedText(data_dir=str(folder), **{**small, **options})


def test_sequences_are_the_text_between_begin_and_end(folder):
    module = data(folder)
    module.setup()
    tokens = module.open().array("val_tokens")
    words = len(module.vocabulary)
    assert module.vocab_size == words + 3
    split = module.split("val")
    assert len(split) == -(-len(tokens) // 7)
    found = []
    for index in range(len(split)):
        inputs, target, number = split[index]
        assert (inputs[0], inputs[-1], number) == (words, words + 1, index)
        assert (target[0], target[-1]) == (-100, -100)
        np.testing.assert_array_equal(inputs[1:-1], target[1:-1])
        found += inputs[1:-1].tolist()
    assert found == tokens.tolist()


def test_text_in_the_tokens_of_a_pretrained_encoder(folder, tmp_path):
    pytest.importorskip("tokenizers")
    lines = made_text.lines(60, 0)
    own = encoder(lines, tmp_path / "vocabulary", 60)
    module = data(folder, tokenizer=str(tmp_path / "vocabulary"))
    module.setup()
    assert (module.vocab_size, module.mask_token) == (len(own), own.mask)
    assert data(folder).mask_token is None
    text = (folder / "wiki.valid.tokens").read_text(encoding="utf-8")
    expected = []
    for line in text.splitlines():
        expected += [*own.encode_plain(line)[0], own.separator]
    split = module.split("val")
    found, hidden = [], 0
    for index in range(len(split)):
        inputs, target, _ = split[index]
        assert (inputs[0], inputs[-1]) == (own.begin, own.separator)
        ends = np.isin(inputs, [own.begin, own.separator])
        np.testing.assert_array_equal(target, np.where(ends, -100, inputs))
        found += inputs[1:-1].tolist()
        hidden += int(ends[1:-1].sum())
    assert found == expected
    assert hidden == len(text.splitlines())
    again = data(folder, tokenizer=str(tmp_path / "vocabulary"))  # from the cache
    assert again.vocabulary.text == module.vocabulary.text
    first = text.splitlines()[1].strip().replace("<unk>", "< unk >")
    assert module.decode([own.begin, *own.encode_plain(first)[0], own.mask]) == first
    assert data(folder, tokenizer=str(tmp_path / "vocabulary"), vocab_size=99).vocab_size == 99


def test_the_cache_of_other_data_is_a_tokeniser(folder, tmp_path):
    pytest.importorskip("tokenizers")
    encoder(made_text.lines(60, 0), tmp_path / "vocabulary", 60)
    options = {"tokenizer": str(tmp_path / "vocabulary"), "cache_dir": str(tmp_path / "cache")}
    pairs = TextPairs(corpus="mnli", path=str(made.write_mnli(tmp_path / "mnli")), **options)
    pairs.prepare_data()
    pairs.setup("fit")
    (cache,) = (tmp_path / "cache").glob("text_pairs-*")
    first, second = (data(folder, tokenizer=str(p)) for p in (tmp_path / "vocabulary", cache))
    assert second.settings() == first.settings()
    second.prepare_data()
    second.setup("fit")
    assert second.pretrained.text == pairs.tokeniser.text


def test_training_keeps_full_sequences_only(folder):
    module = data(folder)
    module.setup()
    tokens = module.open().array("train_tokens")
    assert len(module.split("train")) == len(tokens) // 7
    batch = next(iter(module.train_dataloader()))
    assert batch["inputs"].shape == (4, 9)
    assert batch["key_mask"].all()


def test_a_short_last_sequence_is_padded(folder):
    module = data(folder, eval_batch_size=1000)
    module.setup()
    (batch,) = list(module.test_dataloader())
    assert module.shuffles
    inputs = [module.vocab_size - 3, 1, 2, module.vocab_size - 1]
    assert module.decode(inputs) == module.vocabulary.decode([1, 2])
    assert any("samples (full sequences, segment_len 9)" in line for line in module.size_lines())
    rest = len(module.open().array("test_tokens")) % 7
    assert 0 < rest < 7, "the made text must leave a rest"
    assert batch["key_mask"][-1].sum() == rest + 2
    assert (batch["target"][-1, rest + 1 :] == -100).all()
    assert int((batch["target"] != -100).sum()) == len(module.open().array("test_tokens"))


def test_sizes_that_do_not_fit_are_refused(folder):
    words = len(data(folder).vocabulary)
    with pytest.raises(DataError, match=f"set vocab_size to at least {words + 3}"):
        data(folder, vocab_size=words + 2).setup()
    with pytest.raises(DataError, match="expected at least 20 for segment_len=22"):
        MaskedSplit(np.arange(5), 22, 10, drop_short=True)


def test_a_text_that_is_too_short_is_named(folder, tmp_path):
    short = made_text.write(tmp_path / "test", test="\n")
    message = "the text has 1 tokens, expected at least 2 for"
    with pytest.raises(DataError, match=f"^test split: {message}"):
        made_text.data(short, cache_dir=str(tmp_path)).setup()
    short = made_text.write(tmp_path / "train", train="<unk> w1\n")
    with pytest.raises(DataError, match="train split: the text has 3 tokens, expected at least 7"):
        data(short, cache_dir=str(tmp_path)).setup()
    (tmp_path / "new.txt").write_text("\n")
    module = OwnText(
        path=str(folder / "wiki.train.tokens"),
        tokens="bytes",
        segment_len=9,
        batch_size=1,
        new_path=str(tmp_path / "new.txt"),
        cache_dir=str(tmp_path),
        num_prompts=1,
    )
    with pytest.raises(DataError, match=f"^new_path: .*new.txt: {message}"):
        module.setup("test")

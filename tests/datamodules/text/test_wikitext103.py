"""Vocabulary, splits, order and resume of running text."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from datamodules import WikiText103
from datamodules.core.order import MicroSteps, TrainingOrder
from datamodules.text.segments import IGNORE
from datamodules.text.token_files import read_words
from datamodules.text.tokens import Tokens
from tests.datamodules.text import made as made_text
from tests.support.paths import SHARED_DATA
from tests.support.runs import in_child, kill_me


@pytest.fixture
def folder(tmp_path):
    return made_text.write(tmp_path / "text")


def stream(module: WikiText103, name: str) -> list[int]:
    return module.open().array(f"{name}_tokens").tolist()


# ---- vocabulary --------------------------------------------------------------------------------


def test_streams_equal_a_loop_over_lines(folder):
    module = made_text.data(folder)
    train = (folder / "wiki.train.tokens").read_text(encoding="utf-8")
    counts = Counter(train.split())
    order = sorted(counts, key=lambda word: (-counts[word], train.split().index(word)))
    assert module.vocabulary.words == ["<eos>", *order]
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        text = (folder / f"wiki.{name}.tokens").read_text(encoding="utf-8")
        assert stream(module, split) == made_text.expected_ids(text, module.vocabulary.words)


def test_words_outside_a_given_vocabulary_are_counted(tmp_path, logged):
    words = tmp_path / "words.txt"
    words.write_text("<unk>\na\n<eos>\n")
    text = made_text.write(tmp_path / "t", train="a b a\n", valid="a\n", test="c d a\n\n")
    module = made_text.data(text, vocab_file=str(words), batch_size=1, segment_len=2)
    module.setup()
    assert stream(module, "train") == [1, 0, 1, 2]
    assert stream(module, "test") == [0, 0, 1, 2, 2]
    assert dict(module.num_unknown) == {"train": 1, "val": 0, "test": 2}
    assert (
        "2 of 5 tokens of the test text are missing from the vocabulary of 3 words" in logged.text
    )


def test_vocabulary_file_with_windows_line_ends_and_mark(tmp_path):
    words = tmp_path / "words.txt"
    words.write_bytes(b"\xef\xbb\xbf<eos>\r\na\r\n")
    assert read_words(words).words == ["<eos>", "a"]


def test_vocab_size_is_checked_and_known_before_setup(folder):
    words = len(made_text.data(folder).vocabulary)
    assert made_text.data(folder).vocab_size == words
    assert made_text.data(folder, vocab_size=words + 5).vocab_size == words + 5


def test_counts_are_compared_with_the_published_ones(folder, logged):
    module = made_text.data(folder, corpus="wikitext-103")
    module.setup()
    tokens = len(stream(module, "train"))
    assert f"{tokens} tokens of the training text, expected the published 103227021" in logged.text
    verdicts = dict(module.compare_sizes())
    assert (
        f"published tokens of the test text: 245569; here {len(stream(module, 'test'))}: "
        in str(verdicts)
    )
    assert not any(verdicts.values())


def test_published_counts_from_the_real_files(tmp_path):
    root = SHARED_DATA
    source = Path(os.environ.get("LIT_PROBATTN_TEST_DATA", root)) / "wikitext-2"
    if not (source / "wiki.valid.tokens").is_file():
        pytest.skip("no wikitext-2 in LIT_PROBATTN_TEST_DATA or ../shared/data")
    for name, file in (("train", "valid"), ("valid", "valid"), ("test", "test")):
        (tmp_path / f"wiki.{name}.tokens").symlink_to((source / f"wiki.{file}.tokens").resolve())
    counts = made_text.data(tmp_path).counts
    assert (counts["val"], counts["test"]) == (217646, 245569)


# ---- splits ------------------------------------------------------------------------------------


def test_columns_are_the_stream_cut_and_read_downwards(folder):
    module = made_text.data(folder)
    module.setup()
    tokens = np.array(stream(module, "train"))
    column_len = len(tokens) // 4
    columns = tokens[: 4 * column_len].reshape(4, column_len)
    batches = iter(module.train_dataloader())
    steps = -(-(column_len - 1) // 7)
    assert module.steps_per_epoch == steps
    for epoch in range(2):
        for step in range(steps):
            batch = next(batches)
            first, last = step * 7, min(step * 7 + 7, column_len - 1)
            np.testing.assert_array_equal(batch["inputs"], columns[:, first:last])
            np.testing.assert_array_equal(batch["target"], columns[:, first + 1 : last + 1])
            assert batch["sample_ids"].tolist() == [step * 4 + c for c in range(4)], epoch
            assert batch["key_mask"].all()
    assert last - first < 7, "the last segment of an epoch is shorter"


def test_order_without_shuffling_is_arithmetic():
    whole = iter(TrainingOrder(24, 8, seed=0, shuffle=False))
    expected = [next(whole) for _ in range(7)]
    assert expected[3] == list(range(8)), "the next epoch begins anew"
    parts = [TrainingOrder(24, 8, 5, MicroSteps(r, 2, 2, lambda: 6), False) for r in (0, 1)]
    iterators = [iter(part) for part in parts]
    resumed = [next(i) for _ in range(2) for i in iterators]  # global batch 3, in four parts
    assert [i for part in resumed for i in part] == expected[3]


def test_segments_are_shuffled_and_cover_the_stream(folder):
    module = made_text.data(folder, batching="segments", batch_size=3, seed=4)
    module.setup()
    tokens = stream(module, "train")
    number = (len(tokens) - 1) // 7
    batches = iter(module.train_dataloader())
    seen: list[int] = []
    for _ in range(number // 3):
        batch = next(batches)
        for row, sample in enumerate(batch["sample_ids"].tolist()):
            assert batch["inputs"][row].tolist() == tokens[sample * 7 : sample * 7 + 7]
            assert batch["target"][row].tolist() == tokens[sample * 7 + 1 : sample * 7 + 8]
            seen.append(sample)
    assert len(set(seen)) == len(seen)
    assert seen != sorted(seen)


@pytest.mark.parametrize(("stride", "form"), [(None, "segments"), (1, "sliding"), (3, "stride3")])
@pytest.mark.parametrize("length", [2, 5, 8, 9, 31])
def test_windows_score_every_prediction_once(tmp_path, stride, form, length):
    text = " ".join(f"w{i}" for i in range(length - 1)) + "\n"
    module = made_text.data(
        made_text.write(tmp_path, train=text * 4, valid=text, test=text), test_stride=stride
    )
    module.setup()
    split = module.split("test")
    tokens = stream(module, "test")
    assert len(tokens) == length
    scored = []
    for index in range(len(split)):
        sample = split[index]
        first = index * (stride or 7)
        assert sample.inputs.tolist() == tokens[first : first + len(sample.inputs)]
        for place, word in enumerate(sample.target.tolist()):
            if word != IGNORE:
                assert word == tokens[first + place + 1]
                scored.append(first + place + 1)
                assert index == 0 or place >= 7 - (stride or 7)
    assert scored == list(range(1, length))
    if stride == 1:
        assert len(split) == max(1, length - 7)
    assert next(iter(module.test_dataloader()))["form"] == form


def test_fill_up_rows_and_padding(tmp_path):
    text = "a b c d e f g h i j\n"
    module = made_text.data(
        made_text.write(tmp_path, train=text * 3, valid=text, test=text),
        eval_batch_size=3,
        test_stride=4,
    )
    module.setup()
    (batch,) = list(module.test_dataloader())
    assert batch["sample_ids"].tolist() == [0, 1]
    assert batch["key_mask"].sum(1).tolist() == [7, 6]
    assert batch["target"][1].tolist() == [IGNORE] * 3 + batch["target"][1, 3:6].tolist() + [IGNORE]
    filled = module.collate_of("test")([module.split("test")[i] for i in (1, -1)])
    assert filled["sample_ids"].tolist() == [1, -1]


def test_prompts_are_padded_on_the_left(folder):
    module = made_text.data(folder, prompts=["w1 w2\n", "w3"])
    module.setup("predict")
    (batch,) = list(module.predict_dataloader())
    assert batch["key_mask"].tolist() == [[True] * 3, [False, False, True]]
    rows = zip(batch["inputs"], batch["key_mask"], strict=True)
    assert [module.decode(row[mask].tolist()) for row, mask in rows] == ["w1 w2\n", "w3"]


# ---- interruption ------------------------------------------------------------------------------


def _interrupted(folder: Path, monkeypatch) -> None:
    """Tokenise in pieces of 200 bytes, and be killed in the training text."""
    from datamodules.text import job as token_stream
    from datamodules.text import source as text_source

    monkeypatch.setattr(text_source, "_BLOCK_BYTES", 200)
    monkeypatch.setattr(token_stream, "_BLOCKS_PER_STATE", 2)
    encode = Tokens.encode
    calls = []

    def counting(self, text):
        calls.append(text)
        if len(calls) == 6:
            kill_me()
        return encode(self, text)

    def work() -> int:
        monkeypatch.setattr(Tokens, "encode", counting)
        made_text.data(folder).prepare_data()
        return 0

    assert in_child(work) == -9


def test_a_killed_tokenisation_goes_on_where_it_was(folder, monkeypatch, logged):
    _interrupted(folder, monkeypatch)
    (partial,) = (folder.parent / ".cache").glob(".wikitext103-*.partial")
    state = json.loads((partial / "state.json").read_text(encoding="utf-8"))
    skipped = state["steps"]["train.int32"]["position"]
    assert 0 < skipped < (folder / "wiki.train.tokens").stat().st_size
    read = []
    encode = Tokens.encode
    monkeypatch.setattr(Tokens, "encode", lambda self, t: read.append(t) or encode(self, t))
    module = made_text.data(folder)
    module.prepare_data()
    assert "resuming an interrupted tokenisation" in logged.text
    text = (folder / "wiki.train.tokens").read_text(encoding="utf-8")
    assert "".join(read).startswith(text[skipped : skipped + 50]), "what was done is not repeated"
    assert stream(module, "train") == made_text.expected_ids(text, module.vocabulary.words)
    assert not partial.exists()


def test_an_interrupted_tokenisation_of_other_text_is_begun_anew(folder, monkeypatch):
    _interrupted(folder, monkeypatch)
    text = "entirely other <unk> words\n" * 30
    made_text.write(folder, train=text, valid="words\n", test="other\n")
    module = made_text.data(folder)
    module.prepare_data()
    assert stream(module, "train") == made_text.expected_ids(text, module.vocabulary.words)

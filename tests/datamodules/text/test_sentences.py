"""Single sentences: the layout of the one-billion-word release, cuts, words, batches."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from datamodules import LM1B
from datamodules.core.order import FILL
from datamodules.text.releases import lm1b
from datamodules.text.segments import IGNORE
from datamodules.text.sentences.release import find_release
from lit_probattn.base.errors import DataError, MissingDataError

RELEASE = "1-billion-word-language-modeling-benchmark-r13output"
TRAINING = f"{RELEASE}/training-monolingual.tokenized.shuffled"
HELD_OUT = f"{RELEASE}/heldout-monolingual.tokenized.shuffled"
_NAMES = [name.rpartition("/")[2] for name in lm1b().forms[0]]
_TRAINING_NAMES, _HELD_OUT_NAMES = _NAMES[:99], _NAMES[99:]
WORDS = ["the", "of", "to", "and", "in", "said", "that", "for", "was", "is", "he", "The", ",", "'s"]


def sentences(count: int, seed: int, most: int = 14) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, most))) + " ." for _ in range(count)]


def write(folder: Path) -> Path:
    """The release with two sentences in a training shard, and one to three in a held-out one."""
    for part, names in ((TRAINING, _TRAINING_NAMES), (HELD_OUT, _HELD_OUT_NAMES)):
        (folder / part).mkdir(parents=True)
        for number, name in enumerate(names):
            count = 2 if part == TRAINING else 1 + number % 3
            text = "".join(f"{line}\n" for line in sentences(count, number + len(names)))
            (folder / part / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("release"))


def made(folder: Path, cache: Path | None = None, **options) -> LM1B:
    settings = {"subwords": 280, "max_length": 16, "max_tokens": 64, **options}
    data = LM1B(data_dir=str(folder), cache_dir=str(cache or folder / "cache"), **settings)
    data.setup()
    return data


@pytest.fixture(scope="module")
def data(folder) -> LM1B:
    return made(folder)


def lines_of(folder: Path, part: str, names: list[str]) -> list[str]:
    return [
        line
        for name in names
        for line in (folder / part / name).read_text(encoding="utf-8").splitlines()
    ]


# ---- the release -------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "first", "last"), [((None, None), 1, 50), ((40, 3), 40, 43)])
def test_the_first_held_out_shards_are_the_test_and_the_next_validation(
    folder, tmp_path, shards, first, last
):
    test_shards, val_shards = shards
    data = made(folder, tmp_path, test_shards=test_shards, val_shards=val_shards, max_length=300)
    held_out = _HELD_OUT_NAMES
    expected = {
        "train": lines_of(folder, TRAINING, _TRAINING_NAMES),
        "test": lines_of(folder, HELD_OUT, held_out[:first]),
        "val": lines_of(folder, HELD_OUT, held_out[first:last]),
    }
    end = data.vocabulary.end_of_line
    for name, lines in expected.items():
        split = data.split(name)
        assert len(split) == len(lines)
        for index, line in enumerate(lines):
            sample = split[index]
            assert data.decode(sample.target.tolist()) == f"{line}\n"
            assert sample.inputs[0] == sample.target[-1] == end
            assert (sample.inputs[1:] == sample.target[:-1]).all()
            assert sample.num_words == (0 if name == "train" else len(line.split()) + 1)


def test_text_goes_on_from_the_position_of_any_block(folder):
    source = find_release(folder, 3, 2)["train"]
    blocks = list(source.blocks())
    assert len(blocks) > 50
    for number, block in enumerate(blocks):
        rest = blocks[number + 1 :]
        assert list(source.blocks(block.position)) == rest, number


def test_published_numbers_are_compared(data):
    verdicts = dict(data.compare_sizes())
    held_out = sum(1 + number % 3 for number in range(50))
    assert list(verdicts.values()) == [False, False]
    text = " ".join(verdicts)
    assert "30301028; here 198: DIFFERENT" in text
    assert f"306688; here {held_out}: DIFFERENT" in text


def test_missing_and_short_shards_are_named(tmp_path):
    folder = write(tmp_path / "data")
    gone = folder / TRAINING / "news.en-00042-of-00100"
    text = gone.read_bytes()
    gone.unlink()
    with pytest.raises(MissingDataError, match=r"but missing .*/news.en-00042-of-00100$"):
        made(folder)
    gone.write_bytes(text[:-1])
    with pytest.raises(DataError, match=r"news.en-00042-of-00100 is empty or truncated"):
        made(folder)
    gone.write_bytes(text)
    (folder / HELD_OUT / "news.en.heldout-00007-of-00050").unlink()
    assert len(made(folder, test_shards=5, val_shards=2).split("test")) == 1 + 2 + 3 + 1 + 2


# ---- sentences ---------------------------------------------------------------------------------


def test_a_long_sentence_is_cut_and_loses_its_end(data):
    split, end = data.split("train"), data.vocabulary.end_of_line
    cut = np.flatnonzero(split.lengths > 16)
    assert len(cut) == split.num_cut > 0
    for index in range(len(split)):
        sample = split[index]
        assert len(sample.inputs) == len(sample.target) == min(16, split.lengths[index])
        assert (sample.target[-1] == end) == (index not in cut)
    held_out = data.split("val")
    long = held_out.lengths > 16
    assert long.any()
    assert not long.all()
    for index, is_cut in enumerate(long):
        assert (held_out[index].num_words == 0) == is_cut


def test_lengths_of_sentences_are_in_memory_once(data):
    """The training text has thirty million."""
    lengths = data.batch_lengths("train")
    assert lengths.source is lengths.target


def test_own_text_is_divided_and_paragraphs_are_cut(tmp_path):
    parts = [
        f"= Title =\n\n  One {n} stands here . Another  one stands there .\n" for n in range(150)
    ]
    (tmp_path / "text.txt").write_text("".join(parts))
    plain = made(tmp_path / "text.txt", tmp_path / "c", corpus="other", max_length=300)
    cut = made(tmp_path / "text.txt", tmp_path / "c", corpus="other", paragraphs=True)
    shown = []
    for data in (plain, cut):
        splits = [data.split(name) for name in ("train", "val", "test")]
        shown.append([data.decode(s[i].target.tolist()) for s in splits for i in range(len(s))])
    assert shown[0].count("= Title =\n") == 150
    whole = [f"One {n} stands here . Another one stands there .\n" for n in range(150)]
    assert sorted(set(shown[0]) - {"= Title =\n"}) == sorted(whole)
    assert len(shown[0]) == len(shown[1]) == 300
    assert shown[1].count("Another one stands there .\n") == 150


def test_a_line_with_the_end_in_it_is_refused(tmp_path):
    for name, more in (("train", []), ("valid", []), ("test", ["two <eos> in one"])):
        (tmp_path / f"{name}.txt").write_text(
            "\n".join([*sentences(20, ord(name[1])), *more]) + "\n"
        )
    with pytest.raises(DataError, match=r"test.txt: 21 lines give 22 sentences.*<eos>"):
        made(tmp_path, corpus="other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subwords": None}, "set subwords or tokenizer_file"),
        ({"val_fraction": 0.1}, "val_fraction does not apply to corpus=lm1b"),
        ({"corpus": "other", "test_shards": 2}, "test_shards does not apply to corpus=other"),
        ({"test_shards": 50}, "at most 50 held-out shards, received 50"),
        ({"test_shards": 1, "val_shards": 50}, "received 1 and 50"),
        ({"max_tokens": 8}, "max_tokens=8 is below the longest training sentence of 16 tokens"),
        ({"vocab_size": 100}, "the vocabulary has 280 words, but vocab_size=100"),
    ],
)
def test_wrong_settings_are_one_line(folder, options, message):
    with pytest.raises(DataError, match=message):
        made(folder, **options)


# ---- batches -----------------------------------------------------------------------------------


def test_a_padded_batch(data):
    batch = next(iter(data.train_dataloader()))
    real = batch["key_mask"]
    assert (batch["target"][~real] == IGNORE).all()
    assert (batch["target"][real] != IGNORE).all()
    assert int(real.sum()) == int(batch["global_tokens"])
    assert batch["form"] == "sentences"
    fill = data.collate()([data.split("train")[FILL]])
    assert (fill["target"] == IGNORE).all()
    held_out = list(data.val_dataloader())
    ids = np.concatenate([part["sample_ids"] for part in held_out])
    assert sorted(ids[ids >= 0]) == list(range(len(data.split("val"))))
    assert "global_tokens" not in held_out[0]


def test_prompts_begin_as_sentences_do(data, folder):
    end = data.vocabulary.end_of_line
    (batch,) = list(data.predict_dataloader())
    assert len(batch["inputs"]) == len(data.split("test")) == 1
    assert batch["inputs"][0, 0] == end
    given = made(folder, prompts=["the said"])
    (batch,) = list(given.predict_dataloader())
    assert batch["inputs"][0, 0] == end
    assert given.decode(batch["inputs"][0, 1:].tolist()) == "the said"


def test_size_lines(data):
    lines = list(data.size_lines())
    assert "280 sub-words" in lines[0]
    assert "198 sentences" in lines[1]
    assert "words with <eos>" in lines[2]
    assert "padding in training batches: " in lines[4]

"""Text to pre-train on: documents, pieces of them, pairs of parts, batches."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import PretrainingText
from datamodules.core.sequences import Ragged
from datamodules.text.fine_tuning.batches import shortened
from datamodules.text.fine_tuning.documents import SUFFIXES, read_documents
from datamodules.text.fine_tuning.sequences import DocumentSplit
from datamodules.text.segments import IGNORE
from datamodules.text.source import text_files
from lit_probattn.base.errors import DataError, MissingDataError

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def written(folder: Path, count: int = 60, seed: int = 0) -> Path:
    """Documents of two to six sentences between blank lines; sentence n of document d says so."""
    draw = random.Random(seed)
    parts = []
    for document in range(count):
        sentences = [
            f"{' '.join(draw.choices(WORDS, k=draw.randint(3, 8)))} d{document} s{number}."
            for number in range(draw.randint(2, 6))
        ]
        parts.append(" ".join(s[0].upper() + s[1:] for s in sentences))
    path = folder / "text.txt"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def made(folder: Path, **options) -> PretrainingText:
    path = folder / "text.txt"
    if not path.exists():
        written(folder)
    settings = {"vocab_limit": 400, "max_length": 40, "batch_size": 4, "bucket": 1, **options}
    data = PretrainingText(path=str(path), cache_dir=str(folder / "cache"), **settings)
    data.setup("fit")
    return data


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PretrainingText:
    return made(tmp_path_factory.mktemp("text"))


def tell(data: PretrainingText, ids) -> set[str]:
    return {
        word for word in data.decode(ids).split() if word.startswith("d") and word[1:].isdigit()
    }


# ---- documents ---------------------------------------------------------------------------------


TEXT = " = One = \n\n A first sentence is here . And here is a second one . \n\n = = Part = = \n\
More of the same article stands here . \n\n = Two = \nAnother article is this one .\n"


@pytest.mark.parametrize(
    ("division", "sizes"),
    [("heading", [3, 1]), ("blank_line", [2, 1, 1]), ("line", [2, 1, 1]), ("file", [4])],
)
def test_documents_are_what_is_asked_for(tmp_path, division, sizes):
    (tmp_path / "a.txt").write_text(TEXT)
    documents = list(read_documents([tmp_path / "a.txt"], division))
    assert [len(document) for document in documents] == sizes
    assert documents[0][0] == "A first sentence is here ."


def test_text_that_is_missing_is_named(tmp_path):
    with pytest.raises(MissingDataError, match="nothing: no such file or folder"):
        PretrainingText(path=str(tmp_path / "nothing")).sources()
    with pytest.raises(MissingDataError, match=r"contains no text; expected files ending in \.txt"):
        PretrainingText(path=str(tmp_path)).sources()
    with pytest.raises(DataError, match="path is not set"):
        _ = PretrainingText().folder


# ---- sequences ---------------------------------------------------------------------------------


def test_a_second_part_follows_on_the_first_or_is_of_another_document(data):
    split, own = data.split("train"), data.tokeniser
    labels = []
    for index in range(len(split)):
        sample = split[index]
        values = sample.values.tolist()
        assert len(values) <= 40
        assert values[0] == own.begin
        assert [values[sample.second - 1], values[-1]] == [own.separator] * 2
        assert values.count(own.separator) == 2
        first, second = values[1 : sample.second - 1], values[sample.second : -1]
        assert first
        assert second
        one, other = tell(data, first), tell(data, second)
        assert (one == other) is not bool(sample.target) or not (one and other)
        assert (sample.values == split[index].values).all()
        labels.append(sample.target)
    assert labels == split.targets.tolist()
    assert 0.3 < np.mean(labels) < 0.7


def test_what_follows_is_the_very_next_sentence(data):
    """Numbers of sentences go on where the first part ends."""
    seen = 0
    for index in range(len(data.split("train"))):
        sample = data.split("train")[index]
        if sample.target or len(sample.values) == 40:
            continue
        first = data.decode(sample.values[1 : sample.second - 1]).split()
        second = data.decode(sample.values[sample.second : -1]).split()
        numbers = [
            [int(w.strip(".")[1:]) for w in part if w[0] == "s" and w.strip(".")[1:].isdigit()]
            for part in (first, second)
        ]
        if numbers[0] and numbers[1]:
            assert numbers[1][0] == numbers[0][-1] + 1
            seen += 1
    assert seen > 5


def test_pieces_without_pairs_are_all_sentences_once(tmp_path):
    plain = made(tmp_path, next_sentence=False, max_length=400)
    split = plain.split("train")
    assert len(split) == split.sizes[0]  # every document fits
    assert sum(len(split[i].values) - 2 for i in range(len(split))) == split.sizes[2]
    cut = made(tmp_path, next_sentence=False, max_length=12)
    total = sum(len(cut.split("train")[i].values) - 2 for i in range(len(cut.split("train"))))
    assert max(len(cut.split("train")[i].values) for i in range(len(cut.split("train")))) == 12
    assert total <= split.sizes[2]


def test_the_longer_part_is_cut_first():
    sizes = [
        tuple(map(len, shortened([1] * a, [2] * b, 10)))
        for a, b in ((3, 9), (9, 3), (9, 9), (2, 5))
    ]
    assert sizes == [(3, 7), (7, 3), (5, 5), (2, 5)]
    assert tuple(map(len, shortened([1] * 20, [2] * 7, 10))) == (5, 5)


def test_too_little_text_is_one_line(tmp_path, data):
    (tmp_path / "text.txt").write_text("One sentence is all there is here.\n")
    with pytest.raises(DataError, match="documents"):
        made(tmp_path)
    sentences = Ragged(np.arange(6, dtype=np.int32), np.array([0, 3, 6]))
    options = {"max_length": 20, "tokeniser": data.tokeniser, "pairs": True}
    with pytest.raises(DataError, match="but the val split has 1; provide more text"):
        DocumentSplit("val", sentences, np.array([0, 2]), **options)
    with pytest.raises(DataError, match=r"that fit into max_length=20; .* next_sentence"):
        DocumentSplit("val", sentences, np.array([0, 1, 2]), **options)


# ---- batches -----------------------------------------------------------------------------------


def test_nothing_special_is_ever_hidden(data):
    batch = next(iter(data.train_dataloader()))
    own = data.tokeniser
    special = torch.isin(batch["inputs"], torch.tensor([own.begin, own.separator, own.padding]))
    assert torch.equal(batch["target"] == IGNORE, special)
    assert torch.equal(batch["target"][~special], batch["inputs"][~special])
    assert torch.equal(batch["key_mask"], batch["inputs"] != own.padding)
    for row, index in enumerate(batch["sample_ids"].tolist()):
        sample = data.split("train")[index]
        size = len(sample.values)
        assert batch["elsewhere"][row] == sample.target
        assert batch["token_types"][row, : sample.second].sum() == 0
        assert batch["token_types"][row, sample.second : size].all()
    assert data.max_seq_len == 40
    assert data.mask_token == own.mask


def test_sizes_are_told(data):
    lines = list(data.size_lines())
    assert "bert style" in lines[0]
    assert "documents" in lines[1]
    assert "with an unrelated second part" in lines[1]


def test_the_cache_supports_other_lengths_and_tasks(data, tmp_path):
    """Its tokeniser is read by other data; another length makes no new cache."""
    longer = PretrainingText(
        path=data.given_path,
        cache_dir=str(data.cache_dir),
        vocab_limit=400,
        max_length=60,
        bucket=1,
    )
    assert longer.cache_spec.name == data.cache_spec.name


def test_files_are_text_by_their_ending_in_any_case_and_not_hidden(tmp_path):
    for name in ("a.txt", "b.TXT", ".c.txt", "d.py"):
        (tmp_path / name).write_text("One sentence of some words.\n")
    assert [path.name for path in text_files(tmp_path, SUFFIXES)] == ["a.txt", "b.TXT"]

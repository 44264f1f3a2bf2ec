"""Packed training batches of sentences and of documents: contents, sizes, refusals."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
import torch

from datamodules.core.order import FILL
from datamodules.core.packing import PackedCollate
from datamodules.text.segments import IGNORE
from lit_probattn.base.errors import DataError
from tests.datamodules.text import test_sentences as sentences
from tests.datamodules.text.fine_tuning import test_pretraining as documents

KINDS = ("sentences", "documents")


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return what makes a data module of a kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    sentences.write(folders["sentences"])

    def made(kind: str, **options):
        if kind == "sentences":
            return sentences.made(folders[kind], **options)
        return documents.made(folders[kind], next_sentence=False, **options)

    return made


def epoch(data):
    return list(islice(data.train_dataloader(), data.steps_per_epoch))


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_token_once_between_its_bounds(make, kind):
    data = make(kind, pack=True)
    split, seen = data.split("train"), []
    for batch in epoch(data):
        assert "key_mask" not in batch
        bounds = batch["cu_seqlens"]
        assert bounds.dtype == torch.int32
        total = int(bounds[-1])
        assert batch["inputs"].shape == batch["target"].shape == (1, total)
        assert total <= (64 if kind == "sentences" else 4 * 40)  # of all rows of a step
        if kind == "sentences":
            assert int(batch["global_tokens"]) == batch["target"].numel()
            assert (batch["target"] != IGNORE).all()
        names = batch["sample_ids"].tolist()
        for number, (first, end) in zip(names, pairwise(bounds.tolist()), strict=True):
            plain = data.collate()([split[number]])
            length = int(plain["key_mask"].sum())
            assert end - first == length
            for name in {"inputs", "target", "token_types"} & plain.keys():
                assert batch[name][0, first:end].equal(plain[name][0, :length])
        seen += names
    assert sorted(seen) == list(range(len(split)))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_batches_are_full_and_evaluation_is_padded_as_ever(make, kind):
    packed, padded = make(kind, pack=True), make(kind)
    assert padded.pack is False
    for loader in ("val_dataloader", "test_dataloader"):
        found, expected = list(getattr(packed, loader)()), list(getattr(padded, loader)())
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            assert one["inputs"].equal(other["inputs"])
            assert one["key_mask"].equal(other["key_mask"])
    if kind == "sentences":
        shown = "\n".join(packed.size_lines())
        assert "\nunused share of packed rows: " in shown
    sizes = [int(batch["cu_seqlens"][-1]) for batch in epoch(packed)]
    assert sum(sizes[:-1]) / len(sizes[:-1]) > 0.8 * (64 if kind == "sentences" else 160)


@pytest.mark.parametrize("kind", KINDS)
def test_a_filler_is_not_scored(make, kind):
    data = make(kind, pack=True)
    batch = PackedCollate(data.collate())([data.split("train")[FILL]])
    assert batch["sample_ids"].tolist() == [FILL]
    assert (batch["target"] == IGNORE).all()
    assert int(batch["cu_seqlens"][-1]) == batch["inputs"].shape[1] > 0


def test_pairs_are_not_packed(tmp_path):
    with pytest.raises(DataError, match="pack: true requires next_sentence: false"):
        documents.made(tmp_path, pack=True, next_sentence=True)

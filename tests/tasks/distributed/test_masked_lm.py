"""Hidden words count alike wherever they are: in one batch, on two ranks, in two parts."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.tasks import MaskedLanguageModeling
from tests.datamodules.text import made
from tests.datamodules.text.fine_tuning import test_pretraining as documents
from tests.support.runs import fingerprint, metrics, newest_state, only_version
from tests.tasks.distributed.layouts import DOUBLE, NO_DROPOUT, TWO_PROCESSES, Trial, two_parts

TWO_PARTS = two_parts(16)


def _flags(folder):
    text = folder.parent / "text"
    if not text.exists():
        made.write(text)
    return ["--data.init_args.data_dir", str(text), "--model.init_args.attention_dropout", "0.2"]


TRIAL = Trial("tiny/masked_lm", _flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return TRIAL.trained(tmp_path_factory, *NO_DROPOUT)


@pytest.fixture(scope="module")
def whole_double(tmp_path_factory):
    return TRIAL.trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE)


def assert_alike(one, other, rel, names=("train/loss", "val/mlm_loss")):
    rows = [metrics(only_version(folder)) for folder in (one, other)]
    assert len(rows[0]) == len(rows[1]) == 16
    for first, second in zip(*rows, strict=True):
        for key in names:
            assert bool(first[key]) == bool(second[key])
            if first[key]:
                assert float(second[key]) == pytest.approx(float(first[key]), rel=rel)
    states = [newest_state(only_version(folder))["state_dict"] for folder in (one, other)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=100 * rel, atol=rel)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TWO_PARTS, id="accumulation"),
        pytest.param(TWO_PROCESSES, id="processes", marks=pytest.mark.slow),
        pytest.param((*TWO_PARTS, *TWO_PROCESSES), id="both"),
    ],
)
def test_layouts_train_alike(whole_double, tmp_path_factory, layout):
    """The numbers of hidden words differ between the parts: 4 sequences of 14 words in all."""
    more = (*NO_DROPOUT, *DOUBLE, *layout)
    assert_alike(whole_double, TRIAL.trained(tmp_path_factory, *more), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TWO_PARTS, TWO_PROCESSES], ids=["accumulation", "processes"])
def test_layouts_train_alike_in_single_precision(whole, tmp_path_factory, layout):
    assert_alike(whole, TRIAL.trained(tmp_path_factory, *NO_DROPOUT, *layout), 1e-6)


def test_killed_and_resumed_equals_uninterrupted(tmp_path_factory, tmp_path, monkeypatch):
    """With dropout, inside an optimiser step of two parts."""
    uninterrupted = only_version(TRIAL.trained(tmp_path_factory, *TWO_PARTS))
    resumed = TRIAL.trained_in_two_pieces(
        MaskedLanguageModeling, 21, tmp_path, monkeypatch, *TWO_PARTS
    )
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)


# ---- pairs of parts ------------------------------------------------------------------------------


def _documents(folder):
    text = folder.parent / "documents"
    if not text.exists():
        text.mkdir()
        documents.written(text)
    cache = ["--data.init_args.cache_dir", str(folder.parent / "cache")]
    return [*cache, "--data.init_args.path", str(text / "text.txt")]


PAIRS = Trial("tiny/bert_pretraining", _documents)


def test_pairs_train_alike_and_survive_a_kill(tmp_path_factory, tmp_path, monkeypatch):
    """In float64; the numbers of hidden words and the lengths of sequences differ by part."""
    whole = PAIRS.trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE)
    both = PAIRS.trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE, *TWO_PARTS, *TWO_PROCESSES)
    assert_alike(whole, both, 1e-9, ("train/loss", "val/mlm_loss", "val/nsp_loss", "val/nsp_error"))
    uninterrupted = only_version(PAIRS.trained(tmp_path_factory, *TWO_PARTS))
    resumed = PAIRS.trained_in_two_pieces(
        MaskedLanguageModeling, 21, tmp_path, monkeypatch, *TWO_PARTS
    )
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)

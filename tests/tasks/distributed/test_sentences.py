"""Sentences: a token counts alike wherever it is, in one batch, on two ranks, in two parts."""

from __future__ import annotations

import math

import pytest
import torch
import yaml

from lit_probattn.tasks import LanguageModeling
from lit_probattn.tasks.schedules import schedule_values
from tests.datamodules.text import test_sentences as text
from tests.support.paths import CONFIGS
from tests.support.runs import fingerprint, metrics, only_version
from tests.tasks.distributed.layouts import DOUBLE, NO_DROPOUT, TWO_PROCESSES, Trial, two_parts
from tests.tasks.distributed.test_masked_lm import assert_alike

TWO_PARTS = two_parts(16)
SCORES = ("val/ppl_sentences", "val/tokens_sentences", "val/word_ppl", "val/words")


def _flags(folder):
    place = folder.parent / "sentences"
    if not place.exists():
        place.mkdir()
        for name, count in (("train", 80), ("valid", 21), ("test", 21)):
            lines = text.sentences(count, count + ord(name[1]), most=8)
            (place / f"{name}.txt").write_text("\n".join(lines) + "\n")
    cache = ["--data.init_args.cache_dir", str(folder.parent / "cache")]
    return ["--data.init_args.data_dir", str(place), *cache]


TRIAL = Trial("tiny/lm1b", _flags)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TWO_PARTS, id="accumulation"),
        pytest.param((*TWO_PARTS, *TWO_PROCESSES), id="both"),
    ],
)
def test_layouts_train_alike(tmp_path_factory, layout):
    """The parts have different numbers of tokens, and in the last batch some have none."""
    whole = TRIAL.trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE)
    parts = TRIAL.trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE, *layout)
    assert_alike(whole, parts, 1e-9, ("train/loss", *SCORES))


def test_killed_and_resumed_equals_uninterrupted(tmp_path_factory, tmp_path, monkeypatch):
    """With dropout, inside an epoch and inside an optimiser step of two parts."""
    uninterrupted = only_version(TRIAL.trained(tmp_path_factory, *TWO_PARTS))
    resumed = TRIAL.trained_in_two_pieces(LanguageModeling, 21, tmp_path, monkeypatch, *TWO_PARTS)
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)


class Uniform(torch.nn.Module):
    """A token's loss is a hundredth of its id."""

    def forward(self, inputs, **_):
        return inputs

    def token_losses(self, hidden, target):
        return target[target >= 0].float() / 100


def test_perplexities_of_tokens_and_of_words(monkeypatch, tmp_path):
    """Of all tokens; of the words of the rows that are whole."""
    folder = text.write(tmp_path)
    data = text.made(folder, test_shards=30)
    task = LanguageModeling.__new__(LanguageModeling)
    torch.nn.Module.__init__(task)
    task.model, task._scores, logged = Uniform(), {}, {}
    monkeypatch.setattr(LanguageModeling, "random_key", lambda *_: None)
    monkeypatch.setattr(LanguageModeling, "device", torch.device("cpu"))
    monkeypatch.setattr(
        LanguageModeling, "log", lambda self, k, v, **_: logged.update({k: float(v)})
    )
    task.eval()
    for batch in data.test_dataloader():
        task.evaluate(batch, "test")
    task.log_scores("test")
    split = data.split("test")
    samples = [split[index] for index in range(len(split))]
    losses = [sample.target.sum() / 100 for sample in samples]
    counts = [len(sample.target) for sample in samples]
    assert logged["test/tokens_sentences"] == sum(counts)
    expected = math.exp(sum(losses) / sum(counts))
    assert logged["test/ppl_sentences"] == pytest.approx(expected, rel=1e-6)
    whole = [i for i, sample in enumerate(samples) if sample.num_words]
    assert 0 < len(whole) < len(samples)
    words = sum(samples[i].num_words for i in whole)
    assert logged["test/words"] == words
    expected = math.exp(sum(losses[i] for i in whole) / words)
    assert logged["test/word_ppl"] == pytest.approx(expected, rel=1e-6)


def test_the_schedule_is_that_of_the_paper():
    """0.1 · min(1, t / 10⁴) / √max(t, 10⁴)."""
    config = yaml.safe_load((CONFIGS / "tasks/lm1b.yaml").read_text())["model"]["init_args"]
    for t in (0, 1, 500, 9_999, 10_000, 10_001, 40_000, 249_999):
        found = schedule_values(
            config["schedule"],
            t,
            peak_lr=config["lr"],
            total_steps=250_000,
            warmup_steps=config["warmup_steps"],
        )
        expected = 0.1 * min(1, t / 1e4) / math.sqrt(max(t, 1e4))
        assert found.lr == pytest.approx(expected, rel=1e-9, abs=1e-7)
    assert (config["weight_decay"], config["dropout"], config["norm_first"]) == (0.01, 0.1, False)

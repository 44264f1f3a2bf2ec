"""Sentences: perplexities of tokens and words, and the schedule of their task."""

from __future__ import annotations

import math

import pytest
import torch
import yaml

from lit_probattn.tasks import LanguageModeling
from lit_probattn.tasks.schedules import schedule_values
from tests.datamodules.text import test_sentences as text
from tests.support.paths import CONFIGS


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
    config = yaml.safe_load((CONFIGS / "tasks/lm1b.yaml").read_text(encoding="utf-8"))["model"][
        "init_args"
    ]
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

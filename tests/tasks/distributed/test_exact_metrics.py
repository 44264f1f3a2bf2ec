"""Accuracy and perplexity do not depend on the number of processes (R11)."""

from __future__ import annotations

import json

import pytest

from lit_probattn.cli.app import main
from tests.datamodules.text import made as made_text
from tests.support.runs import arguments, in_ranks, only_version, run, write_attention

NUM_TEST = 23  # neither 2 nor 3 divides it, nor the tokens of the test text
# Scores of a model that has learned nothing are as exact. In float64 what is left of a difference
# is the order of a sum; in float32 the rows of a batch may round differently in another batch.
SHORT = ("--trainer.max_steps", "1", "--trainer.val_check_interval", "1")
SHORT += ("--trainer.precision", "64-true")


def classifier(command, folder, *more):
    """The tiny Text task."""
    attention = write_attention(folder, "MGKAttention", e_step="soft")
    return arguments(command, folder, *SHORT, *more, attention=attention, num_test=NUM_TEST)


def language_model(command, folder, *more):
    """The tiny WikiText task on a made text, scored by sliding windows."""
    made_text.write(folder / "text", test="".join(made_text.lines(16, 19)))
    task, data = "tiny/wikitext103_small", folder / "text"
    return arguments(command, folder, *SHORT, *more, task=task, data_dir=data)


# One task with two processes: ../../training/curves/test_test_scores.py; all: test_simulated.py.
@pytest.mark.slow
@pytest.mark.parametrize("task", [classifier, language_model])
def test_metrics_are_exact_for_every_number_of_processes(task, tmp_path):
    run(task("fit", tmp_path))
    found = []
    for world_size in (1, 2, 3):
        devices = ("--trainer.devices", str(world_size))
        ddp = ("--trainer.strategy", "ddp") if world_size > 1 else ()
        command = task("test", tmp_path, "--ckpt_path", "last", *devices, *ddp)
        assert set(in_ranks(lambda command=command: main(command), world_size)) == {0}
        (path,) = only_version(tmp_path).glob("test-*.json")
        found.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    alone, *others = found
    num_samples = NUM_TEST if task is classifier else int(alone["test/tokens_sliding"])
    assert num_samples % 2
    assert num_samples % 3
    for score in others:
        if task is classifier:
            assert score["test/accuracy"] == alone["test/accuracy"]
            correct = alone["test/accuracy"] * NUM_TEST
            assert correct == pytest.approx(round(correct), abs=1e-5)
        else:
            assert score["test/tokens_sliding"] == alone["test/tokens_sliding"]
            perplexity = score["test/ppl_sliding"]
            assert perplexity == pytest.approx(alone["test/ppl_sliding"], rel=1e-12)

"""Contract of every task: it trains and is scored alike in every layout.

Resumed runs are compared in `test_texts.py`, for each data set of texts, and here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from lit_probattn.cli.app import main
from tests.datamodules.text import made
from tests.datamodules.text import test_sentences as sentences
from tests.datamodules.text.fine_tuning import made as tuning
from tests.datamodules.text.fine_tuning import test_pretraining as documents
from tests.support.runs import fingerprint, in_ranks, metrics, newest_state, only_version
from tests.tasks.distributed.layouts import DOUBLE, NO_DROPOUT, TWO_PROCESSES, Trial, two_parts

ATTENTION_DROPOUT = ("--model.init_args.attention_dropout", "0.2")  # drawn by sample
NO_HEAD_DROPOUT = ("--model.init_args.head_dropout", "0.0")


def _files(write, option="data_dir", name=""):
    """Return the flags of a data set, whose files are written once beside the folders of runs."""

    def flags(folder: Path) -> list[str]:
        place = folder.parent / write.__name__
        if not place.exists():
            place.mkdir()
            write(place)
        cache = ["--data.init_args.cache_dir", str(folder.parent / "cache")]
        return [*cache, f"--data.init_args.{option}", str(place / name)]

    return flags


def text(place):
    """Write a corpus."""
    made.write(place)


def pairs(place):
    """Write documents."""
    documents.written(place)


def lines(place):
    """Write sentences: parts of a batch have different numbers of tokens, the last ones none."""
    for name, count in (("train", 80), ("valid", 21), ("test", 21)):
        found = sentences.sentences(count, count + ord(name[1]), most=8)
        (place / f"{name}.txt").write_text("\n".join(found) + "\n")


def squad(place):
    """Write questions, some without an answer."""
    tuning.write_squad(place, "2.0")


def mnli(place):
    """Write pairs of sentences."""
    tuning.write_mnli(place)


PACKED = ("--data.init_args.pack", "true")
NO_PAIRS = ("--data.init_args.next_sentence", "false", "--model.init_args.next_sentence", "false")
TRIALS = {
    "bert_pretraining": Trial("tiny/bert_pretraining", _files(pairs, "path", "text.txt")),
    "d4rl": Trial("tiny/d4rl"),
    "lm1b": Trial("tiny/lm1b", _files(lines)),
    "lm1b packed": Trial("tiny/lm1b", _files(lines), PACKED),
    "masked documents packed": Trial(
        "tiny/bert_pretraining", _files(pairs, "path", "text.txt"), (*PACKED, *NO_PAIRS)
    ),
    "masked_lm": Trial("tiny/masked_lm", _files(text), ATTENTION_DROPOUT),
    "mnli": Trial("tiny/mnli", _files(mnli, "path"), (*ATTENTION_DROPOUT, *NO_HEAD_DROPOUT)),
    "squad_v2": Trial("tiny/squad_v2", _files(squad, "path"), ATTENTION_DROPOUT),
    "translation": Trial(
        "tiny/translation", lambda folder: _files(text)(folder)[:2], ATTENTION_DROPOUT
    ),
}
# Validations after steps 1 and 2.
LENGTH = ("--trainer.max_steps", "2", "--trainer.val_check_interval", "1")
LAYOUTS = {
    "accumulation": two_parts(2),
    "processes": TWO_PROCESSES,
    "both": (*two_parts(2), *TWO_PROCESSES),
}
# What must be compared, so that a task cannot pass by logging nothing.
LOGGED = {
    "bert_pretraining": {"val/mlm_loss", "val/nsp_loss", "val/nsp_error"},
    "d4rl": {"val/loss", "val/return_high", "val/return_low", "val/score"},
    "lm1b": {"val/ppl_sentences", "val/tokens_sentences", "val/word_ppl", "val/words"},
    "lm1b packed": {"val/ppl_sentences", "val/tokens_sentences", "val/word_ppl", "val/words"},
    "masked documents packed": {"val/mlm_loss"},
    "masked_lm": {"val/mlm_loss"},
    "mnli": {"val/loss", "val/accuracy"},
    "squad_v2": {"val/loss", "val/f1"},
    "translation": {"train/nll", "val/loss", "val/nll", "val/bleu"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return what gives the folder of a task's run in one process, in float64; trained once."""
    found: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in found:
            found[name] = TRIALS[name].trained(tmp_path_factory, *LENGTH, *NO_DROPOUT, *DOUBLE)
        return found[name]

    return folder


# Means over samples are compared in `test_ddp.py`, other losses and scores in `test_simulated.py`.
@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike(whole, tmp_path_factory, name, layout):
    """In float64: every logged number of each step, and the weights."""
    more = (*LENGTH, *NO_DROPOUT, *DOUBLE, *LAYOUTS[layout])
    other = TRIALS[name].trained(tmp_path_factory, *more)
    rows = [metrics(only_version(folder)) for folder in (whole(name), other)]
    assert len(rows[0]) == len(rows[1]) == 2
    logged = {"train/loss"} | LOGGED[name]
    for key in logged:
        assert any(row[key] for row in rows[0]), key
    for first, second in zip(*rows, strict=True):
        assert first.keys() == second.keys()
        for key in first:
            assert bool(first[key]) == bool(second[key]), key
            if key.startswith(("train/", "val/")) and first[key]:
                rel = 1e-6 if key.endswith("accuracy") else 1e-9
                assert float(second[key]) == pytest.approx(float(first[key]), rel=rel), key
    states = [newest_state(only_version(folder))["state_dict"] for folder in (whole(name), other)]
    for weight, tensor in states[0].items():
        torch.testing.assert_close(states[1][weight], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.slow  # scores of all tasks, simulated: test_simulated.py; predictions: tests/training/
@pytest.mark.parametrize("name", ["d4rl", "mnli", "squad_v2", "translation"])
def test_two_processes_score_and_predict_like_one(whole, name):
    folder, found = whole(name), []
    commands = ("test", "predict") if name in ("mnli", "squad_v2") else ("test",)
    for more in ((), TWO_PROCESSES):
        for command in commands:
            flags = (*LENGTH, *NO_DROPOUT, *DOUBLE, "--ckpt_path", "last", *more)
            work = TRIALS[name].command(folder, *flags, name=command)
            assert set(in_ranks(lambda work=work: main(work), 2 if more else 1)) == {0}
        (path,) = only_version(folder).glob("test-step-*2.json")
        report, tables = json.loads(path.read_text(encoding="utf-8")), []
        path.unlink()
        for path in only_version(folder).glob("predictions-*.parquet"):
            tables.append(pd.read_parquet(path))
        assert len(tables) == len(commands) - 1
        found.append((report, tables))
    (one, first), (two, second) = found
    scores = [{k: v for k, v in r.items() if k.startswith(("test/", "num"))} for r in (one, two)]
    assert len(scores[0]) > 2
    assert scores[1] == pytest.approx(scores[0], rel=1e-6)
    for tables in zip(first, second, strict=True):
        pd.testing.assert_frame_equal(*tables, rtol=1e-6)
    if name == "squad_v2":
        assert one["test/questions"] == 9.0 == len(first[0])
    if name == "translation":
        assert one["num_samples"] == 21
        assert one["bleu"] == two["bleu"]
    if name == "d4rl":
        for target in ("high", "low"):
            played = [r["evaluation"]["targets"][target]["returns"] for r in (one, two)]
            assert len(played[0]) == 4
            assert played[1] == pytest.approx(played[0], rel=1e-9)


@pytest.mark.slow  # what a checkpoint stores for it: ../decision/test_task.py
def test_resumed_equals_uninterrupted(tmp_path_factory, tmp_path):
    """With dropout; the third validation plays episodes, two of them before the checkpoint."""
    more = (*two_parts(2), "--model.init_args.val_every", "3", "--trainer.max_steps", "3")
    more += ("--run.checkpoint_every", "1")
    uninterrupted = only_version(TRIALS["d4rl"].trained(tmp_path_factory, *more))
    resumed = TRIALS["d4rl"].resumed(uninterrupted, 2, tmp_path, *more)
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)
    assert sum(bool(row["val/score"]) for row in metrics(resumed)) == 1

"""`--seed`, `--lr` and `--steps` of `fit`, which mean what they mean in `compare`."""

from __future__ import annotations

import pytest

from lit_probattn.base.errors import ConfigError
from lit_probattn.cli.files import with_run_flags

FILES = [
    {"trainer": {"max_steps": 100, "val_check_interval": 50}, "run": {"checkpoint_every": 4}},
    {"model": {"init_args": {"warmup_steps": 20, "schedule_steps": 100}}},
]


def test_steps_shorten_what_follows_them_and_other_flags_have_precedence():
    words = ["fit", "--config=a.yaml", "--steps", "10", "--model.init_args.warmup_steps", "1"]
    assert with_run_flags(words, FILES) == [
        "fit",
        "--trainer.max_steps=10",
        "--model.init_args.schedule_steps=10",
        "--model.init_args.warmup_steps=2",
        "--trainer.val_check_interval=10",
        "--run.checkpoint_every=4",
        *("--config=a.yaml", "--model.init_args.warmup_steps", "1"),
    ]


@pytest.mark.parametrize("given", [["={}"], ["", "{}"]])
def test_intervals_of_validations_are_whole_steps_of_the_micro_batches_that_are_given(given):
    flag = [word.format(4) for word in given]
    flag[0] = f"--trainer.accumulate_grad_batches{flag[0]}"
    words = with_run_flags(["fit", "--steps=10", *flag], FILES)
    assert "--trainer.val_check_interval=40" in words
    assert words[-len(flag) :] == flag


def test_seed_and_learning_rate():
    words = with_run_flags(["fit", "--seed", "3", "--lr=0.1"], FILES)
    assert words == ["fit", "--seed_everything", "3", "--model.init_args.lr=0.1"]
    assert with_run_flags(["test", "--seed=3"], []) == ["test", "--seed_everything=3"]
    assert with_run_flags(["test", "--lr", "1"], []) == ["test", "--lr", "1"]


@pytest.mark.parametrize("given", [["--steps"], ["--steps", "0"], ["--steps=some"]])
def test_steps_are_a_number(given):
    with pytest.raises(ConfigError, match="--steps must be at least 1, received"):
        with_run_flags(["fit", *given], FILES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.init_args.warmup_steps", "1e1"),  # the parser refuses it
        ("trainer.val_check_interval", "00:00:10:00"),  # a duration
        ("trainer.accumulate_grad_batches", "two"),
        ("run.checkpoint_every", [4]),
        ("trainer.max_steps", "1e2"),
    ],
)
def test_values_that_are_not_numbers_are_left_to_the_parser(key, value):
    part, _, name = key.rpartition(".")
    content = {name: value}
    for outer in reversed(part.split(".")):
        content = {outer: content}
    assert with_run_flags(["fit", "--steps=10"], [content]) == ["fit", "--trainer.max_steps=10"]


def test_warm_up_of_a_run_without_a_limit_of_steps_is_not_shortened():
    endless = [{"trainer": {"max_steps": -1}, "model": {"init_args": {"warmup_steps": 20}}}]
    expected = ["--trainer.max_steps=100", "--model.init_args.warmup_steps=20"]
    assert with_run_flags(["fit", "--steps=100"], endless) == ["fit", *expected]

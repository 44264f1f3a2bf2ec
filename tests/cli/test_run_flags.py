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


def test_seed_and_learning_rate():
    words = with_run_flags(["fit", "--seed", "3", "--lr=0.1"], FILES)
    assert words == ["fit", "--seed_everything", "3", "--model.init_args.lr=0.1"]
    assert with_run_flags(["test", "--seed=3"], []) == ["test", "--seed_everything=3"]
    assert with_run_flags(["test", "--lr", "1"], []) == ["test", "--lr", "1"]


@pytest.mark.parametrize("given", [["--steps"], ["--steps", "0"], ["--steps=some"]])
def test_steps_are_a_number(given):
    with pytest.raises(ConfigError, match="--steps must be at least 1, received"):
        with_run_flags(["fit", *given], FILES)

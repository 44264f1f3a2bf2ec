"""The study of conversions: its sides, that they are comparable, its files, its interruption."""

from __future__ import annotations

import argparse

import pandas as pd
import pytest

from lit_probattn.analysis.__main__ import main
from lit_probattn.analysis.conversion import arms as arms_module
from lit_probattn.analysis.conversion import study as study_module
from lit_probattn.analysis.conversion.study import Conversion, arms_of, draw, finding
from tests.analysis import made
from tests.tasks import tiny

SHORT = ["--steps", "4", "--eval_every", "2", "--num_batches", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run whose weights are large, so that a conversion shows in the loss."""
    return made.checkpoint(tmp_path_factory.mktemp("run"), "sequence", "SoftmaxAttention")


def study(checkpoint, out, *more):
    metric = [] if "--metric" in more else ["--metric", "val/loss"]
    words = ["conversion", "--checkpoint", str(checkpoint), "--out", str(out), *SHORT, *metric]
    return main([*words, *more])


def values(out):
    rows = pd.read_csv(out / "conversion.csv")
    return rows.set_index(["side", "seed", "step"])["value"]


def test_every_side_is_scored_from_the_start_on(checkpoint, tmp_path, capsys):
    """One shifted head per old head and norms put back begin as the old model does."""
    more = ("--seeds", "0", "1", "--old_heads", "1", "--anneal_steps", "2")
    assert study(checkpoint, tmp_path, *more) == 0, capsys.readouterr().err
    found = values(tmp_path)
    assert set(found.index) == {
        (side, seed, step)
        for side in ("trained on", "annealed", "at once")
        for seed in (0, 1)
        for step in (0, 2, 4)
    }
    before = found["trained on", 0, 0]
    for seed in (0, 1):
        assert found["trained on", seed, 0] == before
        assert found["annealed", seed, 0] == pytest.approx(before, rel=1e-4)
        assert abs(found["at once", seed, 0] - before) > 1e-3
        ends = [found[side, seed, 4] for side in ("trained on", "annealed", "at once")]
        assert len({round(end, 6) for end in ends}) == 3
    assert found["trained on", 0, 4] != found["trained on", 1, 4]  # another order of the data
    text = (tmp_path / "conversion.md").read_text()
    assert "Finding: of a softmax model with val/loss" in text
    assert "annealed over 2; learning rate" in text
    assert "| 0 steps | 2 steps | 4 steps |" in text
    assert (tmp_path / "conversion.png").stat().st_size > 10_000
    assert "output error" in capsys.readouterr().out


def test_an_interrupted_study_goes_on_with_what_is_missing(checkpoint, tmp_path, monkeypatch):
    more = ("--seeds", "0", "1")
    assert study(checkpoint, tmp_path / "whole", *more) == 0
    done = []
    run = arms_module.run_arm

    def counted(trained, state, arm, course, seed, stop_at=None):
        if len(done) == stop_at:
            raise KeyboardInterrupt
        done.append((arm.name, seed))
        return run(trained, state, arm, course, seed)

    out = tmp_path / "killed"
    monkeypatch.setattr(study_module, "run_arm", lambda *a: counted(*a, stop_at=4))
    with pytest.raises(KeyboardInterrupt):
        study(checkpoint, out, *more)
    monkeypatch.setattr(study_module, "run_arm", lambda *a: counted(*a))
    assert study(checkpoint, out, *more) == 0
    assert done == [(s, n) for n in (0, 1) for s in ("trained on", "annealed", "at once")]
    whole, killed = (
        (folder / "conversion.csv").read_text() for folder in (tmp_path / "whole", out)
    )
    assert killed == whole
    assert not (out / "conversion.partial.jsonl").exists()


def test_fish_has_no_norms_to_anneal(checkpoint, tmp_path):
    assert study(checkpoint, tmp_path, "--to", "fish", "--seeds", "0") == 0
    assert set(values(tmp_path).index.get_level_values("side")) == {"trained on", "converted"}
    assert "annealed" not in (tmp_path / "conversion.md").read_text()


def test_a_seed_orders_the_training_data_and_leaves_the_splits():
    def data():
        made_data = tiny.data(seed=5)
        made_data.setup("fit")
        return made_data

    def first(source):
        return next(iter(source.train_dataloader()))["sample_ids"].tolist()

    changed = data()
    with arms_module._ordered_by(changed, 6):
        inside = first(changed)
        assert changed.seed == 5
    assert inside != first(data())
    assert first(changed) == first(data())


def options(**changed):
    known = {flag.name: flag.arguments.get("default") for flag in Conversion.flags}
    return argparse.Namespace(**{**known, **changed})


def test_sides_are_what_they_are_called():
    trained_on, annealed, at_once = arms_of(options(steps=30))
    assert (trained_on.target, annealed.annealing_steps) == (None, 15)
    assert annealed.target.mixture.key_norm_weight == 1.0
    assert at_once.target.mixture.key_norm_weight is None
    assert at_once.annealing_steps is None
    assert all(arm.target.mixture.shifted_keys for arm in (annealed, at_once))
    assert at_once.seeded(3).target.mixture.seed == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eval_every 3", "--eval_every must divide --steps 4, received 3"),
        ("--anneal_steps 9", "--anneal_steps must be at most --steps 4, received 9"),
        ("--to fish --spread 0.1", "--spread has no meaning with --to fish"),
        ("--to mgk --old_heads 2", "--old_heads has no meaning with --to mgk"),
        ("--num_global_heads 2", "--num_global_heads has no meaning with --to smgk"),
        ("--metric val/f1", "the task does not log val/f1: give --metric, of val/accuracy"),
    ],
)
def test_what_does_not_go_together_is_one_line(checkpoint, tmp_path, capsys, flags, message):
    assert study(checkpoint, tmp_path, "--seeds", "0", *flags.split()) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith(f"error: {message}")


def test_other_attention_is_refused(tmp_path, capsys):
    path = made.checkpoint(tmp_path, "sequence", "MGKAttention")
    assert study(path, tmp_path / "out", "--seeds", "0") == 2
    assert "the model has no softmax attention to convert" in capsys.readouterr().err


def made_rows():
    sides = {"trained on": (80.0, 81.0), "annealed": (70.0, 79.0), "at once": (20.0, 60.0)}
    return pd.DataFrame(
        {"side": side, "seed": seed, "step": step, "value": ends[step > 0] + seed}
        for side, ends in sides.items()
        for seed in (0, 2)
        for step in (0, 50)
    )


def test_the_sentence_and_the_picture_say_what_the_rows_do():
    rows = made_rows()
    assert finding(rows, "val/f1", "max") == (
        "of a softmax model with val/f1 81.0 (82.0 trained on as long, larger is better), "
        "annealed 71.0 right after the conversion and 80.0 after 50 steps; at once 21.0 right "
        "after the conversion and 61.0 after 50 steps (means of 2 seeds)"
    )
    axis = draw(rows, "val/f1", arms_of(options(steps=50))).axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    assert lines["annealed"].get_ydata().tolist() == [71.0, 80.0]
    assert len(axis.collections) == 3
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(82.0 + 2**0.5)

"""Annealing of the keys' norms: it follows from the step, so that a killed run goes on with it."""

from __future__ import annotations

import signal

import pytest

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.attention.mgk.annealing import annealed_cores
from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import list_checkpoints, load_checkpoint
from tests.support.runs import (
    arguments,
    fingerprint,
    in_child,
    kill_me,
    metrics,
    only_version,
    run,
    write_attention,
)
from tests.tasks import tiny

NAME = "model.encoder.blocks.0.attention.core.key_norm_weight"


def smgk(embed_dim, head_dim):
    options = {"num_heads": 2, "shifted_keys": True, "key_norm_weight": 0.8}
    return MGKAttention(embed_dim, head_dim=head_dim, **options)


def command(folder, *more):
    attention = write_attention(folder, "MGKAttention", dropout=0.2, key_norm_weight=1.0)
    options = ("--model.init_args.norm_annealing_steps", "5", "--trainer.log_every_n_steps", "1")
    steps = ("--trainer.max_steps", "6", "--run.checkpoint_every", "1", "--run.keep_checkpoints")
    return arguments("fit", folder, *options, *steps, "20", *more, attention=attention)


def test_the_weight_falls_in_a_straight_line_to_zero():
    """What a step is computed with, and what is there after it."""
    task, seen = tiny.task(smgk, norm_annealing_steps=4), []
    core = annealed_cores(task)[0]
    loss = task.batch_loss
    task.batch_loss = lambda batch: (seen.append(float(core.key_norm_weight)), loss(batch))[1]
    for core_ in annealed_cores(task):
        core_.set_norm_weight(0.3)  # as of a checkpoint: the step says what is right
    trainer = tiny.trainer(6)
    trainer.fit(task, tiny.data())
    assert seen[:6] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    assert [float(c.key_norm_weight) for c in annealed_cores(task)] == [0.0, 0.0]
    assert float(task.state_dict()[NAME]) == float(trainer.logged_metrics["norm_weight"]) == 0.0


def test_accumulated_batches_are_one_step():
    task, seen = tiny.task(smgk, norm_annealing_steps=2), []
    loss = task.batch_loss
    core = annealed_cores(task)[0]
    task.batch_loss = lambda batch: (seen.append(float(core.key_norm_weight)), loss(batch))[1]
    tiny.trainer(3, accumulate_grad_batches=2).fit(task, tiny.data())
    assert seen[:6] == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.0, 0.0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the run folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    run(command(folder))
    return only_version(folder)


@pytest.mark.slow
def test_checkpoints_and_the_log_have_the_weight(whole):
    saved = [load_checkpoint(p) for p in list_checkpoints(whole / "checkpoints", "step")]
    weights = {one["global_step"]: float(one["state_dict"][NAME]) for one in saved}
    assert weights == pytest.approx({n: max(0.0, 1 - n / 5) for n in weights})
    assert sorted(weights) == list(range(1, 7))
    logged = [float(row["norm_weight"]) for row in metrics(whole) if row.get("norm_weight")]
    assert logged == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        train = SequenceClassifier.training_step

        def step(self, batch, batch_idx):
            if batch_idx == 3:
                kill_me()
            return train(self, batch, batch_idx)

        context.setattr(SequenceClassifier, "training_step", step)
        assert in_child(lambda: main(command(tmp_path))) == -signal.SIGKILL
    run(command(tmp_path, "--ckpt_path", "last"))
    assert fingerprint(only_version(tmp_path)) == fingerprint(whole)


def test_a_task_without_such_layers_is_refused():
    task = tiny.task(norm_annealing_steps=4)
    with pytest.raises(ValueError, match="norm_annealing_steps 4 has nothing to anneal: set"):
        tiny.trainer(2).fit(task, tiny.data())
    with pytest.raises(ValueError, match="norm_annealing_steps must be at least 1, received 0"):
        tiny.task(norm_annealing_steps=0)


def test_other_models_are_left_alone():
    task = tiny.task(lambda c, head_dim: SoftmaxAttention(c, head_dim=head_dim, num_heads=2))
    assert not annealed_cores(task)
    assert not [name for name in task.state_dict() if name.endswith("key_norm_weight")]

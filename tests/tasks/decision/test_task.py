"""Decision making: the loss over real steps, episodes in validations and tests, what is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from datamodules import ToyTrajectories
from lit_probattn.rollouts.environments import make_environment
from lit_probattn.tasks import DecisionMaking, decision
from lit_probattn.training.saving import RunCheckpoint
from tests.tasks import tiny

OBS, ACT, STEPS = 5, 2, 5  # of the toy


def make_task(**options: Any) -> DecisionMaking:
    torch.manual_seed(3)
    sizes = {"obs_dim": OBS, "act_dim": ACT, "max_timestep": 1000, "context_length": STEPS}
    small = {"embed_dim": 12, "head_dim": 6, "num_layers": 1, "mlp_dim": 10, "warmup_steps": 1}
    still = {"dropout": 0.0, "attention_dropout": 0.0, "test_episodes": 3}
    return DecisionMaking(tiny.softmax, **{**sizes, **small, **still, **options})


def make_data(**options: Any) -> ToyTrajectories:
    return ToyTrajectories(**{"num_episodes": 12, "batch_size": 8, "val_fraction": 0.2, **options})


def batch(lengths=(5, 2, 4), seed=0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    rows, mask = len(lengths), torch.arange(STEPS) < torch.tensor(lengths)[:, None]
    return {
        "observations": numbers(rows, STEPS, OBS),
        "actions": torch.where(mask[..., None], numbers(rows, STEPS, ACT), -10.0),
        "returns_to_go": numbers(rows, STEPS, 1),
        "timesteps": torch.arange(STEPS).expand(rows, STEPS),
        "mask": mask,
        "sample_ids": torch.arange(rows),
    }


def run(task: DecisionMaking, data: ToyTrajectories, max_steps: int = 4, **options: Any) -> Any:
    trainer = tiny.trainer(max_steps, **{"gradient_clip_val": 0.25, **options})
    trainer.fit(task, data)
    return trainer


# ---- the loss ----------------------------------------------------------------------------------


def test_errors_are_the_squares_written_out():
    task, data = make_task().double().eval(), batch()
    with torch.no_grad():
        predicted, errors = task.predicted(data), task.squared_errors(data)
    for row, length in enumerate((5, 2, 4)):
        for step in range(STEPS):
            pairs = zip(predicted[row, step], data["actions"][row, step], strict=True)
            expected = sum(float(p - a) ** 2 for p, a in pairs) / ACT if step < length else 0.0
            assert float(errors[row, step]) == pytest.approx(expected, rel=1e-13)
    assert task.batch_loss(data).item() == pytest.approx(errors.sum().item() / 11, rel=1e-13)


def test_what_padding_holds_changes_nothing():
    task, data = make_task().double().eval(), batch()
    other = {
        k: torch.where(data["mask"][..., None], v, 3.0) for k, v in data.items() if v.dim() > 2
    }
    torch.testing.assert_close(
        task.batch_loss({**data, **other}), task.batch_loss(data), rtol=1e-13, atol=0.0
    )


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_follows_the_mean_over_the_real_steps_of_its_whole_batch(parts):
    """Its gradient, before clipping, beside that of the mean written out; its logged loss too."""
    found: dict[str, Any] = {}

    class Spy(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            """Runs before the task's own hook."""
            rows = [part for _, part, _ in module._window]
            whole = {k: torch.cat([part[k] for part in rows]) for k in rows[0]}
            real = int(whole["mask"].sum())
            assert real < whole["mask"].numel(), "some of it is padding"
            with torch.enable_grad():
                mean = module.squared_errors(whole).sum() / real
                found["gradients"] = torch.autograd.grad(mean, list(module.parameters()))
            found["loss"] = mean.item()

    task = make_task().double()
    options = {"accumulate_grad_batches": parts, "precision": "64-true", "gradient_clip_val": None}
    hook = task.on_before_optimizer_step

    def after(optimizer):
        hook(optimizer)
        mine = [parameter.grad for parameter in task.parameters()]
        torch.testing.assert_close(mine, list(found["gradients"]), rtol=1e-10, atol=1e-14)
        found["compared"] = found.get("compared", 0) + 1

    task.on_before_optimizer_step = after
    trainer = run(task, make_data(), 3, callbacks=[Spy()], **options)
    assert found["compared"] == 3
    logged = float(trainer.callback_metrics["train/loss"])
    assert logged == pytest.approx(found["loss"], rel=1e-6)


def test_it_learns():
    losses = []
    for steps in (1, 40):
        trainer = run(make_task(lr=1e-2), make_data(num_episodes=24), steps)
        losses.append(float(trainer.callback_metrics["train/loss"]))
    assert losses[1] < 0.6 * losses[0]


# ---- evaluation --------------------------------------------------------------------------------


def test_a_test_scores_every_held_out_step_once_and_plays_for_both_targets(capsys):
    task, data = make_task(), make_data()
    trainer = tiny.trainer(1)
    (found,) = trainer.test(task, data, verbose=False)
    steps = sum(data.split("val").lengths)
    assert found["test/steps"] == steps
    rows = [data.collate()([data.split("val")[i]]) for i in range(len(data.split("val")))]
    with torch.no_grad():
        total = sum(float(task.squared_errors(row).double().sum()) for row in rows)
    assert found["test/loss"] == pytest.approx(total / steps, rel=1e-5)
    told = task.provenance["evaluation"]
    assert told["environment"] == "Toy"
    assert told["episodes"] == 3
    for name, target in (("high", 28.0), ("low", 14.0)):
        returns = told["targets"][name]["returns"]
        assert told["targets"][name]["target"] == target
        assert found[f"test/return_{name}"] == pytest.approx(np.mean(returns))
        assert found[f"test/return_std_{name}"] == pytest.approx(np.std(returns, ddof=1))
        score = 100 * (np.mean(returns) - 0.3) / (29.4 - 0.3)
        assert found[f"test/score_{name}"] == pytest.approx(score)
    assert found["test/score"] == max(found["test/score_high"], found["test/score_low"])
    printed = capsys.readouterr().out
    assert "Toy, target 28: return" in printed
    assert "note: a test environment" in printed


def test_one_episode_has_no_standard_deviation(capsys):
    task = make_task(test_episodes=1)
    (found,) = tiny.trainer(1).test(task, make_data(), verbose=False)
    assert "test/return_high" in found
    assert not any("return_std" in key for key in found)
    assert "return_std" not in task.provenance["evaluation"]["targets"]["high"]
    assert "±" not in capsys.readouterr().out


def test_episodes_do_not_depend_on_how_many_are_played():
    task = make_task()
    tiny.trainer(1).test(task, make_data(), verbose=False)
    three = task.provenance["evaluation"]["targets"]["high"]["returns"]
    assert [episode.total for episode in task.play(28.0, 5)][:3] == pytest.approx(three, abs=1e-5)


def test_episodes_have_the_seeds_of_the_report(monkeypatch):
    played = []

    class Recorded(decision.Player):
        def __init__(self, *args: Any, seed: int | None = None, **options: Any) -> None:
            super().__init__(*args, seed=seed, **options)
            self.own = seed

        def play(self, environments, target, seeds, **options):
            played.append((self.own, seeds))
            return super().play(environments, target, seeds, **options)

    monkeypatch.setattr(decision, "Player", Recorded)
    task = make_task(seed=41, test_episodes=2)
    tiny.trainer(1).test(task, make_data(), verbose=False)
    first = task.provenance["evaluation"]["first_seed"]
    assert played == [(41, [first, first + 1])] * 2
    assert first == 141  # the source adds 100


def test_long_games_show_a_line_with_target_and_episodes(monkeypatch, capsys):
    monkeypatch.setattr(decision, "_SECONDS_BETWEEN_LINES", -1.0)
    tiny.trainer(1, enable_progress_bar=True).test(make_task(), make_data(), verbose=False)
    assert "target 28: step 1, 3 of 3 episodes running" in capsys.readouterr().err


def test_other_targets_may_be_asked_for():
    task = make_task(target_returns=[5.0, 20.0])
    tiny.trainer(1).test(task, make_data(), verbose=False)
    told = task.provenance["evaluation"]["targets"]
    assert (told["high"]["target"], told["low"]["target"]) == (20.0, 5.0)


def test_validations_play_when_it_is_their_turn(monkeypatch):
    """Two validations of six play every third time; the check before training does not count."""
    played: list[tuple[int, float]] = []
    task = make_task(val_episodes=2, val_every=3)
    monkeypatch.setattr(
        DecisionMaking,
        "play",
        lambda self, target, count: (
            played.append((self.trainer.global_step, target))
            or [SimpleNamespace(total=1.0, length=2)] * 2
        ),
    )
    trainer = run(task, make_data(), 12, val_check_interval=2, num_sanity_val_steps=2)
    assert played == [(6, 28.0), (6, 14.0), (12, 28.0), (12, 14.0)]
    assert "val/score" in trainer.callback_metrics


def test_callbacks_see_no_score_of_an_earlier_validation():
    """Early stopping would count it again."""
    seen: dict[int, set[str]] = {}

    class Seen(pl.Callback):
        def on_validation_end(self, trainer, module):
            seen[trainer.global_step] = set(trainer.callback_metrics)

    more = {"val_check_interval": 2, "callbacks": [Seen()]}
    run(make_task(val_episodes=1, val_every=2), make_data(), 8, **more)
    assert [step for step, names in seen.items() if "val/score" in names] == [4, 8]
    assert all({"val/loss", "train/loss"} <= names for names in seen.values())
    assert list(seen) == [2, 4, 6, 8]


def test_early_stopping_waits_only_for_the_validations_that_play(monkeypatch, tmp_path):
    """Every second validation plays, and the score never improves."""
    episodes = [SimpleNamespace(total=1.0, length=2)] * 2
    monkeypatch.setattr(DecisionMaking, "play", lambda self, target, count: episodes)
    stopping = EarlyStopping("val/score", mode="max", patience=2)
    saver = RunCheckpoint(tmp_path, monitor="val/loss", mode="min")
    more = {"val_check_interval": 2, "callbacks": [stopping, saver], "enable_checkpointing": True}
    trainer = run(make_task(val_episodes=2, val_every=2), make_data(), 20, **more)
    assert trainer.global_step == 12  # the third that plays


@pytest.mark.parametrize("wrong", ["val/lss", "val_loss"])
def test_each_metric_of_early_stopping_is_checked_before_training(wrong, tmp_path):
    task, saver = make_task(), RunCheckpoint(tmp_path, monitor="val/loss", mode="min")
    more = {"num_sanity_val_steps": 1, "enable_checkpointing": True}
    watched = [EarlyStopping(wrong), EarlyStopping("val/loss"), EarlyStopping("train/loss")]
    with pytest.raises(ValueError, match=f"EarlyStopping's monitor {wrong} is not a validation"):
        run(task, make_data(), 4, callbacks=[*watched, saver], **more)
    assert task.trainer.global_step == 0


@pytest.mark.parametrize("metric", ["val/score", "val/return_low"])
def test_scores_of_the_validations_that_play_select_the_best_checkpoint(metric, tmp_path):
    savers = [RunCheckpoint(tmp_path, monitor=metric) for _ in range(2)]
    more = {"val_check_interval": 1, "num_sanity_val_steps": 1, "enable_checkpointing": True}
    run(make_task(val_episodes=1, val_every=2), make_data(), 4, callbacks=savers[:1], **more)
    assert savers[0].best_step in (2, 4)
    with pytest.raises(ValueError, match=f"{metric} is not a validation metric"):
        run(make_task(), make_data(), 4, callbacks=savers[1:], **more)


def test_zero_episodes_leave_the_loss():
    task = make_task(test_episodes=0)
    (found,) = tiny.trainer(1).test(task, make_data(), verbose=False)
    assert set(found) == {"test/loss", "test/steps"}


def test_data_without_an_environment_are_tested_by_the_loss(capsys, monkeypatch):
    data = make_data()
    monkeypatch.setattr(ToyTrajectories, "evaluation", None)
    monkeypatch.setattr(ToyTrajectories, "state_dict", lambda self: {})
    (found,) = tiny.trainer(1).test(make_task(), data, verbose=False)
    assert "test/score" not in found
    assert "no episodes played: " in capsys.readouterr().out


# ---- what is kept ------------------------------------------------------------------------------


def test_a_checkpoint_holds_what_playing_needs():
    data = make_data()
    task = make_task(val_episodes=1, val_every=5)
    run(task, data, 4, val_check_interval=2)
    checkpoint: dict[str, Any] = {"state_dict": {}}
    task.on_save_checkpoint(checkpoint)
    assert checkpoint["training"]["validations_since_episodes"] == 2
    fresh = make_task()
    fresh.on_load_checkpoint(checkpoint)
    assert fresh.facts == task.facts
    assert fresh._validations == 2
    np.testing.assert_array_equal(fresh.facts.observation_mean, data.evaluation["observation_mean"])


def test_predictions_are_those_of_real_steps():
    task, data = make_task().double().eval(), batch()
    data["sample_ids"] = torch.tensor([7, 3, -1])
    task._trainer = None
    found = task.predict_step(data, 0)
    assert found["sample_id"].tolist() == [7, 3]
    assert [len(row) for row in found["actions"]] == [5, 2] == [len(r) for r in found["predicted"]]
    assert found["timesteps"] == [[0, 1, 2, 3, 4], [0, 1]]
    np.testing.assert_allclose(
        found["predicted"][1], task.predicted(data)[1, :2].detach(), rtol=1e-6
    )


def test_the_toy_is_made_by_its_name():
    environment = make_environment("Toy")
    assert environment.reset(seed=1)[0].shape == (OBS,)
    environment.close()

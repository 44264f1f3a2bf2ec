"""Loss, metrics, predictions, prior updates and randomness of the classifier task."""

from __future__ import annotations

import io
import os
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger

from lit_probattn.tasks import SequenceClassifier
from lit_probattn.tasks.base import check_trainer
from tests.tasks.tiny import CLASSES, data, soft_mgk, softmax, task, trainer


def all_samples(split):
    """(logits input, target) of every sample of a split, one by one, without loaders."""
    loader = data()
    loader.setup()
    dataset = loader.split(split)
    collate = loader.collate()
    return [collate([dataset[i]]) for i in range(len(dataset))]


def test_metrics_count_every_sample_once():
    """21 samples are no multiple of 8: the last batch is filled up."""
    module = task()
    (values,) = trainer().test(module, data(eval_batch_size=8), verbose=False)
    module.eval()
    rows = [
        (module.model(b["inputs"], key_mask=b["key_mask"]), b["target"])
        for b in all_samples("test")
    ]
    logits, targets = torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
    assert values["test/accuracy"] == pytest.approx(
        float((logits.argmax(1) == targets).double().mean())
    )
    assert values["test/loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_sums_of_losses_are_exact_in_low_precision(precision):
    """In bfloat16, sums of 401 ones would end at 256."""
    module, samples = task(), data(num_test=401, eval_batch_size=1)
    (values,) = trainer(precision=precision).test(module, samples, verbose=False)
    module.eval()
    with torch.inference_mode():
        losses = [
            F.cross_entropy(module(batch), batch["target"]).double()
            for batch in samples.test_dataloader()
        ]
    assert len(losses) == 401
    assert values["test/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-9)


def test_scores_leave_out_fill_up_rows(monkeypatch):
    module, rows = task().double().eval(), all_samples("val")
    monkeypatch.setattr(module, "log", lambda *_, **options: None)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    loader = data()
    loader.setup()
    batch = loader.collate()([loader.split("val")[i] for i in (0, 1, 2, 5, 5)])
    batch["sample_ids"] = torch.tensor([0, 1, 2, -1, -1])
    with torch.no_grad():
        module.evaluate(batch, "val")
    logits = [module.model(b["inputs"], key_mask=b["key_mask"])[0] for b in rows[:3]]
    targets = [int(b["target"]) for b in rows[:3]]
    losses = [-x.log_softmax(0)[y].item() for x, y in zip(logits, targets, strict=True)]
    right = [float(x.argmax() == y) for x, y in zip(logits, targets, strict=True)]
    logged = {}
    monkeypatch.setattr(module, "log", lambda name, value, **options: logged.update({name: value}))
    module.log_scores("val")
    assert float(logged["val/loss"]) == pytest.approx(sum(losses) / 3, rel=1e-9)
    assert float(module.accuracies["val"].compute()) == pytest.approx(sum(right) / 3)


def test_predictions_leave_out_fill_up_rows():
    module = task()
    batches = trainer().predict(module, data())
    ids = torch.cat([b["sample_id"] for b in batches])
    assert ids.tolist() == list(range(21))
    probabilities = torch.cat([b["probabilities"] for b in batches])
    assert probabilities.shape == (21, CLASSES)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(21))


def test_training_loss_is_logged_over_the_whole_step():
    """With dropout off, accumulation changes nothing but the order of the sums."""
    losses = []
    for count in (1, 4):
        run = trainer(1, accumulate_grad_batches=count)
        run.fit(task(), data())
        losses.append(float(run.callback_metrics["train/loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    "callback",
    [
        BatchSizeFinder(),
        GradientAccumulationScheduler({0: 4}),
        LearningRateFinder(),
        StochasticWeightAveraging(0.1, swa_epoch_start=1),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_change_what_the_task_sets_are_refused(callback):
    with pytest.raises(ValueError, match=f"trainer.callbacks: {type(callback).__name__} .*--"):
        trainer(callbacks=[callback]).fit(task(), data())


def test_intervals_do_not_matter_if_there_are_no_validations():
    run = trainer(2, accumulate_grad_batches=2, val_check_interval=3, limit_val_batches=0)
    run.fit(task(), data(num_train=8))
    assert run.global_step == 2


def test_a_duration_between_validations_requires_whole_steps():
    with pytest.raises(ValueError, match="batches 2, received a duration"):
        trainer(2, accumulate_grad_batches=2, val_check_interval="00:00:10:00").fit(task(), data())


def test_a_duration_between_validations_requires_one_process():
    run = trainer(2, val_check_interval="00:00:10:00", devices=2, strategy="ddp_spawn")
    with pytest.raises(ValueError, match="2 processes, received a duration"):
        check_trainer(run)


@pytest.mark.parametrize("name", ["min_steps", "min_epochs"])
def test_a_least_length_would_disable_early_stopping(name):
    with pytest.raises(ValueError, match=f"trainer.{name} must be unset, received 3"):
        trainer(4, **{name: 3}).fit(task(), data())


def test_it_learns():
    run = trainer(25)
    run.fit(task(lr=2e-2), data(num_train=8))
    assert float(run.callback_metrics["train/loss"]) < 1.0 < torch.tensor(CLASSES).log()


def test_schedule_and_betas_reach_the_optimiser():
    module = task(schedule="one_cycle", warmup_steps=3, schedule_steps=9, lr=1e-2)
    run = trainer(5)
    run.fit(module, data())
    (group,) = run.optimizers[0].param_groups
    # Step 4 of 0..8, peak at 2: a third of the way down.
    assert group["lr"] == pytest.approx(1e-2 * (4e-6 / 100 + (1 - 4e-6 / 100) * 2 / 3), rel=1e-4)
    assert group["betas"] == (pytest.approx(0.95 - 0.1 * 2 / 3), 0.999)
    assert group["eps"] == 1e-6
    assert group["weight_decay"] == 0.0


def priors(module):
    return {name: value for name, value in module.state_dict().items() if "prior" in name}


def test_prior_update_is_once_per_step_over_all_micro_batches():
    results = {}
    for count in (1, 4):
        module = task(soft_mgk)
        before = {name: value.clone() for name, value in priors(module).items()}
        trainer(2, accumulate_grad_batches=count).fit(module, data())
        results[count] = priors(module)
        assert before
        assert any(not torch.equal(before[name], results[count][name]) for name in before)
    torch.testing.assert_close(results[4], results[1], rtol=1e-5, atol=1e-6)


def test_dropout_differs_by_micro_step_and_repeats_by_seed():
    def losses(seed):
        seen = []
        module = task(dropout=0.5, seed=seed)
        module.log = lambda name, value, **_: seen.append(value) if name == "train/loss" else None
        torch.manual_seed(seed + 100)  # the state of torch's generator before the run is irrelevant
        trainer(3).fit(module, data(num_train=8))
        return seen

    first = losses(0)
    assert first == losses(0)
    assert first != losses(1)


def test_attention_dropout_is_drawn_anew_in_every_step_and_off_in_evaluation():
    module = task(partial(softmax, dropout=0.5))
    run = trainer(1)
    run.fit(module, data())
    (batch,) = [all_samples("val")[0]]
    module.train()
    at_one = module(batch)
    run.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 2
    assert not torch.equal(module(batch), at_one)
    module.eval()
    without = task()
    without.load_state_dict(module.state_dict())
    without.eval()
    torch.testing.assert_close(module(batch), without.model(batch["inputs"], **_mask(batch)))


def _mask(batch):
    return {"key_mask": batch["key_mask"]}


def test_python_factory_stays_out_of_the_checkpoint(tmp_path):
    run = trainer(1)
    module = task()
    run.fit(module, data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert "attention" not in saved["hyper_parameters"]
    assert saved["hyper_parameters"]["embed_dim"] == 12


def test_activation_checkpointing_changes_no_weight():
    results = []
    for recompute in (False, True):
        module = task(activation_checkpointing=recompute, dropout=0.3)
        trainer(2).fit(module, data())
        results.append(module.state_dict())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.slow
def test_compiled_model_has_the_same_names_draws_and_losses():
    results = []
    for compiled in (False, True):
        module = task(partial(soft_mgk, dropout=0.2), compile=compiled)
        run = trainer(4)
        run.fit(module, data(pad_to="max"))
        results.append((module.state_dict(), float(run.callback_metrics["train/loss"])))
    assert results[0][0].keys() == results[1][0].keys()
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)


class Two(SequenceClassifier):
    """A task class that sets some arguments and renames one."""

    def __init__(self, depth: int, **options):
        super().__init__(softmax, num_classes=2, num_layers=depth, **options)


def test_checkpoints_have_the_arguments_of_every_constructor():
    sizes = {"vocab_size": 13, "max_seq_len": 8, "embed_dim": 8, "head_dim": 4, "mlp_dim": 6}
    kept = Two(3, **sizes).hparams
    expected = {"depth": 3, "num_layers": 3, "num_classes": 2, **sizes}
    assert {name: kept.get(name) for name in expected} == expected
    assert "attention" not in kept


def test_a_logger_gets_no_arguments_of_the_task():
    """A run's configuration is logged instead."""
    got = []

    class Recorder(DummyLogger):
        def log_hyperparams(self, *given, **named):
            got.append((given, named))

    trainer(1, logger=Recorder()).fit(task(), data())
    assert got == []


def test_predictions_of_files_whose_names_are_not_unicode_are_written(monkeypatch):
    """Names of files may be any bytes; Parquet's texts may not."""
    names = [os.fsdecode(b"sp\xe4t.png"), "ä.png"]
    in_ascii = partial(str.encode, encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr(os, "fsencode", in_ascii)  # of a system whose locale is not UTF-8
    files = SimpleNamespace(classes=names, name_of=lambda _, i: names[i], predict_split="test")
    module = task()
    monkeypatch.setattr(type(module), "datamodule", files)
    table = pd.DataFrame({"sample_id": [0, 1], "target": [0, 1], "prediction": [1, 0]})
    file = io.BytesIO()
    module.finish_predictions(table).to_parquet(file)
    found = pd.read_parquet(file)
    assert found["file"].tolist() == [r"sp\xe4t.png", "ä.png"]
    assert found["predicted_label"].tolist() == ["ä.png", r"sp\xe4t.png"]

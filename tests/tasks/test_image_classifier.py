"""The image task: loss of mixed labels, metrics, decay, averages, runs of the tiny recipe."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from datamodules import ImageNet
from lit_probattn.attention import FiSHAttention, MGKAttention, SoftmaxAttention
from lit_probattn.cli.app import main
from lit_probattn.cli.errors import exit_status
from lit_probattn.interop.state_dicts import read_state_dict
from lit_probattn.tasks import ImageClassifier
from lit_probattn.training.checkpoints import CheckedCheckpointIO
from lit_probattn.training.saving import RunCheckpoint
from tests.datamodules.images.made import write_images
from tests.support.runs import arguments, in_ranks, newest_state, only_version, write_attention
from tests.tasks.tiny import loss_scaling, overflow_at, trainer

CLASSES = tuple(f"n{number:02d}" for number in range(7))
SWIN = {"patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Seven classes with 3 training and 3 validation pictures each."""
    return write_images(tmp_path_factory.mktemp("imagenet"), 3, 3, CLASSES)


def fish(embed_dim, **options):
    return FiSHAttention(embed_dim, mixer="mlp", noise="none", **options)


def task(attention=fish, **options) -> ImageClassifier:
    torch.manual_seed(0)
    settings = {
        **{"num_classes": 7, "image_size": 32, "model_options": SWIN, "schedule": "constant"},
        **{"drop_path": 0.0, "stages": [1], "lr": 1e-3, "weight_decay": 0.05},
    }
    return ImageClassifier(attention, **{**settings, **options})


def data(root: Path, **options) -> ImageNet:
    settings = {"image_size": 32, "batch_size": 6, "cache_dir": str(root / "cache")}
    return ImageNet(data_dir=str(root), **{**settings, **options})


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "inputs": torch.randn(rows, 3, 32, 32),
        "key_mask": torch.ones(rows, 1, dtype=torch.bool),
        "target": torch.arange(rows) % 7,
        "sample_ids": torch.arange(rows),
    }


def test_loss_of_mixed_labels_is_that_of_timms_soft_targets():
    from timm.data.mixup import mixup_target
    from timm.loss import SoftTargetCrossEntropy

    module = task().train()
    module.random_key = lambda batch: None
    given = batch()
    given["mix_target"] = given["target"].flip(0)  # timm's partners
    given["mix_weight"] = torch.full((4,), 0.3)
    soft = mixup_target(given["target"], 7, lam=0.7, smoothing=0.1)
    expected = SoftTargetCrossEntropy()(module(given), soft)
    torch.testing.assert_close(module.batch_loss(given), expected)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_mixed_images_train_in_every_precision(root, precision):
    losses = []
    for name in ("32-true", precision):
        run = trainer(2, precision=name, limit_val_batches=0)
        run.fit(task(ema_decay=0.5), data(root))
        losses.append(float(run.callback_metrics["train/loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_weight_decay_leaves_out_vectors_and_positions():
    module = task()
    decayed, spared = module.configure_optimizers().param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.05, 0.0)
    names = {id(p): name for name, p in module.model.named_parameters()}
    assert len(names) == len(decayed["params"]) + len(spared["params"])
    spared = {names[id(p)] for p in spared["params"]}
    kept = set(names.values()) - spared
    assert "net.layers.1.blocks.0.attn.relative_position_bias_table" in spared
    assert "net.layers.1.blocks.0.attn.attention.core.mixing.weights.0" in kept
    assert {n for n in names.values() if n.endswith("bias") or ".norm" in n} <= spared
    assert all(module.model.get_parameter(name).ndim >= 2 for name in kept)


def test_the_optimiser_has_what_a_core_owns_before_the_projections():
    """As when layers owned it: states are kept by position, in both groups."""
    module = task(lambda c, **options: MGKAttention(c, shifted_keys=True, **options))
    names = {id(p): name for name, p in module.model.named_parameters()}
    groups = module.configure_optimizers().param_groups
    ordered = [[names[id(p)] for p in group["params"]] for group in groups]
    start = "net.layers.1.blocks.0.attn.attention."
    decayed = [name.removeprefix(start) for name in ordered[0] if name.startswith(start)]
    projections = [f"{name}_proj.weight" for name in ("query", "key", "value", "out")]
    assert decayed[:5] == ["core.key_shift", *projections]


def test_schedule_is_timms():
    """Warm-up laid over a cosine from start to end, as in timm's scheduler by updates."""
    from timm.scheduler import CosineLRScheduler

    rates = {"lr": 1e-3, "start_lr": 1e-6, "final_lr": 1e-5, "warmup_steps": 3}
    module = task(schedule="cosine_global", schedule_steps=8, **rates)
    module.log_dict = lambda values: None
    trained = module.configure_optimizers()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    expected = CosineLRScheduler(
        optimizer, 8, lr_min=1e-5, warmup_t=3, warmup_lr_init=1e-6, t_in_epochs=False
    )
    for step in range(8):
        module._trainer = SimpleNamespace(global_step=step, max_steps=8)
        module._apply_schedule(trained)
        first, second = (group["lr"] for group in trained.param_groups)
        assert first == second == pytest.approx(expected._get_lr(step)[0], rel=1e-9)


def test_metrics_count_every_picture_once(root):
    """21 pictures in batches of 5: the last one is filled up."""
    module, pictures = task(), data(root, eval_batch_size=5)
    torch.nn.init.normal_(module.net.head.fc.weight)
    (values,) = trainer().test(module, pictures, verbose=False)
    module.eval()
    split = pictures.split("test")
    samples = [split[index] for index in range(21)]
    with torch.no_grad():
        logits = module.model(torch.stack([s.image for s in samples]))
    target = torch.tensor([s.target for s in samples])
    order = logits.argsort(descending=True)
    ranks = (order == target[:, None]).int().argmax(1)
    assert values["test/accuracy"] == pytest.approx(float((ranks < 1).double().mean()))
    assert values["test/accuracy_top5"] == pytest.approx(float((ranks < 5).double().mean()))
    assert values["test/loss"] == pytest.approx(float(F.cross_entropy(logits, target)), rel=1e-4)


def test_moving_average_is_evaluated_and_kept_apart(root):
    module = task(ema_decay=0.5)
    start = {name: p.clone() for name, p in module.model.named_parameters()}
    history = []
    step = module.optimizer_step

    def recorded(*args, **kwargs):
        step(*args, **kwargs)
        history.append({name: p.detach().clone() for name, p in module.model.named_parameters()})

    module.optimizer_step = recorded
    run = trainer(3)
    run.fit(module, data(root))
    name = "net.layers.1.blocks.0.attn.attention.value_proj.weight"
    average = history[0][name]  # timm copies the weights of the first step
    for weights in history[1:]:
        average = (average + weights[name]) / 2
    found = dict(module.ema.module.named_parameters())
    torch.testing.assert_close(found[name], average)
    assert not torch.equal(history[-1][name], start[name])
    assert all(p.grad is None for p in module.ema.parameters())
    trained = {name: p.clone() for name, p in module.model.named_parameters()}
    (values,) = run.validate(module, data(root), verbose=False)
    with torch.no_grad():
        for name, parameter in module.model.named_parameters():
            assert torch.equal(parameter, trained[name])
            parameter.zero_()
    (again,) = run.validate(module, data(root), verbose=False)
    assert again == values


def test_a_skipped_step_is_not_averaged(root):
    """The weights stand still in step 2, and so does their average, which is not yet theirs."""
    module = task(ema_decay=0.5)
    overflow_at(module, {2})
    averages, step = [], module.optimizer_step

    def recorded(*args, **kwargs):
        step(*args, **kwargs)
        average = module.ema.module.net.layers[1].blocks[0].attn.attention.value_proj.weight
        averages.append(average.clone())

    module.optimizer_step = recorded
    trainer(4, plugins=[loss_scaling()]).fit(module, data(root))
    moved = [not torch.equal(old, new) for old, new in pairwise(averages)]
    assert moved == [True, False, True]


def test_it_learns_the_pictures(tmp_path):
    """One picture of each class."""
    seven = write_images(tmp_path, 1, 1, CLASSES)
    small = {**SWIN, "depths": [1, 1], "patch_size": 4}
    options = {"label_smoothing": 0.0, "lr": 2e-2, "weight_decay": 0.0, "warmup_steps": 5}
    module = task(**options, model_options=small)
    run = trainer(20)
    plain = {"augmentation": "none", "mixup": 0.0, "cutmix": 0.0, "batch_size": 7}
    run.fit(module, data(seven, **plain))
    assert float(run.callback_metrics["train/loss"]) < 0.2 < torch.tensor(7.0).log()


VIT = {"patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
VIT_TASK = {"model_name": "vit_tiny_patch16_224", "model_options": VIT, "stages": None}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="swin"),
        pytest.param({**VIT_TASK, "blocks": [0, 2]}, id="vit"),
    ],
)
@pytest.mark.slow  # precision: test_language_model.py; recomputation: test_sequence_classifier.py
def test_mixed_precision_trains_like_single(root, options):
    """Two steps of the recipe with recomputation; bfloat16 has three digits."""
    losses = []
    for precision in ("32-true", "bf16-mixed"):
        module = task(drop_path=0.1, head_ratio=2.0, activation_checkpointing=True, **options)
        run = trainer(2, precision=precision, gradient_clip_val=5.0)
        run.fit(module, data(root))
        losses.append(float(run.callback_metrics["train/loss"]))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_channels_last_changes_the_layout_only():
    logits, seen = [], []
    for channels_last in (False, True):
        module = task(channels_last=channels_last).eval()
        module.net.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        logits.append(module.model(batch()["inputs"]))
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert seen[-1].is_contiguous(memory_format=layout)
        assert module.net.patch_embed.proj.weight.is_contiguous(memory_format=layout)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_starts_from_a_file_of_timm(tmp_path, suffix):
    options = {**SWIN, "img_size": 32, "num_classes": 7}
    theirs = timm.create_model("swin_tiny_patch4_window7_224", **options).eval()
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pth":
        torch.save({"model": theirs.state_dict()}, path)
    else:
        save_file(theirs.state_dict(), path)
    chosen = {"attention_weights": "copy", "initial_weights": str(path), "stages": None}
    module = task(SoftmaxAttention, **chosen).eval()
    pictures = batch()["inputs"]
    torch.testing.assert_close(module.model(pictures), theirs(pictures), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="the state dict belongs to another model"):
        task(SoftmaxAttention, **{**chosen, "num_classes": 5})
    path.write_bytes(b"no weights")
    with pytest.raises(ValueError, match=f"initial_weights: {path} (is corrupt|cannot be read): "):
        task(SoftmaxAttention, **chosen)


def test_wrong_settings_are_refused():
    for options, message in (
        ({"label_smoothing": 1.0}, "label_smoothing must be in"),
        ({"final_lr": 1.0}, "must be at most lr=0.001"),
        ({"final_lr": 1e-5}, "final_lr requires a cosine schedule"),
        ({"model_name": "swin_tinny"}, "timm has no model 'swin_tinny'"),
        ({"model_options": {**SWIN, "window_size": 5}}, "allow_padding=True"),
        ({"stages": [5]}, "stages must be distinct numbers from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            task(**options)
    padded = task(model_options={**SWIN, "window_size": 5}, allow_padding=True)
    assert padded.model(batch()["inputs"]).shape == (4, 7)


# ---- the command line --------------------------------------------------------------------------


def command(name: str, folder: Path, root: Path, *more: str) -> list[str]:
    attention = write_attention(folder, "FiSHAttention", mixer="mlp", noise="none", dropout=0.2)
    given = {"data_dir": root, "cache_dir": root / "cache", "attention": attention}
    return arguments(name, folder, *more, task="tiny/imagenet_swin_tiny", **given)


SHORT = ("--trainer.max_steps", "2", "--run.checkpoint_every", "1")


@pytest.fixture(scope="module")
def one_process(root, tmp_path_factory) -> Path:
    """A run of the tiny recipe: augmented, mixed, averaged."""
    folder = tmp_path_factory.mktemp("run")
    assert main(command("fit", folder, root, *SHORT)) == 0
    return folder


def test_a_resumed_run_is_the_whole_run(root, tmp_path):
    """With the moving average, of pictures that are augmented and mixed."""
    found = []
    for start in (None, tmp_path / "checkpoints/step-00000001.ckpt"):
        saving = RunCheckpoint(tmp_path / "checkpoints", every_n_steps=1)
        run = trainer(
            2, callbacks=[saving], plugins=[CheckedCheckpointIO()], enable_checkpointing=True
        )
        module = task(ema_decay=0.5, drop_path=0.1)
        run.fit(module, data(root), ckpt_path=start, weights_only=True)
        found.append(module.state_dict())
    whole, resumed = found
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    assert any(name.startswith("ema.module") for name in whole)
    assert newest_state(tmp_path)["ImageNet"]["classes"] == list(CLASSES)


def test_a_damaged_image_in_a_worker_is_one_line(tmp_path, capsys):
    broken = write_images(tmp_path / "broken", 1, 1, CLASSES)
    path = broken / "train" / "n03" / "n03_0.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    pictures = data(broken, batch_size=6, num_workers=1, mixup=0.0, cutmix=0.0)
    pictures.setup()
    assert exit_status(lambda: list(islice(pictures.train_dataloader(), 3))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: unreadable image")


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_initial_weights_that_are_nan_are_refused(tmp_path, ending):
    path = tmp_path / f"weights.{ending}"
    save = save_file if ending == "safetensors" else torch.save
    save({"norm.weight": torch.tensor([1.0, torch.nan])}, path)
    with pytest.raises(ValueError, match=f"weights.{ending}: norm.weight contains NaN in 1 of 2"):
        read_state_dict(path)


@pytest.mark.slow
def test_evaluation_and_predictions_are_exact_for_two_processes(root, one_process):
    values, tables = [], []
    for more in ((), ("--trainer.devices", "2", "--trainer.strategy", "ddp")):
        for name in ("validate", "predict"):
            work = command(name, one_process, root, "--ckpt_path", "last", *more)
            assert set(in_ranks(lambda work=work: main(work), 2 if more else 1)) == {0}
        folder = only_version(one_process)
        values.append(
            json.loads((folder / "validate-step-00000002.json").read_text(encoding="utf-8"))
        )
        tables.append(pd.read_parquet(folder / "predictions-step-00000002.parquet"))
    for name in ("val/accuracy", "val/accuracy_top5"):
        assert values[1][name] == values[0][name]
        assert values[0][name] * 21 == pytest.approx(round(values[0][name] * 21), abs=1e-5)
    assert not values[0]["selected_on_test"]  # the last checkpoint: nothing was selected
    assert tables[0]["sample_id"].tolist() == list(range(21))
    pd.testing.assert_frame_equal(tables[0], tables[1], rtol=1e-5)

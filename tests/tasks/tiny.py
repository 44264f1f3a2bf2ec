"""A tiny task on random tokens, built in Python."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from datamodules import Synthetic
from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.callbacks import StepNumbers

VOCAB, CLASSES, LENGTH = 13, 5, 23


# Attention of a task: a layer's class with what the task does not set.
softmax = partial(SoftmaxAttention, num_heads=2)
soft_mgk = partial(MGKAttention, num_heads=2, e_step="soft")


def task(attention=softmax, **options: Any) -> SequenceClassifier:
    """Classifier with two small layers; no dropout unless asked."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "num_classes": CLASSES, "max_seq_len": 32}
    small = {"embed_dim": 12, "head_dim": 6, "num_layers": 2, "mlp_dim": 20, "dropout": 0.0}
    return SequenceClassifier(attention, **sizes, **{**small, "schedule": "constant", **options})


def data(**options: Any) -> Synthetic:
    """Random tokens; 21 validation and test samples."""
    sizes = {"num_train": 48, "num_val": 21, "num_test": 21}
    shape = {"min_length": 9, "max_length": LENGTH, "vocab_size": VOCAB, "num_classes": CLASSES}
    if options.get("pad_to") != "max":
        options.setdefault("pad_multiple", 1)
    return Synthetic(**{**sizes, **shape, "batch_size": 8, **options})


def overflow_at(module: pl.LightningModule, steps: Container[int]) -> None:
    """Make the gradient of the first parameter infinite in these steps."""
    next(module.parameters()).register_hook(
        lambda g: g * float("inf") if module.trainer.global_step in steps else g
    )


def loss_scaling(**options: Any) -> MixedPrecision:
    """A loss scaler on the CPU, with bfloat16 as the type of autocast."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))
    plugin.precision = "bf16-mixed"
    return plugin


def trainer(max_steps: int = 4, **options: Any) -> pl.Trainer:
    """CPU trainer that writes nothing."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {
        **quiet,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "use_distributed_sampler": False,
        "check_val_every_n_epoch": None,
        "val_check_interval": 1000,
        "num_sanity_val_steps": 0,
    }
    callbacks = [StepNumbers(), *options.pop("callbacks", [])]
    return pl.Trainer(max_steps=max_steps, callbacks=callbacks, **{**settings, **options})

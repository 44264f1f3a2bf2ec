"""Settings of optimiser and trainer that cannot work, refused by name before anything runs."""

import math
from collections.abc import Sequence

import lightning.pytorch as pl


def check_optimizer(lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> None:
    """Check the arguments of AdamW.

    Raises:
        ValueError: a value is out of its range.
    """
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be positive, got {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {list(betas)}")
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps must not be negative, got {eps}")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")


def check_trainer(trainer: pl.Trainer) -> None:
    """Check what a training run needs to know of its trainer.

    Raises:
        ValueError: `max_steps` is missing, or a number of batches is below 1.
    """
    if trainer.max_steps < 1:
        raise ValueError(
            f"trainer.max_steps must be set, got {trainer.max_steps}: runs are counted in "
            "optimiser steps, for example --trainer.max_steps 5000"
        )
    if trainer.accumulate_grad_batches < 1:
        raise ValueError(
            "trainer.accumulate_grad_batches must be at least 1, got "
            f"{trainer.accumulate_grad_batches}"
        )
    interval = getattr(trainer, "val_check_interval", None)
    if isinstance(interval, int | float) and not interval > 0:
        raise ValueError(
            f"trainer.val_check_interval must be positive, got {interval}: micro-batches from one "
            "validation to the next; --trainer.limit_val_batches 0 turns validation off"
        )

"""The number of steps of a run, and the settings that follow it: warm-up, schedule, intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_probattn.training.run_folder import flatten

STEPS, SCHEDULE = "trainer.max_steps", "model.init_args.schedule_steps"
WARMUP = "model.init_args.warmup_steps"
INTERVALS = ("trainer.val_check_interval", "run.checkpoint_every")


def shorter(config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings of a run of so many steps, by dotted key.

    The schedule ends with the run, warm-up keeps its share of the steps, and validations and
    checkpoints are at most the run apart.
    """
    flat = flatten(config)
    before = flat.get(STEPS) or steps
    found: dict[str, Any] = {STEPS: steps}
    if flat.get(SCHEDULE) is not None:
        found[SCHEDULE] = steps
    if flat.get(WARMUP):
        found[WARMUP] = max(1, round(flat[WARMUP] * min(1.0, steps / before)))
    # Validations are counted in micro-batches, checkpoints in steps.
    most = {INTERVALS[0]: steps * int(flat.get("trainer.accumulate_grad_batches") or 1)}
    found |= {
        key: min(flat[key], most.get(key, steps)) for key in INTERVALS if flat.get(key) is not None
    }
    return found

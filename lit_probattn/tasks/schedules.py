"""Learning-rate schedules as pure functions of the optimiser step.

Schedules have no state, so a resumed run uses the same values as an uninterrupted one.
Steps count from 0: `step` is the number of completed optimiser steps.
"""

import math
from typing import Literal, NamedTuple

ScheduleName = Literal["one_cycle", "linear", "cosine", "cosine_global", "inverse_sqrt", "constant"]
# Schedules without an end.
OPEN_ENDED = ("inverse_sqrt", "constant")

START_DIVISOR = 25.0
FINAL_DIVISOR = 1e4
BETA1_HIGH = 0.95
BETA1_LOW = 0.85
INVERSE_SQRT_START = 1e-7


class ScheduleValues(NamedTuple):
    """Learning rate of an optimiser step, and beta1 if the schedule sets it."""

    lr: float
    beta1: float | None


class Lengths(NamedTuple):
    """Lengths of a schedule and of its warm-up in steps."""

    total: int
    warmup: int


def lengths_of_run(max_steps: int, schedule_steps: int | None, warmup_steps: int) -> Lengths:
    """Return the lengths for a run; a warm-up that is not shorter than the run is scaled down.

    The scaled warm-up is a tenth of the run. With `schedule_steps` nothing is scaled: the run is
    part of that schedule, and resuming it later must be equivalent to one longer run.

    Args:
        max_steps: length of the run.
        schedule_steps: length of the schedule. None means `max_steps`.
    """
    total = max_steps if schedule_steps is None else schedule_steps
    if schedule_steps is None and warmup_steps >= max_steps > 0:
        return Lengths(max_steps, max_steps // 10)
    return Lengths(total, warmup_steps)


def check_schedule(name: ScheduleName, *, total_steps: int, warmup_steps: int) -> None:
    """Raise for lengths that the schedule does not support.

    Raises:
        ValueError: a negative warm-up, or one that leaves no steps after it.
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, received {warmup_steps}")
    if name not in OPEN_ENDED and not warmup_steps < total_steps:
        raise ValueError(
            f"schedule {name!r} requires warmup_steps below its length, received warmup_steps "
            f"{warmup_steps} and schedule_steps {total_steps}: lower warmup_steps, raise "
            "schedule_steps, or use schedule 'constant'"
        )


def schedule_values(
    name: ScheduleName,
    step: int,
    *,
    peak_lr: float,
    total_steps: int,
    warmup_steps: int,
    cycle_momentum: bool = True,
) -> ScheduleValues:
    """Return the learning rate and beta1 of optimiser step `step`.

    Args:
        name: `one_cycle` is linear from peak / 25 up to the peak and down to peak / 250000, with
            beta1 going 0.95, 0.85, 0.95 if `cycle_momentum`; `linear` increases linearly and
            decreases linearly from the peak, reaching 0 one step after the last (transformers;
            BERT's code has this times 1 − warmup_steps / total_steps after the warm-up); `cosine`
            increases linearly and decreases to 0 along a cosine that starts at the peak;
            `cosine_global` does so along a cosine that starts at step 0 (MGK's language models);
            `inverse_sqrt` increases linearly from 1e-7 and decreases as 1/√step (fairseq);
            `constant` increases linearly and stays at the peak.
        step: number of completed optimiser steps, from 0 to total_steps - 1.
        total_steps: length of the schedule. Unused by `constant` and `inverse_sqrt`.
        warmup_steps: number of warm-up steps; the last one is at the peak (with `inverse_sqrt`, the
            step after it).
        cycle_momentum: whether `one_cycle` sets beta1.

    Raises:
        ValueError: the step is outside the schedule.
    """
    if step < 0 or (name not in OPEN_ENDED and step >= total_steps):
        last = total_steps - 1
        raise ValueError(f"step must be in 0..{last} (schedule {name!r}), received {step}")
    if name == "one_cycle":
        height = _triangle(step, total_steps, warmup_steps)
        start = 1 / START_DIVISOR
        low = start if step < warmup_steps else start / FINAL_DIVISOR
        lr = peak_lr * (low + (1 - low) * height)
        beta1 = BETA1_HIGH + (BETA1_LOW - BETA1_HIGH) * height
        return ScheduleValues(lr, beta1 if cycle_momentum else None)
    if name == "inverse_sqrt":
        return ScheduleValues(_inverse_sqrt(step, peak_lr, warmup_steps), None)
    if step < warmup_steps:
        return ScheduleValues(peak_lr * (step + 1) / warmup_steps, None)
    if name == "constant":
        return ScheduleValues(peak_lr, None)
    if name == "linear":
        return ScheduleValues(peak_lr * (total_steps - step) / (total_steps - warmup_steps), None)
    if name == "cosine_global":
        return ScheduleValues(peak_lr * 0.5 * (1 + math.cos(math.pi * step / total_steps)), None)
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return ScheduleValues(peak_lr * 0.5 * (1 + math.cos(math.pi * progress)), None)


def _inverse_sqrt(step: int, peak_lr: float, warmup_steps: int) -> float:
    """Linear from the start to the peak at step warmup_steps, then peak · √(warmup / step)."""
    if step < warmup_steps:
        return INVERSE_SQRT_START + (peak_lr - INVERSE_SQRT_START) * step / warmup_steps
    return peak_lr * math.sqrt(max(warmup_steps, 1) / max(step, 1))


def _triangle(step: int, total_steps: int, warmup_steps: int) -> float:
    """0 at step 0, 1 at step warmup_steps - 1, 0 at the last step; linear in between."""
    peak = max(warmup_steps - 1, 0)
    if step < peak:
        return step / peak
    return (total_steps - 1 - step) / max(1, total_steps - 1 - peak)

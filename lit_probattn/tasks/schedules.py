"""Learning-rate schedules as pure functions of the optimiser step.

Nothing is remembered between steps, so a resumed run sees the same values as an uninterrupted one.
Steps count from 0: `step` is the number of optimiser steps already taken.
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
    """What an optimiser step uses: learning rate, and beta1 where the schedule sets it."""

    lr: float
    beta1: float | None


class Lengths(NamedTuple):
    """Steps of a schedule, and those of its warm-up."""

    total: int
    warmup: int


def lengths_of_run(max_steps: int, schedule_steps: int | None, warmup_steps: int) -> Lengths:
    """Return the lengths that a run uses: a warm-up as long as the run is scaled to it.

    A tenth of the run is warm-up then. With `schedule_steps` nothing is scaled: the run is a part
    of that schedule, and one that goes on later must equal the whole.

    Args:
        max_steps: length of the run.
        schedule_steps: length of the schedule. None means `max_steps`.
    """
    total = max_steps if schedule_steps is None else schedule_steps
    if schedule_steps is None and warmup_steps >= max_steps > 0:
        return Lengths(max_steps, max_steps // 10)
    return Lengths(total, warmup_steps)


def check_schedule(name: ScheduleName, *, total_steps: int, warmup_steps: int) -> None:
    """Refuse lengths for which the schedule has no meaning.

    Raises:
        ValueError: a negative warm-up, or one that leaves no step to fall in.
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, received {warmup_steps}")
    if name not in OPEN_ENDED and not warmup_steps < total_steps:
        raise ValueError(
            f"schedule {name!r} needs warmup_steps below its length, received warmup_steps "
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
            beta1 going 0.95, 0.85, 0.95 if `cycle_momentum`; `linear` rises linearly and falls
            linearly, to reach 0 one step after the last (BERT); `cosine` rises linearly and falls
            to 0 along a cosine that begins there; `cosine_global` does so along a cosine that
            begins at step 0 (MGK's language models); `inverse_sqrt` rises linearly from 1e-7 and
            falls as 1/√step (fairseq); `constant` rises linearly and stays.
        step: optimiser steps taken so far, from 0 to total_steps - 1.
        total_steps: length of the schedule. Unused by `constant` and `inverse_sqrt`.
        warmup_steps: steps of the rise; the last of them is at the peak (with `inverse_sqrt`, the
            step after it).
        cycle_momentum: whether `one_cycle` sets beta1.

    Raises:
        ValueError: the step lies outside the schedule.
    """
    if step < 0 or (name not in OPEN_ENDED and step >= total_steps):
        last = total_steps - 1
        raise ValueError(f"step must lie in 0..{last} (schedule {name!r}), received {step}")
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

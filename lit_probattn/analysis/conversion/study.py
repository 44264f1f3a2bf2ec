"""What converting the attention of a trained run is worth, over steps of fine-tuning.

    python -m lit_probattn.analysis conversion --checkpoint runs/mnli-softmax/0 --to smgk \\
        --out FOLDER

Task, data and training rules are those of the run, whose attention is softmax. For every seed:

trained on     the model as it was, trained on
annealed       converted, with the keys' norms put back, which are taken away over --anneal_steps
at once        converted to Gaussian scores at once
converted      where there is no norm to anneal (fish), instead of the second and the third

Scores are those of the validation split, at step 0 right after the conversion. A conversion is
fitted to batches of the training data. Seeds decide the order of the training data, dropout and the
spread of shifts. An interrupted study goes on with the trainings that it has not finished.
"""

from __future__ import annotations

from typing import Any, Literal

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.conversion.arms import Arm, Course, run_arm
from lit_probattn.analysis.drawing import BLUE, label, spread_curve
from lit_probattn.analysis.options import MODEL, Flag
from lit_probattn.analysis.results import AnalysisError
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.convert.layer import Mixture
from lit_probattn.convert.model import Target
from lit_probattn.records.tables import counted, markdown_table, panels, with_deviation
from lit_probattn.training.checkpoints import load_checkpoint

TRAINED_ON, ANNEALED, AT_ONCE, CONVERTED = "trained on", "annealed", "at once", "converted"
COLOURS = {
    TRAINED_ON: "0.4",
    ANNEALED: BLUE,
    AT_ONCE: "#b5651d",
    CONVERTED: "#b5651d",
}
_ROWS_DEPEND_ON = (
    *("to", "num_components", "old_heads", "spread", "num_global_heads", "steps", "eval_every"),
    *("anneal_steps", "lr", "num_batches", "val_batches", "metric", "data"),
)


class Conversion(ModelStudy):
    """Scores over steps of fine-tuning, from softmax to another attention."""

    name, title = "conversion", "Converted attention over steps of fine-tuning"
    flags = (
        *MODEL,
        Flag("to", "what softmax is converted into", "smgk", choices=("mgk", "smgk", "fish")),
        Flag("num_components", "of a head of mgk or smgk; default: 2", type=int, least=1),
        Flag("old_heads", "heads that become one, smgk; default: num_components", type=int),
        Flag("spread", "of the shifts of smgk; default: 0.1", type=float),
        Flag("num_global_heads", "of fish; default: half the heads", type=int, least=1),
        Flag("steps", "steps of fine-tuning", 300, least=1),
        Flag("eval_every", "steps from one score to the next", 50, least=1),
        Flag("anneal_steps", "steps of the annealing; default: half of --steps", type=int, least=1),
        Flag("seeds", "of the trainings", [0, 1, 2], least=0),
        Flag("lr", "learning rate; default: the run's", type=float),
        Flag("num_batches", "training batches that a conversion is fitted to", 8, least=1),
        Flag("val_batches", "batches of a score; default: all", type=int, least=1),
        Flag("metric", "of the validation split; default: the run's monitor"),
    )

    def _compute(self) -> str:
        options, run = self.options, self.trained.config.get("run") or {}
        metric = options.metric or run.get("monitor", "val/accuracy")
        mode = run.get("monitor_mode", "max") if options.metric is None else None
        if options.steps % options.eval_every:
            raise AnalysisError(
                f"--eval_every must divide --steps {options.steps}, received {options.eval_every}"
            )
        course = Course(
            options.steps,
            options.eval_every,
            metric,
            options.lr,
            options.num_batches,
            options.val_batches,
        )
        arms = arms_of(options)
        rows = self._rows(arms, course)
        self.results.table(rows)
        self.results.figure(draw(rows, metric, arms))
        table = with_deviation(rows, ["side"], "step", "value", _digits(rows["value"]))
        table = table.rename(columns={n: f"{n} steps" for n in table if isinstance(n, int)})
        what = "mean ± std over seeds" if rows["seed"].nunique() > 1 else "one seed"
        return (
            f"Finding: {finding(rows, metric, mode)}\n\n{self._how(course)}\n\n"
            f"{metric}, {what}, after so many steps from each start:\n\n{markdown_table(table)}"
        )

    def _rows(self, arms: list[Arm], course: Course) -> pd.DataFrame:
        """Return the score of every side, seed and step; finished trainings are kept."""
        state = load_checkpoint(self.trained.checkpoint)["state_dict"]
        store = self.store(("side", "seed", "step"), *_ROWS_DEPEND_ON)
        for seed in dict.fromkeys(self.options.seeds):
            for arm in arms:
                if store.has(side=arm.name, seed=seed, step=course.steps):
                    continue
                found, converted = run_arm(self.trained, state, arm, course, seed)
                for step, value in found.items():
                    store.add({"side": arm.name, "seed": seed, "step": step, "value": value})
                lines = [] if converted is None else [f"  {line}" for line in converted.lines()]
                told = ", ".join(f"{step}: {value:.4g}" for step, value in found.items())
                print("\n".join([f"seed {seed}, {arm.name}: {told}", *lines]), flush=True)
        wanted = pd.DataFrame(store.finish())
        wanted = wanted[wanted["seed"].isin(self.options.seeds)]
        return wanted.sort_values(["seed", "step"], kind="stable", ignore_index=True)

    def _how(self, course: Course) -> str:
        options = self.options
        annealed = "" if options.to == "fish" else f", annealed over {_anneal_steps(options)}"
        rate = "the run's" if course.lr is None else f"{course.lr:g}"
        return (
            f"softmax to {options.to}: {counted(course.steps, 'step')} of fine-tuning{annealed}"
            f"; learning rate {rate}; seeds {', '.join(map(str, options.seeds))}."
        )


def arms_of(options: Any) -> list[Arm]:
    """Return the sides that the flags ask for.

    Raises:
        AnalysisError: flags exclude each other.
    """
    mixed = ("num_components", "old_heads", "spread", "anneal_steps")
    unused = [*mixed] if options.to == "fish" else ["num_global_heads"]
    unused += [] if options.to == "smgk" else ["old_heads", "spread"]
    for name in unused:
        if getattr(options, name) is not None:
            raise AnalysisError(f"--{name} has no meaning with --to {options.to}: leave it out")
    if options.to == "fish":
        plain = Target(num_global_heads=options.num_global_heads)
        return [Arm(TRAINED_ON), Arm(CONVERTED, plain)]
    steps = _anneal_steps(options)
    if steps > options.steps:
        raise AnalysisError(
            f"--anneal_steps must be at most --steps {options.steps}, received {steps}"
        )
    annealed = Arm(ANNEALED, _gaussian(options, 1.0), steps)
    return [Arm(TRAINED_ON), annealed, Arm(AT_ONCE, _gaussian(options, None))]


def _anneal_steps(options: Any) -> int:
    return options.anneal_steps or max(1, options.steps // 2)


def _gaussian(options: Any, weight: float | None) -> Target:
    names = ("num_components", "old_heads", "spread")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    shifted = options.to == "smgk"
    try:
        mixture = Mixture(shifted_keys=shifted, score="gaussian", key_norm_weight=weight, **given)
    except ValueError as error:
        raise AnalysisError(str(error)) from error
    return Target(mixture)


def finding(rows: pd.DataFrame, metric: str, mode: Literal["max", "min"] | None) -> str:
    """Say what every side has right after its start and at the end, beside the model as it was.

    Args:
        mode: whether larger or smaller is better; None says nothing of it.
    """
    seeds, last = rows["seed"].nunique(), int(rows["step"].max())
    means = rows.groupby(["side", "step"])["value"].mean()
    show = f"{{:.{_digits(rows['value'])}f}}".format
    before = means[TRAINED_ON, 0]
    parts = [
        f"{side} {show(means[side, 0])} right after the conversion and {show(means[side, last])} "
        f"after {counted(last, 'step')}"
        for side in rows["side"].unique()
        if side != TRAINED_ON
    ]
    better = {"max": ", larger is better", "min": ", smaller is better", None: ""}[mode]
    return (
        f"of a softmax model with {metric} {show(before)} ({show(means[TRAINED_ON, last])} trained "
        f"on as long{better}), {'; '.join(parts)} (means of {counted(seeds, 'seed')})"
    )


def _digits(values: pd.Series[float]) -> int:
    """Return decimals that show four figures of the largest value."""
    largest = float(values.abs().max())
    return 1 if largest >= 10 else 4


def draw(rows: pd.DataFrame, metric: str, arms: list[Arm]) -> Figure:
    """Draw the metric over steps, a curve with its deviation per side."""
    figure, axes = panels(1, 1, 5.6, 3.8)
    axis = axes[0][0]
    for arm in arms:
        part = rows[rows["side"] == arm.name]
        name = "softmax, trained on" if arm.name == TRAINED_ON else arm.name
        spread_curve(axis, part, "step", "value", colour=COLOURS[arm.name], name=name)
        if arm.annealing_steps is not None:
            axis.axvline(arm.annealing_steps, color=COLOURS[arm.name], lw=0.8, ls="--")
    before = rows[(rows["side"] == TRAINED_ON) & (rows["step"] == 0)]["value"].mean()
    axis.axhline(before, color="0.5", lw=0.8, ls=":")
    label(axis, "steps of fine-tuning", metric, legend=8)
    told = "dotted: before the conversion"
    told += "; dashed: end of the annealing" if any(arm.annealing_steps for arm in arms) else ""
    axis.set_title(told, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    return figure

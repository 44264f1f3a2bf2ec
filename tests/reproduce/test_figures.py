"""Published figures: verdicts on hand-made runs, pictures, the command."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.tables import kinds, read_table
from lit_probattn.experiments.expectations import Sample, trend
from lit_probattn.reproduce.__main__ import main
from lit_probattn.reproduce.figures.low_rank import (
    AgainstHeads,
    AgainstHeadSize,
    AgainstParameters,
    at_equal,
    equal,
)
from lit_probattn.reproduce.figures.low_rank_bert import FineTuned
from lit_probattn.reproduce.figures.registry import FIGURES, figure_class

SEEDS = (0, 1, 2)
SURE, UNSURE = (0.0, 0.1, -0.1), (0.0, 6.0, -6.0)  # spreads over the seeds


def sample(mean: float, spread=SURE) -> Sample:
    return Sample(tuple(mean + s for s in spread), SEEDS)


# ---- verdicts ----------------------------------------------------------------------------------


def chain(*means: float, spreads=None) -> dict[int, Sample]:
    spreads = spreads or [SURE, (0.05, 0.0, 0.1), (0.0, -0.1, 0.1), (0.1, 0.1, 0.0)]
    return {2**i: sample(m, s) for i, (m, s) in enumerate(zip(means, spreads, strict=False))}


@pytest.mark.parametrize(
    ("series", "verdict"),
    [
        ([chain(110, 100, 95)], "agrees"),
        ([chain(110, 100, 95), chain(100, 90, 80)], "agrees"),
        ([chain(110, 100, 105)], "differs"),
        ([chain(110, 100, 95), chain(100, 90, 95)], "differs"),
        ([chain(110, 100, 99, spreads=[SURE, SURE[::-1], UNSURE])], "same direction"),
        ([chain(110, 99.9, 100, 90)], "same direction"),  # not each step, but from end to end
        ([chain(100, 101, spreads=[SURE, UNSURE])], "inconclusive"),
        # The ends of one series agree, those of the other do not: all must.
        ([chain(110, 99.9, 100, 90), chain(100, 101, spreads=[SURE, UNSURE])], "inconclusive"),
        ([chain(100)], "inconclusive"),
        ([], "inconclusive"),
    ],
)
def test_a_trend(series, verdict):
    found = trend({str(number): points for number, points in enumerate(series)}, -1, "heads")
    assert found.verdict == verdict


def runs(rule: str, sizes: list[tuple[int, int, int, int, float]], mean=SURE) -> pd.DataFrame:
    """Rows of (heads, head size, width, parameters, perplexity), each of all seeds."""
    return pd.DataFrame(
        {
            **{"rule": rule, "row": f"{rule}-{h}-{e}-{d}", "seed": seed, "num_heads": h},
            **{"head_dim": e, "embed_dim": d, "mlp_dim": 256, "num_parameters": count},
            "perplexity": value + mean[seed] * (1 + 0.1 * h),
        }
        for h, e, d, count, value in sizes
        for seed in SEEDS
    )


def test_two_models_that_are_one():
    one = runs("fixed", [(4, 16, 64, 100, 50.0)])
    assert equal(one, runs("standard", [(4, 16, 64, 100, 50.0)]), "").verdict == "agrees"
    assert equal(one, runs("standard", [(4, 16, 64, 101, 50.0)]), "").verdict != "agrees"
    assert equal(one, runs("standard", [(8, 8, 64, 100, 59.0)]), "").verdict == "differs"
    assert equal(one, runs("standard", [(8, 8, 64, 100, 50.0)]), "").verdict == "inconclusive"
    assert equal(one, one[:0], "").verdict == "inconclusive"


BASELINES = [
    (4, 16, 64, 1000, 100.0),
    (8, 8, 64, 1000, 104.0),
    (4, 32, 128, 4000, 90.0),
    (8, 16, 128, 4000, 89.0),
]


@pytest.mark.parametrize(
    ("value", "spread", "verdict", "difference"),
    [
        (93.0, SURE, "agrees", -1.5),  # the line of 100 and 89 is at 94.5 where twice as many are
        (93.0, UNSURE, "same direction", -1.5),
        (97.0, SURE, "differs", 2.5),
        (97.0, UNSURE, "inconclusive", 2.5),
    ],
)
def test_models_beside_the_best_baselines_of_as_many_parameters(value, spread, verdict, difference):
    models = [(2, 16, 64, 500, 1.0), (4, 16, 64, 1000, 1.0), (8, 16, 64, 2000, value)]
    groups = [part for _, part in runs("width", BASELINES).groupby("embed_dim")]
    found = at_equal(runs("fixed", models, spread), groups, "num_parameters", -1, "gap")
    assert found.verdict == verdict
    assert f"mean over 1 models with 0.00 to 0.00 M: {difference:+.2f}" in found.measured
    outside = runs("fixed", [(64, 16, 64, 9000, 1.0)])
    assert at_equal(outside, groups, "num_parameters", -1, "").verdict == "inconclusive"


# ---- the figures of fixed head sizes -----------------------------------------------------------


def report(kind, *parts: pd.DataFrame):
    made = kind(None, [], "")
    made.rows = pd.concat(parts, ignore_index=True)
    return made


def verdicts(made) -> dict[str, str]:
    return {key: judge().verdict for key, judge in made.judges().items()}


FALLING = [(h, 16, 64, 900 + 100 * h, 110.0 - 4 * i) for i, h in enumerate((2, 4, 8, 16))]


def test_perplexity_against_parameters():
    as_said = report(AgainstParameters, runs("fixed", FALLING[:3]), runs("width", BASELINES))
    found = as_said.judges()
    assert verdicts(as_said) == {
        "equal_parameters": "differs",  # 102 where the baseline is at 98.7
        "smaller_width": "differs",  # 102 against 89
        "too_many_heads": "agrees",  # 104 against 100
    }
    assert "width 64 with 8 heads − width 128 with 8: +13." in found["smaller_width"]().measured
    better = [(h, e, d, n, value - 20.0) for h, e, d, n, value in FALLING]
    other = report(AgainstParameters, runs("fixed", better), runs("width", BASELINES))
    assert verdicts(other)["equal_parameters"] == verdicts(other)["smaller_width"] == "agrees"
    nothing = report(AgainstParameters, runs("fixed", FALLING))
    assert set(verdicts(nothing).values()) == {"inconclusive"}


def test_perplexity_against_heads():
    fixed = runs("fixed", FALLING)
    turning = [(2, 32, 64, 1, 105.0), (4, 16, 64, 1300, 106.0), (8, 8, 64, 1, 104.0)]
    baseline = runs("matched_mlp", [*turning, (16, 4, 64, 1, 105.5)])
    assert verdicts(report(AgainstHeads, fixed, baseline)) == {
        "coincide": "agrees",  # 4 heads of 16 at width 64
        "turn": "agrees",  # 16 heads against 8
        "fixed_falls": "agrees",
        "below": "agrees",
    }
    rising = runs("fixed", [(h, e, d, n, 200 - value) for h, e, d, n, value in FALLING])
    falling = runs("matched_mlp", [*turning, (16, 4, 64, 1, 90.0)])
    assert verdicts(report(AgainstHeads, rising, falling)) == {
        "coincide": "differs",
        "turn": "differs",
        "fixed_falls": "differs",
        "below": "differs",
    }
    assert set(verdicts(report(AgainstHeads, fixed)).values()) == {"inconclusive", "agrees"}


def test_perplexity_against_the_head_size():
    grid = [(h, e, 64, h * e, 120 - 3.0 * i - 2.0 * j) for i, h in enumerate((4, 8, 16))
            for j, e in enumerate((8, 16, 32))]  # fmt: skip
    made = report(AgainstHeadSize, runs("head_size", grid))
    assert verdicts(made) == {"larger_heads": "agrees", "more_heads": "agrees"}
    grid[0] = (4, 8, 64, 32, 90.0)
    made = report(AgainstHeadSize, runs("head_size", grid))
    assert verdicts(made) == {"larger_heads": "differs", "more_heads": "differs"}


def test_pictures_are_in_the_axes_of_the_paper():
    fixed, widths = runs("fixed", FALLING), runs("width", BASELINES)
    left, right = report(AgainstParameters, fixed, widths).drawn()["figure"]().axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("parameters", "embedding size")
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "d = 64, head size 16",
        "d / h, 4 heads",
        "d / h, 8 heads",
    ]
    assert [text.get_text() for text in right.texts] == ["16", "8", "4", "2"]
    assert [text.get_ha() for text in right.texts] == ["left", "right"] * 2
    points = [c.lines[0].get_ydata()[0] for c in right.containers[2:]]
    assert points == pytest.approx([98.0, 102.0, 106.0, 110.0])  # one point a model, no mean
    (axis,) = report(AgainstHeads, fixed, widths).drawn()["figure"]().axes
    assert axis.get_xlabel() == "heads"
    sizes = runs("head_size", [(4, 8, 64, 1, 9.0), (8, 8, 64, 1, 8.0), (8, 16, 64, 1, 7.0)])
    (axis,) = report(AgainstHeadSize, sizes).drawn()["figure"]().axes
    assert axis.get_xlabel() == "head size"
    assert len(axis.containers) == 2


def fine_tuned(*models: tuple[str, int, int, int, float], spread=SURE) -> pd.DataFrame:
    """Rows of (rule, heads, width, parameters, score) of both tasks, each of all seeds."""
    return pd.DataFrame(
        {
            **{"rule": rule, "row": f"{rule}-h{h}-d{d}", "seed": seed, "num_heads": h},
            **{"head_dim": 16, "embed_dim": d, "mlp_dim": 4 * d, "num_parameters": count},
            "task": task,
            **{f"value {metric}": value + spread[seed] * (1 + 0.1 * h) for metric in metrics},
        }
        for rule, h, d, count, value in models
        for seed in SEEDS
        for task, metrics in (("squad", ("f1", "exact_match")), ("mnli", ("accuracy",)))
    )


def test_scores_against_parameters():
    widths = [("width", 16, 64, 1000, 50.0), ("width", 16, 128, 4000, 60.0)]
    better = [("fixed", 8, 64, 2000, 58.0), ("fixed", 32, 64, 3500, 66.0)]
    made = report(FineTuned, fine_tuned(*widths, *better))
    assert set(verdicts(made).values()) == {"agrees"}
    assert made.judges()["f1_smaller_width"]().measured.startswith(
        "width 64 with 32 heads − width 128: +6."
    )
    worse = report(FineTuned, fine_tuned(*widths, *((*m[:4], m[4] - 20.0) for m in better)))
    assert set(verdicts(worse).values()) == {"differs"}
    axes = made.drawn()["figure"]().axes
    assert [axis.get_xlabel() for axis in axes] == ["parameters"] * 3
    assert [axis.get_ylabel().split(" (")[0] for axis in axes] == [
        "F1",
        "exact match",
        "accuracy, %",
    ]
    assert len(axes[0].containers) == 2
    # The best of several baselines of a width counts, which is the highest here.
    low = [("width", 8, 64, 1000, 20.0), ("width", 8, 128, 4000, 20.0)]
    one = report(FineTuned, fine_tuned(*widths, *low, ("fixed", 8, 64, 2000, 40.0)))
    assert verdicts(one)["f1_equal_parameters"] == "differs"


def test_figure_2_shares_its_models_with_the_tables():
    names = runs_of("low_rank_figure2", reduced=False)
    for table, shared in (("low_rank_table2a", 12), ("low_rank_table1", 3)):
        made = make_runs(read_table(table), ["squad"], [0], Options(), Place())
        assert len(names & {run.name for run in made}) == shared  # with the stages before


# ---- files and command -------------------------------------------------------------------------


def runs_of(name: str, reduced: bool) -> set[str]:
    table = FIGURES[name].table(kinds()[name], Place(), reduced)
    options = Options(shortened=reduced and not figure_class(kinds()[name]).has_reduced_runs)
    return {run.name for run in make_runs(table, [], [0], options, Place())}


LM1B = ("low_rank_figure1", "low_rank_figure3a", "low_rank_figure3b", "low_rank_figure4")


def test_figures_share_runs():
    reduced, full = ({n: runs_of(n, r) for n in LM1B} for r in (True, False))
    assert [len(found) for found in reduced.values()] == [13, 9, 6, 7]
    assert len(set.union(*reduced.values())) == 21
    assert len(set.union(*full.values())) == 47
    assert not set.union(*reduced.values()) & set.union(*full.values())


def test_a_sentence_that_nothing_judges_is_named(tmp_path):
    made = report(AgainstHeads, runs("fixed", FALLING))
    made.part = {"says": {"unheard": "Of nothing."}}
    name = "low_rank_figure3a"
    made.table = FIGURES[name].table(kinds()[name], Place(), True)
    with pytest.raises(ConfigError, match="low_rank_figure3a: no function judges the claim 'unhea"):
        _ = made.findings


@pytest.mark.slow
def test_a_figure_is_trained_and_judged(tmp_path, capsys):
    """Two tiny runs, from the command to verdicts.csv."""
    text = "".join(f"a sentence of {n} words , {n % 7} and {n % 11} .\n" for n in range(400))
    (tmp_path / "text.txt").write_text(text)
    words = ["low_rank_figure3a", "--shortened", "--seeds", "0", "--steps", "4", "--only"]
    words += ["fixed-h2-*", "fixed-h4-*", "--accelerator", "cpu", "--runs", str(tmp_path / "runs")]
    words += ["--data_dir", str(tmp_path / "text.txt"), "--cache_dir", str(tmp_path / "cache")]
    assert main([*words, "--set", "data.init_args.paragraphs=false"]) == 0
    out = tmp_path / "runs/reproduce/reports/low_rank_figure3a"
    found = pd.read_csv(out / "verdicts.csv")
    assert list(found["verdict"])[:2] == ["inconclusive"] * 2
    assert (out / "figures/figure.png").is_file()
    assert "## Claims of the paper" in Path(out / "report.md").read_text(encoding="utf-8")

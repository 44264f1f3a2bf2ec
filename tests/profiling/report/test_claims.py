"""Verdicts on what papers say of costs: each condition, with numbers that hold and that do not."""

from __future__ import annotations

import pandas as pd
import pytest

from profiling.report.claims import judge
from profiling.sweep.config import Claim, Sentence
from tests.profiling.helpers import attention, sweep

VARIANTS = {name: attention() for name in ("softmax", "a", "b")}


def rows(metric="macs", spread=0.0, device="cuda", **values) -> pd.DataFrame:
    """Rows of a measured metric: values by variant and (D, N)."""
    found = []
    for variant, places in values.items():
        for (width, length), value in places.items():
            row = {"variant": variant, "embed_dim": width, "seq_len": length, "grid_heads": None}
            row |= {"batch_size": 1, "mode": "eval", "backend": "reference", "dtype": "float32"}
            row |= {"scope": "model", "status": "ok", "source": "measured", "device_name": "x"}
            row |= {"device": device}
            row |= {metric: value, "time_p20_s": value - spread, "time_p80_s": value + spread}
            found.append(row)
    return pd.DataFrame(found)


def verdict(frame: pd.DataFrame, **claim) -> str:
    config = sweep(variants=VARIANTS, baseline="softmax")
    sentence = Sentence(says="it is so", holds=[Claim(**{"variants": ["a"], **claim})])
    return judge(sentence, config, frame).verdict


ONE = {(8, 16): 10.0, (8, 32): 20.0}
FLAT = {(8, 16): 10.0, (8, 32): 10.0}


@pytest.mark.parametrize(
    ("claim", "holds", "fails"),
    [
        ({"below": 1}, {(8, 16): 9.0, (8, 32): 19.0}, {(8, 16): 9.0, (8, 32): 20.0}),
        ({"reaches": 0.7}, {(8, 16): 9.0, (8, 32): 14.0}, {(8, 16): 9.0, (8, 32): 14.1}),
        ({"falls_over": ["seq_len"]}, {(8, 16): 9.0, (8, 32): 17.0}, {(8, 16): 9.0, (8, 32): 18.0}),
        (
            {"constant_over": ["seq_len"]},
            {(8, 16): 9.0, (8, 32): 18.1},
            {(8, 16): 9.0, (8, 32): 18.3},
        ),
        (
            {"within": 0.05, "variants": ["a", "softmax"]},
            {(8, 16): 10.4, (8, 32): 20.0},
            {(8, 16): 10.6, (8, 32): 20.0},
        ),
        (
            {"ordered": True, "variants": ["a", "softmax"]},
            {(8, 16): 9.0, (8, 32): 19.0},
            {(8, 16): 9.0, (8, 32): 21.0},
        ),
    ],
)
def test_a_count_holds_or_does_not(claim, holds, fails):
    assert verdict(rows(softmax=ONE, a=holds), **claim) == "agrees"
    assert verdict(rows(softmax=ONE, a=fails), **claim) == "differs"


@pytest.mark.parametrize(
    ("values", "spread", "found"),
    [
        ((5.0, 5.0), 0.5, "agrees"),
        ((9.5, 9.5), 0.5, "same direction"),
        ((5.0, 9.5), 0.5, "same direction"),
        ((10.4, 10.4), 0.5, "inconclusive"),
        ((5.0, 15.0), 0.5, "differs"),
    ],
)
def test_a_time_has_the_spread_of_its_repeats(values, spread, found):
    own = dict(zip(FLAT, values, strict=True))
    frame = rows("time_median_s", spread, softmax=FLAT, a=own)
    assert verdict(frame, metric="time_median_s", below=1) == found


def test_one_certain_point_reaches_a_bound_beside_a_smaller_uncertain_one():
    frame = rows("time_median_s", 1.0, softmax={(8, 16): 10.0, (8, 32): 100.0}, a={(8, 16): 6.5})
    claim = {"metric": "time_median_s", "reaches": 0.71}
    assert verdict(frame, **claim) == "same direction"
    certain = rows("time_median_s", 1.0, a={(8, 32): 69.0})
    assert verdict(pd.concat([frame, certain], ignore_index=True), **claim) == "agrees"


def test_two_certain_values_are_apart_between_two_uncertain_ones():
    """102 and 94, while the extremes 103 and 93 are known to ± 20 only."""
    parts = [("softmax", 102.0, 0.1), ("b", 94.0, 0.1), ("a", 103.0, 20.0), ("c", 93.0, 20.0)]
    frames = [rows("time_median_s", spread, **{name: {(8, 16): v}}) for name, v, spread in parts]
    names = [name for name, _, _ in parts]
    config = sweep(variants={name: attention() for name in names}, baseline="softmax")
    claim = Claim(metric="time_median_s", variants=names, within=0.05)
    sentence = Sentence(says="it is so", holds=[claim])
    assert judge(sentence, config, pd.concat(frames)).verdict == "differs"


@pytest.mark.parametrize("claim", [{"below": 1}, {"reaches": 1}, {"falls_over": ["seq_len"]}])
def test_a_claim_of_the_baseline_alone_has_no_verdict(claim):
    assert verdict(rows(softmax=ONE, a=ONE), variants=["softmax"], **claim) == "inconclusive"


def test_a_time_that_falls_within_its_spread_has_only_the_direction():
    def found(spread, values=(9.0, 7.0)):
        own = dict(zip(FLAT, values, strict=True))
        frame = rows("time_median_s", spread, softmax=FLAT, a=own)
        return verdict(frame, metric="time_median_s", falls_over=["seq_len"])

    assert found(0.1) == "agrees"
    assert found(2.0) == "same direction"
    assert found(0.1, (7.0, 9.0)) == "differs"
    assert found(2.0, (7.0, 9.0)) == "inconclusive"


def test_memory_is_resident_and_peak_together():
    frame = rows("resident_memory_bytes", softmax=FLAT, a={(8, 16): 8.0, (8, 32): 8.0})
    peaks = {"softmax": 10.0, "a": 11.0}
    frame["peak_memory_bytes"] = frame["variant"].map(peaks)
    frame["memory_bytes"] = frame["resident_memory_bytes"] + frame["peak_memory_bytes"]
    assert verdict(frame, metric="memory_bytes", reaches=0.95) == "agrees"
    assert verdict(frame, metric="memory_bytes", reaches=0.94) == "differs"
    below = Claim(metric="memory_bytes", variants=["a"], below=1)
    config = sweep(variants=VARIANTS, baseline="softmax")
    found = judge(Sentence(says="it is so", holds=[below]), config, frame)
    assert found.measured == (
        "total peak memory: ratio of a 0.950; below 1 at 2 of 2 points "
        "(peak above resident memory: ratio of a 1.100)"
    )


@pytest.mark.parametrize("order", [("measured", "predicted"), ("predicted", "measured")])
def test_measured_numbers_judge_and_predicted_ones_where_nothing_was_measured(order):
    """At every place both stand, and they contradict each other."""
    numbers = {
        "measured": {(8, 16): 9.0, (8, 32): 19.0},
        "predicted": {(8, 16): 30.0, (8, 32): 30.0},
    }
    frames = {n: rows(softmax=ONE, a=values).assign(source=n) for n, values in numbers.items()}
    both = pd.concat([frames[name] for name in order], ignore_index=True)
    assert verdict(both, below=1) == "agrees"
    assert verdict(frames["predicted"], below=1) == "differs"


@pytest.mark.parametrize("metric", ["time_median_s", "memory_bytes", "peak_memory_bytes"])
@pytest.mark.parametrize("claim", [{"below": 1}, {"within": 0.5, "variants": ["a", "softmax"]}])
def test_what_a_paper_measured_on_its_gpu_cannot_be_told_without_one(metric, claim):
    values = {"softmax": ONE, "a": {(8, 16): 9.0, (8, 32): 19.0}}
    frame = rows(metric, **values)
    frame["peak_memory_bytes"] = frame[metric]
    assert verdict(frame, metric=metric, **claim) == "agrees"
    assert verdict(frame.assign(device="cpu"), metric=metric, **claim) == "inconclusive"
    predicted = frame.assign(source="predicted")
    assert verdict(predicted, metric=metric, **claim) == "inconclusive"


@pytest.mark.parametrize(
    ("claim", "half", "found"),
    [
        ({"ordered": True, "variants": ["softmax", "a"]}, 1.0, "same direction"),
        ({"ordered": True, "variants": ["a", "softmax"]}, 1.0, "inconclusive"),
        ({"ordered": True, "variants": ["softmax", "a"]}, 0.1, "agrees"),
        ({"ordered": True, "variants": ["a", "softmax"]}, 0.1, "differs"),
        ({"within": 0.05, "variants": ["a", "softmax"]}, 1.0, "same direction"),
        ({"within": 0.03, "variants": ["a", "softmax"]}, 1.0, "inconclusive"),
        ({"within": 0.03, "variants": ["a", "softmax"]}, 0.01, "differs"),
    ],
)
def test_the_spread_of_times_counts_in_every_claim(claim, half, found):
    """10.0 and 10.4, each with the spread of its repeats."""
    frame = rows("time_median_s", half, softmax={(8, 16): 10.0}, a={(8, 16): 10.4})
    assert verdict(frame, metric="time_median_s", **claim) == found


def test_a_count_is_told_on_any_device_and_missing_numbers_on_none():
    frame = rows(softmax=ONE, a={(8, 16): 9.0, (8, 32): 19.0})
    assert verdict(frame.assign(device="meta"), below=1) == "agrees"
    assert verdict(frame, below=1, variants=["b"]) == "inconclusive"
    assert verdict(frame, metric="energy_j", below=1) == "inconclusive"
    assert verdict(rows(softmax=ONE, a={(8, 16): 9.0}), falls_over=["seq_len"]) == "inconclusive"


def test_a_sentence_is_no_better_than_its_weakest_part():
    frame = rows(softmax=ONE, a={(8, 16): 9.0, (8, 32): 19.0})
    config = sweep(variants=VARIANTS, baseline="softmax")
    parts = [Claim(variants=["a"], below=1), Claim(variants=["a"], reaches=0.5)]
    found = judge(Sentence(says="so", holds=parts), config, frame)
    assert found.verdict == "differs"
    assert "below 1 at 2 of 2 points (agrees)" in found.measured
    assert "smallest ratio 0.900 (a, D = 8, N = 16) (differs)" in found.measured


@pytest.mark.parametrize("claim", [{"below": 1}, {"ordered": True, "variants": ["a", "softmax"]}])
def test_times_of_two_devices_have_no_ratio_and_no_order(claim):
    frame = rows("time_median_s", softmax=ONE, a={place: value / 2 for place, value in ONE.items()})
    claim = {"metric": "time_median_s", **claim}
    assert verdict(frame, **claim) == "agrees"
    frame.loc[frame["variant"] == "a", "device_name"] = "y"
    assert verdict(frame, **claim) == "inconclusive"

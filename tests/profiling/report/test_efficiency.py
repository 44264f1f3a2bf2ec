"""The front page's answer is computed from the ratios of the reports."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from lit_probattn import list_attention
from lit_probattn.base.config_files import file_named
from lit_probattn.configs import attention_entry
from lit_probattn.records.figures import readable
from profiling.report.efficiency import efficiency_lines
from profiling.report.names import variant_name

MADE = {"machine": "CPU, 2 logical cores, 1 threads", "command": "python -m study"}


def sweep(folder, ratios, baseline=8):
    """Write ratios of sMGK over softmax, one per length; return the report's data."""
    folder.mkdir(parents=True)
    rows = [
        {"metric": "macs", "variant": "b", "baseline": "a", "embed_dim": 64, "seq_len": 16 * 2**i}
        | {"mode": mode, "scope": "attention", "ratio_measured": ratio}
        for i, ratio in enumerate(ratios)
        for mode in ("eval", "train")
    ]
    pd.DataFrame(rows).to_csv(folder / "ratios.csv")
    options = [{"num_heads": baseline}, {"num_heads": 4, "shifted_keys": True}]
    classes = ["SoftmaxAttention", "MGKAttention"]
    variants = [
        {"variant": name, "attention_class": cls, "attention_args": json.dumps(given)}
        for name, cls, given in zip("ab", classes, options, strict=True)
    ]
    return {"about": {"variants": variants}, "made": MADE}


def timed(folder, low, high, **made):
    """Write the ratio of a step's time, without counts."""
    folder.mkdir(parents=True)
    row = {"variant": "MGK, 4 heads", "form": "package", "attention_dropout": 0.1}
    row |= {"time_over_softmax": 0.9, "time_over_softmax_p20": low, "time_over_softmax_p80": high}
    pd.DataFrame([row]).to_csv(folder / "ratios.csv")
    return {"about": {}, "made": MADE | made}


def kernels(folder, ratios):
    """Write ratios of the times of MGK's kernel."""
    folder.mkdir(parents=True)
    row = {"comparison": "MGK / softmax", "timed": "graph"}
    pd.DataFrame([row | {"time_ratio": r} for r in ratios]).to_csv(folder / "rows.csv")
    return {"about": {}, "made": MADE}


def test_counts_and_times_of_reports_are_one_answer(tmp_path):
    reports = {tmp_path / "cost": sweep(tmp_path / "cost", [0.5, 0.75])}
    reports[tmp_path / "step"] = timed(tmp_path / "step", 0.8, 0.95)
    text = "\n".join(efficiency_lines(tmp_path, reports))
    assert "sMGK, 4 heads" in text
    assert "softmax, 8 heads" in text
    assert "0.50 – 0.75" in text
    assert "16 – 32" in text
    assert "1 of 1 variants need fewer multiply-adds" in text
    assert "0.90 [0.80, 0.95]" in text
    assert "1 of 1 training steps are faster" in text


@pytest.mark.parametrize(
    ("ratios", "count"), [([0.5, 1.2], 0), ([0.5, 0.9], 1), ([0.5, 0.998], 1), ([0.5, 1.0], 0)]
)
def test_a_variant_is_cheaper_only_if_every_point_is(ratios, count, tmp_path):
    reports = {tmp_path / "cost": sweep(tmp_path / "cost", ratios)}
    text = "\n".join(efficiency_lines(tmp_path, reports))
    assert f"{count} of 1 variants need fewer multiply-adds" in text


@pytest.mark.parametrize(("high", "count"), [(1.05, 0), (0.998, 1)])
def test_a_time_within_the_spread_is_not_shorter(high, count, tmp_path):
    reports = {tmp_path / "step": timed(tmp_path / "step", 0.8, high)}
    text = "\n".join(efficiency_lines(tmp_path, reports))
    assert f"{count} of 1 training steps are faster" in text


@pytest.mark.parametrize(
    "made",
    [
        {"machine": "NVIDIA H200"},
        {"command": "python -m study --mode eval"},
        {"command": "python -m study --mode=eval --batch 1"},
    ],
)
def test_times_of_a_gpu_and_of_inference_are_not_those_of_training_on_a_cpu(made, tmp_path):
    reports = {tmp_path / "cost": sweep(tmp_path / "cost", [0.5])}
    reports[tmp_path / "step"] = timed(tmp_path / "step", 0.8, 0.95, **made)
    assert "CPU" not in "\n".join(efficiency_lines(tmp_path, reports))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_variant_of_several_reports_is_judged_by_all(reverse, tmp_path):
    """The worst report decides, in any order."""
    reports = {
        tmp_path / "a": sweep(tmp_path / "a", [1.2], baseline=4),
        tmp_path / "b": sweep(tmp_path / "b", [0.5]),
        tmp_path / "c": timed(tmp_path / "c", 0.8, 1.1),
        tmp_path / "d": timed(tmp_path / "d", 0.8, 0.9),
        tmp_path / "e": kernels(tmp_path / "e", [0.6, 1.3]),
        tmp_path / "f": kernels(tmp_path / "f", [0.5]),
    }
    given = dict(reversed(reports.items())) if reverse else reports
    text = "\n".join(efficiency_lines(tmp_path, given))
    for part in ("0 of 1 variants", "0 of 1 training steps", "0 of 1 kernels", "MGK 0.50 – 1.30"):
        assert part in text


def test_without_ratios_there_is_no_answer(tmp_path):
    assert efficiency_lines(tmp_path, {tmp_path: {"about": {}}}) == []


@pytest.mark.parametrize(
    ("options", "heads", "name"),
    [
        ({}, [4], "MGK, 4 heads"),
        ({"shifted_keys": True}, [4], "sMGK, 4 heads"),
        ({"shifted_keys": True, "e_step": "hard"}, [1, 2], "sMGK with hard E-step"),
        ({"e_step": "soft"}, [4], "MGK with Soft-E, 4 heads"),
    ],
)
def test_variants_of_one_class_have_different_names(options, heads, name):
    assert variant_name("MGKAttention", options, heads) == name


@pytest.mark.parametrize(
    ("mixer", "name"),
    [("linear", "FiSH"), ("shared", "MiSH"), ("mlp", "GFiSH"), ("relu_sum", "GFiSH")],
)
def test_fish_is_named_by_its_mixer_noise_and_score_maps(mixer, name):
    options = {"mixer": mixer, "noise": "none", "num_global_heads": 2}
    assert variant_name("FiSHAttention", options, [8]) == f"Hard {name}, 8 heads from 2 score maps"


@pytest.mark.parametrize("preset", [name for name in list_attention() if "/" not in name])
def test_presets_have_the_same_names_in_sweeps_as_elsewhere(preset):
    """In README and figures, `readable` names a preset."""
    entry = attention_entry(file_named("attention", preset))
    name = entry["class_path"].rpartition(".")[2]
    assert variant_name(name, entry["init_args"], [1, 2]) == readable(preset)


def test_variants_of_a_report_with_one_name_have_their_own_rows(tmp_path):
    reports = {tmp_path / "cost": sweep(tmp_path / "cost", [0.5, 0.75])}
    variants = reports[tmp_path / "cost"]["about"]["variants"]
    variants.append({**variants[1], "variant": "c"})
    table = pd.read_csv(tmp_path / "cost" / "ratios.csv")
    other = table.assign(variant="c", ratio_measured=1.5)
    pd.concat([table, other]).to_csv(tmp_path / "cost" / "ratios.csv")
    text = "\n".join(efficiency_lines(tmp_path, reports))
    assert "1 of 2 variants need fewer multiply-adds" in text
    for row in ("| sMGK, 4 heads (b) | softmax, 8 heads | 0.50 – 0.75 |", "| sMGK, 4 heads (c) |"):
        assert row in text


@pytest.mark.parametrize(("timed_by", "answer"), [("graph", "in part"), ("eager", "not measured")])
def test_kernels_timed_on_a_gpu_are_compared_with_softmax(timed_by, answer, tmp_path):
    """In equal kernels: other comparisons, and softmax itself, do not count."""
    reports = {tmp_path / "cost": sweep(tmp_path / "cost", [0.5])}
    folder = tmp_path / "kernels"
    folder.mkdir()
    reports[folder] = {"about": {}}
    names = ["MGK / softmax", "MLK / softmax", "softmax, 4 heads / softmax", "MGK / flash"]
    rows = [
        {"comparison": name, "time_ratio": ratio, "timed": timed_by}
        for name in names
        for ratio in (0.5, 0.75 if name.startswith("MLK") else 1.5)
    ]
    pd.DataFrame([{"side": "x"}, *rows]).to_csv(folder / "rows.csv")
    text = "\n".join(efficiency_lines(tmp_path, reports))
    assert f"Time on a GPU: {answer}." in text
    printed = "1 of 2 kernels are faster than softmax attention with 8 heads" in text
    assert printed is (timed_by == "graph")
    assert ("MGK 0.50 – 1.50; MLK 0.50 – 0.75." in text) is printed

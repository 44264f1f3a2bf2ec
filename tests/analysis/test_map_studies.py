"""Ranks, distances and spectra of maps whose answers are known."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from lit_probattn.analysis.__main__ import main
from lit_probattn.analysis.studies import distance, maps, rank, spectrum
from lit_probattn.attention import LinearAttention, SoftmaxAttention
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.rows import RowStore
from lit_probattn.configs import read_yaml
from tests.analysis.made import change, checkpoint, layer_call, open_once, write_checkpoint
from tests.support.helpers import error_of
from tests.support.patching import check_figures
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def _check_figures(monkeypatch):
    check_figures(monkeypatch)


@pytest.fixture(autouse=True)
def _open_once(monkeypatch):
    open_once(monkeypatch)


def status(name: str, path: Path, out: Path, *more: str) -> int:
    return main([name, "--checkpoint", str(path), "--out", str(out), "--device", "cpu", *more])


def study(name: str, path: Path, out: Path, *more: str) -> pd.DataFrame:
    assert status(name, path, out, *more) == 0
    return pd.read_csv(out / name / f"{name}.csv")


@pytest.mark.parametrize("true_rank", [1, 3, 7])
def test_rank_counts_singular_values_from_the_threshold_on(true_rank):
    torch.manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))[0] for _ in range(2))
    values = torch.tensor([10.0 ** -(i % 4) for i in range(true_rank)] + [9e-7] * (7 - true_rank))
    assert rank.map_rank(left @ torch.diag(values.double()) @ right) == true_rank
    assert rank.map_rank(torch.diag(values.double()), threshold=1e-7) == 7


@pytest.mark.usefixtures("sketches")
def test_uniform_maps_have_rank_one_and_causal_uniform_maps_full_rank(tmp_path):
    for task, full in (("sequence", False), ("text", True)):
        path = checkpoint(tmp_path / task, task, "SoftmaxAttention", spread=0.1)
        change(path, "query_proj.weight", 0.0)
        if task == "sequence":
            change(path, "query_proj.bias", 0.0)
        table = study("rank", path, tmp_path / task / "out", "--num_samples", "3")
        assert set(table["layer"]) == {1, 2}
        assert len(table) == 6
        expected = table["num_tokens"] if full else 1
        assert (table["rank"] == expected).all()
        shares = table["rank"] / table["num_tokens"]
        np.testing.assert_allclose(table["relative_rank"], shares, rtol=1e-5)


@pytest.mark.usefixtures("sketches")
def test_padded_maps_keep_the_rows_of_padding(tmp_path):
    path = checkpoint(tmp_path, "sequence", "SoftmaxAttention")
    cut = study("rank", path, tmp_path / "cut", "--num_samples", "4")
    padded = study("rank", path, tmp_path / "padded", "--num_samples", "4", "--padded")
    assert (padded["num_tokens"] == 48).all()
    assert (cut["num_tokens"] < 48).any()
    assert (padded["rank"] <= cut["num_tokens"]).all()  # hidden columns are zero


@pytest.mark.usefixtures("sketches")
def test_all_applications_of_a_shared_layer_count(tmp_path, capsys):
    """Also those after the first, in studies that store rows by layer and sample."""
    config = read_yaml(ROOT / "configs/tasks/tiny/lra_text.yaml")
    entry = {"class_path": "lit_probattn.attention.MGKAttention", "init_args": {"num_heads": 2}}
    config["model"]["init_args"] |= {"attention": entry, "share_layers": True, "num_layers": 3}
    path = write_checkpoint(tmp_path / "run", config)
    table = study("rank", path, tmp_path, "--num_samples", "2")
    assert table["layer"].tolist() == [1] * 6
    assert sorted(table["part"]) == [0, 0, 1, 1, 2, 2]
    capsys.readouterr()
    assert status("query_likelihood", path, tmp_path, "--num_samples", "2") == 0
    queries = 2 * table["num_tokens"].sum()  # of two heads
    assert f", {queries} queries x heads x layers." in capsys.readouterr().out


@pytest.mark.usefixtures("sketches")
def test_interrupted_study_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, "sequence", "MGKAttention")
    whole = study("rank", path, tmp_path / "whole", "--num_samples", "4")
    calls = []
    true = rank.map_rank

    def stops_at_fourth(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return true(*arguments)

    monkeypatch.setattr(rank, "map_rank", stops_at_fourth)
    assert status("rank", path, tmp_path / "parts", "--num_samples", "4") == 130
    partial = tmp_path / "parts" / "rank/rank.partial.jsonl"
    partial.write_text(partial.read_text(encoding="utf-8") + '{"layer": 1, "sam')  # half a line
    resumed = study("rank", path, tmp_path / "parts", "--num_samples", "4")
    assert len(calls) == 4 + 8 - 3
    assert not partial.exists()
    pd.testing.assert_frame_equal(resumed, whole)


@pytest.mark.usefixtures("sketches")
def test_rows_of_other_settings_are_not_taken_over(tmp_path):
    path = checkpoint(tmp_path, "sequence", "MGKAttention")
    out = tmp_path / "out"
    (out / "rank").mkdir(parents=True)
    row = {"name": "x", "layer": 1, "sample": 0, "part": 0, "head": 1}
    row |= {"num_tokens": 5, "rank": -1, "relative_rank": -1.0}
    (out / "rank/rank.partial.jsonl").write_text('{"study": "rank"}\n' + json.dumps(row) + "\n")
    table = study("rank", path, out, "--num_samples", "2")
    assert (table["rank"] > 0).all()


def stopped_at_the_end(monkeypatch, *command: Any) -> None:
    """Run a study that is interrupted after all its rows are stored."""

    def stops(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RowStore, "finish", stops)
        assert status(*command) == 130


@pytest.mark.usefixtures("sketches")
@pytest.mark.parametrize(
    ("name", "table", "first", "second"),
    [
        ("rank", "", ("--data.num_val", "6"), ("--data.num_val", "5")),
        ("logit_ranks", "_demand", ("--ranks", "1", "2"), ("--ranks", "2", "4")),
        (
            *("approximate", "", ("--methods", "ovo", "norm")),
            ("--methods", "norm", "--ranks", "3", "2", "--local_samples", "0"),
        ),
    ],
)
def test_a_study_with_other_flags_has_the_rows_of_its_own(
    name, table, first, second, tmp_path, monkeypatch
):
    path = checkpoint(tmp_path, "sequence", "SoftmaxAttention")
    count = ("--num_samples", "3")
    stopped_at_the_end(monkeypatch, name, path, tmp_path / "out", *count, *first)
    for folder in ("out", "fresh"):
        study(name, path, tmp_path / folder, *count, *second)
    tables = (
        pd.read_csv(tmp_path / folder / name / f"{name}{table}.csv") for folder in ("out", "fresh")
    )
    pd.testing.assert_frame_equal(*(t.drop(columns="seconds", errors="ignore") for t in tables))


def test_distance_of_identity_and_uniform_map():
    n = 7
    pair = torch.stack([torch.eye(n), torch.full((n, n), 1 / n), torch.eye(n)])
    frobenius = distance.head_distances(pair)
    torch.testing.assert_close(frobenius[0].item(), (n - 1) ** 0.5, rtol=1e-6, atol=0)
    assert frobenius[1].item() == 0.0  # identical heads
    rows = distance.head_distances(pair, "row_mean")
    torch.testing.assert_close(rows[2].item(), (1 - 1 / n) ** 0.5, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("sketches")
def test_identical_heads_of_a_model_are_at_distance_zero(tmp_path):
    path = checkpoint(tmp_path, "pair", "SoftmaxAttention", num_heads=2)
    for name in ("query_proj.weight", "key_proj.weight", "query_proj.bias", "key_proj.bias"):
        content = torch.load(path, weights_only=True)["state_dict"]
        for key, value in content.items():
            if key.endswith(name):
                change(path, key, torch.cat([value[: len(value) // 2]] * 2))
    table = study("head_distance", path, tmp_path / "out", "--num_samples", "3")
    assert table["mean"].abs().max() < 1e-6


@pytest.mark.usefixtures("sketches")
def test_distances_name_the_samples_that_the_split_has(tmp_path):
    path = checkpoint(tmp_path, "pair", "SoftmaxAttention")
    study("head_distance", path, tmp_path / "out", "--num_samples", "5000")
    text = (tmp_path / "out" / "head_distance/report.md").read_text(encoding="utf-8")
    assert ", 6 samples of" in text


def test_distances_of_a_study_are_those_of_the_maps(tmp_path):
    path = checkpoint(tmp_path, "text", "FiSHAttention", num_global_heads=2)
    flags = ("--num_samples", "4", "--save_maps")
    study("attention_maps", path, tmp_path / "maps", *flags)
    table = study("head_distance", path, tmp_path / "out", "--num_samples", "4")
    layers = pd.read_csv(tmp_path / "out" / "head_distance/head_distance_layers.csv")
    saved = np.load(tmp_path / "maps" / "attention_maps/attention_maps.npz")
    for layer in (1, 2):
        found = [saved[k].astype(float) for k in saved if k.endswith(f"layer{layer}")]
        gaps = [[np.linalg.norm(m[h] - m[g]) for h in range(4) for g in range(h)] for m in found]
        row = layers[layers["layer"] == layer].iloc[0]
        assert row["sequences"] == 4
        np.testing.assert_allclose(row["mean"], np.mean(gaps), rtol=1e-4)
        np.testing.assert_allclose(row["variance"], np.var(gaps), rtol=1e-3)
        pairs = table[(table["layer"] == layer) & (table["head"] == 1) & (table["other_head"] == 2)]
        first = [np.linalg.norm(m[0] - m[1]) for m in found]
        np.testing.assert_allclose(pairs["mean"].iloc[0], np.mean(first), rtol=1e-4)
        np.testing.assert_allclose(pairs["variance"].iloc[0], np.var(first), rtol=1e-3)


def test_scores_are_products_and_zero_where_masked():
    layer = SoftmaxAttention(10, 3, head_dim=4)
    call = layer_call(layer, is_causal=True)
    scores = distance.attention_maps(call.one(0), "logits")
    query, key = (p(call.query[0]).view(11, 3, 4) for p in (layer.query_proj, layer.key_proj))
    expected = torch.einsum("nhe,lhe->hnl", query, key) / 2.0
    torch.testing.assert_close(scores, expected.tril(), rtol=0, atol=1e-12)


def test_linear_attention_has_no_scores():
    call = layer_call(LinearAttention(10, 3, head_dim=4))
    with pytest.raises(ConfigError, match="use --maps probs"):
        distance.attention_maps(call, "logits")


def test_spectrum_is_that_of_the_second_moment_matrix():
    torch.manual_seed(2)
    for count, width in ((5, 13), (13, 5)):
        vectors = torch.randn(count, width, dtype=torch.float64)
        expected = torch.linalg.eigvalsh(vectors.mT @ vectors / count).flip(0)[: min(count, width)]
        torch.testing.assert_close(spectrum.spectrum(vectors), expected, rtol=0, atol=1e-12)


def test_mean_spectrum_averages_the_matrices_of_layers():
    torch.manual_seed(3)
    layers = {1: torch.randn(3, 7, dtype=torch.float64), 2: torch.randn(2, 7, dtype=torch.float64)}
    mean = sum(v.mT @ v / len(v) for v in layers.values()) / 2
    expected = torch.linalg.eigvalsh(mean).flip(0)[:5]
    found, used = spectrum.mean_spectrum(layers)
    assert used == 5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("sketches")
def test_maps_that_are_all_alike_need_one_component(tmp_path):
    path = checkpoint(tmp_path, "text", "SoftmaxAttention")
    change(path, "query_proj.weight", 0.0)
    flags = ("--length", "16", "--num_samples", "3")
    study("spectrum", path, tmp_path / "out", *flags)
    layers = pd.read_csv(tmp_path / "out" / "spectrum/spectrum_layers.csv")
    assert (layers["components"] == 1).all()
    assert (layers["maps"] == 12).all()
    np.testing.assert_allclose(layers["top_1_share"], 1.0, rtol=1e-6)


@pytest.mark.usefixtures("sketches")
def test_spectrum_of_layers_one_after_another_is_that_of_all_at_once(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, "text", "SoftmaxAttention")
    seen = []
    gather = spectrum.Spectrum._maps
    monkeypatch.setattr(
        spectrum.Spectrum,
        "_maps",
        lambda self, group: seen.append(len(group)) or gather(self, group),
    )
    flags = ("--length", "16", "--num_samples", "3")
    study("spectrum", path, tmp_path / "at_once", *flags)
    # A layer has 12 maps of 16 x 16 float32; 2 layers fit into 6 times that, with Gram matrices.
    study("spectrum", path, tmp_path / "in_turn", *flags, "--max_gigabytes", "7e-5")
    assert seen == [2, 1, 1]
    for name in ("spectrum.csv", "spectrum_layers.csv"):
        found = [
            (tmp_path / folder / "spectrum" / name).read_text(encoding="utf-8")
            for folder in ("at_once", "in_turn")
        ]
        assert found[0] == found[1]


def test_spectrum_refuses_what_memory_or_data_do_not_allow(tmp_path):
    path = checkpoint(tmp_path, "text", "SoftmaxAttention")
    flags = ["spectrum", "--checkpoint", str(path), "--out", str(tmp_path / "out")]
    assert "no sequence of val has 17 positions" in error_of(
        [*flags, "--length", "17"], main, alone=False
    )
    line = error_of([*flags, "--length", "16", "--max_gigabytes", "1e-6"], main, alone=False)
    assert "reduce --num_samples" in line


def test_statistics_of_uniform_and_diagonal_maps():
    n = 5
    call = layer_call(SoftmaxAttention(10, 2, head_dim=4), length=n, sequences=1)
    weights = torch.stack([torch.full((n, n), 1 / n), torch.eye(n)]).double()
    uniform, diagonal = maps.map_statistics(call, weights)
    assert uniform["entropy_nats"] == pytest.approx(np.log(n))
    assert uniform["largest_weight"] == pytest.approx(1 / n)
    gaps = [abs(i - j) for i in range(n) for j in range(n)]
    assert uniform["mean_distance"] == pytest.approx(np.mean(gaps))
    assert diagonal["entropy_nats"] == 0.0
    assert diagonal["mean_distance"] == 0.0
    # Cross-attention: the last query stands at the last key.
    layer = SoftmaxAttention(10, 2, head_dim=4)
    cross = replace(layer_call(layer, length=3, sequences=1), key=torch.zeros(1, n, 10))
    last, first = torch.eye(n)[2:].double(), torch.eye(n)[:3].double()
    found = maps.map_statistics(cross, torch.stack([last, first]))
    assert [row["mean_distance"] for row in found] == [0.0, 2.0]


def test_maps_of_a_layer_share_a_scale_with_a_bar_and_few_tokens_are_named():
    found = {1: torch.eye(3).expand(2, 3, 3), 2: torch.full((2, 3, 3), 0.25)}
    figure = maps.draw(found, ["[MAX", "7", "]"])
    panels = [axis for axis in figure.axes if axis.images]
    bars = [axis for axis in figure.axes if not axis.images]
    tops = [axis.images[0].norm.vmax for axis in panels]
    assert tops == [1.0, 1.0, 0.25, 0.25]
    assert len(bars) == 2
    assert [bar.get_ylabel() for bar in bars] == ["attention weight"] * 2
    names = [[*filter(None, (t.get_text() for t in a.get_yticklabels()))] for a in panels]
    assert names == [["[MAX", "7", "]"], [], ["[MAX", "7", "]"], []]
    below = [[*filter(None, (t.get_text() for t in a.get_xticklabels()))] for a in panels]
    assert below == [[], [], ["[MAX", "7", "]"], ["[MAX", "7", "]"]]


def test_long_maps_are_shrunk_by_their_largest_weight():
    weights = torch.zeros(600, 500)
    weights[599, 0] = 1.0
    small = maps.shrink(weights)
    assert small.shape == (256, 256)
    assert small.sum() == small[255, 0] == 1.0
    assert maps.shrink(torch.zeros(3, 7)).shape == (3, 7)


def test_layers_that_are_not_there_are_refused():
    options = argparse.Namespace(layers=[3])
    with pytest.raises(ConfigError, match="from 1 to 2"):
        maps._check_layers(options.layers, 2)

"""Rank diagnostics, the study of a checkpoint, and the experiment's grid."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from lit_probattn.analysis.__main__ import main as analysis
from lit_probattn.analysis.approximation.layers import open_call
from lit_probattn.analysis.head_size.rank_study import truncated_output
from lit_probattn.analysis.head_size.ranks import (
    centre,
    diagnose,
    effective_rank,
    energy_rank,
    map_rank,
    recovered_rank,
    stable_rank,
    truncate,
)
from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.base.config_files import is_there
from lit_probattn.base.errors import ConfigError
from lit_probattn.reproduce.__main__ import main
from lit_probattn.reproduce.head_size.grid import Grid, perplexity_of
from lit_probattn.reproduce.head_size.parameters import Sizes, model_weights
from tests.analysis.approximation.inputs import padded_samples
from tests.analysis.made import checkpoint
from tests.compare.tiny import run_commands_here
from tests.datamodules.text import made as made_text
from tests.support.helpers import error_of
from tests.support.patching import check_figures
from tests.support.paths import ROOT, shipped


def logits(length=16, size=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(2, 3, length, size, generator=generator, dtype=torch.float64)
    return factors[0] @ factors[1].mT


def test_logits_have_the_rank_of_the_head_and_maps_do_not():
    scores = logits()
    weights = scores.softmax(-1)
    assert torch.linalg.matrix_rank(scores).tolist() == [5] * 3
    assert torch.linalg.matrix_rank(centre(scores)).tolist() == [5] * 3
    found, clamped = recovered_rank(weights)
    assert found.tolist() == [5] * 3
    assert not clamped.any()
    assert map_rank(weights).tolist() == [16] * 3


def test_measures_of_known_spectra():
    flat, single = torch.ones(7), torch.eye(7)[0]
    assert float(effective_rank(flat)) == pytest.approx(7.0)
    assert float(effective_rank(single)) == pytest.approx(1.0)
    assert float(stable_rank(torch.tensor([2.0, 1.0, 1.0]))) == pytest.approx(1.5)
    values = torch.tensor([3.0, 2.0, 1.0]).sqrt()  # energies 3, 2, 1 of 6
    shares = (0.5, 0.6, 5 / 6, 0.9, 1.0)
    assert [int(energy_rank(values, share)) for share in shares] == [1, 2, 2, 3, 3]


def test_truncation_is_the_best_of_its_rank_and_whole_at_the_end():
    scores = logits()
    weights = scores.softmax(-1)
    torch.testing.assert_close(truncate(scores, 5).softmax(-1), weights)
    for rank in (1, 3):
        cut = truncate(scores, rank)
        assert torch.linalg.matrix_rank(cut.double()).tolist() == [rank] * 3
        values = torch.linalg.svdvals(centre(scores))
        expected = values[:, rank:].square().sum(-1).sqrt()
        torch.testing.assert_close((cut - centre(scores)).norm(dim=(-2, -1)), expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rank", [1, 4, 8])
def test_padding_has_no_part_in_the_rank(rank, is_causal):
    """The first sample of a padded batch, and the same alone."""
    layer, x, mask = padded_samples()
    both = open_call("layer", layer, x, key_mask=mask, is_causal=is_causal)
    alone = open_call("layer", layer, x[:1, :7], is_causal=is_causal)
    found, expected = truncated_output(both, rank)[0, :, :7], truncated_output(alone, rank)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_small_weights_are_flagged():
    weights = torch.eye(4, dtype=torch.float64)[None]
    assert bool(recovered_rank(weights)[1])


def test_other_variants_leave_the_bound():
    """Ranks after centring: dot products E, one Gaussian E + 1, mixtures of keys far more (D6)."""
    x = torch.randn(1, 24, 16, dtype=torch.float64)

    def rank(layer):
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        scores = layer.core.scores(layer.call(x))
        return int(diagnose(scores)["centred_rank"].max())

    assert rank(SoftmaxAttention(16, 2, head_dim=4).double()) == 4
    assert rank(SoftmaxAttention(16, 2, head_dim=4, score="gaussian").double()) == 5
    assert (
        rank(MGKAttention(16, 2, head_dim=4, shifted_keys=True, variance="paper_main").double())
        > 10
    )


def test_study_of_a_checkpoint(tmp_path, monkeypatch):
    check_figures(monkeypatch)
    path = checkpoint(tmp_path, "value_aware", "SoftmaxAttention", num_heads=2)
    out = tmp_path / "out"
    options = ["--checkpoint", str(path), "--out", str(out), "--num_samples", "3"]
    options += ["--demand_samples", "2", "--split", "test"]
    assert analysis(["logit_ranks", *options]) == 0
    table = pd.read_csv(out / "logit_ranks/logit_ranks.csv")
    assert len(table) == 3 * 2 * 2  # samples, layers, heads
    assert (table["rank"] <= 8).all()
    assert (table["centred_rank"] <= 8).all()
    assert (table["effective_rank"] <= 8 + 1e-6).all()
    demand = pd.read_csv(out / "logit_ranks/logit_ranks_demand.csv")
    assert sorted(set(demand["rank"])) == [1, 2, 4, 8]
    whole = demand[demand["rank"] == 8]
    assert whole["value"].tolist() == pytest.approx(whole["exact"].tolist(), rel=1e-4)
    assert (out / "logit_ranks/figures/logit_ranks.png").is_file()
    assert (out / "logit_ranks/figures/logit_ranks_demand.png").is_file()


def test_maps_with_tiny_weights_have_no_recovered_rank(tmp_path, monkeypatch):
    """Their rank is that of clamped logarithms, above the head size; it was part of the means."""
    check_figures(monkeypatch)
    path = checkpoint(tmp_path, "sequence", "SoftmaxAttention", spread=0.6)
    options = ["--checkpoint", str(path), "--out", str(tmp_path), "--num_samples", "2"]
    assert analysis(["logit_ranks", *options, "--demand_samples", "0"]) == 0
    table = pd.read_csv(tmp_path / "logit_ranks/logit_ranks.csv")
    assert 0 < table["clamped"].sum() < len(table)
    assert table["recovered_rank"].isna().tolist() == table["clamped"].astype(bool).tolist()
    assert set(table["recovered_rank"].dropna()) == {8}


@pytest.mark.parametrize(
    "path", [p for p in shipped("table") if p.stem.startswith("head_size")], ids=str
)
def test_shipped_grids_are_consistent(path):
    grid = Grid.read(path)
    assert is_there(ROOT / grid.task)
    points = list(grid.points(num_layers=6, vocab_size=267735))
    assert len({p.name for p in points}) == len(points)
    for p in points:
        if p.rule in ("standard", "matched_mlp", "matched_width"):
            assert p.num_heads * p.head_dim == p.embed_dim
        if p.rule == "fixed":
            assert p.head_dim == grid.head_dim
        assert p.embed_dim % 2 == 0
    equal = grid.embed_dim // grid.head_dim
    twice = [p for p in points if p.num_heads == equal and p.embed_dim == grid.embed_dim]
    assert {p.rule for p in twice if p.head_dim == grid.head_dim} >= {"standard", "fixed"}


def test_malformed_grids_are_one_line(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text("task: a\nunknown: 1\n")
    with pytest.raises(ConfigError, match=r"grid grid.yaml: .*unknown"):
        Grid.read(path)


@pytest.mark.slow
def test_experiment_runs_each_model_once_and_resumes(tmp_path, capsys, monkeypatch):
    run_commands_here(monkeypatch)
    text = made_text.write(tmp_path / "text")
    (tmp_path / "grid.yaml").write_text(
        json.dumps(
            {
                "kind": "grid",
                "title": "A grid",
                "task": str(ROOT / "configs/tasks/tiny/wikitext103_value_aware.yaml"),
                "attention": str(ROOT / "configs/attention/softmax.yaml"),
                "embed_dim": 16,
                "mlp_dim": 32,
                "head_dim": 8,
                "standard_heads": [2],
                "fixed_heads": [2, 4],
                "matched_width_heads": [4],
                "flags": {"trainer.max_steps": 2, "trainer.val_check_interval": 2},
            }
        )
    )
    command = [
        *("grid", "--tables", str(tmp_path), "--data_dir", str(text), "--accelerator", "cpu"),
        *("--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--jobs", "2"),
    ]
    assert main(command) == 0
    table = pd.read_csv(tmp_path / "out/rows.csv")
    assert table["rule"].tolist() == ["standard", "fixed", "fixed", "matched_width"]
    assert table["perplexity"][0] == table["perplexity"][1]  # one model, two rules
    assert len(list((tmp_path / "runs").glob("wikitext103*"))) == 3
    assert {p.name for p in (tmp_path / "out/figures").iterdir()} == {
        *("heads.png", "heads.svg", "parameters.png", "parameters.svg")
    }
    fixed, matched = table.iloc[2], table.iloc[3]
    tokens = table["num_parameters"] - table["num_other_parameters"]
    (vocab_size,) = set(tokens // table["embed_dim"])

    def sizes(row, width):
        heads = row["num_heads"]
        size = row["head_dim"] if width == row["embed_dim"] else width // heads
        return Sizes(width, heads, size, row["mlp_dim"], 2, vocab_size)

    for _, row in table.iterrows():
        found = sizes(row, row["embed_dim"])
        biases = 3 * found.inner_dim + 2 * found.embed_dim + found.mlp_dim
        norms = 4 * found.embed_dim
        assert row["num_parameters"] == model_weights(found) + 2 * (biases + norms)
    # Rule M2: no other multiple of the heads is nearer to the parameters of the fixed model.
    width, goal = matched["embed_dim"], model_weights(sizes(fixed, 16))
    gaps = [abs(model_weights(sizes(matched, width + step)) - goal) for step in (-4, 0, 4)]
    assert min(gaps) == gaps[1]
    assert fixed["num_parameters"] > table["num_parameters"][0]
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.count("already finished") == 3
    assert main([*command, "--report"]) == 0
    assert "--shard: expected 0 <= i < n" in error_of(
        [*command, "--shard", "2/2"], main, alone=False
    )


def test_perplexity_of_test_results():
    assert perplexity_of({"test/tokens_sliding": 3, "test/ppl_sliding": 7.5}) == (
        "test/ppl_sliding",
        7.5,
    )
    name, value = perplexity_of({"test/mlm_error": 80.0, "test/mlm_loss": 2.0})
    assert (name, value) == ("exp(test/mlm_loss)", pytest.approx(7.389056, rel=1e-6))
    with pytest.raises(
        ConfigError, match=r"missing test/ppl_\* or test/mlm_loss; scores: test/accuracy"
    ):
        perplexity_of({"test/accuracy": 1.0})

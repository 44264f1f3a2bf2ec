"""Likelihoods, priors, keys and responsibilities against sums written out."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from lit_probattn.analysis.__main__ import main
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.studies import keys, likelihood, responsibilities
from lit_probattn.attention import (
    Attention,
    FiSHAttention,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)
from tests.analysis.made import change, checkpoint, layer_call

LENGTHS = torch.tensor([7, 5])
MASK = torch.arange(7) < LENGTHS[:, None]


def mgk(**options) -> MGKAttention:
    layer = MGKAttention(
        10, 2, head_dim=3, **{"variance": [1.0, 2.5], "shifted_keys": True, **options}
    )
    if layer.core.prior is not None:
        torch.nn.init.uniform_(layer.core.prior.value, 0.2, 0.9)
    return layer


def parts_of(call: LayerCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (S, H, N, E), keys (S, H, K, L, E), raw priors (H, K), variances (H, K)."""
    layer = call.layer
    split = {"query": layer.query_proj(call.query), "key": layer.key_proj(call.query)}
    query = split["query"].unflatten(-1, (2, 3)).transpose(1, 2)
    key = split["key"].unflatten(-1, (2, 3)).transpose(1, 2)
    key = key[:, :, None] + layer.core.key_shift[None, :, :, None]
    return query, key, layer.core.prior.value, layer.core.variance()


@torch.no_grad()
def posterior(call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
    return call.layer.core.posterior(call.call())


@torch.no_grad()
def learned(layer: Attention) -> dict[str, torch.Tensor]:
    return {name: found.values.double() for name, found in layer.core.learned().items()}


@pytest.mark.parametrize("causal", [False, True])
def test_query_likelihood_is_the_written_out_sum(causal):
    call = layer_call(mgk(), length=7, key_mask=MASK, is_causal=causal)
    found = likelihood.query_nll(call)
    query, key, prior, variance = (x.detach() for x in parts_of(call))
    prior = prior / prior.sum(1, keepdim=True)
    for s in range(2):
        for h in range(2):
            for i in range(int(LENGTHS[s])):
                seen = range(i + 1) if causal else range(int(LENGTHS[s]))
                kernel = density = 0.0
                for j in seen:
                    for r in range(2):
                        gap = float((query[s, h, i] - key[s, h, r, j]).square().sum())
                        v = float(variance[h, r])
                        value = float(prior[h, r]) * math.exp(-gap / (2 * v))
                        kernel += value / len(seen)
                        density += value / (2 * math.pi * v) ** 1.5 / len(seen)
                assert float(found["kernel_nll"][s, h, i]) == pytest.approx(-math.log(kernel))
                assert float(found["density_nll"][s, h, i]) == pytest.approx(-math.log(density))
                per_dim = -math.log(density) / 3
                assert float(found["density_nll_per_dim"][s, h, i]) == pytest.approx(per_dim)
    assert found["kernel_nll"][1, :, 5:].isnan().all()  # queries that are padding


def test_density_integrates_to_one():
    """Over a grid of queries in one dimension; the kernel does not."""
    grid = torch.linspace(-60.0, 60.0, 4001, dtype=torch.float64)
    key = torch.tensor([0.3, -2.0, 4.0], dtype=torch.float64).view(1, 1, 1, 3, 1)
    parts = likelihood.Mixture(
        grid.view(1, 1, -1, 1),
        torch.cat([key, key + 1.0], 2),
        torch.tensor([[[0.3], [0.7]]], dtype=torch.float64),
        torch.tensor([[1.0, 3.0]], dtype=torch.float64),
    )
    step = float(grid[1] - grid[0])
    mean = likelihood.log_kernel(parts, density=True).exp().mean(-1)
    assert float(mean.sum()) * step == pytest.approx(1.0, abs=1e-9)
    assert float(likelihood.log_kernel(parts, density=False).exp().mean(-1).sum()) * step > 2.0


def test_softmax_attention_is_one_gaussian_per_key():
    soft = SoftmaxAttention(10, 2, head_dim=3, score="gaussian")
    one = MGKAttention(10, 2, head_dim=3, num_components=1)
    one.load_state_dict(soft.state_dict() | {"core.prior.value": torch.full((2, 1), 0.4)})
    found = likelihood.query_nll(layer_call(soft, length=7, key_mask=MASK))
    expected = likelihood.query_nll(layer_call(one, length=7, key_mask=MASK))
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, equal_nan=True)


@pytest.mark.usefixtures("sketches")
def test_likelihood_study_weights_queries_alike(tmp_path):
    path = checkpoint(tmp_path, "sequence", "MGKAttention", num_heads=2)
    out = tmp_path / "out"
    flags = ["query_likelihood", "--checkpoint", str(path), "--out", str(out), "--num_samples", "5"]
    assert main([*flags, "--device", "cpu"]) == 0
    table = pd.read_csv(out / "query_likelihood/query_likelihood.csv")
    assert list(table.columns[:2]) == ["layer", "head"]
    assert len(table) == 4
    rows = pd.DataFrame(
        [
            {"layer": 1, "head": 1, "num_queries": 3, **dict.fromkeys(likelihood._COLUMNS, 2.0)},
            {"layer": 1, "head": 1, "num_queries": 1, **dict.fromkeys(likelihood._COLUMNS, 6.0)},
        ]
    )
    assert likelihood.layer_means(rows)["kernel_nll"].item() == 3.0


@pytest.mark.parametrize("e_step", ["learned", "hard"])
def test_responsibilities_are_the_formula_and_sum_to_one(e_step):
    call = layer_call(mgk(e_step=e_step), length=7, key_mask=MASK)
    weights, shares = posterior(call)
    torch.testing.assert_close(weights, call.weights(), rtol=0, atol=1e-13)
    torch.testing.assert_close(shares.sum(2), torch.ones_like(weights), rtol=0, atol=1e-13)
    layer = call.layer
    query = layer.query_proj(call.query).unflatten(-1, (2, 3)).transpose(1, 2)
    key = layer.key_proj(call.query).unflatten(-1, (2, 3)).transpose(1, 2)
    key = key[:, :, None] + layer.core.key_shift[None, :, :, None]
    for s, h, i, j in np.ndindex(2, 2, 7, 7):
        gaps = (query[s, h, i] - key[s, h, :, j]).square().sum(-1)
        values = torch.exp(-gaps / (2 * layer.core.variance()[h]))
        if e_step == "hard":
            expected = torch.zeros(2, dtype=torch.float64)
            expected[values.argmax()] = 1.0
        else:
            values = values * layer.core.prior.value[h]
            expected = values / values.sum()
        torch.testing.assert_close(shares[s, h, :, i, j], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_responsibilities_of_linear_mixtures(causal):
    layer = MLKAttention(10, 2, head_dim=3)
    torch.nn.init.uniform_(layer.core.prior.value, 0.2, 0.9)
    call = layer_call(layer, length=7, key_mask=MASK, is_causal=causal)
    weights, shares = posterior(call)
    torch.testing.assert_close(weights, call.weights(), rtol=0, atol=1e-13)
    query = layer.query_proj(call.query).unflatten(-1, (2, 3)).transpose(1, 2)
    key = layer.key_proj(call.query).unflatten(-1, (2, 2, 3)).permute(0, 2, 3, 1, 4)
    for s, h, i, j in np.ndindex(2, 2, 7, 7):
        features = torch.nn.functional.elu(key[s, h, :, j]) + 1
        kernel = features @ (torch.nn.functional.elu(query[s, h, i]) + 1)
        expected = layer.core.prior.value[h] * kernel
        torch.testing.assert_close(
            shares[s, h, :, i, j], (expected / expected.sum()).detach(), rtol=0, atol=1e-12
        )


def test_token_shares_split_the_attention():
    call = layer_call(mgk(), length=7, key_mask=MASK).one(1, padded=True)
    found = responsibilities.token_shares(call)
    weights, shares = (x[0] for x in posterior(call))
    weights = weights[:, :5, :5]
    joint = weights[:, None] * shares[:, :, :5, :5]
    torch.testing.assert_close(found["query_share"][..., :5], joint.sum(-1))
    torch.testing.assert_close(found["key_share"][..., :5], joint.sum(2) / weights.sum(1)[:, None])
    torch.testing.assert_close(found["query_share"][..., :5].sum(1), torch.ones(2, 5).double())
    rows = responsibilities.usage_rows(found)
    assert sum(row["usage"] for row in rows if row["head"] == 1) == pytest.approx(1.0)
    # mutual information of the table P(j, r) of one query, by its definition
    table = joint[1, :, 2].numpy()
    outer = table.sum(0, keepdims=True) * table.sum(1, keepdims=True)
    expected = (table * np.log(table / outer)).sum()
    assert float(found["mutual_information"][1, 2]) == pytest.approx(expected)
    assert len(responsibilities.token_rows(found)) == 2 * 2 * 5


def test_one_component_answers_everything():
    found = responsibilities.token_shares(
        layer_call(MGKAttention(10, 2, head_dim=3, num_components=1)).one(0)
    )
    torch.testing.assert_close(found["query_share"], torch.ones(2, 1, 11).double())
    torch.testing.assert_close(found["mutual_information"], torch.zeros(2, 11).double())


@pytest.mark.usefixtures("sketches")
def test_priors_are_clamped_and_normalised(tmp_path):
    path = checkpoint(tmp_path, "sequence", "MGKAttention", num_heads=2)
    change(path, "core.prior.value", torch.tensor([[0.2, 0.6], [1.7, 0.25]]))
    assert main(["priors", "--checkpoint", str(path), "--out", str(tmp_path / "out")]) == 0
    table = pd.read_csv(tmp_path / "out" / "priors/priors.csv")
    assert set(table["quantity"]) == {"prior"}
    first = table[table["layer"] == 1]
    np.testing.assert_allclose(first["value"], [0.2, 0.6, 1.0, 0.25], rtol=1e-5)
    np.testing.assert_allclose(first["normalised"], [0.25, 0.75, 0.8, 0.2], rtol=1e-5)
    sums = table.groupby(["layer", "head"])["normalised"].sum()
    np.testing.assert_allclose(sums, 1.0, rtol=1e-6)


def test_other_learned_quantities():
    found = learned(mgk(learn_variance=True))
    assert set(found) == {"prior", "variance"}
    np.testing.assert_allclose(found["variance"][0], [3**0.5, 2.5 * 3**0.5], rtol=1e-6)
    fish = FiSHAttention(10, 4, head_dim=3, num_global_heads=2)
    found = learned(fish)
    torch.testing.assert_close(
        found["mixing"].float(), fish.core.mixing.values(None).weights[0].detach()
    )
    torch.testing.assert_close(found["noise_scale"], torch.full((1, 2), 0.01).double())
    assert set(learned(MLKAttention(10, 2, head_dim=3))) == {"prior"}
    assert learned(SoftmaxAttention(10, 2, head_dim=3)) == {}


def test_position_priors_are_averaged():
    layer = mgk(prior_share="head_position", max_positions=5)
    found = learned(layer)["prior"]
    torch.testing.assert_close(found.float(), layer.core.prior.value.detach().mean(-1))


LAYERS = {
    "softmax": SoftmaxAttention(10, 4, head_dim=3),
    "grouped": SoftmaxAttention(10, 4, head_dim=3, num_kv_heads=2),
    "mgk": MGKAttention(10, 4, head_dim=3),
    "fish": FiSHAttention(10, 4, head_dim=3, num_global_heads=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_key_weights_make_the_keys(name):
    layer = LAYERS[name].double()
    call = layer_call(layer).one(0)
    found = keys.component_keys(call)
    zero = LayerCall("layer", layer, torch.zeros_like(call.query))
    without_bias = found - keys.component_keys(zero)
    weights = keys.key_weights(layer)
    assert weights.shape[:2] == found.shape[:2]
    made = torch.einsum("hkec,nc->hkne", weights, call.query[0])
    torch.testing.assert_close(made, without_bias, rtol=0, atol=1e-12)


def test_heads_of_a_group_have_the_weights_of_their_key_head():
    weights, seen = torch.randn(3, 1, 5, 7), torch.randn(6, 1, 4, 5)
    rows = keys.statistics(weights, seen)
    expected = [float(torch.linalg.matrix_norm(weights[head // 2, 0])) for head in range(6)]
    assert [row["weight_norm"] for row in rows] == pytest.approx(expected)


def test_shifted_keys_have_one_weight_and_their_shifts():
    layer = mgk().double()
    call = layer_call(layer).one(0)
    assert keys.key_weights(layer).shape == (2, 1, 3, 10)
    found = keys.component_keys(call)
    gap = (found[:, 1] - found[:, 0])[:, 0]
    torch.testing.assert_close(
        gap, (layer.core.key_shift[:, 1] - layer.core.key_shift[:, 0]).detach()
    )
    rows = keys.statistics(keys.key_weights(layer), found)
    assert rows[0]["distance_from_first"] == 0.0
    assert rows[1]["distance_from_first"] == pytest.approx(float(gap[0].norm()))


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (torch.eye(5), 5.0),
        (torch.ones(4, 7), 1.0),
        (torch.diag(torch.tensor([2.0, 2.0, 0.0])), 2.0),
        (torch.diag(torch.tensor([2.0, 1.0])), 5.0 / 4.0**0.8),  # energies 4 and 1 of 5
    ],
)
def test_effective_rank_of_key_weights(matrix, expected):
    (row,) = keys.statistics(matrix[None, None], torch.zeros(1, 1, 2, matrix.shape[0]))
    assert row["weight_effective_rank"] == pytest.approx(expected)

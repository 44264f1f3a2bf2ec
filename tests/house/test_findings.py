"""What `docs/findings.md` says about the papers, where no other test shows it."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest
import torch

from lit_probattn.analysis.studies.likelihood import query_nll
from lit_probattn.attention import MGKAttention
from lit_probattn.attention.blockwise import Block
from lit_probattn.attention.fish.functions import ScoreNoise, local_scores
from lit_probattn.attention.fish.mixing import MixingValues
from lit_probattn.attention.mgk.functions import MGKArguments, component_scores
from lit_probattn.randomness import RandomKey
from tests.analysis.made import layer_call
from tests.support.paths import ROOT

PUBLISHED = pd.read_csv(ROOT / "configs/reproduce/published.csv")


def printed(table: str, task: str, method: str, heads: object, split: str | None = None) -> float:
    """A value of a published table."""
    rows = PUBLISHED[PUBLISHED["table"] == table]
    rows = rows[(rows["task"] == task) & (rows["method"] == method)]
    rows = rows[rows["heads"] == str(heads)]
    if split is not None:
        rows = rows[rows["split"] == split]
    (value,) = rows["value"]
    return float(value)


def test_every_proof_that_the_page_names_exists():
    page = (ROOT / "docs/findings.md").read_text()
    file, count = "", 0
    for named, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", page):
        file = named or file
        if named or test:
            count += 1
            assert f"def {test}" in (ROOT / file).read_text(), (file, test)
    assert count > 30
    for report in re.findall(r"R `(\w+)`", page):
        assert (ROOT / "reports" / report / "report.md").is_file(), report


# ---- MGK -------------------------------------------------------------------------------------


def test_density_of_queries_cannot_be_as_small_as_printed():
    """−log of a mixture density is at least (E/2) log(2π σ²) of its narrowest component."""
    layer = MGKAttention(64, 2, head_dim=32, shifted_keys=True)
    call = layer_call(layer, length=40)
    with torch.no_grad():  # queries on top of their keys: the best that a mixture can do
        layer.query_proj.weight.copy_(layer.key_proj.weight)
        layer.query_proj.bias.copy_(layer.key_proj.bias + layer.core.key_shift[:, 0].flatten())
    found = query_nll(call)
    bound = 16 * math.log(2 * math.pi * 32**0.5)
    assert bound == pytest.approx(57.1, abs=0.05)
    assert found["density_nll"].min() >= bound
    assert found["density_nll_per_dim"].min() > 1.78 > 0.292  # the largest printed value
    assert found["kernel_nll"].min() > 0.0


def test_unequal_variances_need_the_determinant():
    """Eq. (3) without σ^{−E}: for E = 32 and σ²_2 = 3 σ²_1 the odds are off by 17.6 nats."""
    plain, exact = (
        MGKAttention(64, 2, head_dim=32, variance="paper_main", include_log_det=flag)
        for flag in (False, True)
    )
    exact.load_state_dict(plain.state_dict())
    query = torch.zeros(1, 2, 1, 32)
    key = torch.zeros(1, 2, 2, 1, 32)
    odds = []
    for layer in (plain, exact):
        determinant = layer.core.include_log_det
        arguments = MGKArguments(
            layer.core.prior(1), layer.core.variance(), include_log_det=determinant
        )
        scores = component_scores(query, key, arguments)
        odds.append((scores[0, 0, 0] - scores[0, 0, 1]).item())
    assert odds[1] - odds[0] == pytest.approx(16 * math.log(3), rel=1e-5)
    assert 16 * math.log(3) == pytest.approx(17.58, abs=0.005)


def test_gradient_of_clamped_priors_cannot_change_their_scale():
    """Σ_r p_r ∂/∂p_r = 0: so two priors that start at 1/2 keep a sum near 1, as table 8 prints."""
    layer = MGKAttention(10, 3, head_dim=4).double()
    with torch.no_grad():
        layer.core.prior.value.uniform_(0.2, 0.9)
    x = torch.randn(2, 11, 10, dtype=torch.float64)
    layer(x).square().sum().backward()
    inner = (layer.core.prior.value * layer.core.prior.value.grad).sum(1)
    assert layer.core.prior.value.grad.abs().max() > 1e-3
    torch.testing.assert_close(inner, torch.zeros_like(inner), rtol=0, atol=1e-13)
    rows = PUBLISHED[PUBLISHED["table"] == "mgk_table8"]
    pairs = rows.groupby(["method", rows["metric"].str[-1]])["value"].sum()
    assert len(pairs) == 4
    assert (pairs - 1.0).abs().max() < 1e-9


def test_half_the_heads_are_not_better_everywhere_in_the_papers_own_tables():
    assert printed("mgk_table1", "text", "sMGK", 4) < printed("mgk_table1", "text", "Softmax", 8)
    assert printed("mgk_table1", "text", "MGK", 4) < printed("mgk_table1", "text", "Softmax", 8)
    two, four = (("MGK", 2), ("Softmax", 4))
    assert printed("mgk_table1", "listops", *two) < printed("mgk_table1", "listops", *four)
    mlk, linear = ("MLK", 2), ("Linear", 12)
    assert printed("mgk_table2", "average", *mlk) < printed("mgk_table2", "average", *linear) - 0.4


def test_averages_are_cut_where_they_should_be_rounded():
    tasks = ("listops", "text", "retrieval")
    for table, method, heads in (
        ("mgk_table2", "MLK", 2),
        ("mgk_table2", "sMLK", 2),
        ("mgk_table2", "Linear", 2),
        ("mgk_table2", "sMLK", 1),
    ):
        mean = sum(printed(table, task, method, heads) for task in tasks) / 3
        shown = printed(table, "average", method, heads)
        assert abs(mean - shown) > 0.005, (method, heads)
        assert math.floor(100 * mean) / 100 == pytest.approx(shown), (method, heads)


# ---- FiSH ------------------------------------------------------------------------------------


def test_equation_8_is_not_a_draw_from_equation_7():
    """Same mean; variance (Σ p s)² where the admixture has Σ p s² + Σ p (g − mean)²."""
    torch.manual_seed(0)
    share = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    centre = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    mean = (share * centre).sum()
    side = 400
    maps = centre[None, :, None, None].expand(1, 3, side, side).contiguous()
    mixing = MixingValues("linear", (share[None],), (), scale)
    noise = ScoreNoise("local", RandomKey(3), 1)
    relaxed = local_scores(maps, mixing, noise, Block(range(side), range(side)))[0, 0]
    which = torch.multinomial(share, side * side, replacement=True)
    drawn = centre[which] + scale[which] * torch.randn(side * side, dtype=torch.float64)
    between = (share * (centre - mean).square()).sum()
    assert float(relaxed.mean()) == pytest.approx(float(mean), abs=0.02)
    assert float(drawn.mean()) == pytest.approx(float(mean), abs=0.02)
    assert float(relaxed.var()) == pytest.approx(float((share * scale).sum().square()), rel=0.02)
    true = float((share * scale.square()).sum() + between)
    assert float(drawn.var()) == pytest.approx(true, rel=0.02)
    assert true > 1.9 * float(relaxed.var())


def test_generalised_mixing_as_written_collapses_for_scalar_maps():
    """Σ_k (w ReLU(p_k g_k) + c) is w Σ_k |p_k| ReLU(± g_k) and a constant that softmax cancels."""
    maps = torch.randn(3, 5, 7, dtype=torch.float64)
    p = torch.tensor([0.7, -1.2, 0.4], dtype=torch.float64)[:, None, None]
    written = (1.7 * torch.relu(p * maps) - 0.3).sum(0)
    collapsed = 1.7 * (p.abs() * torch.relu(p.sign() * maps)).sum(0)
    torch.testing.assert_close(written.softmax(-1), collapsed.softmax(-1), rtol=0, atol=1e-14)


def test_noise_is_not_better_in_every_setting():
    for split in ("valid", "test"):
        hard = printed("fish_table1", "wikitext_small", "Hard FiSH", "4/8", split)
        assert hard < printed("fish_table1", "wikitext_small", "FiSH", "4/8", split)


def test_one_model_is_printed_with_two_perplexities():
    values = [printed(t, "wikitext_small", "GFiSH", "4/8", "valid") for t in _TWO]
    assert values == [32.68, 32.60]
    tests = {printed(t, "wikitext_small", "GFiSH", "4/8", "test") for t in _TWO}
    assert tests == {33.71}


_TWO = ("fish_table1", "fish_table11")


def test_printed_averages_of_table_7_are_not_those_of_its_rows():
    rows = PUBLISHED[PUBLISHED["table"] == "fish_table7"]
    for method, agrees in (
        ("Softmax (reproduced)", False),
        ("Softmax (reported by source)", False),
        ("GFiSH", True),
    ):
        part = rows[rows["method"] == method]
        shown = part[part["task"] == "d4rl_average_all"]["value"].item()
        mean = part[part["task"] != "d4rl_average_all"]["value"].mean()
        assert (abs(mean - shown) < 0.005) == agrees, (method, mean, shown)


def test_unit_of_the_flops_of_table_5():
    """Printed in 10⁹; 4618.24 = 4.51 · 1024 and 4372.48 = 4.27 · 1024 exactly."""
    flops = PUBLISHED[PUBLISHED["metric"] == "flops_as_printed_1e9"].set_index("method")["value"]
    assert flops["Softmax"] / 1024 == pytest.approx(4.51, abs=1e-12)
    assert flops["Hard GFiSH"] / 1024 == pytest.approx(4.27, abs=1e-12)

"""What `docs/findings.md` says about the papers, where no other test shows it."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter, defaultdict
from functools import partial

import pandas as pd
import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from datamodules.lra.listops_generator import TOKENS, GeneratorSettings, generate_chunks
from lit_probattn.analysis.studies.likelihood import query_nll
from lit_probattn.attention import MGKAttention
from lit_probattn.attention.fish.functions import ScoreNoise, local_scores
from lit_probattn.attention.fish.mixing import MixingValues
from lit_probattn.attention.masks import Block
from lit_probattn.attention.mgk.functions import MGK, component_scores
from lit_probattn.compare.tables import FOLDER, read_published
from lit_probattn.models.images import replace_attention
from lit_probattn.randomness import RandomKey
from tests.analysis.made import layer_call
from tests.models.images.made import hard_gfish
from tests.support.paths import ROOT

SECTION_3_2 = ("fish_table2", "fish_table4")


def printed(table, task, method, heads=None, *, split=None, metric=None) -> float:
    """A value of a published table."""
    asked = {"table": table, "task": task, "method": method, "split": split, "metric": metric}
    asked["heads"] = None if heads is None else str(heads)
    wanted = {key: value for key, value in asked.items() if value is not None}
    rows = [row for row in read_published(ROOT / FOLDER) if wanted.items() <= row.items()]
    (row,) = rows
    return float(row["value"])


def test_every_proof_that_the_page_names_exists():
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    file, count = "", 0
    for named, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", page):
        file = named or file
        if named or test:
            count += 1
            assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8"), (file, test)
    assert count > 30
    for report in re.findall(r"R `([\w/]+)`", page):
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
        arguments = MGK(layer.core.prior(1), layer.core.variance(), include_log_det=determinant)
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
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for row in read_published(ROOT / FOLDER):
        if row["table"] == "mgk_table8":
            sums[row["method"], row["metric"][-1]] += float(row["value"])
    assert list(sums.values()) == pytest.approx([1.0] * 4)


def listops_shares(min_length: int, max_length: int) -> tuple[float, float]:
    """Shares of values predicted by the most frequent value: of all, and after each first token."""
    settings = GeneratorSettings(min_length, max_length, max_depth=10, max_args=10, seed=1)
    values: dict[int, Counter[int]] = defaultdict(Counter)
    count = 0
    chunks = generate_chunks(settings, num_processes=1)
    while count < 16_000:
        for tokens, value in next(chunks).expressions():
            values[int(tokens[0])][value] += 1
            count += 1
    chunks.close()
    assert {TOKENS[operator] for operator in values} == {"[MIN", "[MAX", "[MED", "[SM"}
    frequent = max(sum(values.values(), Counter()).values())
    return frequent / count, sum(max(seen.values()) for seen in values.values()) / count


def test_listops_accuracies_are_those_of_the_first_token():
    """M22, R2: the outermost operator, by its most frequent value, gives the column of table 1.

    Each printed value must agree with it within the sampling error of the 2,000 test expressions.
    """
    frequent, first = listops_shares(500, 2000)
    row = row_of_page("M22")
    assert first == pytest.approx(0.361, abs=0.01)
    assert frequent == pytest.approx(0.168, abs=0.01)
    assert "36.1 %" in row
    assert "16.8 %" in row
    assert listops_shares(8, 64)[1] == pytest.approx(0.326, abs=0.01)
    assert "32.6 %" in row_of_page("R2")
    assert listops_shares(4, 64)[1] == pytest.approx(0.29, abs=0.01)  # the example of the README

    def column(table: str) -> list[float]:
        rows = read_published(ROOT / FOLDER)
        return [float(r["value"]) for r in rows if (r["table"], r["task"]) == (table, "listops")]

    def agrees(value: float, share: float) -> bool:
        return abs(value / 100 - share) < 1.96 * math.sqrt(share * (1 - share) / 2000)

    quadratic, linear = column("mgk_table1"), column("mgk_table2")
    assert all(agrees(value, first) for value in quadratic)
    assert not any(agrees(value, first) for value in linear)
    assert f"{min(quadratic)} to {max(quadratic)}" in row
    assert f"{min(linear)} to {max(linear)}" in row
    others = [value for value in column("mgk_table5") if not agrees(value, first)]
    assert len(others) == 2
    assert f"{others[0]:.2f} and {others[1]:.2f}" in row


# ---- FiSH ------------------------------------------------------------------------------------


def test_equation_8_is_not_a_draw_from_equation_7():
    """Same mean; variance (Σ p s)² where the admixture has Σ p s² + Σ p (g − mean)²."""
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
    """Σ_k ReLU(p_k g_k) is Σ_k |p_k| ReLU(± g_k): the sign of p_k alone chooses a half of g_k."""
    maps = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    p = torch.tensor([[0.7, -1.2, 0.4]], dtype=torch.float64)
    last = torch.tensor([[1.7]], dtype=torch.float64)
    mixing = MixingValues("relu_sum", (p, last), (None,), None)
    found = local_scores(maps, mixing, None, Block(range(5), range(7)))[:, 0]
    halves = [maps[:, 0].clamp_min(0), (-maps[:, 1]).clamp_min(0), maps[:, 2].clamp_min(0)]
    collapsed = 1.7 * (0.7 * halves[0] + 1.2 * halves[1] + 0.4 * halves[2])
    torch.testing.assert_close(found, collapsed, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_unit_of_the_flops_of_table_5():
    """Printed in 10⁹: 1024 times what we count, 4.49 and 4.26; they count norms and biases too."""
    model = timm.create_model("swin_tiny_patch4_window7_224").eval()
    for method in ("Softmax", "Hard GFiSH"):
        if method == "Hard GFiSH":
            replace_attention(model, hard_gfish, stages=[2, 3], head_ratio=2.0)
        # It is not made there: not every release of timm can.
        on_meta = copy.deepcopy(model).to("meta")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            on_meta(torch.empty(1, 3, 224, 224, device="meta"))
        products = counter.get_total_flops() / 2e9
        flops = printed("fish_table5", "imagenet", method, metric="flops_as_printed_1e9")
        assert products < flops / 1024 < 1.005 * products
        assert f"{flops}" in row_of_page("F10")
        assert f"{flops / 1024:.2f}" in row_of_page("F10")


# ---- what the papers print -------------------------------------------------------------------


def row_of_page(number: str) -> str:
    """The line of docs/findings.md that is numbered so."""
    lines = (ROOT / "docs/findings.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {number} |")]
    return line


def translations_with_and_without_noise() -> list[tuple[float, float]]:
    """BLEU of every printed pair of section 3.2 of FiSH, which is about tables 2 and 4."""
    rows = [row for row in read_published(ROOT / FOLDER) if row["table"] in SECTION_3_2]
    scores = {(row["table"], row["method"], row["heads"]): float(row["value"]) for row in rows}
    return [
        (value, scores[table, f"Hard {method}", heads])
        for (table, method, heads), value in scores.items()
        if (table, f"Hard {method}", heads) in scores
    ]


def test_a_claim_about_a_gpu_is_open_where_its_table_cannot_be_told():
    """M12 and the report of table 7 follow one rule."""
    table = pd.read_csv(ROOT / "reports/mgk_table7/printed.csv")
    memory = table[(table["number"] == "gpu_memory_gb") & (table["baseline"] == "softmax8")]
    assert set(memory["ratio_verdict"]) == {"inconclusive"}
    ratios = " and ".join(f"{value:.3f}" for value in memory["ratio_published"])
    assert f"Memory {ratios} of softmax" in row_of_page("M12")
    assert "| **open**: " in row_of_page("M12")
    assert set(table["ratio_verdict"].dropna()) == {"inconclusive"}  # no GPU has measured it


def test_sentences_of_the_page_follow_from_the_printed_tables():
    """M10, F8, F9: the page's sentences, made again from published.csv; false means smaller."""
    one, two = partial(printed, "mgk_table1"), partial(printed, "mgk_table2", "average")
    pairs = [
        (one("text", "sMGK", 4), one("text", "Softmax", 8)),
        (one("text", "MGK", 4), one("text", "Softmax", 8)),
        (one("listops", "MGK", 2), one("listops", "Softmax", 4)),
        (two("MLK", 2), two("Linear", 12)),
    ]
    (a, c), (b, _), (d, e), (f, g) = pairs
    assert all(half < whole for half, whole in pairs)
    expected = (
        f"text {a} and {b} against {c}, ListOps {d} against {e}; MLK with 2 heads {f} against"
    )
    assert f"{expected} {g} of linear with 12" in row_of_page("M10")

    def small(method, split, table="fish_table1"):
        return printed(table, "wikitext_small", method, "4/8", split=split)

    pairs = translations_with_and_without_noise()
    assert len(pairs) == 4
    assert all(noisy > hard for noisy, hard in pairs)
    told = [f"{noisy:.2f} to {hard:.2f}" for noisy, hard in pairs]
    assert f"{', '.join(told[:-1])} and {told[-1]} BLEU" in row_of_page("F8")
    hard, soft = ([small(m, s) for s in ("valid", "test")] for m in ("Hard FiSH", "FiSH"))
    assert hard < soft
    assert hard[1] < soft[1]
    expected = "Hard FiSH has {:.2f} / {:.2f}, FiSH {:.2f} / {:.2f}".format(*hard, *soft)
    assert expected in row_of_page("F8")
    tables = ("fish_table1", "fish_table11")
    first, second = (small("GFiSH", "valid", table) for table in tables)
    (test,) = {small("GFiSH", "test", table) for table in tables}
    assert first != second
    expected = f"{first:.2f} (table 1) and {second:.2f} (table 11), test {test:.2f} in both"
    assert expected in row_of_page("F9")


@pytest.mark.parametrize(
    ("number", "table", "average", "sentence"),
    [
        ("M11", "mgk_table2", "average", "some are truncated, not rounded ({printed})"),
        ("F11", "fish_table7", "average", "{printed} are printed, the rows give {means}"),
    ],
)
def test_printed_averages_that_are_not_those_of_their_rows(number, table, average, sentence):
    rows = [row for row in read_published(ROOT / FOLDER) if row["table"] == table]
    wrong = []
    for method, heads in dict.fromkeys((row["method"], row["heads"]) for row in rows):
        values = {
            row["task"]: float(row["value"])
            for row in rows
            if (row["method"], row["heads"]) == (method, heads)
        }
        shown = values.pop(average)
        mean = sum(values.values()) / len(values)
        if abs(mean - shown) > 0.005 + 1e-9:
            wrong.append((shown, mean))
    join = ", " if number == "M11" else " and "
    shown_ones, means = (join.join(f"{v:.2f}" for v in side) for side in zip(*wrong, strict=True))
    assert sentence.format(printed=shown_ones, means=means) in row_of_page(number)
    if number == "M11":
        assert all(math.floor(100 * mean) / 100 == shown for shown, mean in wrong)

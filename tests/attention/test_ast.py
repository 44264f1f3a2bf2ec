"""α-entmax attention: against thresholds found in float64, its limits, refusals, and cost."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

pytest.importorskip("entmax")

from lit_probattn.attention import (
    ASTAttention,
    HeadCall,
    HeadLayout,
)
from lit_probattn.attention.ast import (
    AST,
    ASTCore,
    ASTOptions,
    entmax,
)
from lit_probattn.attention.backends import attend
from lit_probattn.attention.engines import blocks
from lit_probattn.attention.masks import make_masks
from lit_probattn.commands.bounded_cache import bound_problem
from lit_probattn.kernels.cpu.selftest import failure
from tests.attention.mgk.oracles import visible_pairs
from tests.attention.test_parity import COMBINATIONS, EMBED, make_layer
from tests.support.helpers import (
    assert_blocks_of_any_size_agree,
    assert_dropout_draws_the_pairs_of,
    assert_equals_the_sums,
)
from tests.support.slow import FEWER, some_of

BACKENDS = ("reference", "blockwise")
OPTIONS = {
    "ast": {"num_heads": 3},
    "ast, grouped": {"num_heads": 6, "num_kv_heads": 3, "value_head_dim": 7},
    "ast, alpha 1.5": {"num_heads": 3, "alpha": 1.5},
    "ast, alpha 1.3, rotary": {"num_heads": 3, "alpha": 1.3, "rotary_dim": 4},
}


def oracle_row(scores: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """α-entmax of one row (n,) of visible scores.

    The threshold is bisected without gradient; one Newton step with gradient then has the implicit
    derivatives with respect to scores and α.
    """
    power = 1.0 / (alpha - 1.0)
    x = scores * (alpha - 1.0)
    with torch.no_grad():
        low, high = x.max() - 1.0, x.max()
        for _ in range(80):
            middle = (low + high) / 2
            if (x - middle).clamp_min(0).pow(power).sum() >= 1.0:
                low = middle
            else:
                high = middle
        support = x > low
        slope = (power * (x[support] - low).pow(power - 1.0)).sum()
    total = (x[support] - low).pow(power).sum()
    threshold = low + (total - 1.0) / slope
    result = torch.zeros_like(scores)
    result[support] = (x[support] - threshold).pow(power)
    return result


def ast_oracle(query, key, value, *, masks, dropout, alpha):
    """Attention by loops over samples, heads and queries; signature of a backend function."""
    batch, heads, rows, size = query.shape
    cols = key.shape[2]
    visible = visible_pairs(masks, batch, heads, rows, cols).bool()
    groups = heads // key.shape[1]
    outs = torch.zeros(batch, heads, rows, value.shape[-1], dtype=query.dtype)
    kept = None
    if dropout is not None:
        kept = dropout.keep(batch, heads, range(rows), range(cols), query.device)
    parts = []
    for b, h, i in itertools.product(range(batch), range(heads), range(rows)):
        seen = visible[b, h, i].nonzero()[:, 0]
        if len(seen) == 0:
            parts.append(outs[b, h, i])
            continue
        scores = (query[b, h, i] * key[b, h // groups, seen]).sum(-1) / size**0.5
        if masks.bias is not None:
            scores = scores + masks.bias.expand(batch, heads, rows, cols)[b, h, i, seen]
        weights = oracle_row(scores, alpha[h])
        if kept is not None:
            weights = torch.where(kept[b, h, i, seen], weights * dropout.scale, 0.0)
        parts.append(weights @ value[b, h // groups, seen])
    return torch.stack(parts).view(batch, heads, rows, -1)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize("share", FEWER)
@pytest.mark.parametrize("name", OPTIONS)
def test_backends_equal_the_sums(name, share):
    layer = make_layer(ASTAttention, OPTIONS[name])
    for case in some_of(COMBINATIONS, share, name):
        assert_equals_the_sums(layer, ast_oracle, BACKENDS, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_draws_the_same_pairs(backend):
    layer = make_layer(ASTAttention, OPTIONS["ast"], dropout=0.3)
    assert_dropout_draws_the_pairs_of(ast_oracle, layer, backend)


def test_blocks_of_any_size_agree():
    assert_blocks_of_any_size_agree(make_layer(ASTAttention, OPTIONS["ast"], dropout=0.2))


def test_single_precision_is_close():
    exact = make_layer(ASTAttention, {"num_heads": 3, "alpha": 1.4})
    single = make_layer(ASTAttention, {"num_heads": 3, "alpha": 1.4}).float()
    single.load_state_dict(exact.state_dict())
    exact.load_state_dict(single.state_dict())
    x = torch.randn(2, 61, EMBED)
    for backend in ("reference", "blockwise"):
        single.backend = backend
        torch.testing.assert_close(single(x), exact(x.double()).float(), rtol=2e-5, atol=2e-6)


def test_a_scale_multiplies_the_products():
    core = ASTCore(HeadLayout(3, 3, 3, 3, 5, 4), options=ASTOptions(alpha=1.5))
    query, key = (torch.randn(2, 3, n, 5, dtype=torch.float64) for n in (7, 11))
    value = torch.randn(2, 3, 11, 4, dtype=torch.float64)
    masks = make_masks(2, 3, 7, 11)
    found = core(HeadCall(query, key, value, masks, scale=0.2))
    expected = core(HeadCall(query * 0.2 * 5**0.5, key, value, masks))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_studies_see_learned_alphas_only():
    layer = ASTAttention(10, 2, head_dim=3)
    torch.nn.init.zeros_(layer.core.pre_alpha)
    (found,) = layer.core.learned().values()
    torch.testing.assert_close(found.values, torch.full((2, 1), 1.5))
    assert ASTAttention(10, 2, head_dim=3, alpha=1.5).core.learned() == {}


# ---- limits ----------------------------------------------------------------------------------


def test_alpha_two_is_the_projection_on_the_simplex():
    """By its sorting formula (Martins and Astudillo, 2016)."""
    scores = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    found = entmax(scores, None, torch.full((3,), 2.0))
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    counts = torch.arange(1, 12)
    size = (1 + counts * ordered > sums).sum(-1, keepdim=True)
    threshold = (sums.gather(-1, size - 1) - 1) / size
    expected = (scores - threshold).clamp_min(0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert (found == 0).double().mean() > 0.5


def test_alpha_one_and_a_half_is_the_exact_algorithm_of_the_package():
    from entmax import entmax15

    scores = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    found = entmax(scores, None, torch.full((3,), 1.5))
    torch.testing.assert_close(found, entmax15(scores, -1), rtol=0, atol=1e-13)


def test_small_alpha_tends_to_the_softmax():
    """The difference halves with α − 1."""
    scores = torch.randn(1, 1, 7, 11, dtype=torch.float64)
    errors = [
        (entmax(scores, None, torch.tensor([1.0 + gap])) - scores.softmax(-1)).abs().max()
        for gap in (0.02, 0.01)
    ]
    assert 1.8 < float(errors[0] / errors[1]) < 2.2


# ---- what every layer promises ---------------------------------------------------------------


def test_blocks_need_less_memory_for_the_backward_pass(monkeypatch):
    """Tensors saved for backward: none of size N x N."""
    query, key = (torch.randn(1, 2, 300, 5, requires_grad=True) for _ in range(2))
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    masks = make_masks(1, 2, 300, 300)
    call = (HeadCall(query, key, key, masks), AST(torch.tensor([1.2, 1.7])))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(*call, "reference")
        assert max(sizes) >= 300 * 300
        sizes.clear()
        monkeypatch.setattr(blocks, "BLOCK_SCORES", {"cpu": 16 * AST.score_maps * 2 * 300})
        attend(*call, "blockwise")
        assert 0 < max(sizes) <= key.numel()


@pytest.mark.parametrize("alpha", [1.0, 2.5, "fixed"])
def test_alpha_out_of_range(alpha):
    with pytest.raises(ValueError, match=r"learned or a number from 1\.01 to 2"):
        ASTAttention(11, 3, head_dim=5, alpha=alpha)


def test_learned_alpha_moves_and_stays_in_range():
    layer = ASTAttention(11, 3, head_dim=5)
    with torch.no_grad():
        layer.core.pre_alpha.copy_(torch.tensor([-50.0, 0.0, 50.0]))
    torch.testing.assert_close(
        layer.core.alphas(layer.core.pre_alpha), torch.tensor([1.01, 1.5, 2.0])
    )
    layer(torch.randn(2, 13, 11)).square().sum().backward()
    assert layer.core.pre_alpha.grad[0] == 0.0
    assert layer.core.pre_alpha.grad[1] != 0.0
    assert layer.core.pre_alpha.grad.isfinite().all()


def test_without_the_package_the_layer_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "entmax", None)
    with pytest.raises(ValueError, match=r"pip install 'lit-probattn\[entmax\]'"):
        ASTAttention(8, 2, head_dim=4)


def test_the_first_training_step_of_a_process_may_draw_dropout_in_a_checkpoint(monkeypatch):
    """The library's self-test saves tensors of its own while a checkpoint counts those saved."""
    monkeypatch.setitem(blocks.BLOCK_SCORES, "cpu", 1 << 10)
    failure.cache_clear()
    layer = ASTAttention(8, 2, backend="blockwise", dropout=0.1)
    layer(torch.randn(2, 37, 8)).sum().backward()
    assert layer.core.pre_alpha.grad is not None


def test_a_subclass_of_tensor_is_bisected_as_often_as_a_tensor():
    class Subclass(torch.Tensor):
        """A tensor as other libraries derive it: operations on it return the same class."""

    scores, alpha = torch.randn(2, 3, 5, 17), torch.tensor([1.3, 1.5, 1.7])
    found = entmax(scores.as_subclass(Subclass), None, alpha)
    assert torch.equal(found.as_subclass(torch.Tensor), entmax(scores, None, alpha))


def test_entmax_needs_all_keys():
    assert "entmax" in (bound_problem(ASTAttention(8, 2).core) or "")

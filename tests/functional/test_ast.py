"""The functional form of ASTAttention."""

from __future__ import annotations

import pytest
import torch

from lit_probattn import functional as LF
from lit_probattn.attention import ASTAttention
from tests.functional.checks import E_V, B, E, H, N, check_form
from tests.support.helpers import double


def alphas(layer):
    return {"alpha": layer.core.alphas(torch.empty(0).double())}


def test_the_form_is_what_the_layer_computes():
    check_form(LF.ast_attention, ASTAttention, {}, alphas, {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("added", [-1e9, -1e4, 1e6])
def test_a_number_that_is_added_to_a_whole_row_changes_nothing(added, backend, dtype):
    """As in a softmax: a mask of -1e9 may hide a query."""
    query, key, value = double(B, H, N, E), double(B, H, N, E), double(B, H, N, E_V)
    bias = torch.zeros(N, N)
    bias[2] = added
    query[:, :, 2] = 0.0  # all scores of the row are equal, in every dtype
    heads = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    found = LF.ast_attention(*heads, bias, backend=backend)
    torch.testing.assert_close(found, LF.ast_attention(*heads, backend=backend))
    found.sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in heads)

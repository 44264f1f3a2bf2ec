"""The functional form of ASTAttention."""

from __future__ import annotations

import torch

from lit_probattn import functional as LF
from lit_probattn.attention import ASTAttention
from tests.functional.checks import check_form


def alphas(layer):
    return {"alpha": layer.core.alphas(torch.empty(0).double())}


def test_the_form_is_what_the_layer_computes():
    check_form(LF.ast_attention, ASTAttention, {}, alphas, {})

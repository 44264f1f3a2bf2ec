"""The functional form of PolynomialAttention."""

from __future__ import annotations

from lit_probattn import functional as LF
from lit_probattn.attention import PolynomialAttention
from tests.functional.checks import check_form


def test_the_form_is_what_the_layer_computes():
    check_form(
        LF.polynomial_attention, PolynomialAttention, {"degree": 4}, lambda layer: {}, {"degree": 4}
    )

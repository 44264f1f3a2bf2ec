"""The papers' closed forms: published values, independent derivations, and algebra."""

from __future__ import annotations

from fractions import Fraction

import pytest
import sympy

from tests.profiling.cost import paper_formulas as f

N, H, E, C, K, G, OUT = sympy.symbols("N H E C K G OUT", positive=True)


def product(rows, inner, cols):
    """Operations of a matrix product by definition: inner multiplications, inner - 1 additions."""
    return rows * cols * inner + rows * cols * (inner - 1)


def zero(expression):
    assert sympy.simplify(sympy.expand(expression)) == 0


def test_published_values():
    """N = 256, 8 heads of 16, width 128, two components."""
    size = (256, 8, 16, 128)
    assert f.softmax_operations(*size) == 66_420_736
    assert f.mgk_operations(*size, 2) == 45_760_512
    assert f.mgk_operations_printed(*size, 2) == 45_744_128
    assert f.smgk_operations(*size, 2) == 41_615_360


def test_published_linear_values():
    """N = 4096, heads of 32, width and output 64."""
    assert f.linear_operations(4096, 8, 32, 64, 64) == 670_785_280
    assert f.mlk_operations(4096, 8, 32, 64, 2, 64) == 403_419_008
    assert f.smlk_operations(4096, 8, 32, 64, 2, 64) == 337_883_008


def softmax_by_parts(heads, out):
    projections = 3 * heads * product(N, C, E)
    scores = heads * product(N, E, N)
    values = heads * product(N, N, E)
    return projections + scores + values + product(N, heads * E, out)


def mgk_by_parts(heads, out, shifted):
    keys = heads * product(N, C, E) * (1 if shifted else K)
    keys += K * N * E * heads if shifted else 0
    projections = 2 * heads * product(N, C, E) + keys
    scores = K * heads * product(N, E, N) + (K - 1) * heads * N**2
    values = heads * product(N, N, E)
    return projections + scores + values + product(N, heads * E, out)


def test_softmax_from_its_products():
    zero(softmax_by_parts(H, H * E) - f.softmax_operations(N, H, E, C))
    zero(softmax_by_parts(H, OUT) - f.softmax_operations(N, H, E, C, OUT))


@pytest.mark.parametrize("shifted", [False, True])
def test_mixture_from_its_products(shifted):
    formula = f.smgk_operations if shifted else f.mgk_operations
    zero(mgk_by_parts(H / K, H * E, shifted) - formula(N, H, E, C, K))
    zero(mgk_by_parts(H / K, OUT, shifted) - formula(N, H, E, C, K, OUT))


def test_corrected_constant_is_not_the_printed_one():
    corrected, printed = (g(N, H, E, C, K) for g in (f.mgk_operations, f.mgk_operations_printed))
    zero(corrected - printed - N * H * E * (K - 1) / K)
    zero(printed.subs(K, 1) - corrected.subs(K, 1))
    two = printed.subs(K, 2)
    zero(two - (N**2 * H * (3 * E - sympy.Rational(1, 2)) + N * H * E * (4 * C + H * E - 4)))


def test_savings_are_differences():
    softmax = f.softmax_operations(N, H, E, C)
    zero(softmax - f.mgk_operations(N, H, E, C, K) - f.mgk_saving(N, H, E, C, K))
    printed = softmax - f.mgk_operations_printed(N, H, E, C, K).subs(K, 2)
    zero(printed - f.mgk_saving_printed(N, H, E, C))
    shifted = f.mgk_operations(N, H, E, C, K) - f.smgk_operations(N, H, E, C, K)
    zero(shifted - N * H * E * (2 * (K - 1) * C - 2 * K + 1) / K)
    parameters = f.softmax_parameters(H, E, C)
    zero(parameters - f.mgk_parameters(H, E, C, K) - f.mgk_parameter_saving(H, E, C, K))
    zero(parameters - f.smgk_parameters(H, E, C, K) - f.smgk_parameter_saving(H, E, C, K))


def test_limits_of_the_ratio():
    ratio = f.mgk_operations(N, H, E, C, K) / f.softmax_operations(N, H, E, C)
    zero(sympy.limit(ratio, N, sympy.oo) - (2 * (K + 1) * E - 1) / (K * (4 * E - 1)))
    zero(sympy.limit(ratio, C, sympy.oo) - (K + 2) / (3 * K))


def linear_by_parts(heads, keys, out):
    core = product(E, N, E) + (N - 1) * E + product(N, E, E) + product(N, E, 1) + N * E
    return heads * (2 * product(N, C, E) + keys + core) + product(N, heads * E, out)


def test_linear_forms_from_their_products():
    mix = (2 * K - 1) * N * E
    one, several = product(N, C, E), K * product(N, C, E) + mix
    zero(linear_by_parts(H, one, H * E) - f.linear_operations(N, H, E, C))
    zero(linear_by_parts(H / K, several, H * E) - f.mlk_operations(N, H, E, C, K))
    shifted = one + K * N * E + mix
    zero(linear_by_parts(H / K, shifted, H * E) - f.smlk_operations(N, H, E, C, K))


def test_fish_from_its_products():
    maps = G * product(N, E, N) + H * N**2 * (2 * G - 1) + G * N**2
    scores = maps + 2 * G * product(N, C, E)
    zero(scores - f.fish_score_operations(N, H, G, E, C))
    saving = f.softmax_score_operations(N, H, E, C) - f.fish_score_operations(N, H, G, E, C)
    printed = (2 * (H - G) * E - 2 * G * H) * N**2 + 2 * (H - G) * E * (2 * C - 1) * N
    zero(saving - printed)
    layer = scores + H * product(N, C, E) + H * product(N, N, E) + product(N, H * E, C)
    zero(layer - f.fish_operations(N, H, G, E, C))


def brute_force(n, h, e, c, k):
    """Count the operations of MGK by looping over outputs."""
    count = 0
    outputs = [(n * e, c)] * (h * (k + 2)) + [(n * n, e)] * (h * k) + [(n * e, n)] * h
    for number, inner in [*outputs, (n * h * k * e, h * e)]:
        for _ in range(number):
            count += inner + (inner - 1)
    return count + (k - 1) * n * n * h


@pytest.mark.parametrize(
    ("n", "h", "e", "c", "k"), [(3, 1, 2, 5, 2), (4, 2, 3, 6, 3), (2, 1, 1, 1, 1)]
)
def test_counting_every_operation(n, h, e, c, k):
    assert f.mgk_operations(n, h * k, e, c, k) == brute_force(n, h, e, c, k)


def test_heads_that_do_not_divide_stay_exact():
    assert f.mgk_operations(2, 3, 4, 5, 2) == Fraction(
        f.mgk_operations(2, 6, 4, 5, 2)
    ) / 2 - Fraction(2 * 3 * 4 * (2 * 6 * 4 - 2 * 3 * 4), 2)

"""Lengths beyond one step of the loops over masks and over parts of a spread: 1,060 keys."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.kernels.dense import operators
from lit_probattn.kernels.fish.operators import fish_attention
from lit_probattn.kernels.runtime import Launch, draw_tensor, forced
from lit_probattn.randomness import STREAM_NOISE, RandomKey, normal_noise
from tests.kernels.test_dense import attend
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, KEYS, E = 16, 1060, 7


def draw(*shape):
    return torch.randn(*shape, device=DEVICE).requires_grad_()


def late_mask():
    """Real keys on both sides of the 1,024th; of the second sample beyond it only.

    All are near it, so that few tiles are looked at.
    """
    mask = torch.zeros(2, KEYS, dtype=torch.bool, device=DEVICE)
    mask[0, 1016:1040:7], mask[1, 1030:1057] = True, True
    return mask


def assert_gradients_agree(outputs, leaves, size=100.0):
    """Weights of scores of a size have twice its float32 rounding as their relative error."""
    bound = 2 * size * torch.finfo(torch.float32).eps
    cotangent = torch.randn(outputs[0].shape, device=DEVICE)
    found, exact = (torch.autograd.grad(x, leaves, cotangent.to(x.dtype)) for x in outputs)
    torch.testing.assert_close(outputs[0].double(), outputs[1], atol=bound, rtol=bound)
    for ours, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, truth, atol=bound, rtol=bound)


@pytest.mark.usefixtures("nan_filled_empties")
def test_softmax_sees_real_keys_beyond_the_1024th():
    query, key, value = leaves = draw(2, 1, ROWS, E), draw(2, 1, KEYS, E), draw(2, 1, KEYS, E)
    mask = late_mask()
    with forced(Launch(16, 128)):
        found = attend(query, key[:, :, None], value, key_mask=mask, scale=0.3)
    q, k, v = (x.double() for x in leaves)
    scores = (0.3 * q @ k.mT).masked_fill(~mask[:, None, None], float("-inf"))
    assert_gradients_agree((found, scores.softmax(-1) @ v), leaves)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize("of", ["output", pytest.param("gradients", marks=pytest.mark.slow)])
def test_fish_sees_real_keys_beyond_the_1024th(of):
    """All passes find the real keys by one function."""
    leaves = draw(2, 1, ROWS, E), draw(2, 1, KEYS, E), draw(2, 1, KEYS, E), draw(1, 1)
    query, key, value, first = leaves
    mask = late_mask()
    with forced(Launch(16, 128)):
        found = fish_attention(query * 0.3, key, value, first=first, key_mask=mask)
    q, k, v, p = (x.double() for x in leaves)
    scores = torch.einsum("hg,bgij->bhij", p, 0.3 * q @ k.mT)
    exact = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1) @ v
    if of == "output":
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    else:
        assert_gradients_agree((found, exact), leaves)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("rows", "keys", "part"),
    [
        pytest.param(ROWS, KEYS, 16, id="one part", marks=pytest.mark.slow),
        pytest.param(66, 66, 1, id="66 parts"),
    ],
)
def test_components_far_apart_are_found_in_every_part(rows, keys, part, monkeypatch):
    """Row and key terms of opposite sign, at the last points only: F would underflow.

    64 parts are read at once; the last points are beyond them.
    """
    monkeypatch.setattr(operators, "_ROWS", part)
    query, key, value = leaves = draw(1, 1, rows, E), draw(1, 1, keys, E), draw(1, 1, keys, E)
    far = 150.0
    row, col = torch.zeros(1, 1, 2, rows, device=DEVICE), torch.zeros(1, 1, 2, keys, device=DEVICE)
    row[..., 0, -2:], col[..., 1, -2:] = far, far
    with forced(Launch(128, 128)):
        found = attend(query, key[:, :, None], value, row_bias=row, key_bias=col, scale=1.0)
    q, k, v = (x.double() for x in leaves)
    pairs = (q @ k.mT)[:, :, None] + row.double()[..., None] + col.double()[..., None, :]
    exact = pairs.logsumexp(2).softmax(-1) @ v
    assert_gradients_agree((found[:, :, -ROWS:], exact[:, :, -ROWS:]), leaves, far)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize("first_row", mostly_slow([0, 19], [19]))
def test_noise_of_a_continued_sequence_is_that_of_its_positions(first_row):
    leaves = draw(2, 2, ROWS, E), draw(2, 2, 43, E), draw(2, 3, 43, E), draw(3, 2), draw(2)
    query, key, value, first, scale = leaves
    rng = RandomKey(3, 5)
    words = draw_tensor(rng.philox_key(STREAM_NOISE), rng.samples(2, DEVICE))
    options = {"noise_scale": scale, "noise_draw": words, "first_row": first_row}
    found = fish_attention(query * 0.3, key, value, first=first, **options)
    rows = range(first_row, first_row + ROWS)
    noise = normal_noise(rng, 2, 2, rows, range(43), DEVICE, torch.float64)
    q, k, v, p, sigma = (x.double() for x in leaves)
    scores = 0.3 * q @ k.mT + sigma[:, None, None] * noise
    weights = torch.einsum("hg,bgij->bhij", p, scores).softmax(-1)
    assert_gradients_agree((found, weights @ v), leaves)

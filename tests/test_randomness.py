"""The counter-based generator: published vectors, keys, blocks, the distribution of its noise."""

from __future__ import annotations

import math
import re

import pytest
import torch

from lit_probattn import randomness
from lit_probattn.randomness import (
    STREAM_DROPOUT,
    STREAM_NOISE,
    AttentionDropout,
    RandomKey,
    normal_noise,
    philox4x32,
)
from tests.support.paths import ROOT

CPU = torch.device("cpu")
ONES = 0xFFFFFFFF


def words(counter, key):
    counters = tuple(torch.tensor(c) for c in counter)
    return [int(word) for word in philox4x32(counters, key)]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ((ONES,) * 4, (ONES, ONES), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_test_vectors(counter, key, expected):
    assert words(counter, key) == expected


def python_philox(counter, key):
    """Philox4x32-10 in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & ONES, (a >> 32) ^ c[3] ^ k[1], a & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


def test_philox_equals_python_integers():
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        drawn = torch.randint(0, 2**32, (6,), generator=generator).tolist()
        assert words(drawn[:4], tuple(drawn[4:])) == python_philox(drawn[:4], drawn[4:])


def test_noise_is_box_muller_of_named_counters():
    key = RandomKey(5, step=7, sample_ids=torch.tensor([23, 2**40 + 9])).fold(1)
    noise = normal_noise(key, 2, 7, range(3, 8), range(11, 14), CPU, torch.float64)
    philox_key = key.philox_key(STREAM_NOISE)
    for b, sample in enumerate((23, (2**40 + 9) & ONES)):
        for h in range(7):
            for i in range(3, 8):
                for j in range(11, 14):
                    x = python_philox((i, j, h // 4, sample), philox_key)[2 * (h % 4 // 2) :]
                    radius = math.sqrt(-2 * math.log((x[0] + 1) / 2**32))
                    turn = (math.cos, math.sin)[h % 2]
                    expected = radius * turn(2 * math.pi * x[1] / 2**32)
                    assert abs(noise[b, h, i - 3, j - 11].item() - expected) < 1e-12


def test_blocks_and_chunks_draw_the_same_noise(monkeypatch):
    key = RandomKey(1)
    full = normal_noise(key, 2, 5, range(17), range(13), CPU)
    monkeypatch.setattr("lit_probattn.randomness._CHUNK_COUNTERS", 29)
    assert torch.equal(normal_noise(key, 2, 5, range(17), range(13), CPU), full)
    part = normal_noise(key, 2, 3, range(4, 11), range(2, 9), CPU)
    assert torch.equal(part, full[:, :3, 4:11, 2:9])


def test_samples_name_their_noise():
    full = normal_noise(RandomKey(1, 2, torch.tensor([5, 9, 31])), 3, 2, range(7), range(5), CPU)
    other = normal_noise(RandomKey(1, 2, torch.tensor([31, 4])), 2, 2, range(7), range(5), CPU)
    assert torch.equal(full[2], other[0])
    assert (full[0] - full[1]).abs().max() > 0.1


def test_every_word_of_the_key_matters():
    keys = [
        RandomKey(1, 2),
        RandomKey(2, 2),
        RandomKey(1, 3),
        RandomKey(1, 2).fold(0),
        RandomKey(1, 2).fold(1),
        RandomKey(1, 2).fold(1).fold(0),
        RandomKey(1, 2).fold(0).fold(1),
    ]
    drawn = {key.philox_key(STREAM_NOISE) for key in keys}
    drawn |= {key.philox_key(STREAM_DROPOUT) for key in keys}
    assert len(drawn) == 2 * len(keys)


def test_every_purpose_has_a_number_of_its_own():
    numbers = {name: n for name, n in vars(randomness).items() if name.startswith("STREAM_")}
    assert sorted(numbers.values()) == list(range(1, len(numbers) + 1))
    assert numbers["STREAM_MASKING"] == 4  # trainings were run with it
    keys = {RandomKey(0).philox_key(number) for number in numbers.values()}
    assert len(keys) == len(numbers)


def test_numbers_of_purposes_stand_in_one_place():
    """No other file gives a number to a purpose, or names a purpose by a bare number."""
    elsewhere = re.compile(r"^\s*\w*STREAM_\w+.*[^=]=[^=]|philox_key\(\s*\d", re.MULTILINE)
    paths = [
        path.relative_to(ROOT)
        for package in ("lit_probattn", "datamodules", "profiling")
        for path in sorted((ROOT / package).rglob("*.py"))
        if elsewhere.search(path.read_text(encoding="utf-8"))
    ]
    assert [str(path) for path in paths] == ["lit_probattn/randomness.py"]


def test_noise_is_standard_normal_and_uncorrelated():
    noise = normal_noise(RandomKey(11), 1, 5, range(512), range(512), CPU, torch.float64)[0]
    flat = noise.flatten(1)
    count = flat.shape[1]
    # Bounds: five standard errors of each statistic.
    assert flat.mean(1).abs().max() < 5 / math.sqrt(count)
    assert (flat.var(1) - 1).abs().max() < 5 * math.sqrt(2 / count)
    assert ((flat**4).mean(1) - 3).abs().max() < 5 * math.sqrt(96 / count)
    inside = (flat.abs() < 1).double().mean(1)
    p = math.erf(1 / math.sqrt(2))
    assert (inside - p).abs().max() < 5 * math.sqrt(p * (1 - p) / count)
    correlation = torch.corrcoef(flat).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(count)
    squares = torch.corrcoef(flat.square()).fill_diagonal_(0)
    assert squares.abs().max() < 5 / math.sqrt(count)
    for shifted in (noise.roll(1, -1), noise.roll(1, -2), noise.mT):
        both = torch.stack([noise[0].flatten(), shifted[0].flatten()])
        assert torch.corrcoef(both)[0, 1].abs() < 8 / math.sqrt(count)


def test_dropout_keeps_the_promised_share():
    dropout = AttentionDropout(0.3, RandomKey(3))
    keep = dropout.keep(1, 3, range(256), range(257), CPU)
    share = keep.double().mean().item()
    assert abs(share - 1 / dropout.scale) < 5 * math.sqrt(0.21 / keep.numel())
    part = dropout.keep(1, 3, range(5, 31), range(13, 99), CPU)
    assert torch.equal(part, keep[:, :, 5:31, 13:99])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 1 / 3, 0.99999])
def test_dropout_scale_is_the_inverse_of_the_share_really_kept(p):
    """A lane has 16 bits: the share is the nearest multiple of 2⁻¹⁶, and the mean stays exact."""
    dropout = AttentionDropout(p, RandomKey(3))
    kept = sum(lane >= dropout.threshold for lane in range(-32768, 32768))
    assert kept == 65536 - round(p * 65536)
    assert kept * dropout.scale == pytest.approx(65536, rel=1e-15)


def test_wrong_number_of_samples_is_named():
    with pytest.raises(ValueError, match=r"shape \(3,\), but the batch has 2"):
        RandomKey(0, sample_ids=torch.arange(3)).samples(2, CPU)

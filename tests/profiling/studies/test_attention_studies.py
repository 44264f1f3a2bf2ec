"""Talking heads beside FiSH, and decoding from caches: what is compared, and what is counted."""

from __future__ import annotations

import torch

from profiling.studies import cached_decoding, talking_heads


def test_both_forms_of_talking_heads_compute_the_same():
    made = talking_heads.layers(24, 3)
    x = torch.randn(2, 13, 24)
    fish, plain = made[talking_heads.FUSED], made[talking_heads.PLAIN]
    torch.testing.assert_close(fish(x), plain(x), rtol=0, atol=1e-5)
    assert not torch.allclose(plain.before, torch.eye(3))


def test_talking_heads_report(capsys):
    words = ["--embed_dim", "16", "--num_heads", "2", "--lengths", "7"]
    words += ["--repeats", "3", "--threads", "1"]
    assert talking_heads.main(words) == 0
    shown = capsys.readouterr().out
    assert "| 7 | plain form | reference |" in shown
    assert "| 7 | FiSH | " in shown


def test_a_cache_is_counted_by_the_numbers_of_a_token(capsys):
    """Per token: softmax 2HE, MGK (K + 1) HE / 2, sMGK HE, FiSH GE + HE; MLK's is a state."""
    words = "--embed_dim 16 --num_heads 2 --lengths 5 11 --tokens 2 --repeats 3 --threads 1"
    assert cached_decoding.main(words.split()) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line[:2] == "| "]
    found = {(row[1], row[0].strip("| ")): row for row in rows}
    names, size = rows[0], 8
    at = names.index("cache_bytes")
    for length in (5, 11):
        numbers = {
            name: int(found[name, str(length)][at].replace(",", "")) / 4 / length
            for name in ("softmax", "MGK", "sMGK", "FiSH")
        }
        assert numbers["softmax"] == 2 * 2 * size
        assert numbers["FiSH"] == (1 + 2) * size
        assert numbers["sMGK"] >= 2 * size  # and what the scores add per key
        assert numbers["MGK"] >= 3 * size
    assert found["MLK", "5"][at] == found["MLK", "11"][at]

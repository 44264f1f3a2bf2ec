"""Talking heads beside FiSH, decoding from caches, packed documents: what is compared."""

from __future__ import annotations

import torch

from examples.studies import cached_decoding, dropout, packed_documents, talking_heads
from lit_probattn.randomness import Dropout
from tests.support.helpers import error_of


def test_both_forms_of_talking_heads_compute_the_same():
    made = talking_heads.layers(24, 3)
    x = torch.randn(2, 13, 24)
    fish, plain = made[talking_heads.FUSED], made[talking_heads.STORED]
    torch.testing.assert_close(fish(x), plain(x), rtol=0, atol=1e-5)
    assert not torch.allclose(plain.before, torch.eye(3))


def test_talking_heads_report(capsys):
    words = ["--embed_dim", "16", "--num_heads", "2", "--lengths", "7"]
    words += ["--repeats", "3", "--threads", "1"]
    assert talking_heads.main(words) == 0
    shown = capsys.readouterr().out
    assert "| 7 | stored maps | reference |" in shown
    assert "| 7 | FiSH | " in shown


def test_packed_documents_report(capsys):
    """Both forms compute the same, and padding is that of the drawn lengths."""
    words = ["--cases", "3x10", "1x8", "--variants", "softmax", "fish", "--repeats", "3"]
    sizes = ["--embed_dim", "8", "--head_dim", "4", "--num_layers", "1", "--mlp_dim", "8"]
    assert packed_documents.main([*words, *sizes, "--threads", "1", "--shortest", "0.5"]) == 0
    shown = capsys.readouterr().out
    torch.manual_seed(0)
    lengths = packed_documents.lengths_of("3x10", 0.5)
    assert lengths[0] == lengths.max() == 10
    assert lengths.min() >= 5
    padding = f"{100 * (1 - float(lengths.sum()) / 30):.0f} %"
    assert f"| 3x10 | {padding} | softmax | packed |" in shown
    assert "| 1x8 | 0 % | fish | padded |" in shown
    difference = float(shown.partition("differ by at most ")[2].split()[0])
    assert difference < 1e-5


def test_cases_of_packed_documents_are_checked():
    for case in ("16", "x3", "0x5", "axb"):
        line = error_of(["--cases", case, "--repeats", "3"], packed_documents.main, 1)
        assert "--cases: expected DOCUMENTSxLONGEST" in line


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


def test_dropout_report(capsys):
    words = ["--lengths", "5", "--batch", "2", "--repeats", "3", "--threads", "1"]
    assert dropout.main(words) == 0
    rows = [
        line.split("|")[2:4] for line in capsys.readouterr().out.splitlines() if "| 5 |" in line
    ]
    expected = {("dropout", dropout.PYTORCH), ("dropout", dropout.OWN)}
    expected |= {("block", dropout.PYTORCH), ("block", dropout.OWN)}
    assert {(module.strip(), form.strip()) for module, form in rows} == expected


def test_only_one_form_of_dropout_is_the_packages():
    kinds = [type(part) for part in dropout.block().modules() if isinstance(part, torch.nn.Dropout)]
    other = dropout.with_pytorchs(dropout.block()).modules()
    others = [type(part) for part in other if isinstance(part, torch.nn.Dropout)]
    assert set(kinds) == {Dropout}
    assert others == [torch.nn.Dropout] * len(kinds)

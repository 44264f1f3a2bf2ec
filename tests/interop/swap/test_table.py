"""What is refused of the hosts of the table, before anything is touched; and a few that are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lit_probattn
from tests.interop.swap.table import (
    BEGIN,
    END,
    HOSTS,
    PAGE,
    gradient,
    host_of,
    identity,
    read,
    written,
)

pytest.importorskip("transformers", reason="transformers is not installed")

REFUSED = {
    "Gemma 2": "soft cap",
    "GPT-OSS": "attention sinks",
    "BLOOM": r"its softmax is written out \(bloom/modeling_bloom.py:\d+\): written_out=True",
    "DeBERTa-v2": r"written out \(deberta_v2/modeling_deberta_v2.py:\d+\)",
    "timm CaiT": r"its softmax is written out \(models/cait.py:\d+\)",
    "timm XCiT": "between channels",
    "by hand, heads as batch": "heads into the batch",
    "by hand, own checkpoint": "inside a checkpoint",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_leave_the_model_as_it_was(name):
    host = host_of(name)
    model, config = host.model, getattr(host.model, "config", None)
    before = [(n, type(m), getattr(m, "fused_attn", None)) for n, m in model.named_modules()]
    names, implementation = list(model.state_dict()), getattr(config, "_attn_implementation", None)
    with pytest.raises(ValueError, match=REFUSED[name]):
        lit_probattn.swap(model, "smgk", example=host.example)
    after = [(n, type(m), getattr(m, "fused_attn", None)) for n, m in model.named_modules()]
    assert after == before
    assert list(model.state_dict()) == names
    assert getattr(config, "_attn_implementation", None) == implementation


@pytest.mark.parametrize("name", ["Llama", "ALBERT", "BLOOM", "by hand, two calls"])
def test_the_softmax_computes_what_the_host_did(name):
    assert name in HOSTS
    host = host_of(name)
    assert identity(host) < 1e-6
    assert gradient(host) < 1e-5


def test_padding_masks_of_multi_head_attention_compile():
    """PyTorch's own check of the mask cannot be traced, and a wrong mask is still an error."""
    x = torch.randn(2, 5, 8)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    model, _ = lit_probattn.swap(layer, "softmax", example=(x, x, x))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    hidden = torch.arange(5)[None] >= torch.tensor([[5], [3]])
    expected = model(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    found = compiled(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(found, expected)
    with pytest.raises(AssertionError, match="key_padding_mask"):
        model(x, x, x, key_padding_mask=hidden[:, :4])


def test_masks_that_nobody_makes_are_an_error():
    """Without the mask function transformers hands over no mask, and says nothing."""
    from transformers import AttentionMaskInterface

    host = host_of("Llama")
    model, _ = lit_probattn.swap(host.model, "softmax", example=host.example)
    lost = AttentionMaskInterface._global_mapping.pop("lit_probattn")
    try:
        with pytest.raises(RuntimeError, match="causality and padding would be lost"):
            model(torch.ones(1, 3, dtype=torch.int64))
    finally:
        AttentionMaskInterface.register("lit_probattn", lost)


def test_the_table_that_was_read_is_written_again():
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    rows, versions = read(table)
    assert len(rows) > 50
    assert written(rows, versions) == table

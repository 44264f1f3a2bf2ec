"""Output layers over large vocabularies: definition, chunks, memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lit_probattn.models import adaptive_softmax
from lit_probattn.models.adaptive_softmax import AdaptiveSoftmax, FullSoftmax, chunked_cross_entropy

VOCAB = 47


def adaptive(**options) -> AdaptiveSoftmax:
    layer = AdaptiveSoftmax(vocab_size=VOCAB, embed_dim=6, cutoffs=[7, 20, 29, 60], **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_no_cluster_is_empty():
    layer = AdaptiveSoftmax(vocab_size=VOCAB, embed_dim=6, cutoffs=[7, VOCAB])
    assert layer.bounds == [0, 7, VOCAB]
    losses = layer(torch.zeros(VOCAB, 6), torch.arange(VOCAB), torch.randn(VOCAB, 6))
    assert losses.neg().exp().sum().item() == pytest.approx(1.0)


def test_adaptive_softmax_equals_its_definition():
    layer, table, hidden = adaptive(), torch.randn(VOCAB, 6), torch.randn(VOCAB, 6)
    assert layer.bounds == [0, 7, 20, 29, VOCAB], "a cutoff beyond the vocabulary drops out"
    found = layer(hidden, torch.arange(VOCAB), table)
    table64 = table.double()
    for word, (h, loss) in enumerate(zip(hidden.double(), found, strict=True)):
        logits = [table64[v] @ h + layer.bias[v].double() for v in range(VOCAB)]
        clusters = [layer.cluster_weight[c].double() @ h + layer.cluster_bias[c] for c in range(3)]
        head = torch.stack([*logits[:7], *clusters]).softmax(0)
        if word < 7:
            p = head[word]
        else:
            number, (low, high) = next(
                (i, b) for i, b in enumerate([(7, 20), (20, 29), (29, 47)], 1) if word < b[1]
            )
            p = head[-number] * torch.stack(logits[low:high]).softmax(0)[word - low]
        assert loss.item() == pytest.approx(-math.log(p.item()), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["adaptive", "full"])
def test_log_probabilities_sum_to_one_and_hold_the_losses(kind, bias):
    layer = adaptive(bias=bias) if kind == "adaptive" else FullSoftmax(vocab_size=VOCAB, bias=bias)
    table, hidden, target = torch.randn(VOCAB, 6), torch.randn(20, 6), torch.randint(VOCAB, (20,))
    log_probs = layer.log_probs(hidden, table)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(20))
    picked = -log_probs.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(layer(hidden, target, table), picked)


def test_chunks_change_neither_losses_nor_gradients(monkeypatch):
    sizes = []
    plain = F.linear
    monkeypatch.setattr(
        adaptive_softmax.F,
        "linear",
        lambda *a: sizes.append(plain(*a).numel()) or plain(*a),
    )
    inputs = [torch.randn(23, 6), torch.randn(VOCAB, 6), torch.randn(VOCAB)]
    target, weight = torch.randint(VOCAB, (23,)), torch.randn(23)
    results = []
    for limit in (10**9, 5 * VOCAB, 1):
        leaves = [x.clone().requires_grad_() for x in inputs]
        sizes.clear()
        losses = chunked_cross_entropy(*leaves, target, limit)
        (losses * weight).sum().backward()
        assert max(sizes) <= max(limit, VOCAB)
        results.append([losses.detach(), *(leaf.grad for leaf in leaves)])
    reference = F.cross_entropy(plain(*inputs), target, reduction="none")
    torch.testing.assert_close(results[0][0], reference)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_chunks_keep_no_logits_for_backward():
    saved = []
    hidden, table = torch.randn(40, 6, requires_grad=True), torch.randn(VOCAB, 6)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):
        chunked_cross_entropy(hidden, table, None, torch.zeros(40, dtype=torch.long), 4 * VOCAB)
    assert VOCAB * 4 not in saved
    assert sum(saved) < 40 * VOCAB / 4


def test_cutoffs_must_increase():
    with pytest.raises(ValueError, match=r"must be positive and increase, received \[9, 9\]"):
        AdaptiveSoftmax(vocab_size=VOCAB, embed_dim=6, cutoffs=[9, 9])


def test_losses_of_parts_are_those_of_the_whole_with_and_without_gradients():
    layer = FullSoftmax(vocab_size=VOCAB, max_logits=3 * VOCAB)  # three of twenty rows at a time
    table, hidden, target = torch.randn(VOCAB, 6), torch.randn(20, 6), torch.randint(VOCAB, (20,))
    expected = F.cross_entropy(hidden @ table.T + layer.bias, target, reduction="none")
    torch.testing.assert_close(layer(hidden, target, table), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(hidden, target, table), expected.detach())

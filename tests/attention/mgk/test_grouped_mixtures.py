"""Grouped queries with mixtures of keys: the same as repeating the shared heads."""

from __future__ import annotations

import torch

from lit_probattn.attention import MGKAttention, SoftmaxAttention

B, N, C, E = 2, 13, 11, 6


def test_grouped_mixtures_equal_repeated_heads():
    """extensions.md 7: sharing keys, priors and variances equals repeating them over the group."""
    options = {"num_components": 2, "variance": "paper_main", "learn_variance": True}
    grouped = MGKAttention(C, 6, head_dim=E, num_kv_heads=3, **options).double().eval()
    with torch.no_grad():
        grouped.core.prior.value += 0.3 * torch.rand_like(grouped.core.prior.value)
        grouped.core.variance.log_variance += 0.3 * torch.rand(3, 2)
    full = MGKAttention(C, 6, head_dim=E, **options).double().eval()
    with torch.no_grad():
        full.query_proj.load_state_dict(grouped.query_proj.state_dict())
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
        for name, target in full.named_parameters():
            if name.startswith(("key_proj", "value_proj")):
                source = dict(grouped.named_parameters())[name].unflatten(0, (3, -1))
                target.copy_(source.repeat_interleave(2, 0).flatten(0, 1))
        full.core.prior.value.copy_(grouped.core.prior.value.repeat_interleave(2, 0))
        full.core.variance.log_variance.copy_(
            grouped.core.variance.log_variance.repeat_interleave(2, 0)
        )
    x = torch.randn(B, N, C, dtype=torch.float64)
    out = []
    for layer in (grouped, full):
        layer.zero_grad()
        out.append(layer(x, is_causal=True))
        out[-1].square().sum().backward()
    torch.testing.assert_close(*out, atol=1e-13, rtol=0)
    for name in ("core.prior.value", "core.variance.log_variance"):
        mine, theirs = (dict(layer.named_parameters())[name].grad for layer in (grouped, full))
        torch.testing.assert_close(mine, theirs.unflatten(0, (3, 2)).sum(1), atol=1e-12, rtol=0)


def test_one_component_without_norms_is_grouped_query_attention():
    mixture = (
        MGKAttention(C, 6, head_dim=E, num_kv_heads=2, num_components=1, score="dot")
        .double()
        .eval()
    )
    plain = SoftmaxAttention(C, 6, head_dim=E, num_kv_heads=2).double().eval()
    plain.load_state_dict({k: v for k, v in mixture.state_dict().items() if "prior" not in k})
    x = torch.randn(B, N, C, dtype=torch.float64)
    torch.testing.assert_close(mixture(x), plain(x), atol=1e-13, rtol=0)

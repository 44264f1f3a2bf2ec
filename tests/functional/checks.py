"""What every functional form is held to."""

from __future__ import annotations

import torch

from lit_probattn.attention.backends import BACKENDS
from lit_probattn.randomness import RandomKey
from tests.support.helpers import double

B, H, N, C, E, E_V = 2, 6, 11, 17, 5, 3
KEY = RandomKey(3, step=5)


def check_form(function, cls, options, given_of, own):
    """Compare a form with the reference of its layer: supported backends, dropout, masks.

    Args:
        function: the form.
        cls: the layer.
        options: of the layer.
        given_of: layer -> what the form is given of it.
        own: options of the form.
    """
    layer = cls(C, H, head_dim=E, value_head_dim=E_V, **options).double()
    grouped = {"enable_gqa": True} if "num_kv_heads" in options else {}
    hidden = torch.ones(B, 1, 1, N, dtype=torch.bool)
    hidden[1, ..., 8:] = False
    x = double(B, N, C)
    for causal, dropout in ((True, 0.0), (False, 0.4)):
        layer.dropout = dropout
        call = layer.call(x, key_mask=hidden[:, 0, 0], is_causal=causal, rng=KEY)
        heads = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
        given = {k: v for k, v in given_of(layer).items() if v is not None}
        words = {"attn_mask": hidden, "is_causal": causal, "dropout_p": dropout, "rng": KEY}
        layer.core.backend = "reference"
        layer.out_proj = torch.nn.Identity()
        expected = layer(x, key_mask=hidden[:, 0, 0], is_causal=causal, rng=KEY)
        expected = expected.unflatten(2, (H, E_V)).transpose(1, 2)
        supported = []
        for backend in BACKENDS:
            try:
                out = function(*heads, **given, **words, **grouped, **own, backend=backend)
            except NotImplementedError:
                continue
            supported.append(backend)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
            grads = torch.autograd.grad(out.square().sum(), heads)
            assert all(bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads)
        assert {"auto", "reference"} <= set(supported)
        assert "triton" not in supported

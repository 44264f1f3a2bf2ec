"""Dropout and noise are off in evaluation: two passes are identical, for every variant (R16)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lit_probattn import attention
from tests.support.slow import mostly_slow
from tests.tasks.tiny import data, task, trainer

VARIANTS = {
    "softmax": ("SoftmaxAttention", {}),
    "mgk": ("MGKAttention", {"e_step": "soft"}),
    "smgk": ("MGKAttention", {"shifted_keys": True}),
    "mlk": ("MLKAttention", {}),
    "linear": ("LinearAttention", {}),
    "favor": ("LinearAttention", {"feature_map": "favor"}),
    "fish": ("FiSHAttention", {"num_global_heads": 1, "noise_scale": 0.5}),
    "gfish": ("FiSHAttention", {"num_global_heads": 1, "mixer": "mlp", "noise_scale": 0.5}),
    "linear fish": ("LinearFiSHAttention", {"num_global_heads": 1}),
}
DROPS = {"mlk", "linear", "favor", "linear fish"}  # these have no attention weights to drop


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, ["mgk", "favor", "gfish", "linear fish"]))
def test_two_passes_are_identical(variant):
    name, options = VARIANTS[variant]
    dropout = {} if variant in DROPS else {"dropout": 0.4}
    layer = partial(getattr(attention, name), num_heads=2, **dropout, **options)
    module, loader, run = task(layer, dropout=0.4), data(), trainer(2)
    run.fit(module, loader)
    passes = [run.validate(module, loader, verbose=False)[0] for _ in range(2)]
    assert passes[0] == passes[1]
    batch = next(iter(loader.val_dataloader()))
    module.eval()
    with torch.no_grad():
        quiet = [module(batch) for _ in range(2)]
        module.train()
        noisy = [module(batch) for _ in range(2)]
    assert torch.equal(*quiet)
    assert not torch.equal(*noisy)

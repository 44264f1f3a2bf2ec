"""What a resumed run needs beside weights: the state of the loss scaler."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lit_probattn.training.checkpoints import CheckedCheckpointIO, list_checkpoints, load_checkpoint
from lit_probattn.training.saving import RunCheckpoint
from tests.tasks.tiny import data, task, trainer


def fit(folder, max_steps: int, ckpt_path=None, scale: float = 64.0):
    """Steps 4 and 7 overflow; the scale doubles after every second good step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    plugin.precision = "bf16-mixed"  # the autocast type; the scaler stays
    module = task()
    next(module.parameters()).register_hook(
        lambda g: g * float("inf") if module.trainer.global_step in (4, 7) else g
    )
    run = trainer(
        max_steps,
        plugins=[plugin, CheckedCheckpointIO()],
        enable_checkpointing=True,
        callbacks=[RunCheckpoint(folder, every_n_steps=5)],
        accumulate_grad_batches=2,
    )
    run.fit(module, data(), ckpt_path=ckpt_path, weights_only=True)
    return module, scaler


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole"), 10)


def test_the_scaler_goes_on_where_it_was(whole, tmp_path):
    module, scaler = whole
    fit(tmp_path, 5)
    (saved,) = list_checkpoints(tmp_path, "step")
    resumed, again = fit(tmp_path, 10, saved, scale=1.0)
    assert again.state_dict() == scaler.state_dict()
    assert scaler.get_scale() not in (64.0, 1.0)
    expected = module.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in resumed.state_dict().items())


def test_without_the_scaler_s_state_the_run_would_differ(whole, tmp_path):
    """The comparison above can fail."""
    _, scaler = whole
    fit(tmp_path, 5)
    (path,) = list_checkpoints(tmp_path, "step")
    content = load_checkpoint(path)
    (key,) = (key for key in content if "Precision" in key)
    content[key]["scale"] = 1.0
    CheckedCheckpointIO().save_checkpoint(content, path)
    _, again = fit(tmp_path, 10, path)
    assert again.state_dict() != scaler.state_dict()

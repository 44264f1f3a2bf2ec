"""Optimisers of a subclass of a task: settings that the task would replace are refused."""

from __future__ import annotations

import pytest
import torch

from tests.tasks.tiny import data, softmax, task, trainer


def groups(module, *rates):
    """Put the first parameter into a group with the first rate, and so on."""
    first, *rest = module.parameters()
    every = zip(([first], rest), rates, strict=True)
    return [{"params": parameters, "lr": rate} for parameters, rate in every]


def with_schedule(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=module.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (with_schedule, "a learning-rate scheduler"),
        (lambda module: torch.optim.SGD(groups(module, 0.5, 0.25)), "lr 0.5"),
        (lambda module: torch.optim.Adam(module.parameters(), module.lr, (0.5, 0.6)), "betas"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(make, told):
    module = task(softmax, lr=0.25)
    module.configure_optimizers = lambda: make(module)
    with pytest.raises(ValueError, match=told):
        trainer(1).fit(module, data())


def test_another_optimiser_with_the_settings_of_the_task_trains():
    module = task(softmax, lr=0.25)
    module.configure_optimizers = lambda: torch.optim.SGD(groups(module, 0.25, 0.25), momentum=0.5)
    trainer(1).fit(module, data())
    (group, _) = module.optimizers().param_groups
    assert (group["lr"], group["momentum"]) == (0.25, 0.5)

"""A loss or gradient that is not finite stops the run before the update."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

import pytest
import torch

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.tasks import NonFiniteError
from lit_probattn.tasks.finite import describe_samples
from tests.tasks.tiny import data, loss_scaling, overflow_at, soft_mgk, softmax, task, trainer


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class Poisoned(SoftmaxAttention):
    """Returns NaN from micro-batch `bad_call` on."""

    bad_call = 3

    def __init__(self, embed_dim: int, head_dim: int) -> None:
        super().__init__(embed_dim, 2, head_dim=head_dim)
        self.calls = 0

    def forward(self, query, *args, **kwargs):
        out = super().forward(query, *args, **kwargs)
        self.calls += self.training
        return out * float("nan") if self.calls >= self.bad_call else out


class Once(Poisoned):
    """Returns NaN at once."""

    bad_call = 1


def test_nan_in_a_forward_names_step_samples_and_module():
    count = iter(range(100))

    def attention(embed_dim, head_dim):
        if next(count) == 1:  # only the second layer is bad
            return Poisoned(embed_dim, head_dim)
        return softmax(embed_dim, head_dim=head_dim)

    module, loader = task(attention), data()
    seen = []
    run = trainer(10)
    original = module.optimizer_step

    def step(*args, **kwargs):
        seen.append(weights(module.model))
        return original(*args, **kwargs)

    module.optimizer_step = step
    with pytest.raises(NonFiniteError) as caught:
        run.fit(module, loader)
    text = str(caught.value)
    assert "not finite at step 2" in text
    assert re.search(r"first bad module model\.encoder\.[\w.]*1[\w.]* \(Poisoned\)", text)
    ids = [int(i) for i in text.split("samples ")[1].split(".")[0].split(", ")]
    assert len(ids) == 8
    assert set(ids) <= set(range(48))
    after = weights(module.model)
    assert all(torch.equal(seen[-1][name], after[name]) for name in after)
    assert any(not torch.equal(seen[0][name], after[name]) for name in after)


def test_the_bad_module_is_sought_with_the_draws_of_its_batch():
    class Unlucky(SoftmaxAttention):
        """Returns NaN for the first number that a training draws, wherever it is drawn again."""

        bad: torch.Tensor | None = None

        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            if not self.training:
                return out
            drawn = torch.rand(())
            self.bad = drawn if self.bad is None else self.bad
            return out * (float("nan") if drawn == self.bad else 1.0)

    module = task(partial(Unlucky, num_heads=2))
    with pytest.raises(NonFiniteError, match=r"first bad module model\.[\w.]* \(Unlucky\)"):
        trainer(2).fit(module, data())


def test_infinite_gradient_names_the_parameter():
    module = task()

    def poison(grad):
        return torch.full_like(grad, float("inf")) if module.trainer.global_step == 1 else grad

    name, parameter = list(module.named_parameters())[4]
    parameter.register_hook(poison)
    with pytest.raises(NonFiniteError, match=rf"gradient is not finite at step 1.*{name}") as error:
        trainer().fit(module, data())
    assert "The weights were not updated" in str(error.value)
    assert parameter.isfinite().all()


def test_a_score_that_is_not_a_number_is_not_hidden(recwarn):
    """Samples without a finite loss are not left out of the mean."""
    module = task(Poisoned)
    for block in module.model.encoder.blocks:
        torch.nn.init.constant_(block.attention.value_proj.weight, float("nan"))
    run = trainer()
    (scores,) = run.validate(module, data(), verbose=False)
    assert scores["val/loss"] != scores["val/loss"]
    assert not [w for w in recwarn if "Will be removed" in str(w.message)]


def test_anomaly_detection_says_the_same_of_a_loss():
    lines = []
    for detect in (False, True):
        module = task(Once, num_layers=1)
        with pytest.raises(NonFiniteError) as caught:
            trainer(1, detect_anomaly=detect).fit(module, data())
        lines.append(str(caught.value))
    assert lines[0] == lines[1]
    assert "the loss is not finite at step 0" in lines[0]


def test_anomaly_detection_names_the_function_of_a_bad_gradient(monkeypatch):
    module = task()
    loss = type(module).batch_loss

    def poisoned(self, batch):
        value = loss(self, batch)
        return value + (value.detach() - value).abs().sqrt()  # its gradient is 0 · inf

    monkeypatch.setattr(type(module), "batch_loss", poisoned)
    with pytest.raises(NonFiniteError, match=r"gradient is not finite at step 0: Function '\w+'"):
        trainer(detect_anomaly=True).fit(module, data())


def test_first_micro_batch_of_a_window_is_checked_too(monkeypatch):
    module = task()
    original = module.batch_loss
    bad = 2  # first of the two micro-batches of step 1
    calls = iter(range(100))
    module.batch_loss = lambda batch: original(batch) * (float("nan") if next(calls) == bad else 1)
    with pytest.raises(NonFiniteError, match="loss is not finite at step 1"):
        trainer(accumulate_grad_batches=2).fit(module, data())


def test_an_overflow_under_loss_scaling_is_a_skipped_step():
    """Nothing moves in it, priors of an M-step included, whose own sums are finite."""
    module = task(soft_mgk)
    overflow_at(module, {1, 2})
    states, step = [], module.optimizer_step

    def recorded(*args, **kwargs):
        step(*args, **kwargs)
        states.append(weights(module))

    module.optimizer_step = recorded
    run = trainer(5, plugins=[loss_scaling(init_scale=4.0)])
    run.fit(module, data())
    assert run.global_step == 5
    assert module._overflows_in_a_row == 0
    steps = next(iter(run.optimizers[0].state.values()))["step"]
    assert int(steps) == 3
    assert all(p.isfinite().all() for p in module.parameters())
    moved = [
        {name for name in new if not torch.equal(old[name], new[name])}
        for old, new in pairwise(states)
    ]
    priors = {name for name in states[0] if "prior" in name}
    assert len(priors) == 2
    assert moved[:2] == [set(), set()]
    assert all(priors < names for names in moved[2:])


def test_ten_overflows_in_a_row_stop():
    module = task()
    overflow_at(module, range(2, 100))
    with pytest.raises(NonFiniteError, match="at step 11 in 10 steps in a row"):
        trainer(50, plugins=[loss_scaling(init_scale=4.0)]).fit(module, data())


def test_a_checkpoint_without_a_training_state_begins_with_no_overflows():
    """As one that was converted."""
    module = task()
    module._overflows_in_a_row = 7
    module.on_load_checkpoint({"training": {"overflows_in_a_row": 4}})
    assert module._overflows_in_a_row == 4
    module.on_load_checkpoint({})
    assert module._overflows_in_a_row == 0


@pytest.mark.parametrize(("count", "end"), [(64, ", 63"), (65, ", 63 and 1 more")])
def test_a_message_has_up_to_64_samples(count, end):
    assert describe_samples(range(count)).endswith(end)

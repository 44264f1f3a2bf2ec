"""No variant has a parameter that a step leaves without gradient: DDP needs no search for them."""

from __future__ import annotations

import importlib
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lit_probattn.configs import attention_entry
from lit_probattn.models.classifiers import Classifier
from lit_probattn.randomness import RandomKey
from tests.support.paths import shipped
from tests.support.runs import in_ranks

ATTENTION = shipped("attention")
SIZES = {"vocab_size": 11, "num_classes": 3, "max_seq_len": 16, "num_layers": 2, "mlp_dim": 20}


def factory(path: Path):
    """The attention factory that a file of configs/attention describes."""
    attention = attention_entry(path)
    module, _, name = attention["class_path"].rpartition(".")
    return partial(getattr(importlib.import_module(module), name), **attention["init_args"])


def classifier(path: Path) -> Classifier:
    torch.manual_seed(0)
    return Classifier(factory(path), embed_dim=16, head_dim=8, dropout=0.1, **SIZES)


def batch(step: int, rank: int = 0):
    generator = torch.Generator().manual_seed(17 * step + rank)
    inputs = torch.randint(1, 11, (4, 13), generator=generator)
    ids = torch.arange(4) + 4 * rank
    return inputs, inputs > 2, RandomKey(0, step, ids)


def train_step(model, step: int, rank: int = 0) -> None:
    inputs, mask, key = batch(step, rank)
    model(inputs, key_mask=mask, rng=key).square().sum().backward()


def without_gradient(model: torch.nn.Module) -> list[str]:
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    return [name for name, parameter in trained if parameter.grad is None]


def problem(path: Path, rank: int) -> str:
    """What goes wrong in two DDP steps that take every parameter to be used; empty if nothing."""
    wrapped = DistributedDataParallel(classifier(path), find_unused_parameters=False)
    for step in range(2):
        wrapped.zero_grad()
        train_step(wrapped, step, rank)  # raises in the step after one with an unused parameter
    return ", ".join(without_gradient(wrapped.module))


@pytest.mark.slow  # without processes: below
def test_every_parameter_of_every_variant_gets_a_gradient_under_ddp(capfd):
    def work() -> int:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        failed = []
        for path in ATTENTION:
            try:
                found = problem(path, dist.get_rank())
            except Exception:
                found = traceback.format_exc()
            failed += [f"{path.stem}: {found}"] if found else []
        print("\n".join(failed))
        return 1 if failed else 0

    assert len(ATTENTION) > 40
    codes = in_ranks(work)
    assert codes == [0, 0], capfd.readouterr().out


# One file of each class; gradients of every variant: tests/attention/test_contract.py.
FIRST = list({attention_entry(path)["class_path"]: path for path in reversed(ATTENTION)}.values())


@pytest.mark.parametrize("path", FIRST, ids=lambda path: path.stem)
def test_every_parameter_of_a_classifier_gets_a_gradient_in_a_step(path):
    model = classifier(path)
    train_step(model, 0)
    assert without_gradient(model) == []


def test_an_unused_parameter_would_be_seen(tmp_path, capfd):
    def work() -> int:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        model = classifier(ATTENTION[0])
        model.register_parameter("idle", torch.nn.Parameter(torch.zeros(())))
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)
        for step in range(2):
            train_step(wrapped, step, dist.get_rank())
        return 0

    assert 0 not in in_ranks(work)
    assert "that were not used in producing loss" in capfd.readouterr().err

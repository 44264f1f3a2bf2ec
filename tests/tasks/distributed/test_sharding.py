"""Sharded data parallelism trains what one process trains, and its checkpoints fit everywhere."""

from __future__ import annotations

import inspect
import json
from datetime import timedelta
from typing import Any, cast

import pytest
from torch import nn

from lit_probattn.cli.app import main
from lit_probattn.tasks.distributed import shard
from lit_probattn.training.sharding import ShardedDataParallel
from tests.support.runs import (
    ROOT,
    arguments,
    fingerprint,
    in_ranks,
    metrics,
    newest_state,
    only_version,
    run,
    write_attention,
)
from tests.tasks.tiny import softmax

SHARDED = (
    *("--config", str(ROOT / "configs/trainer/fsdp.yaml"), "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true", "--trainer.devices", "2"),
)


def command(folder, *more, name="fit"):
    """Attention dropout stays on: it is drawn by sample. Priors follow the M-step."""
    attention = write_attention(folder, "MGKAttention", dropout=0.3, e_step="soft")
    options = ("--trainer.log_every_n_steps", "1", "--trainer.precision", "32-true")
    quiet = ("--model.init_args.dropout", "0.0", "--trainer.devices", "1")
    return arguments(name, folder, *options, *quiet, *more, attention=attention)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Two ranks, stopped after step 7 and resumed."""
    folder = tmp_path_factory.mktemp("sharded")
    for more in (("--trainer.max_steps", "7"), ("--ckpt_path", "last")):
        work = command(folder, *SHARDED, *more)
        assert in_ranks(lambda work=work: main(work)) == [0, 0]
    return folder


@pytest.mark.slow
def test_two_shards_train_like_one_process(sharded, tmp_path):
    run(command(tmp_path))
    rows = metrics(only_version(tmp_path)), metrics(only_version(sharded))
    assert len(rows[0]) == len(rows[1]) == 16
    for first, second in zip(*rows, strict=True):
        assert float(second["train/loss"]) == pytest.approx(float(first["train/loss"]), rel=2e-5)
        if first["val/accuracy"]:  # the resumed run was validated after step 7 too
            assert second["val/accuracy"] == first["val/accuracy"]
    before, after = newest_state(only_version(tmp_path)), newest_state(only_version(sharded))
    assert before["state_dict"].keys() == after["state_dict"].keys()
    parts = [state["optimizer_states"][0]["state"] for state in (before, after)]
    assert parts[0].keys() == parts[1].keys()
    assert all(parts[0][k]["exp_avg"].shape == parts[1][k]["exp_avg"].shape for k in parts[0])


@pytest.mark.slow
def test_resume_is_exact_and_one_process_can_score(sharded, tmp_path):
    assert in_ranks(lambda: main(command(tmp_path, *SHARDED))) == [0, 0]
    assert fingerprint(only_version(tmp_path)) == fingerprint(only_version(sharded))
    scores = []
    for more, count in ((SHARDED, 2), ((), 1)):
        work = command(sharded, *more, "--ckpt_path", "last", name="test")
        assert set(in_ranks(lambda work=work: main(work), count)) == {0}
        path = only_version(sharded) / "test-step-00000016.json"
        scores.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    assert scores[0]["test/accuracy"] == scores[1]["test/accuracy"]
    assert scores[0]["test/loss"] == pytest.approx(scores[1]["test/loss"], rel=1e-6)


@pytest.mark.slow
def test_two_shards_of_a_block_that_all_layers_share(tmp_path):
    """Its gradients are those of all passes, and its priors see all of them, on every rank."""
    shared = ("--model.init_args.share_layers", "true", "--trainer.max_steps", "3")
    rows = []
    for name, more, count in (("one", (), 1), ("two", SHARDED, 2)):
        (tmp_path / name).mkdir()
        work = command(tmp_path / name, *more, *shared)
        assert set(in_ranks(lambda work=work: main(work), count)) == {0}
        rows.append(metrics(only_version(tmp_path / name)))
    for first, second in zip(*rows, strict=True):
        assert float(second["train/loss"]) == pytest.approx(float(first["train/loss"]), rel=2e-5)


def test_each_block_of_attention_is_a_group_and_all_else_another(monkeypatch):
    """Also a block of two layers, and an attention layer that is in no block."""
    one, two = nn.ModuleList(), nn.ModuleList()
    one.extend([softmax(10, head_dim=5), nn.Linear(10, 10)])
    two.extend([softmax(10, head_dim=5), softmax(10, head_dim=5)])
    model = nn.ModuleDict(
        {"a": one, "b": two, "alone": softmax(10, head_dim=5), "head": nn.Linear(10, 3)}
    )
    groups = []
    monkeypatch.setattr(
        "torch.distributed.fsdp.fully_shard", lambda part, mesh: groups.append((part, mesh))
    )
    mesh = object()
    shard(model, cast(Any, mesh))
    assert [group for group, _ in groups] == [one, two, model]
    assert all(given is mesh for _, given in groups)


def test_ranks_wait_for_each_other_for_five_minutes():
    """As docs/distributed.md says."""
    default = inspect.signature(ShardedDataParallel).parameters["timeout"].default
    assert default == timedelta(minutes=5)

"""The model of a run without training: published sizes, samples and memory of a real step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.model import (
    PAIR_LEN,
    build_task,
    counts,
    make_inputs,
    rows_of_step,
    sides,
    step_bytes,
    training_step,
)
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.runs import Run, data_of
from lit_probattn.compare.tables import read_table
from lit_probattn.measure.memory import cpu_peak_bytes
from tests.compare.tiny import tiny_runs
from tests.support.slow import mostly_slow
from tests.tasks.decision.test_task import ACT, OBS, make_task

WIDE = {"model.init_args.mlp_dim": 16384, "model.init_args.activation_checkpointing": False}


def run(table, task, row, **options):
    found = read_table(table)
    return Run(found.tasks[task], found.rows[row], 0, Options(**options))


@pytest.mark.slow  # the second is one of `tests/reproduce/test_analyses.py::test_computed_numbers`
@pytest.mark.parametrize(
    ("table", "task", "row", "parameters"),
    [
        ("fish_table2", "iwslt14_de_en", "softmax_4", 39_469_056),
        ("fish_table4", "wmt14_en_de", "softmax_16", 209_911_808),
    ],
)
def test_the_baselines_have_the_published_sizes(table, task, row, parameters):
    """As fairseq prints them for these architectures and dictionaries."""
    assert counts(run(table, task, row))["parameters"] == parameters


def test_a_step_holds_as_many_pairs_as_its_tokens():
    iwslt, wmt = (
        run("fish_table2", "iwslt14_de_en", "softmax_4"),
        run("fish_table4", "wmt14_en_de", "softmax_16"),
    )
    assert rows_of_step(iwslt.config) == 4096 // PAIR_LEN
    assert rows_of_step(wmt.config) == 458_752 // PAIR_LEN


def test_a_task_of_the_user_may_leave_arguments_of_the_data_at_their_defaults():
    place = SimpleNamespace(data_dir=None, cache_dir=None)
    given: list[dict[str, Any]] = [{}, {"init_args": {"batch_size": 3}}]
    for more, rows in zip(given, (32, 3), strict=True):
        config = {"data": {"class_path": "datamodules.Synthetic", **more}}
        assert rows_of_step(config) == data_of(config, place).batch_size == rows
    config = {"data": {"class_path": "datamodules.LM1B"}}
    assert rows_of_step(config) == data_of(config, place).max_tokens // PAIR_LEN


def test_data_of_other_packages_are_refused():
    config = {"data": {"class_path": "lightning.pytorch.LightningDataModule"}}
    with pytest.raises(ConfigError, match=r"LightningDataModule .* datamodules"):
        data_of(config, SimpleNamespace(data_dir=None, cache_dir=None))


def test_a_shorter_run_validates_once_in_micro_batches():
    config = run("fish_table4", "wmt14_en_de", "softmax_16", steps=20).config
    assert config["trainer"]["max_steps"] == 20
    assert config["trainer"]["val_check_interval"] == 20 * 128
    assert config["run"]["checkpoint_every"] == 20


@pytest.mark.parametrize("row", mostly_slow(["softmax_2", "mgk_1"], ["mgk_1"]))
def test_memory_is_that_of_a_real_step_and_of_adam(row, tmp_path):
    """The allocator's peak of a step, and three copies of the weights: they and two averages.

    Bounded by a quarter of one copy, so that a copy more or less is seen.
    """
    run = tiny_runs(tmp_path, ["listops", row])[1][0]
    run = Run(run.task, run.row, 0, Options(settings=WIDE), run.place)
    data = run.data()
    torch.manual_seed(0)
    task = build_task(run, data).train()
    inputs, target = make_inputs(task, data, rows_of_step(run.config))
    step = training_step(task, inputs, target)
    step()
    weights = 4 * sum(p.numel() for p in task.model.parameters())
    measured = cpu_peak_bytes(step) + 3 * weights
    assert weights > 1e6
    assert step_bytes(run) == pytest.approx(measured, abs=weights / 4)


def test_memory_is_that_of_one_micro_batch(tmp_path):
    tiny = tiny_runs(tmp_path, ["listops", "softmax_2"])[1][0]

    def found(rows, parts):
        settings = {"data.init_args.batch_size": rows, "trainer.accumulate_grad_batches": parts}
        return step_bytes(Run(tiny.task, tiny.row, 0, Options(settings=settings), tiny.place))

    assert found(8, 2) == found(4, 1)
    assert found(8, 2) < found(8, 1)


@pytest.mark.parametrize(
    ("seq_len", "mlp_dim", "dropout"),
    [(23, 16384, 0.1), (400, 64, 0.0)],  # the second by PyTorch's attention, which stores no maps
)
def test_memory_of_a_model_with_two_outputs_is_that_of_a_real_step(seq_len, mlp_dim, dropout):
    """A model of questions returns logits of starts and of ends."""
    sizes = {"embed_dim": 16, "head_dim": 8, "num_layers": 1, "num_token_types": 2}
    softmax = {
        "class_path": "lit_probattn.attention.SoftmaxAttention",
        "init_args": {"num_heads": 2},
    }
    task_class = "lit_probattn.tasks.QuestionAnswering"
    arguments = {**sizes, "mlp_dim": mlp_dim, "attention": softmax, "attention_dropout": dropout}
    data = SimpleNamespace(max_seq_len=seq_len, vocab_size=31, batch_setting=("batch_size", 6))
    config = {
        "data": {"init_args": {"batch_size": 6}},
        "model": {"class_path": task_class, "init_args": arguments},
        "trainer": {},
    }
    run = cast(Any, SimpleNamespace(config=config, data=lambda: data, seed=0))
    run.options, run.task = Options(), SimpleNamespace(sizes={})
    task = build_task(run, cast(Any, data)).train()
    step = training_step(task, *make_inputs(task, cast(Any, data), 6))
    step()
    weights = 4 * sum(p.numel() for p in task.model.parameters())
    measured = cpu_peak_bytes(step) + 3 * weights
    assert step_bytes(run) == pytest.approx(measured, rel=0.15)


def test_inputs_are_all_words_but_padding():
    task = cast(Any, SimpleNamespace(model=SimpleNamespace(vocab_size=4)))
    data = SimpleNamespace(max_seq_len=97, batch_setting=("batch_size", 5))
    inputs, target = make_inputs(task, cast(Any, data), 5)
    assert inputs.shape == (5, 97)
    assert inputs.unique().tolist() == [1, 2, 3]
    assert target.tolist() == [0] * 5


def test_a_decision_model_has_a_step_that_fits_the_actions_of_its_inputs():
    task = make_task()
    inputs, target = make_inputs(task, cast(Any, None), 3)
    states, actions, returns, times = sides(task, inputs)
    assert torch.equal(target, actions)
    assert [part.shape[-1] for part in (states, actions, returns)] == [OBS, ACT, 1]
    assert times.tolist() == [list(range(task.context_length))] * 3

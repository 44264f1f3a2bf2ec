"""A cell's model without a run: published sizes, samples of a step, memory beside a real step."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.compare.cells import Cell
from lit_probattn.compare.model import (
    PAIR_LEN,
    build_task,
    counts,
    make_inputs,
    rows_of_step,
    step_bytes,
    training_step,
)
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.tables import read_table
from lit_probattn.measure.memory import cpu_peak_bytes
from tests.compare.tiny import tiny_cells
from tests.support.paths import ROOT

WIDE = {"model.init_args.mlp_dim": 16384, "model.init_args.activation_checkpointing": False}
pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def root(monkeypatch):
    monkeypatch.chdir(ROOT)


def cell(table, task, row, **options):
    found = read_table(table)
    return Cell(found.tasks[task], found.rows[row], 0, Options(**options))


@pytest.mark.parametrize(
    ("table", "task", "row", "parameters"),
    [
        # As fairseq prints them for these architectures and dictionaries.
        ("fish_table2", "iwslt14_de_en", "softmax_4", 39_469_056),
        ("fish_table4", "wmt14_en_de", "softmax_16", 209_911_808),
    ],
)
def test_the_baselines_have_the_published_sizes(table, task, row, parameters):
    assert counts(cell(table, task, row))["parameters"] == parameters


def test_a_step_holds_as_many_pairs_as_its_tokens():
    iwslt, wmt = (
        cell("fish_table2", "iwslt14_de_en", "softmax_4"),
        cell("fish_table4", "wmt14_en_de", "softmax_16"),
    )
    assert rows_of_step(iwslt.config) == 4096 // PAIR_LEN
    assert rows_of_step(wmt.config) == 458_752 // PAIR_LEN


def test_a_shorter_run_validates_once_in_micro_batches():
    config = cell("fish_table4", "wmt14_en_de", "softmax_16", steps=20).config
    assert config["trainer"]["max_steps"] == 20
    assert config["trainer"]["val_check_interval"] == 20 * 128
    assert config["run"]["checkpoint_every"] == 20


@pytest.mark.parametrize("row", ["softmax_2", "mgk_1"])
def test_memory_is_that_of_a_real_step_and_of_adam(row, tmp_path):
    """The allocator's peak of a step, and three copies of the weights: they and two averages.

    Bounded by a quarter of one copy, so that a copy more or less is seen.
    """
    cell = tiny_cells(tmp_path, ["listops", row])[1][0]
    cell = Cell(cell.task, cell.row, 0, Options(settings=WIDE), cell.place)
    data = cell.data()
    torch.manual_seed(0)
    task = build_task(cell, data).train()
    inputs, target = make_inputs(task, data, rows_of_step(cell.config))
    step = training_step(task, inputs, target)
    step()
    weights = 4 * sum(p.numel() for p in task.model.parameters())
    measured = cpu_peak_bytes(step) + 3 * weights
    assert weights > 1e6
    assert step_bytes(cell) == pytest.approx(measured, abs=weights / 4)

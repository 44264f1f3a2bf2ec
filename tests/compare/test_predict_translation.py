"""Predictions of translation: pairs by tokens, intervals in micro-batches, the published sizes."""

from __future__ import annotations

import pytest

from lit_probattn.compare import predict as predict_module
from lit_probattn.compare.cells import Cell
from lit_probattn.compare.predict import (
    PAIR_LEN,
    _validation_interval,
    counts,
    predict,
    rows_of_step,
)
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.tables import read_table
from tests.support.paths import ROOT

SMALL = {
    "model.init_args.embed_dim": 16,
    "model.init_args.mlp_dim": 16,
    "data.init_args.max_tokens": 256,
}
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
    assert (_validation_interval(iwslt), _validation_interval(wmt)) == (1100, 300)


def test_a_shorter_run_validates_once_in_micro_batches():
    config = cell("fish_table4", "wmt14_en_de", "softmax_16", steps=20).config
    assert config["trainer"]["max_steps"] == 20
    assert config["trainer"]["val_check_interval"] == 20 * 128
    assert config["run"]["checkpoint_every"] == 20


def test_a_bigger_beam_takes_longer_by_the_model_of_operations():
    hours = [
        predict(
            cell(
                "fish_table2",
                "iwslt14_de_en",
                "softmax_4",
                settings={**SMALL, "model.init_args.val_beam_size": size},
            ),
            tflops=1e-3,
        ).hours
        for size in (0, 5)
    ]
    assert hours[1] > hours[0]


@pytest.mark.parametrize(("size", "searched"), [(5, [5]), (2, [2, 5])])
def test_equal_searches_of_validation_and_test_are_measured_once(monkeypatch, size, searched):
    sizes = []
    search = predict_module.beam_search

    def counting(model, source, mask, beam):
        sizes.append(beam.size)
        return search(model, source, mask, beam)

    monkeypatch.setattr(predict_module, "beam_search", counting)
    monkeypatch.setattr(predict_module, "start_seconds", lambda: 0.0)
    settings = {**SMALL, "model.init_args.val_beam_size": size}
    predict(cell("fish_table2", "iwslt14_de_en", "softmax_4", settings=settings))
    assert sizes == searched

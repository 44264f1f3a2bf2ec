"""The authors' order of evaluation: a stream of samples in windows, whole batches of the test."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from datamodules import ListOps
from datamodules.core.order import FILL, RotatingOrder, permutation
from lit_probattn.base.errors import DataError

NUM, WINDOW, SEED = 53, 24, 11


def samples(number: int, **options) -> list[int]:
    order = RotatingOrder(NUM, WINDOW, SEED, lambda: number, 7, **options)
    return [sample for batch in order for sample in batch if sample != FILL]


def test_windows_are_one_stream_of_whole_passes():
    """Every pass has each sample once; the first is in order, the others have their own orders."""
    stream = [sample for number in range(20) for sample in samples(number)]
    passes = [stream[first : first + NUM] for first in range(0, len(stream) - NUM + 1, NUM)]
    assert len(passes) == 9
    assert passes[0] == list(range(NUM))
    assert all(sorted(part) == passes[0] for part in passes)
    assert len({tuple(part) for part in passes}) == 9
    orders = [permutation(NUM, SEED, number).tolist() for number in range(20)]
    assert not any(part in orders for part in passes)  # not those of training


def test_a_window_longer_than_the_split_goes_through_it_again():
    order = RotatingOrder(5, 12, SEED, lambda: 1, 4)
    stream = np.concatenate(
        [RotatingOrder(5, 5, SEED, lambda: 0, 4).samples_at(n) for n in range(5)]
    )
    assert order.samples_at(1).tolist() == stream[12:24].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_a_window(world_size):
    parts = [
        RotatingOrder(NUM, WINDOW, SEED, lambda: 2, 5, r, world_size) for r in range(world_size)
    ]
    assert len({len(list(part)) for part in parts}) == 1
    found = [s for part in parts for batch in part for s in batch if s != FILL]
    assert sorted(found) == sorted(samples(2))


def test_it_is_asked_anew_which_evaluation_it_is():
    now = 0
    order = RotatingOrder(NUM, WINDOW, SEED, lambda: now, WINDOW)
    first = next(iter(order))
    now = 3
    assert next(iter(order)) == samples(3)
    assert first == samples(0)


def listops(tmp_path, **options) -> ListOps:
    sizes = {"num_train": 64, "num_val": 40, "num_test": 42, "num_processes": 1}
    lengths = {"min_length": 4, "max_length": 32, "max_length_tokens": 32}
    data = ListOps(**sizes, **lengths, cache_dir=str(tmp_path), **{"batch_size": 8, **options})
    data.setup()
    return data


def trainer(fn: str, processed: int, interval: float | None = 6) -> SimpleNamespace:
    progress = SimpleNamespace(total=SimpleNamespace(processed=processed))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    return SimpleNamespace(
        **{"global_rank": 0, "world_size": 1, "accumulate_grad_batches": 1, "fit_loop": loop},
        **{"state": SimpleNamespace(fn=fn), "val_check_batch": interval, "overfit_batches": 0},
        **{"val_check_interval": "00:05:00", "is_global_zero": True},
    )


@pytest.mark.parametrize(
    ("processed", "number"), [(0, 0), (6, 0), (12, 1), (13, 2), (17, 2), (18, 2), (600, 99)]
)
def test_the_step_says_which_validation_it_is(tmp_path, processed, number):
    data = listops(tmp_path, parity_eval=3)
    data.trainer = trainer("fit", processed)
    found = [sample for batch in data._evaluation_order("val") for sample in batch]
    oracle = RotatingOrder(40, 24, data.seed, lambda: number, 8)
    assert found == oracle.samples_at(number).tolist()


def test_validations_only_at_the_end_are_the_first(tmp_path):
    data = listops(tmp_path, parity_eval=3)
    data.trainer = trainer("fit", 50, float("inf"))
    assert [s for b in data._evaluation_order("val") for s in b] == list(range(24))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("fit", "must be a number of micro-batches, received '00:05:00'"),  # not by the clock
        ("test", "42 samples has no other: lower batch_size=43"),
    ],
)
def test_evaluations_that_no_batches_make_up_are_refused(tmp_path, fn, message):
    data = listops(tmp_path, parity_eval=3, batch_size=8 if fn == "fit" else 43)
    data.trainer = trainer(fn, 50, None)
    with pytest.raises(DataError, match=message):
        list(data._evaluation_order("val") if fn == "fit" else data.test_dataloader())

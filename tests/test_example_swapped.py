"""The study of swapping: starts, curves, what is counted, the report."""

from __future__ import annotations

import csv
import functools

import pytest
import torch

from datamodules import expressions
from datamodules.expressions import batches
from examples.studies import swapped

SMALL = ["--seeds", "0", "--steps", "1", "--tune_steps", "2", "--at", "0"]
NAME = "MGK, 2 heads"
draw = functools.cache(expressions.draw)


@pytest.fixture(scope="module", autouse=True)
def few_expressions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expressions, "_NUM_CHUNKS", 3)
        patch.setattr(expressions, "NUM_TEST", 100)
        yield


def test_the_host_reads_no_padding():
    model = swapped.fresh(0).eval()
    tokens = draw(0)[1].tokens[:3, :12]
    padded = torch.cat([tokens, torch.zeros(3, 5, dtype=torch.int64)], 1)
    torch.testing.assert_close(model(tokens), model(padded), rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # of any model: tests/interop/swap
def test_a_swap_starts_near_the_trained_model_and_a_fresh_start_does_not():
    learn, test = draw(0)
    host = swapped.fresh(0)
    for _ in swapped.train(host, batches(learn, 32, 0), 40, 5e-3):
        pass
    before = swapped.accuracy(host, test)
    near, _ = swapped.exchanged(host, NAME, 0)
    far, _ = swapped.exchanged(swapped.fresh(1000), NAME, 0)
    assert swapped.accuracy(near, test) > before - 20 > swapped.accuracy(far, test) + 10
    assert host.encoder.layers[0].self_attn.num_heads == 4


def test_training_starts_slowly_and_yields_before_its_first_step():
    learn, _ = draw(0)
    model = swapped.fresh(0)
    start = model.head.weight.clone()
    seen = [
        (step, float((now.head.weight - start).abs().max().detach()))
        for step, now in swapped.train(model, batches(learn, 8, 0), 2, 1.0)
    ]
    assert [step for step, _ in seen] == [0, 1, 2]
    assert seen[0][1] == 0.0
    # Adam's first step is its rate, whatever the gradient; decay adds 0.01 of the largest weight.
    most = 0.01 * start.abs().max().item() + 1e-5
    assert seen[1][1] == pytest.approx(1.0 / swapped.WARMUP, rel=most)


def test_command_writes_curves_and_costs(tmp_path, capsys, sketches, monkeypatch):
    monkeypatch.setattr(swapped, "draw", draw)
    assert swapped.main([*SMALL, "--repeats", "1", "--warmup", "0", "--out", str(tmp_path)]) == 0
    assert "from a fresh start" in capsys.readouterr().out
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    learned = [row for row in rows if row["accuracy"]]
    assert len(learned) == 3 * 2  # sides, steps 0 and 2
    first = {
        (row["seed"], row["steps"]): row for row in learned if row["variant"] == swapped.UNSWAPPED
    }
    assert all(
        row["accuracy"] == row["before"] for (_, steps), row in first.items() if steps == "0.0"
    )
    plain, half = (row for row in rows if row["parameters"])
    assert (plain["parameters"], half["parameters"]) == ("33280.0", "20872.0")
    assert (plain["cache bytes/token"], half["cache bytes/token"]) == ("1024.0", "768.0")
    assert float(half["time_over_unswapped"]) > 0
    assert (tmp_path / "figures/accuracy.png").is_file()

"""The stage that compares a model with the same written as released."""

from __future__ import annotations

from pathlib import Path

import torch

from profiling.stages.place import Place
from profiling.stages.released import released, released_page
from profiling.studies import step_ratio


def test_every_rate_of_dropout_and_inference_after_their_kernels_are_compiled():
    compiling, timing = released(Place(Path("."), "cuda"))
    assert [unit.key for unit in timing.units] == [
        "training step, attention dropout 0.1",
        "training step, attention dropout 0",
        "inference",
    ]
    keys = [unit.key for unit in compiling.units]
    assert len(set(keys)) == 9
    assert "compile: sMGK, 4 heads, dropout 0.1, float32, head size 32, train" in " ".join(keys)


def run(place):
    units = [unit for unit in released(place)[1].units if "dropout 0.1" not in unit.key]
    return [{"unit": u.key, "status": "ok", **row} for u in units for row in u.work()]


def test_rows_and_page_of_a_rehearsal(tmp_path):
    place = Place(tmp_path, "cpu")
    rows = run(place)
    assert len(rows) == 12
    for row in rows:
        assert {"variant", "form", "backend", "peak_memory_bytes", "time_over_plain"} <= set(row)
        assert row["largest_difference"] < step_ratio.TOLERANCE
    page = released_page(place, rows)
    assert "## training step, attention dropout 0\n" in page
    assert "## inference\n" in page
    assert page.count("| variant | form | backend | median, s | peak memory, MiB |") == 2
    assert "nan" not in page


def test_a_form_that_does_not_fit_leaves_the_others(tmp_path, monkeypatch):
    def infer(model, tokens, original=step_ratio.infer):
        if isinstance(model.encoder.blocks[0].attention, step_ratio.PlainAttention):
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(model, tokens)

    monkeypatch.setattr(step_ratio, "infer", infer)
    place = Place(tmp_path, "cpu")
    rows = [row for row in run(place) if row["mode"] == "eval"]
    lost = [row for row in rows if row.get("failed") == "out of memory"]
    assert [row["form"] for row in lost] == ["plain"] * 3
    assert not any("time_median_s" in row for row in lost)
    page = released_page(place, rows)
    assert "- MGK, 4 heads, plain: out of memory" in page
    assert page.count("| package |") == 3
    assert "nan" not in page

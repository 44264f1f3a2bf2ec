"""The plain formula is the package's function; the command compares both forms in one run."""

from __future__ import annotations

import argparse
import copy
import csv

import pytest
import torch

from examples.studies import step_ratio
from examples.studies.step_ratio import PlainAttention, materialise
from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.attention.backends import BACKENDS
from profiling import study


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (SoftmaxAttention, {}),
        (MGKAttention, {}),
        (MGKAttention, {"shifted_keys": True, "variance": "code_lm"}),
        (MGKAttention, {"num_components": 3, "prior_share": "layer", "learn_variance": True}),
    ],
)
def test_plain_formula_is_the_reference(cls, options):
    """Outputs and gradients of every weight, float64, with padding."""
    layer = cls(7, 3, head_dim=5, backend="reference", **options).double()
    for name, parameter in layer.named_parameters():
        if name.startswith("core.prior"):
            parameter.data.uniform_(0.2, 0.9)
    plain = PlainAttention(copy.deepcopy(layer))
    inputs = torch.randn(2, 11, 7, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, 8:] = False
    outputs = [form(inputs, key_mask=mask) for form in (layer, plain)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-11)
    for out in outputs:
        out.square().sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    assert len(gradients) > 7
    for name, parameter in plain.layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "layer",
    [
        SoftmaxAttention(8, 2, head_dim=4, num_kv_heads=1),
        SoftmaxAttention(8, 2, head_dim=4, score="gaussian"),
        MGKAttention(8, 2, head_dim=4, e_step="hard"),
        MGKAttention(8, 2, head_dim=4, score="dot"),
    ],
)
def test_other_layers_are_refused(layer):
    with pytest.raises(NotImplementedError, match="no plain form"):
        PlainAttention(layer)


def test_dropout_acts_in_training_only():
    layer = PlainAttention(SoftmaxAttention(8, 2, head_dim=4, dropout=0.5))
    inputs = torch.randn(1, 5, 8)
    assert not torch.equal(layer(inputs), layer(inputs))
    layer.eval()
    assert torch.equal(layer(inputs), layer(inputs))


SECONDS = {
    ("softmax, 8 heads", "plain"): 3.0,
    ("softmax, 8 heads", "package"): 2.0,
    ("MGK, 4 heads", "plain"): 12.0,
    ("MGK, 4 heads", "package"): 5.0,
    ("sMGK, 4 heads", "plain"): 21.0,
    ("sMGK, 4 heads", "package"): 7.0,
}


def test_command_compares_both_forms_and_reports(tmp_path, capsys, monkeypatch, sketches):
    """Every side is run, and is over its own plain form, and over softmax in the same form."""

    def time_sides(sides, **limits):
        for run in sides.values():
            run()
        return {side: [SECONDS[side]] * 2 for side in sides}

    monkeypatch.setattr(study, "time_sides", time_sides)
    words = ["--length", "64", "--batch", "2", "--repeats", "2", "--out", str(tmp_path)]
    assert step_ratio.main(words) == 0
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(SECONDS)
    bytes_of = {
        (row["attention_dropout"], row["variant"], row["form"]): int(row["peak_memory_bytes"])
        for row in rows
    }
    for row in rows:
        name, form, dropout = row["variant"], row["form"], row["attention_dropout"]
        seconds = SECONDS[name, form]
        others = {"plain": (name, "plain"), "softmax": ("softmax, 8 heads", form)}
        for label, other in others.items():
            assert float(row[f"time_over_{label}"]) == pytest.approx(seconds / SECONDS[other])
            memory = bytes_of[dropout, name, form] / bytes_of[dropout, *other]
            assert float(row[f"memory_over_{label}"]) == pytest.approx(memory)
    printed = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    shown = [cells[4:7:2] for cells in printed if cells[1:3] == ["sMGK, 4 heads", "package"]]
    chosen = {(row["form"], row["attention_dropout"]): row["backend"] for row in rows}
    assert chosen["plain", "0.1"] == chosen["plain", "0.0"] == "plain formula"
    assert {chosen["package", rate] for rate in ("0.1", "0.0")} <= set(BACKENDS) - {"auto"}
    assert shown == [["7", "0.333 [0.333, 0.333]"]] * 2
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "python -m examples.studies.step_ratio --length 64" in text
    assert "2 sequences of 64 tokens" in text
    assert f"sMGK, 4 heads, dropout 0: {chosen['package', '0.0']}" in text
    assert "| attention dropout | variant | form | backend |" in text
    assert "(figures/time_over_softmax." in text
    assert (tmp_path / "figures/time_over_softmax.png").is_file()
    assert "peak_memory_bytes" not in (tmp_path / "ratios.csv").read_text(encoding="utf-8")


def test_inference_is_measured_without_gradients_and_dropout(monkeypatch, capsys):
    seen = []

    def time_sides(sides, **limits):
        for run in sides.values():
            model, tokens = run.args
            run()
            seen.append((run.func.__name__, model.training, tokens.shape))
        return {side: [SECONDS[side]] * 2 for side in sides}

    monkeypatch.setattr(study, "time_sides", time_sides)
    assert step_ratio.main(["--length", "64", "--dropout", "0.1", "--mode", "eval"]) == 0
    assert seen == [("infer", False, (2, 64))] * len(SECONDS)
    printed = capsys.readouterr().out
    assert printed.startswith("# Time of inference: this package and the plain formula")
    assert "float32, forward\n" in printed


@pytest.mark.slow  # of any side: test_study.py
def test_a_form_that_runs_out_of_memory_leaves_the_others(monkeypatch):
    """Its backend cannot be known either: it takes a call."""
    monkeypatch.setattr(step_ratio, "step", out_of_memory)
    options = argparse.Namespace(device="cpu", length=64, batch=2, mode="train", warmup=1)
    options = argparse.Namespace(**vars(options), repeats=1, max_seconds=9.0)
    rows, _ = step_ratio.measure(options, 0.1)
    found = {(row["variant"], row["form"]): row for row in rows}
    assert set(found) == set(SECONDS)
    lost = found["MGK, 4 heads", "package"]
    assert (lost["failed"], lost["backend"]) == ("out of memory", "not known")
    assert [row["form"] for row in rows if "failed" in row] == ["package"]
    assert found["sMGK, 4 heads", "package"]["time_median_s"] > 0


def out_of_memory(model, tokens, original=step_ratio.step):
    """A step that fails for MGK as the package computes it."""
    layer = model.encoder.blocks[0].attention
    if isinstance(layer, MGKAttention) and layer.core.key_shift is None:
        raise torch.OutOfMemoryError("CUDA out of memory")
    original(model, tokens)


def test_forms_that_compute_something_else_are_noticed():
    sides = step_ratio.build_sides(64, 0.0, torch.device("cpu"))
    tokens = torch.randint(1, 16, (2, 64))
    assert step_ratio.largest_difference(sides, tokens) < 1e-5
    wrong = step_ratio.build("mgk", 4, 64, 0.0)
    wrong.encoder.blocks[0].attention.query_proj.weight.data.mul_(5.0)
    sides["MGK, 4 heads", "plain"] = materialise(wrong)
    with pytest.raises(RuntimeError, match="package and plain formula differ"):
        step_ratio.largest_difference(sides, tokens)

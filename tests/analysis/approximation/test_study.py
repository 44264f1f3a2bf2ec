"""The commands `approximate` and `approximate_compare`: tables, pictures, resuming, refusals."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch

from lit_probattn.analysis.__main__ import main
from lit_probattn.analysis.approximation import figures
from lit_probattn.analysis.approximation.layers import open_call
from lit_probattn.analysis.approximation.measure import LocalErrors
from lit_probattn.analysis.approximation.methods import ESTIMATE, EXACT, Oblivious
from lit_probattn.base.rows import RowStore
from lit_probattn.models.language_model import IGNORE
from tests.analysis.approximation.inputs import padded_samples
from tests.analysis.made import checkpoint, opened
from tests.datamodules.text import made as made_text
from tests.support.helpers import error_of, with_options
from tests.support.patching import check_figures
from tests.support.runs import arguments, only_version, run


def train(folder):
    """Train a small language model; return its last checkpoint."""
    text = made_text.write(folder / "text")
    short = ("--trainer.max_steps", "4", "--trainer.val_check_interval", "4")
    run(arguments("fit", folder, *short, task="tiny/wikitext103_value_aware", data_dir=text))
    return next((only_version(folder) / "checkpoints").glob("step-00000004.ckpt"))


def command(model, out, *more):
    small = ["--num_samples", "4", "--solver_samples", "2", "--local_samples", "1"]
    sizes = ["--ranks", "1", "3", "9", "16", "--features", "8", "--draws", "2"]
    places = ["--checkpoint", str(model), "--out", str(out)]
    return main(with_options(["approximate", *places, *small, *sizes], *more))


def test_claims_name_the_fewest_keys_from_which_the_metric_is_near():
    """Method b is near with one key by chance, and again from 8 keys; c never is."""
    values = {"a": (1.3, 1.04, 1.0), "b": (1.0, 1.2, 0.96), "c": (2.0, 2.0, 2.0)}
    rows = [
        {"method": name, "num_kept": kept, "value": 10 * value, "exact": 10.0}
        for name, found in values.items()
        for kept, value in zip((1, 4, 8), found, strict=True)
    ]
    table = pd.DataFrame(rows).assign(scope="all", metric="perplexity", model="m")
    claim = figures.keys_claim(table)
    assert claim.endswith("a perplexity within 5 % of exact attention: a 4, b 8")
    assert figures.keys_claim(table, ("x", "b"), "model").endswith("(b): m 8")
    assert figures.keys_claim(table[table["method"] == "c"]).startswith("No approximation")
    errors = table.assign(rel_error=table["value"] / 100)
    assert figures.error_claim(errors).endswith("with 1 key: b 0.1, a 0.13, c 0.2")


def test_study_writes_tables_pictures_and_resumes(tmp_path, capsys, monkeypatch):
    model = checkpoint(tmp_path, "value_aware", "SoftmaxAttention", num_heads=2)
    check_figures(monkeypatch)
    settings, add = [], RowStore.add

    def adding(store, *rows):
        add(store, *rows)
        settings[:] = store.path.read_text(encoding="utf-8").splitlines()[:1]

    monkeypatch.setattr(RowStore, "add", adding)
    assert command(model, tmp_path) == 0
    first = pd.read_csv(tmp_path / "approximate/approximate.csv")
    assert set(first["method"]) == {"ovo", "ovo_reopt", "ova", "norm", "window", "orf"}
    whole = first[(first["num_kept"] == 16) & (first["method"] != "orf")]
    assert whole["difference"].abs().max() < 1e-3
    aware = first[first["method"] == "ova"].set_index("num_kept")
    assert aware["status"].to_dict() == {1: EXACT, 3: ESTIMATE, 9: EXACT, 16: EXACT}
    assert aware.loc[9, "difference"] == pytest.approx(0.0, abs=1e-4)
    text = (tmp_path / "approximate/report.md").read_text(encoding="utf-8")
    for part in ("Carathéodory", "(≤; exact", "Command: `lit-probattn analyse"):
        assert part in text
    for name in ("approximate", "approximate_local", "approximate_local_mean"):
        assert (tmp_path / f"approximate/figures/{name}.png").is_file()
    assert not (tmp_path / "approximate/approximate.partial.jsonl").exists()
    # An interrupted study: one of the rows is there, with a mark that must survive.
    keep = json.loads(first.iloc[0].to_json()) | {"value": 12345.0}
    out = tmp_path / "again"
    (out / "approximate").mkdir(parents=True)
    partial = out / "approximate/approximate.partial.jsonl"
    partial.write_text(f"{settings[0]}\n{json.dumps(keep)}\n")
    capsys.readouterr()
    assert command(model, out, "--local_samples", "0") == 0
    assert "all ovo r=1:" not in capsys.readouterr().out
    second = pd.read_csv(out / "approximate/approximate.csv")
    assert second.loc[0, "value"] == 12345.0
    pd.testing.assert_series_equal(second["value"][1:], first["value"][1:])


@pytest.mark.usefixtures("sketches")
@pytest.mark.parametrize("scope", ["layers", "heads"])
def test_the_text_names_the_scope_of_its_table(scope, tmp_path):
    model = checkpoint(tmp_path, "value_aware", "SoftmaxAttention", num_heads=2)
    more = ("--methods", "norm", "--local_samples", "0", "--ranks", "3", "2", "3")
    assert command(model, tmp_path / "out", *more, "--scope", scope) == 0
    table = pd.read_csv(tmp_path / "out/approximate/approximate.csv")
    first = table["scope"].iloc[0]
    assert table.loc[table["scope"] == first, "num_kept"].tolist() == [3, 2]
    text = (tmp_path / "out/approximate/report.md").read_text(encoding="utf-8")
    assert f"scope: {first}" in text
    assert "approximate.csv" in text


def translation_scores(task, batch):
    """−log p of the words of the references, and nothing about wrong ones."""
    names = {"source_mask": batch["source_mask"], "key_mask": batch["key_mask"]}
    hidden = task.model(batch["source"], batch["inputs"], **names)
    log_probs = task.model.logits(hidden).double().log_softmax(-1)
    real = batch["target"] != IGNORE
    return -log_probs[real].gather(-1, batch["target"][real][:, None])[:, 0], None


def squad_scores(task, batch):
    """−log p of the first and the last token of the answer, and whether others are likelier."""
    probs = [logits.double().softmax(-1) for logits in task(batch)]
    right = batch["target"].unbind(-1)
    found = [p.gather(-1, place[:, None])[:, 0] for p, place in zip(probs, right, strict=True)]
    wrong = [p.max(-1).values > one for p, one in zip(probs, found, strict=True)]
    return -torch.cat(found).log(), torch.cat(wrong)


@pytest.mark.usefixtures("sketches")
@pytest.mark.parametrize(
    ("name", "scores"), [("translation", translation_scores), ("squad", squad_scores)]
)
def test_other_tasks_have_the_metric_of_their_targets(name, scores, tmp_path):
    model = checkpoint(tmp_path, name, "SoftmaxAttention", num_heads=2)
    assert command(model, tmp_path / "out", "--methods", "ovo") == 0
    table = pd.read_csv(tmp_path / "out/approximate/approximate.csv")
    trained = opened(model)
    with torch.no_grad():
        (found,) = (scores(trained.task, batch) for batch in trained.batches("test", 4, rows=8))
    losses, wrong = found
    expected = losses.mean().exp() if wrong is None else 100 * wrong.double().mean()
    np.testing.assert_allclose(table["exact"], float(expected), rtol=1e-5)
    assert set(table["words"]) == {len(losses)}


def study(model, out, *more):
    places = ["--checkpoint", str(model), "--out", str(out), "--device", "cpu"]
    own = ["--methods", "ovo", "--local_samples", "0"]
    return main(with_options(["approximate", *places, *own], *more))


def length_of(task, batch):
    if task == "picture":
        return 4**2  # window_size, in tokens
    return max(x.shape[-1] for name, x in batch.items() if name in ("inputs", "source"))


@pytest.mark.usefixtures("sketches")
@pytest.mark.parametrize("name", ["text", "pair", "picture", "translation"])
def test_ranks_go_up_to_the_length_of_sequences(name, tmp_path):
    model = checkpoint(tmp_path, name, "SoftmaxAttention", num_heads=2)
    assert study(model, tmp_path / "out", "--num_samples", "1") == 0
    table = pd.read_csv(tmp_path / "out/approximate/approximate.csv")
    (batch,) = opened(model).batches("test", 1, rows=8)
    length, size = length_of(name, batch), table["value_dim"].iloc[0]
    expected = [r for r in {1, 2, 4, 8, 16, 32, 64, size, size + 1} if r <= length < 65]
    assert table["num_kept"].tolist() == sorted(expected)


@pytest.mark.usefixtures("sketches")
def test_samples_are_those_that_the_split_has(tmp_path):
    model = checkpoint(tmp_path, "translation", "SoftmaxAttention", num_heads=2)
    sizes = ("--num_samples", "5000", "--solver_samples", "4000", "--local_samples", "3000")
    more = ("--methods", "ovo", "ova", "--ranks", "1", "2")
    assert study(model, tmp_path / "out", *more, *sizes) == 0
    assert set(pd.read_csv(tmp_path / "out/approximate/approximate.csv")["samples"]) == {21}
    text = (tmp_path / "out/approximate/report.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(\d+) samples", text.partition("Split")[2])) == {"21"}


def test_fewer_than_no_samples_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        study(tmp_path, tmp_path, "--local_samples", "-1")
    assert stop.value.code == 2
    assert "--local_samples" in capsys.readouterr().err


@pytest.mark.slow
def test_scopes_and_comparison(tmp_path):
    trained_run = train(tmp_path)
    options = ("--methods", "ovo", "ova", "--local_samples", "1")
    assert command(trained_run, tmp_path / "a", *options, "--scope", "layers") == 0
    table = pd.read_csv(tmp_path / "a/approximate/approximate.csv")
    assert set(table["scope"]) == {"layer 1", "layer 2"}
    assert command(trained_run, tmp_path / "b", *options) == 0
    curve = str(trained_run.parents[1])
    status = main(
        [
            *("approximate_compare", "--out", str(tmp_path / "c"), "--runs", f"one={curve}"),
            *("--results", f"a={tmp_path / 'b'}", f"b={tmp_path / 'b'}"),
        ]
    )
    assert status == 0
    text = (tmp_path / "c/approximate_compare/report.md").read_text(encoding="utf-8")
    assert "| keys | a ovo | a ova | b ovo | b ova |" in text
    for part in ("", "_skew", "_curves"):
        assert (tmp_path / f"c/approximate_compare/figures/approximate_compare{part}.png").is_file()


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True])
def test_errors_of_layers_do_not_depend_on_batches(is_causal):
    """Samples of 7 and 12 positions in one padded batch, and each alone; 8 keys are all of one."""
    layer, x, mask = padded_samples()
    together, alone = (LocalErrors([Oblivious(r) for r in (1, 3, 8)], (1,)) for _ in range(2))
    together.core(open_call("layer", layer, x, key_mask=mask, is_causal=is_causal))
    alone.core(open_call("layer", layer, x[:1, :7], is_causal=is_causal))
    alone.core(open_call("layer", layer, x[1:], is_causal=is_causal))
    found, expected = ([*one.rows(), *one.skew_rows()] for one in (together, alone))
    for ours, theirs in zip(found, expected, strict=True):
        numbers = {k: v for k, v in theirs.items() if k != "method"}
        assert {k: ours[k] for k in numbers} == pytest.approx(numbers, rel=1e-9)


def write_results(folder, value, **more):
    """Write the tables of `approximate` with one row each."""
    (folder / "approximate").mkdir(parents=True)
    row = {"scope": "all", "method": "ovo", "num_kept": 1, "status": EXACT, "metric": "perplexity"}
    row |= {"value": value, "exact": 2.0, "rel_error": 0.5, "layer": 1, "head": 1}
    row |= {"effective_support": 3.0, "top_16": 0.5, "samples": 64, "words": 900} | more
    for part in ("", "_skew", "_local"):
        pd.DataFrame([row]).to_csv(folder / f"approximate/approximate{part}.csv", index=False)
    return folder


@pytest.mark.usefixtures("sketches")
@pytest.mark.parametrize(("label", "status"), [("b", 0), ("a", 2)])
def test_models_of_one_label_are_not_merged(label, status, tmp_path, capsys):
    first, second = (write_results(tmp_path / name, x) for name, x in (("one", 3), ("two", 4)))
    more = ["--results", f"a={first}", f"{label}={second}", "--out", str(tmp_path / "out")]
    assert main(["approximate_compare", *more]) == status
    assert ("duplicate label a" in capsys.readouterr().err) == (status == 2)


@pytest.mark.usefixtures("sketches")
@pytest.mark.parametrize(
    ("column", "value"),
    [("scope", "layer 1"), ("metric", "error"), ("samples", 8), ("words", 901)],
)
def test_models_with_different_samples_are_not_compared(column, value, tmp_path):
    first = write_results(tmp_path / "one", 3)
    second = write_results(tmp_path / "two", 4, **{column: value})
    more = ["--results", f"a={first}", f"b={second}", "--out", str(tmp_path / "out")]
    message = error_of(["approximate_compare", *more], main)
    assert f"different {column} (a " in message
    assert f", b {value})" in message


def test_a_comparison_without_results_is_one_line(tmp_path):
    missing = ["--results", f"a={tmp_path}", "--out", str(tmp_path)]
    assert "no approximate.csv" in error_of(["approximate_compare", *missing], main)

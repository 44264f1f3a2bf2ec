"""The command: every study on every kind of task, learning curves, errors in one line."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

from lit_probattn.analysis.__main__ import main
from lit_probattn.analysis.recording import record
from lit_probattn.analysis.registry import STUDIES, load_study
from lit_probattn.analysis.studies import curves
from lit_probattn.base.provenance import place, shown_command
from lit_probattn.records.figures import MAX_BYTES
from tests.analysis.made import checkpoint, open_once, opened
from tests.support.helpers import error_of, with_options
from tests.support.patching import check_figures
from tests.support.slow import mostly_slow

MAPS = ("attention_maps", "rank", "head_distance", "spectrum")
MIXTURES = ("query_likelihood", "responsibilities", "priors")
CASES = {
    "sequence": ("MGKAttention", {"shifted_keys": True, "num_heads": 2}, (*MIXTURES, "keys")),
    "pair": ("MGKAttention", {"e_step": "hard"}, ("responsibilities", "keys", "spectrum")),
    "picture": ("FiSHAttention", {"num_global_heads": None}, (*MAPS, "keys", "priors")),
    "text": ("LinearAttention", {}, (*MAPS, "keys")),
}
SPECIAL = {"spectrum": ["--length", "8"]}


def flags(path: Path, out: Path) -> list[str]:
    return ["--checkpoint", str(path), "--out", str(out), "--device", "cpu"]


@pytest.mark.parametrize(
    ("task", "drawn"),
    mostly_slow(
        [("sequence", "once"), *((task, "whole") for task in CASES)], [("sequence", "once")]
    ),
)
def test_studies_write_table_picture_and_text(task, drawn, tmp_path, monkeypatch, request):
    cls, options, studies = CASES[task]
    if drawn == "once":
        check_figures(monkeypatch)
        studies = studies[::3]
    path = checkpoint(tmp_path, task, cls, **options)
    before = torch.load(path, weights_only=True)["state_dict"]
    for study in studies:
        out = tmp_path / study
        more = [] if study == "priors" else ["--num_samples", "3"]
        assert main([study, *flags(path, tmp_path), *more, *SPECIAL.get(study, [])]) == 0
        assert not pd.read_csv(out / f"{study}.csv").empty
        text = (out / "report.md").read_text(encoding="utf-8")
        assert f"Command: `lit-probattn analyse {study}" in text
        assert "step 7" in text
        assert str(tmp_path) not in text
        pictures = list(out.glob("figures/*.png"))
        assert pictures
        assert all(0 < picture.stat().st_size <= MAX_BYTES for picture in pictures)
        assert all(picture.stem in text for picture in pictures)
        told = {Image.open(picture).text["Description"] for picture in pictures}
        assert all(f"analyse {study} --checkpoint" in t and place() in t for t in told)
        claims = {Image.open(picture).text["Title"] for picture in pictures}
        assert all(f"![{claim}](" in text and re.search(r"\d", claim) for claim in claims)
        assert not list(out.glob("*.jsonl"))
        if drawn == "once":
            request.getfixturevalue("sketches")
    after = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("sketches")
def test_series_of_the_archive(tmp_path):
    pytest.importorskip("aeon")
    path = checkpoint(tmp_path, "series", "SoftmaxAttention")
    assert main(["head_distance", *flags(path, tmp_path / "out"), "--num_samples", "3"]) == 0
    assert len(pd.read_csv(tmp_path / "out" / "head_distance/head_distance.csv")) == 6


@pytest.mark.usefixtures("sketches")
def test_cells_say_what_was_asked_for(tmp_path):
    """Samples, split and length reach the study."""
    path = checkpoint(tmp_path, "sequence", "SoftmaxAttention")
    out = tmp_path / "out"
    more = ["--num_samples", "4", "--max_len", "9", "--split", "test", "--batch_size", "3"]
    assert main(["rank", *flags(path, out), *more]) == 0
    table = pd.read_csv(out / "rank/rank.csv")
    assert (table["num_tokens"] == 9).all()  # all sequences of this task are longer
    assert table["sample"].nunique() == 4
    assert "test split" in (out / "rank/report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", ["sequence", "pair", "picture", "squad"])
def test_models_run_as_in_their_task(task, tmp_path):
    """The attention layers of a study receive the inputs that those of an evaluation receive."""
    path = checkpoint(tmp_path, task, "SoftmaxAttention")
    trained = opened(path)
    for batch in trained.batches("val", 3):
        found = []
        for forward in (trained.forward, trained.task):
            with torch.no_grad(), record(trained.task.model) as calls:
                forward(batch)
            found.append([call.query for call in calls])
        assert len(found[0]) == len(found[1]) > 0
        assert all(map(torch.equal, *found))


def write_run(folder: Path, **columns: list) -> Path:
    folder.mkdir(parents=True)
    names = ["step", *(name.replace("_", "/", 1) for name in columns)]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(
            [10 * (i + 1), *row] for i, row in enumerate(zip(*columns.values(), strict=False))
        )
    return folder


def test_curves_of_several_runs(tmp_path, monkeypatch):
    check_figures(monkeypatch)
    first = write_run(
        tmp_path / "a/0",
        train_loss=[3.0, 2.0, 2.5],
        val_loss=["", 2.2, ""],
        val_accuracy=["", 0.5, 0.4],
        val_bleu=[3.0, 7.0, 6.5],
    )
    second = write_run(tmp_path / "b/1", train_loss=[4.0, 1.0, 0.5], val_loss=["", 2.1, 2.3])
    out = tmp_path / "out"
    command = ["learning_curves", "--runs", f"one={first}", str(second), "--out", str(out)]
    assert main(command) == 0
    long = pd.read_csv(out / "learning_curves/learning_curves.csv")
    assert set(long["run"]) == {"one", "b/1"}
    best = curves.best_values(long).set_index(["run", "metric"])
    assert best.loc[("one", "val/accuracy"), "best"] == 0.5  # larger is better
    assert best.loc[("one", "val/bleu"), "at step"] == 20
    assert best.loc[("one", "train/loss"), "at step"] == 20
    assert best.loc[("b/1", "val/loss"), "last"] == 2.3
    assert (out / "learning_curves/figures/learning_curves.png").stat().st_size > 0


@pytest.mark.parametrize("label", ["", "one", "lr=1"])
def test_a_folder_may_have_an_equals_sign(label, tmp_path):
    folder = write_run(tmp_path / "lr=0.1/0", train_loss=[3.0, 2.0])
    found = curves.read_runs([f"{label}={folder}".lstrip("=")])
    assert set(found["run"]) == {label or "lr=0.1/0"}
    assert found["value"].tolist() == [3.0, 2.0]


@pytest.mark.parametrize("labels", [("", ""), ("a", "a"), ("x/0", "")])
def test_runs_of_one_label_are_not_merged(labels, tmp_path):
    """Folders a/x/0 and b/x/0 have the same label unless one is given."""
    runs = [write_run(tmp_path / name / "x/0", train_loss=[3.0, 2.0]) for name in "ab"]
    named = [f"{label}={run}".lstrip("=") for label, run in zip(labels, runs, strict=True)]
    given = ["learning_curves", "--runs", *named, "--out", str(tmp_path / "out")]
    assert f"duplicate label {labels[0] or 'x/0'}" in error_of(given, main)


@pytest.mark.parametrize(
    "metric",
    [
        *("val/accuracy", "val/accuracy_top5", "val/bleu", "val/bleu_tokenised", "val/f1"),
        *("val/exact_match", "val/best_f1", "val/has_answer_exact_match", "val/score"),
        *("val/return_high", "val/score_low"),
    ],
)
def test_scores_are_best_where_they_are_largest(metric):
    assert curves.grows(metric)


@pytest.mark.parametrize(
    "metric",
    [
        *("train/loss", "val/loss", "val/nll_bits", "val/ppl_segments", "val/mlm_error"),
        *("val/return_std_high", "val/best_f1_threshold", "grad_norm", "lr"),
    ],
)
def test_other_metrics_are_best_where_they_are_smallest(metric):
    assert not curves.grows(metric)


@pytest.mark.usefixtures("sketches")
def test_no_best_value_is_chosen_of_the_test_split(tmp_path):
    columns = {"val_accuracy": [0.5, 0.4], "test_accuracy": [0.6, 0.3]}
    folder, out = write_run(tmp_path / "a/0", **columns), tmp_path / "out"
    assert main(["learning_curves", "--runs", str(folder), "--out", str(out)]) == 0
    long = pd.read_csv(out / "learning_curves/learning_curves.csv")
    assert set(long["metric"]) == {"val/accuracy", "test/accuracy"}  # both are drawn
    best = curves.best_values(long).set_index("metric")
    assert best.loc["val/accuracy", "best"] == 0.5
    assert best.loc["test/accuracy", ["best", "at step"]].isna().all()
    assert best.loc["test/accuracy", "last"] == 0.3
    told = (out / "learning_curves/report.md").read_text(encoding="utf-8")
    assert "run.test_during_training" in told
    assert "0.6" not in told


def test_curves_of_what_was_not_logged(tmp_path):
    run = write_run(tmp_path / "a/0", train_loss=[3.0])
    out = ["--out", str(tmp_path / "out")]
    line = error_of(["learning_curves", "--runs", str(run), "--metrics", "val/f1", *out], main)
    assert "no run logged val/f1; logged: train/loss" in line


def test_wrong_use_is_one_line(tmp_path, monkeypatch):
    open_once(monkeypatch)
    path = checkpoint(tmp_path, "sequence", "LinearFiSHAttention", num_global_heads=2)
    given = flags(path, tmp_path / "out")
    assert "did you mean 'spectrum'" in error_of(["spectrun"], main)
    assert "linear FiSH mixes states" in error_of(["rank", *given], main)
    assert "expected MGKAttention" in error_of(["responsibilities", *given], main)
    assert "needs MGKAttention" in error_of(["query_likelihood", *given], main)
    assert "--num_samples: must be at least 1, received 0" in error_of(
        ["rank", *given, "--num_samples", "0"], main
    )
    assert "--data.seed: expected a value" in error_of(["rank", *given, "--data.seed"], main)
    assert "--data.seed: expected a value" in error_of(["rank", *given, "--data.seed="], main)
    line = error_of(["rank", *given, "--data.min_length", "[1"], main)
    assert "min_length" in line
    assert "[1" in line
    assert "--seed: must be at least 0, received -1" in error_of(
        ["rank", *given, "--seed", "-1"], main
    )
    assert "num_trian" in error_of(["rank", *given, "--data.num_trian", "3"], main)
    assert "unknown device" in error_of(["rank", *with_options(given, "--device", "tpus")], main)
    assert "must be positive" in error_of(["rank", *given, "--threshold", "0"], main)
    missing = [*flags(tmp_path / "no.ckpt", tmp_path), "--num_samples", "1"]
    assert "checkpoint not found" in error_of(["rank", *missing], main)
    config = path.parent.parent / "config.yaml"
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    content["model"]["init_args"]["embed_dim"] = 12
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(content))
    line = error_of(["rank", *given, "--config", str(other)], main)
    assert "does not match the configuration" in line
    config.unlink()
    line_without = error_of(["rank", *given, "--data.seed", "1"], main)
    assert "pass --config runs/NAME/0/config.yaml" in line_without
    assert "size mismatch" in line


@pytest.mark.parametrize(
    ("task", "study"),
    [
        *(("translation", study) for study in (*MAPS, *MIXTURES[:2], "logit_ranks")),
        *(("decision", study) for study in ("rank", "approximate")),
    ],
)
def test_models_of_other_inputs_are_refused_in_one_line(task, study, tmp_path, monkeypatch):
    open_once(monkeypatch)
    path = checkpoint(tmp_path, task, "MGKAttention")
    name = {"translation": "Translation", "decision": "DecisionMaking"}[task]
    assert name in error_of([study, *flags(path, tmp_path / "out")], main)


def test_cuda_that_is_not_there(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    path = checkpoint(tmp_path, "sequence", "SoftmaxAttention")
    given = with_options(flags(path, tmp_path), "--device", "cuda")
    assert "use --device cpu" in error_of(["rank", *given], main)


@pytest.mark.usefixtures("sketches")
def test_task_and_attention_files_stand_in_for_a_run_config(tmp_path):
    path = checkpoint(tmp_path, "sequence", "SoftmaxAttention")
    config = yaml.safe_load((path.parent.parent / "config.yaml").read_text(encoding="utf-8"))
    attention = {"attention": config["model"]["init_args"].pop("attention")}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "attention.yaml").write_text(yaml.safe_dump({"model": {"init_args": attention}}))
    files = ["--config", str(tmp_path / "task.yaml"), "--config", str(tmp_path / "attention.yaml")]
    (path.parent.parent / "config.yaml").unlink()
    assert main(["rank", *flags(path, tmp_path / "out"), "--num_samples", "2", *files]) == 0


def test_overview_lists_every_study(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in STUDIES)


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_its_name_and_a_help_that_suffices(study, capsys):
    assert load_study(study).name == study
    with pytest.raises(SystemExit) as stop:
        main([study, "--help"])
    assert stop.value.code == 0
    assert "--out" in capsys.readouterr().out


def test_a_study_that_is_interrupted_ends_with_one_line(tmp_path, monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_probattn.analysis.studies.curves.Curves.run", interrupted)
    assert main(["learning_curves", "--runs", "a", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "error: stopped by SIGINT\n"


def test_commands_are_shown_without_absolute_paths():
    words = ["rank", "--out", "/a/b/c", "x=/d/e", "--data", "k=v w", "/f/lr=0.1/g", "--set=y=/h/i"]
    words.append(f"--here={Path.cwd() / 'j' / 'k'}")
    assert shown_command(words) == "rank --out c x=e --data 'k=v w' g --set=y=i --here=j/k"

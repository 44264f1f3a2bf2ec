"""The study of translations on tiny runs: its report, what it keeps, what it refuses."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest

from lit_probattn.analysis.__main__ import main
from lit_probattn.analysis.translations import decoded
from lit_probattn.analysis.translations.study import drawn
from lit_probattn.tasks.bleu import FORMS
from tests.analysis.made import checkpoint, open_once, train_translator, translator
from tests.support.helpers import error_of
from tests.support.patching import check_figures
from tests.support.runs import run

pytest.importorskip("sacrebleu")
NAMES = ("softmax", "smgk")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    smgk = train_translator(folder, 8, "MGKAttention", shifted_keys=True)
    return dict(zip(NAMES, (translator(), smgk), strict=True))


@pytest.fixture(autouse=True)
def _open_once(monkeypatch):
    open_once(monkeypatch)


@pytest.fixture(autouse=True)
def _sketches_of_fast_tests(request):
    if request.node.get_closest_marker("slow") is None:
        request.getfixturevalue("sketches")


def study(runs, out, *more):
    named = [f"{name}={folder}" for name, folder in runs.items()]
    return main(["translations", "--runs", *named, "--out", str(out), "--device", "cpu", *more])


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        check_figures(patch)
        assert study(runs, out, "--resamples", "50") == 0
    return out


def test_scores_are_those_of_the_test_command(runs, written):
    """Every form, to the last digit, with its signature; the other model has other scores."""
    scores = pd.read_csv(written / "translations/translations.csv").set_index(["form", "model"])
    folder = runs["softmax"]
    run(["test", "--config", str(folder / "config.yaml"), "--ckpt_path", "best"])
    (result,) = folder.glob("test-*.json")
    told = json.loads(result.read_text(encoding="utf-8"))
    for form in FORMS:
        found, expected = scores.loc[(form, "softmax")], told["bleu"][form]
        assert found["bleu"] == pytest.approx(expected["score"], rel=1e-5)
        assert found["signature"] == expected["signature"]
        assert found["precision_1"] == pytest.approx(expected["precisions"][0], rel=1e-5)
    ours, others = (scores.xs(name, level="model")["bleu"].tolist() for name in NAMES)
    assert max(ours) > 1  # something to compare
    assert ours != others


def test_report_begins_with_copying(runs, written):
    text = (written / "translations/report.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[7].startswith("Finding: ")
    assert "copying the source (BLEU 0.00, detokenised)" in lines[7]
    told = [line for line in lines[8:14] if line.startswith("- ")]
    assert [line.split(":")[0] for line in told] == ["- softmax", "- smgk"]
    assert all("copying the source is" in line for line in told)
    assert "against softmax" in told[1]
    pictures = {path.name for path in written.glob("translations/figures/*.png")}
    assert pictures == {f"translations{part}.png" for part in ("", "_curves", "_lengths")}
    assert all(name.removesuffix(".png") in text for name in pictures)


def test_copying_the_source_scores_no_changed_word(written):
    scores = pd.read_csv(written / "translations/translations.csv").set_index(["form", "model"])
    copied = scores.loc[("detokenised", "copying the source")]
    assert copied["changed_f1"] == copied["changed_f1_high"] == 0.0
    assert (scores.loc["detokenised"].loc[list(NAMES), "changed_f1"] > 0).all()
    assert copied["signature"].count("tok:13a") == 1


def test_a_second_call_decodes_only_what_an_interrupted_one_left(
    runs, written, tmp_path, monkeypatch
):
    """One model is complete, the other has three sentences; the report is that of one call."""
    out = tmp_path / "out"
    shutil.copytree(written, out)
    kept = out / "translations/decoded" / "smgk.jsonl"
    whole = kept.read_text(encoding="utf-8").splitlines()
    kept.write_text("".join(f"{line}\n" for line in whole[:4]))  # settings and three sentences
    counted = []
    translate = decoded._translate

    def counting(trained, rows):
        counted.extend(rows["sample_ids"].tolist())
        return translate(trained, rows)

    monkeypatch.setattr(decoded, "_translate", counting)
    assert study(runs, out, "--resamples", "50") == 0
    assert len(counted) == len(set(counted)) == 8
    assert sorted(kept.read_text(encoding="utf-8").splitlines()[1:]) == sorted(whole[1:])
    same = [
        (folder / "translations/report.md").read_text(encoding="utf-8").splitlines()[4:]
        for folder in (out, written)
    ]
    assert same[0] == same[1]


def test_drawn_sentences_are_shown_with_all_translations(runs, written, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(written, out)
    shown = drawn(11, 4, seed=5)
    assert study(runs, out, "--resamples", "2", "--num_shown", "4", "--seed", "5") == 0
    text = (out / "translations/report.md").read_text(encoding="utf-8")
    parts = text.partition("## Sample translations")[2].split("Sentence ")[1:]
    assert [int(part.split()[0]) for part in parts] == shown
    assert all("- **smgk**: " in part for part in parts)
    pairs = [line for part in parts for line in part.splitlines() if "- source: " in line]
    assert len(set(pairs)) == 4


@pytest.mark.slow
def test_its_figures_can_be_drawn(runs, tmp_path):
    assert study(runs, tmp_path, "--resamples", "2", "--num_shown", "0") == 0
    for part in ("", "_curves", "_lengths"):
        assert (tmp_path / f"translations/figures/translations{part}.png").stat().st_size > 10_000


def test_what_is_drawn_follows_the_seed():
    assert drawn(1249, 20, 0) == drawn(1249, 20, 0) != drawn(1249, 20, 1)
    assert drawn(3, 20, 0) == [1, 2, 3]


def test_duplicate_labels_and_runs_of_other_tasks_are_one_line(runs, tmp_path, capsys):
    out, softmax = tmp_path / "out", str(runs["softmax"])
    line = error_of(["translations", "--runs", softmax, softmax, "--out", str(out)], main)
    assert "duplicate label translation_tiny-variant/0" in line
    other = checkpoint(tmp_path, "sequence", "SoftmaxAttention").parents[1]
    (other / "metrics.csv").write_text("step,train/loss\n1,2.0\n")
    assert study({"a": other}, out) == 2
    told = capsys.readouterr().err
    assert "is a run of SequenceClassifier, which does not translate" in told


def test_the_mean_of_checkpoints_is_a_model_of_its_own(runs, tmp_path):
    """Its curves are those of its run."""
    mean = {"mean": runs["softmax"] / "average-2"}
    assert study(mean, tmp_path, "--resamples", "2", "--split", "val", "--num_shown", "0") == 0
    text = (tmp_path / "translations/report.md").read_text(encoding="utf-8")
    assert "sentences of the val split" in text
    assert "average-2-00000016.ckpt" in text
    assert "## Sample translations" not in text

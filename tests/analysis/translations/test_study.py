"""The study of translations on tiny runs: its report, what it keeps, what it refuses."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
import yaml

from lit_probattn.analysis.__main__ import main
from lit_probattn.analysis.translations import decoded
from lit_probattn.analysis.translations.study import drawn
from lit_probattn.tasks.bleu import FORMS
from tests.support.patching import draw_once
from tests.support.paths import ROOT
from tests.support.runs import arguments, only_version, run, write_attention

pytest.importorskip("sacrebleu")
pytestmark = pytest.mark.usefixtures("sketches")
TASK = ROOT / "configs/tasks/tiny/translation.yaml"
NAMES = ("softmax", "smgk")


def train(folder, *more, cls="SoftmaxAttention", **attention):
    """Train the tiny task in `folder`/runs; return the run folder."""
    folder.mkdir(exist_ok=True)
    run(
        [
            *("fit", "--config", str(TASK)),
            *("--config", write_attention(folder, cls, **attention)),
            *("--run.root", str(folder / "runs"), "--trainer.accelerator", "cpu"),
            *("--trainer.devices", "1", "--trainer.enable_progress_bar", "false"),
            *("--data.init_args.cache_dir", str(folder.parent / "cache"), *more),
        ]
    )
    return only_version(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    steps = ("--trainer.max_steps", "16", "--trainer.val_check_interval", "8")
    steps += ("--model.init_args.lr", "0.02", "--run.checkpoint_every", "8")
    softmax = train(folder / "a", *steps)
    smgk = train(folder / "b", *steps, cls="MGKAttention", shifted_keys=True)
    return dict(zip(NAMES, (softmax, smgk), strict=True))


def study(runs, out, *more):
    named = [f"{name}={folder}" for name, folder in runs.items()]
    return main(["translations", "--runs", *named, "--out", str(out), "--device", "cpu", *more])


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        draw_once(patch)
        assert study(runs, out, "--resamples", "50") == 0
    return out


def test_scores_are_those_of_the_test_command(runs, written):
    """Both decode: every form, to the last digit, with its signature."""
    scores = pd.read_csv(written / "translations.csv").set_index(["form", "model"])
    best = 0.0
    for name, folder in runs.items():
        config = str(folder / "config.yaml")
        run(["test", "--config", config, "--ckpt_path", "best"])
        (result,) = folder.glob("test-*.json")
        told = json.loads(result.read_text(encoding="utf-8"))
        for form in FORMS:
            found, expected = scores.loc[(form, name)], told["bleu"][form]
            assert found["bleu"] == pytest.approx(expected["score"], rel=1e-5)
            assert found["signature"] == expected["signature"]
            assert found["precision_1"] == pytest.approx(expected["precisions"][0], rel=1e-5)
            best = max(best, expected["score"])
    assert best > 1  # something to compare


def test_report_begins_with_copying(runs, written):
    text = (written / "translations.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[5].startswith("Finding: ")
    assert "copying the source (BLEU 0.00, detokenised)" in lines[5]
    told = [line for line in lines[6:12] if line.startswith("- ")]
    assert [line.split(":")[0] for line in told] == ["- softmax", "- smgk"]
    assert all("copying the source is" in line for line in told)
    assert "against softmax" in told[1]
    pictures = {path.name for path in written.glob("*.png")}
    assert pictures == {f"translations{part}.png" for part in ("", "_curves", "_lengths")}
    assert all(f"]({name})" in text for name in pictures)


def test_copying_the_source_scores_no_changed_word(written):
    scores = pd.read_csv(written / "translations.csv").set_index(["form", "model"])
    copied = scores.loc[("detokenised", "copying the source")]
    assert copied["changed_f1"] == copied["changed_f1_high"] == 0.0
    assert (scores.loc["detokenised"].loc[list(NAMES), "changed_f1"] > 0).all()
    assert copied["signature"].count("tok:13a") == 1


def test_a_second_call_decodes_nothing_and_an_interrupted_one_the_rest(
    runs, written, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    shutil.copytree(written, out)
    asked = []
    monkeypatch.setattr(decoded, "_translate", lambda *given: asked.append(given))
    assert study(runs, out, "--resamples", "50") == 0
    assert not asked
    same = [
        (folder / "translations.md").read_text(encoding="utf-8").splitlines()[4:]
        for folder in (out, written)
    ]
    assert same[0] == same[1]
    monkeypatch.undo()
    kept = out / "translations_decoded" / "smgk.jsonl"
    whole = kept.read_text(encoding="utf-8").splitlines()
    kept.write_text("".join(f"{line}\n" for line in whole[:4]))  # settings and three sentences
    counted = []
    translate = decoded._translate

    def counting(trained, rows):
        counted.extend(rows["sample_ids"].tolist())
        return translate(trained, rows)

    monkeypatch.setattr(decoded, "_translate", counting)
    assert study(runs, out, "--resamples", "50") == 0
    assert len(counted) == len(set(counted)) == 18
    assert sorted(kept.read_text(encoding="utf-8").splitlines()[1:]) == sorted(whole[1:])


def test_remarks_stand_below_their_sentences(runs, written, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(written, out)
    shown = drawn(21, 4, seed=5)
    remarks = tmp_path / "remarks.csv"
    remarks.write_text(f'sentence,remark\n{shown[1]},"no | verb, no end"\n')
    more = ("--resamples", "2", "--num_shown", "4", "--seed", "5", "--remarks", str(remarks))
    assert study(runs, out, *more) == 0
    text = (out / "translations.md").read_text(encoding="utf-8")
    parts = text.partition("## Sample translations")[2].split("Sentence ")[1:]
    assert [int(part.split()[0]) for part in parts] == shown
    assert [part.rstrip().splitlines()[-1] for part in parts] == [
        "- remark:",
        "- remark: no \\| verb, no end",
        *["- remark:"] * 2,
    ]
    assert "- **smgk**: " in parts[0]
    pairs = [line for part in parts for line in part.splitlines() if "- source: " in line]
    assert len(set(pairs)) == 4
    absent = next(number for number in range(1, 22) if number not in shown)
    for content, message in (
        (f"{absent},x", f"sentence {absent} is not among the shown ones"),
        ("one,x", "expected a unique number and a remark"),
        (f"{shown[0]},x\n{shown[0]},y", "expected a unique number and a remark"),
        (f"{shown[0]},x,y", "quoted if it contains commas"),
    ):
        remarks.write_text(f"sentence,remark\n{content}\n")
        assert study(runs, out, *more) == 2
        assert message in capsys.readouterr().err
    for content, message in (
        (b"", "with the columns sentence,remark, received nothing"),
        (b"number,remark\n", "received number,remark"),
        (b"\xff", "cannot be read"),
    ):
        remarks.write_bytes(content)
        assert study(runs, out, *more) == 2
        assert message in capsys.readouterr().err


def test_what_is_drawn_follows_the_seed():
    assert drawn(1249, 20, 0) == drawn(1249, 20, 0) != drawn(1249, 20, 1)
    assert drawn(3, 20, 0) == [1, 2, 3]


# ---- errors ------------------------------------------------------------------------------------


def refused(capsys, runs, out, *more):
    assert study(runs, out, *more) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: ")
    return line


def test_runs_that_do_not_go_together_are_one_line(runs, tmp_path, capsys):
    out = tmp_path / "out"
    softmax = runs["softmax"]
    copy = tmp_path / "copied" / "0"
    shutil.copytree(softmax, copy)
    config = yaml.safe_load((copy / "config.yaml").read_text(encoding="utf-8"))
    config["data"]["init_args"]["num_test"] = 9
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    line = refused(capsys, {"a": softmax, "b": copy}, out)
    assert "b and a have different test splits (9 pairs and 21)" in line
    (copy / "metrics.csv").unlink()
    line = refused(capsys, {"a": softmax, "b": copy}, out)
    assert f"no metrics.csv in {copy}" in line
    line = refused(capsys, {"a": softmax, "b": tmp_path / "none"}, out)
    assert "checkpoint not found" in line
    status = main(["translations", "--runs", str(softmax), str(softmax), "--out", str(out)])
    assert status == 2
    assert "duplicate label translation_tiny-variant/0" in capsys.readouterr().err


def test_runs_of_other_tasks_are_refused(tmp_path, capsys):
    run(arguments("fit", tmp_path, "--trainer.max_steps", "1"))
    line = refused(capsys, {"a": only_version(tmp_path)}, tmp_path / "out")
    assert "is a run of SequenceClassifier, which does not translate" in line


def test_the_mean_of_checkpoints_is_a_model_of_its_own(runs, tmp_path):
    """Its curves are those of its run."""
    both = {"best": runs["softmax"], "mean": runs["softmax"] / "average-2"}
    assert study(both, tmp_path, "--resamples", "2", "--split", "val", "--num_shown", "0") == 0
    text = (tmp_path / "translations.md").read_text(encoding="utf-8")
    assert "sentences of the val split" in text
    assert "average-2-00000016.ckpt" in text
    assert "## Sample translations" not in text

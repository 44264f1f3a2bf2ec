"""A number is kept under what it is about: configuration, data, part of the split."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import read_yaml
from lit_probattn.training.callbacks import PredictionWriter, predictions_frame
from lit_probattn.training.evaluation import (
    SampleCount,
    Scope,
    differences,
    limit_of,
    reject_other_attention,
)
from lit_probattn.training.trained import open_trained
from tests.support.helpers import error_of
from tests.support.runs import only_version, rewound, run, stateful
from tests.support.slow import mostly_slow

OWN = "test-step-00000006.json"


@pytest.fixture(scope="module")
def trained(uninterrupted, tmp_path_factory):
    """A folder with a run, and the result of its test."""
    folder = tmp_path_factory.mktemp("trained")
    rewound(uninterrupted, 6, folder)
    run(stateful("test", folder, "--ckpt_path", "last"))
    return folder


@pytest.mark.parametrize(("right", "above"), [(17, False), (18, True)])
def test_chance_is_the_most_frequent_label(right, above, monkeypatch):
    """12 of 30 are of class 1: 0.4, and 1.96 standard errors of 0.0894 are 0.1753; 17.3 of 30.

    Two ranks have the batches in turn.
    """
    samples, other, sent = SampleCount(), SampleCount(), []
    for first in range(0, 30, 7):
        ids = torch.arange(first, first + 7)
        target = (ids % 5 < 2).long() + 2 * (ids % 5 > 3).long()
        batch = {"sample_ids": torch.where(ids < 30, ids, -1), "target": target}
        (samples, other)[first % 2].on_test_batch_end(None, None, None, batch)
    gather = "lit_probattn.training.evaluation.gather_objects"
    monkeypatch.setattr(gather, lambda own: sent.append(own) or [own])
    other.on_test_end()
    monkeypatch.setattr(gather, lambda own: [own, sent.pop(0)])
    samples.on_test_end()
    assert samples.count == 30
    assert samples.most_frequent_label == 0.4
    assert samples.above_chance(right / 30) is above
    assert "gives 0.4000, and with 30 samples only an accuracy above 0.5753" in samples.chance()


def test_few_samples_can_make_every_accuracy_chance():
    """2 of 3, and 1.96 standard errors of 0.2722: above 1."""
    samples, target = SampleCount(), torch.tensor([0, 1, 1])
    samples.on_test_batch_end(None, None, None, {"sample_ids": torch.arange(3), "target": target})
    assert samples.above_chance(1.0) is False
    assert "with 3 samples no accuracy differs" in samples.chance()


@pytest.mark.parametrize("target", [torch.zeros(3, 5, dtype=torch.long), torch.zeros(3), None])
def test_samples_of_many_labels_or_none_have_no_chance(target):
    samples = SampleCount()
    samples.on_test_batch_end(None, None, None, {"sample_ids": torch.arange(3), "target": target})
    assert samples.count == 3
    assert samples.above_chance(0.0) is None


def results(trained) -> dict[str, dict]:
    """Content of every result file, the run's own first."""
    paths = sorted(only_version(trained).glob("test-*.json"), key=lambda path: len(path.name))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def test_a_result_says_what_it_is_about(trained):
    own = results(trained)[OWN]
    assert own["num_samples"] == 21
    assert own["limit_batches"] is None
    assert own["attention"] == "lit_probattn.attention.MGKAttention"
    assert own["differs_from_run"] == {}
    assert own["test_during_training"] is None


@pytest.mark.parametrize(
    ("more", "differs", "limit", "count"),
    [
        (("--data.init_args.min_length", "40"), {"data.init_args.min_length": 40}, None, 21),
        # Files of predictions have such names, too: below.
        pytest.param(("--trainer.limit_test_batches", "1"), {}, 1, 4, marks=pytest.mark.slow),
        pytest.param(("--trainer.fast_dev_run", "true"), {}, 1, 4, marks=pytest.mark.slow),
    ],
    ids=["other-data", "limit", "fast-dev-run"],
)
def test_other_numbers_do_not_replace_the_runs_own(trained, capsys, more, differs, limit, count):
    before = results(trained)
    run(stateful("test", trained, "--ckpt_path", "last", *more))
    told = capsys.readouterr().out
    after = results(trained)
    path = next(line for line in told.splitlines() if line.startswith("results: ")).split("/")[-1]
    assert path != OWN
    assert after[OWN] == before[OWN]
    assert (after[path]["differs_from_run"], after[path]["limit_batches"]) == (differs, limit)
    assert after[path]["num_samples"] == count
    for key in differs:
        assert f"the configuration differs from {only_version(trained)} in {key}: results" in told


@pytest.mark.parametrize("name", mostly_slow(["test", "validate", "predict"], ["test"]))
def test_another_attention_is_refused(trained, tmp_path, name):
    other = "--model.init_args.attention.init_args.num_components=3"
    line = error_of(stateful(name, trained, "--ckpt_path", "best", other))
    assert "different: model.init_args.attention.init_args.num_components): pass --" in line
    assert line.endswith(str(only_version(trained) / "config.yaml"))


@pytest.mark.parametrize(
    ("key", "value"), [("attention.init_args.e_step", "hard"), ("head_dim", 1)]
)
def test_a_copied_checkpoint_knows_its_attention(trained, tmp_path, key, value):
    folder = only_version(trained)
    path = Path(shutil.copy(folder / "checkpoints/step-00000006.ckpt", tmp_path / "x.ckpt"))
    config = read_yaml(folder / "config.yaml")
    assert differences(path, config, dict) == {}
    *parents, name = ["model", "init_args", *key.split(".")]
    functools.reduce(dict.__getitem__, parents, config)[name] = value
    with pytest.raises(ConfigError, match=rf"different: model\.init_args\.{re.escape(key)}\)"):
        differences(path, config, dict)
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(config))
    options = {"checkpoint": path, "config": [other], "data": [], "device": "cpu"}
    with pytest.raises(ConfigError, match=rf"different: model\.init_args\.{re.escape(key)}\)"):
        open_trained(argparse.Namespace(**options))


SOFTMAX = "lit_probattn.attention.SoftmaxAttention"


@pytest.mark.parametrize(
    "given",
    [
        {"attention": {"class_path": SOFTMAX}},
        {"attention": {"class_path": SOFTMAX, "init_args": {}}, "head_dim": 32},
        {"attention": "SoftmaxAttention"},
    ],
)
def test_a_configuration_of_a_copied_checkpoint_may_leave_defaults_out(given):
    """Files have what their author wrote; checkpoints have all arguments."""
    attention = {"class_path": SOFTMAX, "init_args": {"bias": True, "score": "dot"}}
    content = {"hyper_parameters": {"attention": attention, "head_dim": 32}}
    model = {"class_path": "lit_probattn.tasks.SequenceClassifier", "init_args": given}
    reject_other_attention(Path("x.ckpt"), content, {"model": model})


def test_a_copied_checkpoint_without_attention_of_its_encoder_refuses_one():
    attention = {"class_path": SOFTMAX, "init_args": {"num_heads": 8}}
    linear = {"class_path": "lit_probattn.attention.LinearAttention"}
    content = {"hyper_parameters": {"attention": attention, "encoder_attention": None}}
    arguments = {"attention": attention, "encoder_attention": linear}
    config = {"model": {"class_path": "lit_probattn.tasks.Translation", "init_args": arguments}}
    with pytest.raises(ConfigError, match=r"different: .*encoder_attention\.class_path\)"):
        reject_other_attention(Path("x.ckpt"), content, config)


def test_an_edited_configuration_is_not_the_runs_own(uninterrupted, tmp_path):
    """Results of another one have other names: above."""
    folder = rewound(uninterrupted, 6, tmp_path)
    own = folder / "config.yaml"
    text = own.read_text(encoding="utf-8")
    edited = text.replace("e_step: soft", "e_step: hard")
    assert edited != text
    own.write_text(edited)
    checkpoint = folder / "checkpoints/step-00000006.ckpt"
    with pytest.raises(ConfigError, match=r"attention\.init_args\.e_step.* was edited since; rest"):
        differences(checkpoint, read_yaml(own), dict)
    own.write_text(text.replace("seed_everything: ", "seed_everything: 1"))
    assert differences(checkpoint, read_yaml(own), dict) == {"seed_everything": 10}


@pytest.mark.parametrize("name", ["test", "validate", "predict"])
def test_a_limit_that_leaves_nothing_is_refused(name):
    key = f"limit_{name.replace('validate', 'val')}_batches"
    limits = {f"limit_{other}_batches": 1.0 for other in ("test", "val", "predict")}
    assert limit_of(SimpleNamespace(**limits), name) is None
    with pytest.raises(ConfigError, match=f"{key} must be positive, received 0"):
        limit_of(SimpleNamespace(**{**limits, key: 0}), name)


def test_predictions_of_a_part_have_a_name_of_their_own(trained):
    """Those of a whole split: tests/cli/test_app.py."""
    part = ("--trainer.limit_predict_batches", "1")
    run(stateful("predict", trained, "--ckpt_path", "last", *part))
    (path,) = only_version(trained).glob("predictions-*")
    assert path.name != "predictions-step-00000006.parquet"
    assert len(pd.read_parquet(path)) == 4


def test_predictions_of_all_ranks_are_one_table_in_the_order_of_samples(tmp_path, monkeypatch):
    def rows(*ids):
        return {"sample_id": torch.tensor(ids), "target": torch.tensor(ids) * 10.0}

    other = predictions_frame([rows(1), rows(3)])
    monkeypatch.setattr("lit_probattn.training.callbacks.gather_objects", lambda own: [own, other])
    writer = PredictionWriter(tmp_path / "predictions.parquet")
    for outputs in (rows(0, 2), rows(4)):
        writer.on_predict_batch_end(None, None, outputs)
    writer.on_predict_end(SimpleNamespace(is_global_zero=True), None)
    table = pd.read_parquet(tmp_path / "predictions.parquet")
    assert table["sample_id"].tolist() == [0, 1, 2, 3, 4]
    assert table["target"].tolist() == [0, 10, 20, 30, 40]
    assert table["target"].dtype == np.float32  # as it was given
    writer.on_predict_batch_end(None, None, rows(2))
    writer.on_predict_end(SimpleNamespace(is_global_zero=True), None)
    again = pd.read_parquet(tmp_path / "predictions.parquet")
    assert again["sample_id"].tolist() == [1, 2, 3]  # nothing of the first prediction


def test_what_decides_no_score_is_no_difference(trained):
    """Nor an option that the run's version did not have."""
    folder = only_version(trained)
    now = read_yaml(folder / "config.yaml")
    attention = now["model"]["init_args"]["attention"]["init_args"]
    attention |= {"brand_new": 3, "backend": "reference"}
    now["model"]["init_args"]["lr"] = 0.5
    now["data"]["init_args"]["eval_batch_size"] = 3
    checkpoint = folder / "checkpoints/step-00000006.ckpt"
    assert differences(checkpoint, now, dict) == {}
    now["seed_everything"] = 7
    assert differences(checkpoint, now, dict) == {"seed_everything": 7}
    del attention["brand_new"]
    converted = shutil.copy(checkpoint, folder / "checkpoints/converted.ckpt")
    assert differences(Path(converted), now, dict) == {}


@pytest.mark.parametrize("key", ["batch_size", "eval_batch_size"])
def test_batch_sizes_are_differences_if_a_part_of_the_split_is_scored(trained, key):
    folder = only_version(trained)
    now = read_yaml(folder / "config.yaml")
    checkpoint = folder / "checkpoints/step-00000006.ckpt"
    assert differences(checkpoint, now, dict, limit=2) == {}
    now["data"]["init_args"][key] = 3
    assert differences(checkpoint, now, dict, limit=2) == {f"data.init_args.{key}": 3}
    assert differences(checkpoint, now, dict) == {}
    now["data"]["init_args"]["parity_eval"] = 4
    assert differences(checkpoint, now, dict)[f"data.init_args.{key}"] == 3


def test_accumulation_is_a_difference_if_a_part_of_the_split_is_scored(trained):
    """It divides batch_size, the default of eval_batch_size."""
    folder = only_version(trained)
    now = read_yaml(folder / "config.yaml")
    key, checkpoint = "accumulate_grad_batches", folder / "checkpoints/step-00000006.ckpt"
    now["trainer"][key] = 3
    assert differences(checkpoint, now, dict) == {}
    assert differences(checkpoint, now, dict, limit=2) == {f"trainer.{key}": 3}


def test_a_part_depends_on_the_number_of_processes(tmp_path):
    ranks = (SimpleNamespace(limit_test_batches=2, world_size=count) for count in (1, 2))
    paths = [Scope.of(trainer, "test").path(tmp_path, "test", ".json") for trainer in ranks]
    assert paths[0] != paths[1]
    whole = SimpleNamespace(limit_test_batches=1.0, world_size=2)
    assert Scope.of(whole, "test").path(tmp_path, "test", ".json").name == "test.json"


@pytest.mark.parametrize(
    ("option", "decides"),
    [
        ("attention.init_args.default.init_args.backend", False),
        ("attention.init_args.layers.1.init_args.dropout", False),
        ("encoder_attention.init_args.backend", False),
        ("attention_dropout", False),
        ("attention_bias", True),
        ("attention.init_args.layers.1.init_args.num_heads", True),
    ],
)
def test_backends_and_dropout_of_any_attention_decide_no_score(option, decides, tmp_path):
    def configured(value):
        *parents, last = f"model.init_args.{option}".split(".")
        found = {last: value}
        for parent in reversed(parents):
            found = {parent: found}
        return found

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(configured(1)), encoding="utf-8")
    checkpoint = tmp_path / "checkpoints/step-00000006.ckpt"
    if decides:
        with pytest.raises(ConfigError, match=option):
            differences(checkpoint, configured(2), dict)
    else:
        assert differences(checkpoint, configured(2), dict) == {}


def test_the_version_with_this_configuration_is_scored(trained, tmp_path, capsys):
    """Seeds share a name: a test of one does not take the weights of another."""
    first = rewound(only_version(trained), 6, tmp_path)
    second = Path(shutil.copytree(first, first.parent / "1"))
    for path in (second / "config.yaml", second / "versions.json"):
        text = path.read_text(encoding="utf-8")
        assert "seed_everything: 0" in text
        later = text.replace('"started": "20', '"started": "21')
        path.write_text(later.replace("seed_everything: 0", "seed_everything: 1"))
    run(stateful("test", tmp_path, "--ckpt_path", "last"))
    assert f"lra_text_tiny-variant/0/{OWN}" in capsys.readouterr().out


def test_new_texts_are_predicted_by_a_run(tmp_path, capsys):
    """Named by their labels; scores of labelled ones; each file has results under its name."""
    texts = [f"{'alpha' if n % 2 else 'beta'} {n}" for n in range(60)]
    table = pd.DataFrame({"text": texts, "label": ["odd" if n % 2 else "even" for n in range(60)]})
    table.to_csv(tmp_path / "mine.csv", index=False)
    table[["text"]][:7].to_csv(tmp_path / "new.csv", index=False)
    table[:5].to_csv(tmp_path / "labelled.csv", index=False)
    data = [f"--data.path={tmp_path / 'mine.csv'}", "--data.tokens=words", "--data.min_count=1"]
    model = ["--model.embed_dim=8", "--model.head_dim=4", "--model.mlp_dim=8"]
    place = [f"--run.root={tmp_path / 'runs'}", "--trainer.accelerator=cpu", "--steps=2"]
    run(["fit", "--task=own_texts", "--attention=softmax", *data, *model, *place])
    version = only_version(tmp_path)
    given = [f"--config={version / 'config.yaml'}", "--ckpt_path=last"]
    for command, name in (("predict", "new"), ("predict", "labelled"), ("test", "labelled")):
        run([command, *given, f"--data.new_path={tmp_path / name}.csv"])
    told = capsys.readouterr().out
    assert re.findall(r"predictions: .*/predictions-\S+\.parquet \((.*)\)\n", told) == [
        "7 samples of new.csv",
        "5 samples of labelled.csv",
    ]
    new, labelled = sorted(map(pd.read_parquet, version.glob("predictions-*")), key=len)[::-1]
    assert new["target"].isna().all()
    assert len(new) == 7
    assert labelled["target"].tolist() == [0, 1, 0, 1, 0]
    assert labelled["predicted_label"].tolist() == [
        ["even", "odd"][number] for number in labelled["prediction"]
    ]
    np.testing.assert_allclose(new["probability_0"][:5], labelled["probability_0"], rtol=1e-5)
    (path,) = version.glob("test-*.json")
    report = json.loads(path.read_text(encoding="utf-8"))
    right = (labelled["target"] == labelled["prediction"]).mean()
    assert report["test/accuracy"] == pytest.approx(right)
    words = ["test", *given, f"--data.new_path={tmp_path / 'new.csv'}"]
    assert "has no labels" in error_of(words, alone=False)
    table[5:9].to_csv(tmp_path / "labelled.csv", index=False)
    run(["predict", *given, f"--data.new_path={tmp_path / 'labelled.csv'}"])
    sizes = sorted(len(pd.read_parquet(found)) for found in version.glob("predictions-*"))
    assert sizes == [4, 5, 7]  # the changed file did not replace the results of the earlier one
    table["text"] += " gamma"
    table.to_csv(tmp_path / "other.csv", index=False)
    words = ["predict", *given, f"--data.path={tmp_path / 'other.csv'}"]
    assert "with another vocabulary of words than that of" in error_of(words, alone=False)
    run(["predict", *given, "--data.predict_split=val"])
    assert re.search(r"\.parquet \(\d+ samples of the val split\)\n", capsys.readouterr().out)

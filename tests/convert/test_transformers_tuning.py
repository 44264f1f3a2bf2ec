"""Imported models with a head in the fine-tuning tasks: tested, predicted with, trained from."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import datamodules
from lit_probattn.__main__ import main
from lit_probattn.convert.from_transformers import convert
from lit_probattn.training.checkpoints import find_file, load_checkpoint
from tests.bad_inputs.cases import command_error
from tests.datamodules.text.fine_tuning import made
from tests.datamodules.text.made import encoder
from tests.support.helpers import error_of
from tests.support.runs import arguments, only_version, run
from tests.support.slow import mostly_slow

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

POSITIONS = 40
SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 13,
    "layer_norm_eps": 3e-3,  # so large that another one shows
}
# Class of transformers -> the task whose head it has.
CLASSES = {
    "BertForQuestionAnswering": "squad",
    "RobertaForQuestionAnswering": "squad",
    "BertForSequenceClassification": "mnli",
    "RobertaForSequenceClassification": "mnli",
}


def imported(name: str, folder: Path, labels: int = 3, **more: Any) -> Any:
    """A model of transformers with random weights, written with its tokeniser, and converted."""
    bert = name.startswith("Bert")
    texts = [text for n in range(70) for text in (made.context(n), made.asked(n, "")["question"])]
    own = encoder(texts, folder / "theirs", 300, "wordpiece" if bert else "bpe")
    torch.manual_seed(3)
    config = (transformers.BertConfig if bert else transformers.RobertaConfig)(
        **SIZES,
        vocab_size=len(own),
        pad_token_id=own.padding,
        type_vocab_size=2 if bert else 1,
        max_position_embeddings=POSITIONS + (0 if bert else own.padding + 1),
        **({"num_labels": labels if name.endswith("Classification") else 2} | more),
    )
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.4)
    model.save_pretrained(folder / "theirs")
    words = ["convert", "from_transformers", str(folder / "theirs"), str(folder / "bert.ckpt")]
    assert main(words) == 0
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What gives the model of a class and the folder where it is imported; made once."""

    def made_once(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        return imported(name, folder), folder

    return functools.cache(made_once)


def arguments_of(folder: Path, task: str) -> dict[str, Any]:
    """Arguments of the data, whose files are written."""
    text = folder / task
    if not text.exists():
        (made.write_squad if task == "squad" else made.write_mnli)(text)
    places = {"path": text, "cache_dir": folder / "cache", "tokenizer": folder / "theirs"}
    return {
        **{name: str(place) for name, place in places.items()},
        **{"max_positions": POSITIONS, "max_length": 24, "vocab_limit": 8000},
    }


def command(name: str, folder: Path, task: str, *more: str) -> list[str]:
    given = {"attention": str(folder / "bert.yaml"), **arguments_of(folder, task)}
    return arguments(name, folder, *more, task=f"tiny/{task}", **given)


def taken(folder: Path) -> dict[str, Any]:
    """What a run's record says of its initial weights."""
    (start,) = json.loads((folder / "versions.json").read_text(encoding="utf-8"))["starts"]
    found: dict[str, Any] = start["init_from"]
    return found


def losses_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The losses of transformers' model for the real rows of a batch of ours."""
    real = batch["sample_ids"] >= 0
    names = {"inputs": "input_ids", "key_mask": "attention_mask", "token_types": "token_type_ids"}
    out = model(**{theirs: batch[ours] for ours, theirs in names.items()})
    if "logits" in out:
        return cross_entropy(out.logits, batch["target"], reduction="none")[real]
    pairs = zip((out.start_logits, out.end_logits), batch["target"].unbind(-1), strict=True)
    losses = [
        cross_entropy(x.masked_fill(~batch["key_mask"], -torch.inf), place, reduction="none")
        for x, place in pairs
    ]
    return torch.stack(losses).mean(0)[real]


# Classes of sentences: below, too; every class without a command: test_transformers.py.
ONE_OF_EACH = mostly_slow(CLASSES, ["BertForQuestionAnswering"])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_it_is_tested_and_predicts_as_it_was_imported(name, theirs):
    (model, folder), task = theirs(name), CLASSES[name]
    words = ["--ckpt_path", str(folder / "bert.ckpt")]
    for step in ("test", "predict"):
        run(command(step, folder, task, *words))
    report = json.loads((folder / "test-bert.json").read_text(encoding="utf-8"))
    table = pd.read_parquet(folder / "predictions-bert.parquet")
    assert len(table) == report.get("test/questions", report["num_samples"])
    options = arguments_of(folder, task)
    data: Any = (
        datamodules.QuestionAnswering(stride=4, max_query_length=8, **options)
        if task == "squad"
        else datamodules.TextPairs(corpus="mnli", **options)
    )
    data.prepare_data()
    data.setup("test")
    with torch.no_grad():
        losses = torch.cat([losses_of(model, batch) for batch in data.test_dataloader()])
    assert len(losses) == report["num_samples"]
    assert float(losses.std()) > 0.01
    assert report["test/loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.slow  # from an imported model: test_transformers.py; by --init_from: tests/training
@pytest.mark.parametrize("name", CLASSES)
def test_a_training_begins_with_all_its_weights(name, theirs):
    _, folder = theirs(name)
    words = ["--init_from", str(folder / "bert.ckpt"), "--model.init_args.lr", "1e-7"]
    run(command("fit", folder, CLASSES[name], *words, "--trainer.max_steps", "1"))
    version = only_version(folder)
    state = load_checkpoint(folder / "bert.ckpt")["state_dict"]
    told = taken(version)
    assert (told["left"], told["new"], told["other_shape"]) == ([], [], {})
    assert told["taken"] == len(state)
    trained = load_checkpoint(find_file(version / "last"))["state_dict"]
    steps = [float((trained[key] - tensor).abs().max()) for key, tensor in state.items()]
    assert 0 < max(steps) < 1e-5


ORDER = ["contradiction", "NEUTRAL", "Entailment"]


def test_labels_in_another_order_are_refused_and_put_in_order(tmp_path, capsys):
    """Class 0 of many published MultiNLI models is contradiction; here it is entailment."""
    model = imported("BertForSequenceClassification", tmp_path, id2label=dict(enumerate(ORDER)))
    assert "classes: contradiction, NEUTRAL, Entailment" in capsys.readouterr().out
    assert convert(model.config.to_dict(), model.state_dict()).classes == ORDER  # keys: integers
    words = ["--ckpt_path", str(tmp_path / "bert.ckpt")]
    wrong = error_of(command("test", tmp_path, "mnli", *words))
    assert "class 0 was contradiction and is now entailment" in wrong
    assert "`convert from_transformers --labels entailment neutral contradiction`" in wrong
    for path in (tmp_path / "bert.ckpt", tmp_path / "bert.yaml"):
        path.unlink()
    again = [
        "convert",
        "from_transformers",
        str(tmp_path / "theirs"),
        str(tmp_path / "bert.ckpt"),
    ]
    assert main([*again, "--labels", "entailment", "neutral", "contradiction"]) == 0
    run(command("test", tmp_path, "mnli", *words))
    report = json.loads((tmp_path / "test-bert.json").read_text(encoding="utf-8"))
    data: Any = datamodules.TextPairs(corpus="mnli", **arguments_of(tmp_path, "mnli"))
    data.prepare_data()
    data.setup("test")
    place = torch.tensor([2, 1, 0])  # of our classes among theirs
    batches = [{**b, "target": place[b["target"]]} for b in data.test_dataloader()]
    with torch.no_grad():
        losses = torch.cat([losses_of(model, batch) for batch in batches])
    assert report["test/loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    back = str(tmp_path / "back")
    assert main(["convert", "to_transformers", str(tmp_path / "bert.ckpt"), back]) == 0
    returned = transformers.BertForSequenceClassification.from_pretrained(back).eval()
    assert list(returned.config.id2label.values()) == data.classes
    names = {"inputs": "input_ids", "key_mask": "attention_mask", "token_types": "token_type_ids"}
    given = {theirs: batches[0][ours] for ours, theirs in names.items()}
    with torch.no_grad():
        torch.testing.assert_close(returned(**given).logits, model(**given).logits[:, [2, 1, 0]])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"classifier_dropout": 0.3}, 0.3),
        ({"hidden_dropout_prob": 0.2}, 0.2),
        ({"classifier_dropout": 0.1, "hidden_dropout_prob": 0.2}, 0.1),
    ],
)
def test_a_classifier_keeps_the_dropout_of_its_head(tmp_path, given, expected):
    """Without classifier_dropout it is that of the encoder, in both directions."""
    imported("RobertaForSequenceClassification", tmp_path, **given)
    written = yaml.safe_load((tmp_path / "bert.yaml").read_text(encoding="utf-8"))
    assert written["model"]["init_args"].get("head_dropout", 0.1) == expected
    back = tmp_path / "back"
    assert main(["convert", "to_transformers", str(tmp_path / "bert.ckpt"), str(back)]) == 0
    config = json.loads((back / "config.json").read_text(encoding="utf-8"))
    assert config["classifier_dropout"] == expected


def test_classes_without_names_are_told_and_can_be_named(theirs, tmp_path, capsys):
    _, folder = theirs("RobertaForSequenceClassification")
    words = ["convert", "from_transformers", str(folder / "theirs"), str(tmp_path / "bert.ckpt")]
    assert main(words) == 0
    assert "unnamed classes: the data must use the same order" in capsys.readouterr().out
    words[-1] = str(tmp_path / "n.ckpt")
    assert main([*words, "--labels", "b", "a", "c"]) == 0
    before, after = (load_checkpoint(tmp_path / f"{name}.ckpt") for name in ("bert", "n"))
    assert after["TextPairs"]["classes"] == ["b", "a", "c"]
    head = "model.classifier.weight"
    assert torch.equal(before["state_dict"][head], after["state_dict"][head])
    assert "TextPairs" not in before
    out = tmp_path / "more.ckpt"
    for labels, said in (
        (
            ["a", "b"],
            "--labels: expected names for its 3 classes, in the order of the data, received a, b",
        ),
        (["a", "b", "A"], "names for its 3 classes, in the order of the data, received a, b, A"),
    ):
        assert said in error_of([*words[:3], str(out), "--labels", *labels])
    assert not out.exists()


@pytest.mark.slow  # heads of other tasks and shapes: tests/training/init_from
def test_a_head_of_another_task_or_of_other_labels_begins_anew(tmp_path):
    imported("BertForSequenceClassification", tmp_path, labels=5)
    start = ["--init_from", str(tmp_path / "bert.ckpt"), "--trainer.max_steps", "1"]
    heads = {f"model.classifier.{x}" for x in ("weight", "bias")}
    for number, task in enumerate(("mnli", "squad")):
        run(command("fit", tmp_path, task, *start, "--run.name", task))
        told = taken(tmp_path / f"runs/{task}/0")
        if number == 0:
            assert set(told["other_shape"]) == heads
            assert told["left"] == told["new"] == []
        else:
            assert set(told["left"]) == heads | {f"model.pooler.{x}" for x in ("weight", "bias")}
            assert set(told["new"]) == {"model.spans.weight", "model.spans.bias"}
    words = command("test", tmp_path, "squad", "--ckpt_path", str(tmp_path / "bert.ckpt"))
    assert "the checkpoint does not match this configuration" in command_error(words)

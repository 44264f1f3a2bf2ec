"""`fit --init_from`: what is taken, left, new and refused, and what the run says of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.base.errors import ConfigError
from lit_probattn.tasks import (
    ImageClassifier,
    QuestionAnswering,
    SequenceClassifier,
    TextClassifier,
)
from lit_probattn.training.checkpoints import save_checkpoint
from lit_probattn.training.init_from import Taken, init_from
from tests.datamodules.text.fine_tuning import made
from tests.support.helpers import error_of
from tests.support.runs import arguments, newest_state, only_version, run
from tests.tasks.tiny import softmax

SIZES = {"vocab_size": 23, "max_seq_len": 12, "embed_dim": 8, "head_dim": 4}
SIZES |= {"num_layers": 2, "mlp_dim": 8}


def made_task(cls=QuestionAnswering, seed=0, **options):
    torch.manual_seed(seed)
    return cls(softmax, **{**SIZES, **options})


def saved(folder: Path, task, **more) -> str:
    path = folder / "from.ckpt"
    save_checkpoint({"state_dict": task.state_dict(), "global_step": 7, **more}, path)
    return str(path)


def test_a_task_takes_what_another_has(tmp_path):
    classifier = made_task(TextClassifier, seed=1, num_classes=3)
    task, untouched = made_task(), made_task()
    found = init_from(task, saved(tmp_path, classifier))
    assert found.new == ["model.spans.weight", "model.spans.bias"]
    heads = ("pooler", "classifier")
    assert found.left == [f"model.{head}.{kind}" for head in heads for kind in ("weight", "bias")]
    assert not found.other_shape
    state, source = task.state_dict(), classifier.state_dict()
    assert set(found.taken) | set(found.new) == set(state)
    for name, tensor in state.items():
        expected = untouched.state_dict() if name in found.new else source
        assert torch.equal(tensor, expected[name]), name
    assert found.lines() == [
        f"initial weights from {tmp_path / 'from.ckpt'} (step 7): "
        f"{len(found.taken)} entries loaded",
        "  unused checkpoint keys: pooler.weight, pooler.bias, classifier.weight, classifier.bias",
        "  newly initialised keys: spans.weight, spans.bias",
    ]


def image_task(seed, **options):
    torch.manual_seed(seed)
    swin = {"patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": [1, 1]}
    swin["num_heads"] = [2, 4]
    sizes = {"num_classes": 3, "image_size": 32, "model_options": swin, "replace": False}
    return ImageClassifier(SoftmaxAttention, **{**sizes, **options})


def test_a_moving_average_begins_with_what_was_taken(tmp_path):
    """Heads that are new begin alike in both, too."""
    path = saved(tmp_path, image_task(1))
    task = image_task(2, ema_decay=0.9, num_classes=5)
    found = init_from(task, path)
    assert set(found.other_shape) == {"model.net.head.fc.weight", "model.net.head.fc.bias"}
    average = task.ema.module.state_dict()
    for name, tensor in task.model.state_dict().items():
        assert torch.equal(average[name], tensor), name
    assert torch.equal(average["net.norm.weight"], image_task(1).net.norm.weight)


def test_the_moving_average_of_the_file_is_loaded(tmp_path):
    """As by evaluations and `convert to_safetensors`, whether or not the new run has one."""
    source = image_task(1, ema_decay=0.9)
    for tensor in source.ema.module.parameters():
        tensor.data.add_(1.0)
    path = saved(tmp_path, source)
    expected = source.ema.module.state_dict()
    for options in ({}, {"ema_decay": 0.9}, {"ema_decay": 0.9, "num_classes": 5}):
        task = image_task(2, **options)
        found = init_from(task, path)
        assert (found.left, found.new) == ([], [])
        own = task.model.state_dict()
        other_shape = {name.removeprefix("model.") for name in found.other_shape}
        assert len(other_shape) == (2 if "num_classes" in options else 0)
        for name in own.keys() - other_shape:
            assert torch.equal(own[name], expected[name]), name
        if "ema_decay" in options:
            average = task.ema.module.state_dict()
            assert all(torch.equal(average[name], own[name]) for name in own)


def test_a_head_of_another_shape_begins_anew(tmp_path):
    source = made_task(TextClassifier, seed=1, num_classes=3)
    task, untouched = (made_task(TextClassifier, num_classes=2) for _ in range(2))
    found = init_from(task, saved(tmp_path, source))
    assert found.other_shape["model.classifier.weight"] == ((3, 8), (2, 8))
    assert torch.equal(task.model.classifier.weight, untouched.model.classifier.weight)
    assert torch.equal(task.model.pooler.weight, source.model.pooler.weight)
    assert "classifier.weight (2, 8), checkpoint (3, 8)" in found.lines()[1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"vocab_size": 29},
            r"tokens.weight has shape \(29, 8\), expected \(23, 8\).*tokeniser",
        ),
        (
            {"max_seq_len": 16},
            r"positions.offsets.weight has shape .*, 8\): .*--data.init_args.max_positions 16",
        ),
        ({"num_token_types": 1}, r"token_types.weight .* set --model.init_args.num_token_types 1"),
        (
            {"mlp_dim": 16},
            r"mlp.fc1.weight has shape \(16, 8\), expected \(8, 8\) \(and 5 more",
        ),
        ({"embed_dim": 16, "head_dim": 8}, r"tokens.weight has shape \(23, 16\).*set the sizes"),
    ],
)
def test_other_shapes_are_refused(other, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        init_from(made_task(), saved(tmp_path, made_task(**other)))


def test_a_model_of_another_kind_is_refused(tmp_path):
    save_checkpoint({"state_dict": {"model.pooler.weight": torch.zeros(8, 8)}}, tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match="share no names outside the heads"):
        init_from(made_task(TextClassifier, num_classes=2), str(tmp_path / "x.ckpt"))


def test_layers_may_be_missing(tmp_path):
    task = made_task()
    found = init_from(task, saved(tmp_path, made_task(num_layers=1, seed=4)))
    assert all(".blocks.1." in name for name in found.new)
    assert any(".blocks.0." in name for name in found.taken)


def test_another_tokeniser_is_refused(tmp_path):
    path = saved(tmp_path, made_task(seed=4), TextPairs={"tokeniser": "one"})
    with pytest.raises(ConfigError, match="trained with another tokeniser"):
        init_from(made_task(), path, "two")
    init_from(made_task(), path, "one")
    init_from(made_task(), path)


def test_heads_that_were_kept_apart_are_taken(tmp_path):
    source = made_task(TextClassifier, seed=4, num_classes=2)
    state = source.state_dict()
    apart = {name: state.pop(name) for name in list(state) if "pooler" in name}
    save_checkpoint(
        {"state_dict": state, "transformers": {"other_heads": apart}}, tmp_path / "x.ckpt"
    )
    task = made_task(TextClassifier, num_classes=2)
    assert not init_from(task, str(tmp_path / "x.ckpt")).new
    assert torch.equal(task.model.pooler.weight, source.model.pooler.weight)


def test_safetensors_are_weights_of_a_model(tmp_path):
    source, task = made_task(seed=4), made_task()
    save_file(source.model.state_dict(), tmp_path / "x.safetensors")
    assert init_from(task, str(tmp_path / "x.safetensors")).step is None
    assert torch.equal(task.model.spans.weight, source.model.spans.weight)
    nan = {name: torch.full_like(x, torch.nan) for name, x in source.model.state_dict().items()}
    save_file(nan, tmp_path / "x.safetensors")
    told = r"--init_from: .*/x\.safetensors: \S+ contains NaN in .*, so its outputs would be NaN"
    with pytest.raises(ConfigError, match=told):
        init_from(task, str(tmp_path / "x.safetensors"))
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"--init_from: .*/x\.safetensors is corrupt: "):
        init_from(task, str(tmp_path / "x.safetensors"))


def test_other_tasks_have_heads_too(tmp_path):
    few, many = (made_task(SequenceClassifier, num_classes=n) for n in (2, 5))
    found = init_from(few, saved(tmp_path, many))
    assert list(found.other_shape) == ["model.head.fc2.weight", "model.head.fc2.bias"]


# ---- runs --------------------------------------------------------------------------------------


def command(folder: Path, task: str, *more: str) -> list[str]:
    text = folder / task
    if not text.exists():
        made.write_mnli(text) if task == "mnli" else made.write_sst2(text)
    words = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "1"]
    words += ["--model.init_args.schedule_steps", "8", *more]
    given = {"task": f"tiny/{task}", "path": text, "cache_dir": folder / "cache"}
    return arguments("fit", folder, *words, **given)


@pytest.fixture(scope="module")
def mnli(tmp_path_factory):
    """A folder with a run on MultiNLI."""
    folder = tmp_path_factory.mktemp("mnli")
    run(command(folder, "mnli"))
    return folder


@pytest.fixture
def folder(mnli, tmp_path):
    return Path(shutil.copytree(mnli, tmp_path / "copy"))


def start_of(folder: Path, number: int) -> dict:
    (record,) = (folder / "runs").glob(f"mnli*/{number}/versions.json")
    return json.loads(record.read_text(encoding="utf-8"))["starts"][-1]


def test_a_run_begins_with_the_weights_of_another_and_goes_on_with_its_own(folder, capsys):
    """It says so; one step without learning keeps the weights."""
    source = only_version(folder)
    still = ("--model.init_args.lr", "1e-30", "--model.init_args.weight_decay", "0.0")
    words = command(folder, "mnli", "--init_from", str(source), *still)
    run(words)
    told = capsys.readouterr().out
    assert f"initial weights from {source}/checkpoints/" in told
    found = start_of(folder, 1)["init_from"]
    assert found["step"] == 1
    assert found["taken"] == len(newest_state(source)["state_dict"])
    assert len(found["sha256"]) == 64
    assert (found["left"], found["new"], found["other_shape"]) == ([], [], {})
    assert start_of(folder, 0)["init_from"] is None
    (place,) = (folder / "runs").glob("mnli*/1")
    now, before = (newest_state(path)["state_dict"] for path in (place, source))
    for name, tensor in before.items():
        torch.testing.assert_close(now[name], tensor, rtol=0, atol=1e-12)
    run([*words, "--ckpt_path", "last", "--trainer.max_steps", "2"])
    assert "is ignored: the run resumes from its checkpoint" in capsys.readouterr().out
    assert start_of(folder, 1)["init_from"] is None


def test_another_runs_checkpoint_beside_it_is_refused(folder):
    source = str(only_version(folder))
    more = ("--init_from", source, "--ckpt_path", "best")
    line = error_of(command(folder, "mnli", *more))
    assert line.startswith(f"error: --init_from {source} and --ckpt_path")
    assert "mutually exclusive" in line
    assert len(list((folder / "runs").glob("mnli*/*"))) == 1


def test_it_is_for_training_only(folder):
    words = command(folder, "mnli", "--init_from", "x", "--ckpt_path", "last")
    assert "--init_from applies to fit" in error_of(["test", *words[1:]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.ckpt", "--init_from: checkpoint not found: nowhere.ckpt"),
        ("", "--init_from is empty"),
    ],
)
def test_a_missing_file_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        init_from(made_task(), given)


def test_six_names_are_shown_and_more_are_counted():
    names = [f"model.{letter}" for letter in "abcdefgh"]
    taken = Taken(Path("x.ckpt"), "0" * 64, None, [], names, names[:6], {})
    assert taken.lines() == [
        "initial weights from x.ckpt: 0 entries loaded",
        "  unused checkpoint keys: a, b, c, d, e, f, and 2 more",
        "  newly initialised keys: a, b, c, d, e, f",
    ]

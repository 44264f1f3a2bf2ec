"""Configuration files on the command line: their places, and flags that win over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.cli.files import files_before_flags, read_config_files
from lit_probattn.configs import compose, read_yaml
from tests.support.helpers import error_of
from tests.support.paths import CONFIGS
from tests.support.runs import TASK, printed_config, write_attention


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["fit", "--a", "1", "--config", "x", "-c", "y"], "fit --config=x --config=y --a 1"),
        (["fit", "--config=x", "--a=1", "--config=y"], "fit --config=x --config=y --a=1"),
        (["test", "--ckpt_path", "best"], "test --ckpt_path best"),
        ([], ""),
    ],
)
def test_files_come_before_flags(given, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        Path(name).write_text("trainer: {}")
    assert " ".join(files_before_flags(given)) == expected


@pytest.mark.parametrize(
    ("first", "then", "key", "value"),
    [
        ("mgk", "softmax", "score", "dot"),  # both have this argument
        ("smgk", "mgk", "shifted_keys", False),  # one class
        ("mgk", "smgk", "shifted_keys", True),
    ],
)
def test_attention_replaces_that_of_a_runs_configuration(tmp_path, first, then, key, value):
    """`--config RUN/config.yaml --attention NAME`: nothing of the run's attention remains."""
    whole = printed_config(["fit", "--task", "tiny/lra_text", "--attention", first])
    whole["model"]["init_args"]["mlp_dim"] = 24
    own = tmp_path / "config.yaml"
    own.write_text(yaml.safe_dump(whole))
    fresh = printed_config(["fit", "--task", "tiny/lra_text", "--attention", then])
    found = printed_config(["fit", "--config", str(own), "--attention", then])
    assert found["model"]["init_args"]["attention"] == fresh["model"]["init_args"]["attention"]
    assert found["model"]["init_args"]["attention"]["init_args"][key] == value
    assert found["model"]["init_args"]["mlp_dim"] == 24
    preset = CONFIGS / "attention" / f"{then}.yaml"
    composed = compose([own, preset], {})["model"]["init_args"]["attention"]
    assert composed == read_yaml(preset)["model"]["init_args"]["attention"]


def test_attention_files_of_one_class_are_merged(tmp_path):
    """A further file changes what it names; a file with another class replaces the attention."""
    attention = {"class_path": "lit_probattn.attention.MGKAttention", "init_args": {"dropout": 0.5}}
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(content_of(attention)))
    both = ["fit", "--task", "tiny/lra_text", "--attention", "smgk", "--config", str(own)]
    found = printed_config(both)["model"]["init_args"]["attention"]["init_args"]
    assert (found["dropout"], found["shifted_keys"]) == (0.5, True)
    own.write_text(yaml.safe_dump(content_of(attention, class_path="MGKAttention")))
    assert printed_config(both)["model"]["init_args"]["attention"]["init_args"] == found
    other = ["fit", "--task", "tiny/lra_text", "--config", str(own), "--attention", "softmax"]
    found = printed_config(other)["model"]["init_args"]["attention"]
    assert found["class_path"] == "lit_probattn.attention.SoftmaxAttention"
    assert found["init_args"]["dropout"] != 0.5


def test_attention_replaces_what_is_before_another_class(tmp_path):
    """MGK after softmax after sMGK: the shifted keys of the first do not remain."""
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(content_of({"class_path": "MGKAttention"})))
    last = ["--config", str(own)]
    before = [f"--config={CONFIGS / 'attention' / name}.yaml" for name in ("smgk", "softmax")]
    found = printed_config(["fit", "--config", TASK, *before, *last])
    alone = printed_config(["fit", "--config", TASK, *last])
    assert found["model"]["init_args"]["attention"] == alone["model"]["init_args"]["attention"]


def test_attention_by_the_name_of_its_class_replaces_another_class(tmp_path):
    own, before = tmp_path / "own.yaml", tmp_path / "before.yaml"
    path = "lit_probattn.attention.SoftmaxAttention"
    own.write_text(f"model: {{init_args: {{attention: {path}}}}}")
    mgk = {"class_path": "MGKAttention", "init_args": {"dropout": 0.5}}
    before.write_text(yaml.safe_dump(content_of(mgk)))
    found = printed_config(["fit", "--config", TASK, f"--config={before}", f"--config={own}"])
    alone = printed_config(["fit", "--config", TASK, f"--config={own}"])
    assert found["model"]["init_args"]["attention"] == alone["model"]["init_args"]["attention"]


def content_of(attention: dict, **changed) -> dict:
    return {"model": {"init_args": {"attention": {**attention, **changed}}}}


def test_flags_win_wherever_they_stand(tmp_path):
    files = ["--config", TASK, "--config", write_attention(tmp_path)]
    (tmp_path / "own.yaml").write_text("ckpt_path: null\nseed_everything: 3\n")
    flags = ["--trainer.max_steps", "7", "--seed_everything", "5", "--ckpt_path", "last"]
    command = ["fit", *flags, *files, "--config", str(tmp_path / "own.yaml")]
    printed = printed_config(command)
    assert printed["trainer"]["max_steps"] == 7
    assert printed["seed_everything"] == 5
    assert printed["ckpt_path"] == "last"


def test_two_task_files_are_refused(tmp_path):
    attention, own = write_attention(tmp_path), tmp_path / "own.yaml"
    own.write_text("model: {init_args: {num_layers: 3}}\ndata: {init_args: {batch_size: 3}}\n")
    other = str(CONFIGS / "tasks/tiny/lra_listops.yaml")
    read_config_files([TASK, attention, str(own)])  # a file of one's own names no classes
    for read in (read_config_files, lambda files: compose(files, {})):
        with pytest.raises(ConfigError) as error:
            read([TASK, attention, other])
        assert f"two task files, {TASK} and {other}" in str(error.value)


LINKED = {
    "model.init_args.vocab_size": "the data",
    "model.init_args.num_classes": "the data",
    "model.init_args.seed": "seed_everything",
    "data.init_args.seed": "seed_everything",
}


@pytest.mark.parametrize("key", LINKED)
@pytest.mark.parametrize("form", ["nested", "dotted", "flag", "short flag"])
def test_what_the_data_or_the_seed_decide_is_refused(key, form, tmp_path):
    part, _, name = key.split(".")
    own = tmp_path / "own.yaml"
    nested = {part: {"init_args": {name: 7}}}
    own.write_text(yaml.safe_dump({key: 7} if form == "dotted" else nested))
    words = ["fit", "--config", TASK, "--config", write_attention(tmp_path)]
    given = f"{part}.{name}" if form == "short flag" else key
    words += [f"--{given}=7"] if "flag" in form else ["--config", str(own)]
    assert f"{given} is set by {LINKED[key]}" in error_of([*words, "--print_config"])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model: {init_args: null}", "model.init_args"),
        ("model: {init_args: {attention: {init_args: 3}}}", "model.init_args.attention.init_args"),
    ],
)
def test_arguments_that_are_none_are_named(text, key, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"own\.yaml: {key}: expected arguments by name"):
        read_config_files([TASK, str(tmp_path / "own.yaml")])

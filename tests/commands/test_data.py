"""`lit-probattn data`: the name of a task stands for its data set and the options in its file."""

from __future__ import annotations

import shlex

import pytest

from lit_probattn.__main__ import main
from lit_probattn.cli.app import check_arguments
from lit_probattn.commands import data
from lit_probattn.configs import read_yaml
from tests.datamodules.test_commands import write_reviews
from tests.support.helpers import error_of
from tests.support.paths import CONFIGS


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LIT_PROBATTN_CACHE", str(tmp_path / "cache"))


def test_a_task_is_its_data_set_with_the_options_of_its_file(monkeypatch):
    given = []
    monkeypatch.setattr(data, "data_main", lambda words, options_of: given.append(words) or 0)
    assert main(["data", "check", "tiny/lra_listops", "--batch_size", "3"]) == 0
    own = read_yaml(CONFIGS / "tasks/tiny/lra_listops.yaml")["data"]["init_args"]
    (words,) = given
    assert words[:2] == ["check", "listops"]
    assert words[-2:] == ["--batch_size", "3"]  # instead of the file's
    assert own.pop("batch_size") != 3
    assert dict(word[2:].split("=") for word in words[2:-2]) == {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in own.items()
    }


def test_check_takes_the_name_of_a_task(tmp_path, capsys):
    path = write_reviews(tmp_path / "mine.csv")
    assert main(["data", "check", "own_texts", "--path", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("LabelledTexts: num_classes 2, ")
    assert "\nnote: " in shown
    assert len([line for line in shown.splitlines() if line.startswith("sample ")]) == 3
    assert main(["data", "check", str(path)]) == 0
    sizes = [line for line in shown.splitlines() if " texts, lengths" in line]
    assert len(sizes) == 3
    assert set(sizes) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("words", [["PATH"], ["own_texts", "--path", "PATH"]])
def test_own_data_are_checked_with_the_settings_of_the_recommended_fit(words, tmp_path, capsys):
    path = str(write_reviews(tmp_path / "mine.csv"))
    words = [path if word == "PATH" else word for word in words]
    assert main(["data", "check", *words]) == 0
    shown = capsys.readouterr().out
    own = read_yaml(CONFIGS / "tasks/own_texts.yaml")["data"]["init_args"]
    assert f"max_seq_len {own['max_length']}\n" in shown
    assert f" at batch_size {own['batch_size']}\n" in shown
    assert f"\ntokens: {own['tokens']}, " in shown
    recommended = f"fit --task own_texts --attention smgk --data.path {path}"
    assert shown.endswith(f"train on it: lit-probattn {recommended}\n") == (len(words) == 1)
    assert main(["data", "check", *words, "--tokens", "bytes", "--batch_size=4"]) == 0
    shown = capsys.readouterr().out
    assert " at batch_size 4\n" in shown
    assert "\ntokens: bytes, " in shown
    more = " --data.tokens bytes --data.batch_size=4\n"
    assert shown.endswith(recommended + more) == (len(words) == 1)


@pytest.mark.parametrize("given", ["--new_path NEW", "--new_path=NEW"])
def test_the_recommended_fit_can_be_pasted_and_reads_no_new_samples(given, tmp_path, capsys):
    path = write_reviews(tmp_path / "my reviews.csv")
    new = write_reviews(tmp_path / "new.csv")
    more = ["--tokens", "bytes", *given.replace("NEW", str(new)).split(), "--text_column", "review"]
    assert main(["data", "check", str(path), *more]) == 0
    shown = capsys.readouterr().out
    assert f"the samples of {new}\n" in shown
    command = shlex.split(shown.splitlines()[-1].removeprefix("train on it: lit-probattn "))
    assert command[-6:] == [
        *("--data.path", str(path)),
        *("--data.tokens", "bytes", "--data.text_column", "review"),
    ]
    check_arguments(command)


def test_what_is_neither_a_task_nor_a_data_set_is_one_line(capsys):
    assert main(["data", "check", "own_text_s"]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean 'own_texts'?" in error


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("data: {class_path: elsewhere.ListOps}", "elsewhere.ListOps"),
        ("data: {class_path: datamodules.Nothing}", "datamodules.Nothing"),
        ("data: {class_path: 3}", "data.class_path"),
        ("data: ListOps", "data.class_path"),
        ("model: {}", "data.class_path"),
    ],
)
def test_a_task_without_a_registered_data_set_is_one_line(tmp_path, monkeypatch, text, named):
    """A class of another package is not the registered one of the same name."""
    path = tmp_path / "tasks/mine.yaml"
    path.parent.mkdir()
    path.write_text(f"{text}\n")
    monkeypatch.setenv("LIT_PROBATTN_CONFIGS", str(tmp_path))
    error = error_of(["data", "check", "mine"])
    assert "mine" in error
    assert named in error

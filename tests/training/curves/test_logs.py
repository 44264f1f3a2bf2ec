"""`metrics.csv` of a run that goes on: what can be read of a damaged one is kept, and it is too."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_probattn.training.logs import RunCSVLogger, tensorboard_logger
from tests.tasks.tiny import data, task, trainer

GOOD = b"step,train/loss,val/accuracy\r\n2,0.5,\r\n4,0.25,0.75\r\n6,0.125,\r\n"


def load(folder: Path, content: bytes | None, steps_done: int = 6) -> list[str]:
    """Steps of the rows that are kept, after one more is logged."""
    path = folder / "metrics.csv"
    path.mkdir() if content is None else path.write_bytes(content)
    logger = RunCSVLogger(folder, steps_done)
    logger.load()
    logger.log_metrics({"train/loss": 1.0}, steps_done)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["train/loss"] for row in rows)
    assert rows[-1]["train/loss"] == "1.0"
    return [row["step"] for row in rows[:-1]]


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        pytest.param(GOOD, "246", id="whole"),
        pytest.param(GOOD[:-5], "24", id="cut in a number"),
        pytest.param(GOOD[:-1], "24", id="no line end"),
        pytest.param(b"\xef\xbb\xbf" + GOOD, "246", id="byte order mark"),
        pytest.param(GOOD.replace(b"\n2,", b"\n2.0,"), "246", id="steps as fractions"),
        pytest.param(b"", "", id="empty"),
        pytest.param(GOOD[:9], "", id="half a head"),
    ],
)
def test_what_can_be_read_goes_on(tmp_path, content, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path, content) == list(steps)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize(
    ("content", "steps", "named"),
    [
        pytest.param(GOOD.replace(b"0.25", b"0.\xff5"), "26", "row 3 ", id="no text"),
        pytest.param(GOOD.replace(b"0.25", b"0.2u"), "26", "row 3 ", id="no number"),
        pytest.param(GOOD.replace(b"4,", b"4,1,"), "26", "row 3 ", id="a value too many"),
        pytest.param(GOOD.replace(b"4,", b"inf,"), "26", "row 3 ", id="no step"),
        pytest.param(
            GOOD.replace(b"2,", b",").replace(b"6,", b","),
            "4",
            "row 2, and 1 other rows ",
            id="two rows",
        ),
        pytest.param(GOOD.replace(b",", b";"), "", "row 1, the names of", id="semicolons"),
        pytest.param(GOOD.replace(b"val", b"v\xffl"), "", "row 1, the names of", id="head"),
        pytest.param(None, "", "Is a directory", id="folder"),
    ],
)
def test_a_damaged_file_is_set_aside_and_named(tmp_path, content, steps, named):
    with pytest.warns(UserWarning, match=rf"metrics.csv: {named}.*kept as metrics.csv.corrupt"):
        assert load(tmp_path, content) == list(steps)
    aside = tmp_path / "metrics.csv.corrupt"
    assert aside.is_dir() if content is None else aside.read_bytes() == content


def test_a_second_damaged_file_does_not_replace_the_first(tmp_path):
    for _ in range(2):
        with pytest.warns(UserWarning, match="is kept as"):
            load(tmp_path, GOOD.replace(b"step", b"setp"))
    assert len(list(tmp_path.glob("metrics.csv.corrupt*"))) == 2


def test_repeated_steps_are_dropped_before_training(tmp_path):
    assert load(tmp_path, GOOD, steps_done=4) == ["2", "4"]


def test_without_tensorboard_one_line_says_so(tmp_path, monkeypatch, logged):
    assert len(tensorboard_logger(tmp_path / "a/0", 0)) == 1
    monkeypatch.setattr("lit_probattn.training.logs.find_spec", lambda name: None)
    assert tensorboard_logger(tmp_path / "a/0", 0) == []
    assert "pip install 'lit-probattn[tensorboard]'" in logged.text


def test_what_callbacks_of_lightning_write_is_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/name/0"
    saving = ModelCheckpoint(filename="own", every_n_train_steps=1)
    made = trainer(1, callbacks=[saving], enable_checkpointing=True)
    made.loggers = [RunCSVLogger(folder, 0)]
    made.fit(task(), data())
    assert made.log_dir == str(folder)
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["own.ckpt"]
    assert (folder / "checkpoints/own.ckpt").is_file()

"""Loggers that a user names write into the run's folder; a missing package names its extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger

from lit_probattn.base.errors import ConfigError
from lit_probattn.cli.errors import explain
from lit_probattn.cli.loggers import PendingLogger, pending, with_folder
from tests.support.helpers import error_of
from tests.support.runs import arguments

CSV = "lightning.pytorch.loggers.CSVLogger"
FLAG = "--trainer.logger.init_args.save_dir="


def test_a_logger_without_a_folder_writes_into_the_runs(tmp_path):
    made = PendingLogger(CSVLogger, save_dir="").make(tmp_path)
    assert isinstance(made, CSVLogger)
    assert made.save_dir == str(tmp_path)


def test_a_folder_that_is_given_stays(tmp_path):
    assert PendingLogger(CSVLogger, save_dir="mine").make(tmp_path).save_dir == "mine"


def test_offline_wandb_writes_into_the_runs_folder(tmp_path):
    pytest.importorskip("wandb")
    wandb = PendingLogger(WandbLogger, offline=True, save_dir=".").make(tmp_path)
    assert wandb.save_dir == str(tmp_path)


def test_mlflow_writes_into_the_runs_folder(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    made = PendingLogger(MLFlowLogger).make(tmp_path)
    assert made.save_dir == str(tmp_path / "mlruns")


@pytest.mark.parametrize(("cls", "extra"), [(WandbLogger, "wandb"), (MLFlowLogger, "mlflow")])
def test_a_missing_package_names_its_extra(cls, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ConfigError, match=rf"pip install 'lit-probattn\[{extra}\]'$"):
        pending(PendingLogger(cls))


def test_a_package_that_fails_later_is_told(tmp_path):
    class Broken(CSVLogger):
        def __init__(self) -> None:
            raise ModuleNotFoundError("No module named 'comet'")

    with pytest.raises(ConfigError, match=r"^trainer\.logger: No module named 'comet'$"):
        PendingLogger(Broken).make(tmp_path)


class Refusing(CSVLogger):
    """A logger whose package is there and refuses, as W&B does without a key."""

    def __init__(self, save_dir: str = ".") -> None:
        raise RuntimeError("no key is configured\nhint")


def test_what_a_logger_refuses_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^trainer.logger: Refusing: no key is configured$"):
        PendingLogger(Refusing).make(tmp_path)


class LeavingFolders(Refusing):
    """A logger that makes folders before it refuses."""

    def __init__(self, save_dir: str = ".") -> None:
        (Path(save_dir) / "wandb" / "latest").mkdir(parents=True)
        super().__init__()


def test_a_logger_that_refuses_leaves_no_run_folder(tmp_path):
    named = f"{__name__}.LeavingFolders"
    line = error_of(arguments("fit", tmp_path, "--trainer.logger", named))
    assert line == "error: trainer.logger: LeavingFolders: no key is configured"
    assert not list((tmp_path / "runs").glob("*/*"))


def test_only_waiting_loggers_are_made():
    one = PendingLogger(CSVLogger, save_dir="")
    assert pending([one, one]) == [one, one]
    assert pending(one) == [one]
    assert pending(None) == pending(True) == pending(False) == []


@pytest.mark.parametrize(
    ("words", "files", "added"),
    [
        (["--trainer.logger", CSV], [], True),
        ([f"--trainer.logger.class_path={CSV}"], [], True),
        ([], [{"trainer": {"logger": {"class_path": CSV}}}], True),
        (["--trainer.logger", CSV, f"{FLAG}x"], [], False),
        (
            ["--trainer.logger", CSV],
            [{"trainer": {"logger": {"init_args": {"save_dir": "x"}}}}],
            False,
        ),
        (["--trainer.logger", CSV.replace("CSV", "Wandb")], [], False),
        (["--trainer.logger", "false"], [{"trainer": {"logger": {"class_path": CSV}}}], False),
        ([], [{"trainer": None}, {}], False),
    ],
)
def test_the_folder_is_asked_of_nobody(words, files, added):
    assert with_folder(words, files) == [*words, *([FLAG] if added else [])]


def test_what_a_loggers_package_refuses_later_is_one_line():
    refused = type("UsageError", (Exception,), {"__module__": "wandb.errors"})
    assert explain(refused("No API key.\nUse it.")) == ("trainer.logger: No API key. Use it.", 2)
    other = type("UsageError", (Exception,), {"__module__": "wandbox"})
    assert explain(other("a fault")) is None

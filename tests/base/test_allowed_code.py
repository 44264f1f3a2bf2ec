"""Code that merely lies about is not imported because a configuration names it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import cache
from importlib import metadata

import lightning.pytorch as pl
import pytest

from lit_probattn.analysis.__main__ import main as analysis
from lit_probattn.base import allowed_code
from lit_probattn.base.errors import ConfigError
from lit_probattn.cli.app import main as train
from lit_probattn.compare.own import main as compare
from lit_probattn.configs import attention_factory, class_of, instantiate
from lit_probattn.convert.__main__ import main as convert
from profiling.cli import main as profile
from tests.support.helpers import error_of
from tests.support.runs import arguments

ENTRY = {"class_path": "strange.X", "init_args": {}}
DOORS = {
    "class_of": lambda: class_of("strange.X"),
    "instantiate": lambda: instantiate(pl.LightningModule, ENTRY),
    "attention_factory": lambda: attention_factory("strange.X", {}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a module that writes a file when it is imported."""
    text = "open('ran', 'w').close()\nimport helper\nclass X:\n    pass\n"
    (tmp_path / "strange.py").write_text(text)
    (tmp_path / "helper.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(allowed_code.VARIABLE, "")
    yield tmp_path
    for name in ("strange", "helper"):
        sys.modules.pop(name, None)


known_distributions = cache(metadata.packages_distributions)


@pytest.fixture
def _distributions_are_listed_once(monkeypatch):
    """Looking through everything that is installed takes half a second each time."""
    monkeypatch.setattr(metadata, "packages_distributions", known_distributions)


listed_once = pytest.mark.usefixtures("_distributions_are_listed_once")


@listed_once
@pytest.mark.parametrize("on_path", [True, False])
@pytest.mark.parametrize("door", DOORS)
def test_a_module_in_the_working_folder_is_not_imported(folder, door, on_path, monkeypatch):
    """Nor one that Python would not find there, as in the installed program."""
    if not on_path:
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(folder))])
    with pytest.raises(ConfigError, match=r"strange.py\) is not .*: add --allow_code strange if"):
        DOORS[door]()
    assert not (folder / "ran").exists()


@listed_once
@pytest.mark.parametrize(
    "more",
    [
        ("--data", "strange.X"),
        pytest.param(("--model", "strange.X"), marks=pytest.mark.slow),  # as --data
        ("--model.init_args.attention", "strange.X"),
        # as in a file, below
        pytest.param(("--trainer.callbacks", "strange.X"), marks=pytest.mark.slow),
        pytest.param(("--trainer.logger", "strange.X"), marks=pytest.mark.slow),
        pytest.param(("--trainer.strategy", "{class_path: strange.X}"), marks=pytest.mark.slow),
        pytest.param(("--trainer.plugins+=strange.X",), marks=pytest.mark.slow),
        ("--config", "own.yaml"),
    ],
    ids=" ".join,
)
def test_no_flag_of_a_run_imports_it(folder, more):
    (folder / "own.yaml").write_text("trainer: {callbacks: [{class_path: strange.X}]}")
    assert "add --allow_code strange" in error_of(arguments("fit", folder, *more))
    assert not (folder / "ran").exists()


@listed_once
def test_what_is_allowed_is_imported_with_all_that_it_needs(folder):
    line = error_of(arguments("fit", folder, "--allow_code", "strange", "--data", "strange.X"))
    assert "subclass of LightningDataModule" in line
    assert (folder / "ran").exists()
    assert class_of("strange.X").__module__ == "strange"
    allowed_code.allow("nowhere")
    with pytest.raises(ConfigError, match="--allow_code nowhere: No module named 'nowhere'"):
        class_of("strange.X")


def test_what_is_installed_in_any_way_may_be_named(folder, monkeypatch):
    for name, facts in (("told", {}), ("worked_on", {"editable": True})):
        (folder / "site" / f"{name}-1.dist-info").mkdir(parents=True)
        notes = folder / "site" / f"{name}-1.dist-info"
        (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (notes / "top_level.txt").write_text(f"{name}\n")
        url = {"url": (folder / "project").as_uri(), "dir_info": facts}
        (notes / "direct_url.json").write_text(json.dumps(url))
    (folder / "project/src").mkdir(parents=True)
    (folder / "site/told.py").write_text("X = 1")
    (folder / "project/src/worked_on.py").write_text("X = 1")
    (folder / "project/src/beside.py").write_text("X = 1")
    monkeypatch.syspath_prepend(folder / "site")
    monkeypatch.syspath_prepend(folder / "project/src")
    for path in ("told.X", "worked_on.X", "json.JSONDecoder", "torch.nn.Linear"):
        class_of(path)
    with pytest.raises(ConfigError, match="add --allow_code beside"):
        class_of("beside.X")
    with pytest.raises(ConfigError, match=r"unknown class 'nowhere.X'"):
        class_of("nowhere.X")


def test_every_program_takes_the_flag(folder, capsys):
    commands = {analysis: ["rank"], convert: [], compare: [], profile: ["sweep"], train: []}
    for program, words in commands.items():
        with pytest.raises(SystemExit) as end:
            program([*words, "--allow_code", "strange", "--help"])
        assert end.value.code == 0
        assert "--allow_code" in capsys.readouterr().out
        assert os.environ[allowed_code.VARIABLE] == "strange"
        os.environ[allowed_code.VARIABLE] = ""


def test_an_optional_import_goes_on_without_a_file_of_the_working_folder(tmp_path, monkeypatch):
    """Which the installed program does not search: a user's file can have any name."""
    (tmp_path / "optional_thing.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with (
        allowed_code.guarded(),
        pytest.raises(ImportError, match="is not an installed package"),
    ):
        importlib.import_module("optional_thing")

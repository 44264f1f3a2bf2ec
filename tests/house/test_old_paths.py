"""Class paths and commands of earlier versions, which configurations and habits still hold."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import sys

import pytest

from lit_probattn.configs import class_of
from tests.support.paths import ROOT

NAMES = {
    "lit_probattn.attention": (
        *("Attention", "AttentionFactory", "Cache", "Cost", "FiSHAttention"),
        *("KVCache", "LinearAttention", "LinearFiSHAttention", "LinearState", "MGKAttention"),
        *("MLKAttention", "SoftmaxAttention", "recorded_choices"),
    ),
    "lit_probattn.tasks": (
        *("Batch", "ImageClassifier", "LanguageModeling", "MaskedLanguageModeling"),
        *("NonFiniteError", "PairClassifier", "SequenceClassifier", "SeriesClassifier", "Task"),
    ),
    "lit_probattn.cli": ("main",),
    "lit_probattn.models": ("Classifier", "PairClassifier"),
    "datamodules": (
        *("REGISTRY", "UEA", "Image", "ImageNet", "ListOps", "MaskedText", "Pathfinder"),
        *("Retrieval", "Synthetic", "Text", "WikiText103"),
    ),
}
DATA_SETS = (
    *("image", "imagenet", "listops", "masked_text", "pathfinder", "retrieval", "synthetic"),
    *("text", "uea", "wikitext103"),
)
COMMANDS = (
    *("lit_probattn", "lit_probattn.analysis", "lit_probattn.convert", "lit_probattn.doctor"),
    *("lit_probattn.doctor.reach", "lit_probattn.export", "lit_probattn.head_size"),
    *("lit_probattn.quickstart", "lit_probattn.reproduce", "lit_probattn.uea_benchmark"),
    *("datamodules", "profiling", "profiling.ddp_overhead", "profiling.fish_memory"),
    *("profiling.layouts", "profiling.linear_scaling", "profiling.running_text"),
    *("profiling.step_ratio", "profiling.swin_step"),
)
# Modules that only forward a command, so that its name stays; they are no loose files.
STUBS = (
    *("lit_probattn.export", "lit_probattn.head_size", "lit_probattn.uea_benchmark"),
    *("profiling.ddp_overhead", "profiling.fish_memory", "profiling.layouts"),
    *("profiling.linear_scaling", "profiling.running_text", "profiling.step_ratio"),
    "profiling.swin_step",
)
LOOSE = {
    "lit_probattn": {"__init__", "__main__", "configs", "quickstart", "randomness"},
    "profiling": {"__init__", "__main__", "cli"},
}


@pytest.mark.parametrize("path", [f"{module}.{n}" for module in NAMES for n in NAMES[module]])
def test_names_are_where_they_were(path):
    assert class_of(path) is not None


def test_data_sets_keep_their_names():
    registry = importlib.import_module("datamodules").REGISTRY
    assert set(registry) >= set(DATA_SETS)
    for name in DATA_SETS:
        assert isinstance(class_of(".".join(registry[name])), type)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_help(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    file = ROOT / (command.replace(".", "/") + ".py")
    name = command if file.is_file() else f"{command}.__main__"
    monkeypatch.delitem(sys.modules, name, raising=False)  # else runpy warns that it is imported
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    assert stop.value.code in (0, None)
    assert capsys.readouterr().out.lower().startswith(("usage: python -m", "usage: lit-probattn "))


@pytest.mark.parametrize("name", STUBS)
def test_stubs_are_short(name):
    text = (ROOT / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) <= 3
    assert len(ast.parse(text).body) <= 3


@pytest.mark.parametrize("package", LOOSE)
def test_there_are_no_loose_files(package):
    stubs = {name.rpartition(".")[2] for name in STUBS if name.startswith(f"{package}.")}
    files = {path.stem for path in (ROOT / package).glob("*.py")}
    assert files - stubs == LOOSE[package]


# ---- files -------------------------------------------------------------------------------------

MOVES = re.findall(
    r"^\| `([^`]+)` \| (`.+`) \|$",
    (ROOT / "docs" / "moved_files.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


def test_every_old_file_stands_once_in_the_table_of_moves():
    old = [name for name, _ in MOVES]
    assert len(old) == len(set(old)) >= 308  # 309, or one fewer where a variant is taken out
    assert {name.partition("/")[0] for name in old} == {"lit_probattn", "datamodules", "profiling"}


def test_every_new_place_exists():
    named = {name for _, places in MOVES for name in re.findall(r"`([^`]+)`", places)}
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []

"""Commands of the pages that train nothing parse: every flag that a page names exists."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from datamodules import REGISTRY
from datamodules.__main__ import _make as make_data
from lit_probattn.analysis.registry import load_study
from lit_probattn.base import allowed_code
from lit_probattn.commands.ask.command import main as ask
from lit_probattn.commands.ask.layers import names
from lit_probattn.reproduce import uea
from lit_probattn.reproduce.__main__ import make_parser as reproduce_parser
from profiling.cli import make_parser as profiling_parser
from tests.pages.blocks import commands, is_assignment
from tests.pages.test_commands import PAGES
from tests.support.paths import ROOT


def parse_study(words: list[str]) -> None:
    """Parse the flags of a study of trained models; none lists the studies."""
    if words:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        load_study(words[0]).add_arguments(parser)
        parser.parse_args(words[1:])


def parse_data(words: list[str]) -> None:
    """Parse the options of a data set; a path has options that depend on its content."""
    if words[1] in REGISTRY:
        make_data(words[0], words[1], words[2:])


PARSERS: dict[str, Callable[[list[str]], object]] = {
    "datamodules": parse_data,
    "lit_probattn.analysis": parse_study,
    "lit_probattn.reproduce": lambda words: reproduce_parser().parse_args(words),
    "lit_probattn.reproduce.uea": lambda words: uea.make_parser().parse_args(words),
    "profiling": lambda words: profiling_parser().parse_args(words),
}


# Modules behind commands of the program.
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "analyse": ("lit_probattn.analysis", []),
    "data": ("datamodules", []),
    "reproduce": ("lit_probattn.reproduce", []),
    "sweep": ("profiling", ["sweep"]),
    "report": ("profiling", ["report"]),
}


def modules(page: str) -> list[tuple[str, list[str]]]:
    """Return module and arguments of each `python -m` of a page and of commands with a parser."""
    found = []
    for command in commands(page):
        if command.python or is_assignment(command.text):
            continue
        words = shlex.split(re.sub(r"\$\w+", "runs", command.text))
        if "-m" in words:
            at = words.index("-m") + 1
            found.append((words[at], words[at + 1 :]))
        elif words[0] == "lit-probattn" and words[1] in COMMANDS:
            module, first = COMMANDS[words[1]]
            found.append((module, [*first, *words[2:]]))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page, tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_PROBATTN_CACHE", str(tmp_path))
    monkeypatch.setenv(allowed_code.VARIABLE, "")
    for module, words in modules(page):
        assert find_spec(module), f"{page}: no module {module}"
        if module in PARSERS and "--help" not in words:
            PARSERS[module](words)


def test_rows_of_ask_are_those_that_it_prints(capsys):
    pytest.importorskip("entmax")
    page = (ROOT / "docs/choose.md").read_text(encoding="utf-8")
    assert f"a table of all {len(names())} variants" in page
    for words in ("--embed_dim 512 --seq_len 4096", "--model timm:vit_small_patch16_224"):
        block = re.search(
            rf"^lit-probattn ask ({words}.*)\n```\n(?s:.*?)^```\n(?s:(.*?))^```$", page, re.M
        )
        assert block
        assert ask(block[1].split()) == 0
        printed = capsys.readouterr().out
        rows = [line for line in block[2].splitlines() if line != "…"]
        assert [row for row in rows if f"\n{row}" not in printed] == []
        assert len(rows) >= 3


def test_a_wrong_flag_is_seen(capsys):
    with pytest.raises(SystemExit):
        PARSERS["lit_probattn.reproduce"](["mgk_table1", "--dry_run"])
    assert "--dry_run" in capsys.readouterr().err
    assert ("datamodules", ["prepare", "listops"]) in modules("docs/data.md")

"""The first commands of the README and of docs/training.md run, the others parse, files exist.

`tests/pages` runs all of them.
"""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from lit_probattn import quickstart
from lit_probattn.cli.app import main
from lit_probattn.compare.own import read_row
from lit_probattn.configs import attention_entry
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [README, *((ROOT / "docs" / f"{n}.md").read_text("utf-8") for n in ("training", "layer"))]


def blocks(language: str, pages: list[str] = PAGES) -> list[str]:
    return [b for page in pages for b in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


def commands() -> list[list[str]]:
    """Return every command line of the pages, continuation lines joined, comments dropped."""
    found = []
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append(words)
    return found


FITS = [words[3:] for words in commands() if words[:4] == ["python", "-m", "lit_probattn", "fit"]]


def test_python_blocks_run():
    assert blocks("python")
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), {})


def test_first_run_and_its_evaluation_as_they_stand(monkeypatch, tmp_path):
    """`fit`, `test` and `predict` of the first block, in a folder that holds the configurations."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_PROBATTN_CACHE", str(tmp_path / "cache"))
    first = [words[3:] for words in commands() if words[2:3] == ["lit_probattn"]][:3]
    assert [words[0] for words in first] == ["fit", "test", "predict"]
    for arguments in first:
        assert main(arguments) == 0, arguments
    (version,) = (tmp_path / "runs").glob("*/0")
    assert list(version.glob("test-*.json"))
    assert list(version.glob("predictions-*.parquet"))


@pytest.mark.parametrize("arguments", FITS, ids=" ".join)
def test_fit_commands_parse(arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    drop = arguments.index("--ckpt_path") if "--ckpt_path" in arguments else None
    if drop is not None:
        arguments = arguments[:drop] + arguments[drop + 2 :]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--print_config"])
    assert stop.value.code in (0, None)
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] > 0


def test_paths_that_the_readme_names_exist():
    named = set(re.findall(r"(?:configs|lit_probattn|docs|reports|profiling)/[\w./-]*\w", README))
    missing = [
        name
        for name in sorted(named)
        if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*"))
    ]
    assert missing == []


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands():
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), words


def test_the_quickstart_writes_where_git_does_not_look():
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert f"{quickstart.OUT.parts[0]}/" in ignored
    assert f"`{quickstart.OUT}/report.md`" in README


def test_fish_of_the_table_of_costs_and_of_the_comparison_is_the_preset():
    """One meaning: local heads from maps as the table prints them; `compare` changes neither."""
    entry = attention_entry("configs/attention/hard_fish.yaml")["init_args"]
    sizes = (entry["num_heads"], entry["num_global_heads"])
    (line,) = re.findall(r"^\| Hard FiSH: (\d+) heads from (\d+) maps \| (\d+) \|", README, re.M)
    assert line == (str(sizes[0]), str(sizes[1]), str(sizes[0]))
    words = next(words for words in commands() if words[1:2] == ["compare"])
    assert [dict(read_row(word).set) for word in words if word.startswith("hard_fish")] == [{}]


@pytest.mark.parametrize("folder", ["README.md", "docs/quick_start.md", "docs/training.md"])
def test_the_comparison_is_the_same_wherever_it_stands(folder):
    compared = [
        words
        for block in re.findall(r"```\w*\n(.*?)```", (ROOT / folder).read_text("utf-8"), re.S)
        for line in block.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True))[1:2] == ["compare"]
    ]
    (first, *_) = compared
    assert first == next(words for words in commands() if words[1:2] == ["compare"])

"""The commands of the README and of docs/training.md parse, and files that pages name exist.

`tests/pages` runs all of them.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable

import pandas as pd
import pytest

import lit_probattn
from lit_probattn.base.config_files import file_named, is_there, run_stem
from lit_probattn.compare.own import read_row
from lit_probattn.configs import attention_entry
from tests.pages import blocks
from tests.support.paths import ROOT
from tests.support.runs import printed_config

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "docs/training.md", "docs/layer.md")


def commands(*pages: str) -> list[list[str]]:
    """Return the words of every command of some pages."""
    found = (command for page in pages or PAGES for command in blocks.commands(page))
    return [shlex.split(command.text) for command in found if not command.python]


def without_checkpoint(fits: Iterable[list[str]]) -> list[list[str]]:
    """Return different commands of `fit`, without the checkpoint, which need not exist."""
    found = []
    for words in fits:
        at = words.index("--ckpt_path") if "--ckpt_path" in words else len(words)
        rest = [*words[:at], *words[at + 2 :]]
        if rest not in found:
            found.append(rest)
    return found


FITS = without_checkpoint(w[1:] for w in commands() if w[:2] == ["lit-probattn", "fit"])


def test_python_blocks_run():
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    assert found
    for code in found:
        if blocks.SNIPPET.search(code):
            continue  # a script of examples, which has its own test
        exec(compile(code, "README.md", "exec"), {})


def test_the_evaluation_names_the_run_that_the_first_command_makes():
    runs = {words[1]: words for words in commands()[::-1] if words[0] == "lit-probattn"}
    task, attention = (runs["fit"][runs["fit"].index(f) + 1] for f in ("--task", "--attention"))
    folder = f"runs/{run_stem(file_named('task', task))}-{attention}/0"
    for command in ("test", "predict"):
        assert runs[command][2:] == ["--config", f"{folder}/config.yaml", "--ckpt_path", "best"]


@pytest.mark.parametrize("arguments", FITS, ids=" ".join)
def test_fit_commands_parse(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert printed_config(arguments)["trainer"]["max_steps"] > 0


# Reports that commands of the pages write.
EXAMPLES = {f"reports/{name}" for name in ("translations", "name/report.md", "cosine", "cuda")}


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name
)
def test_paths_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "configs|datamodules|docs|examples|lit_probattn|profiling|reports|tests"
    named = set(re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*\w", text))
    missing = [
        name
        for name in sorted(named - EXAMPLES)
        if not is_there(ROOT / name) and not list(ROOT.glob(f"{name}*"))
    ]
    assert missing == []


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands():
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), words


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_parts_of_the_full_tests_that_passed_are_not_run_again(tmp_path):
    """Status 5 of pytest is a part whose libraries are not installed."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(
        "#!/bin/sh\nfor part; do :; done\necho $part >> ran\nexit $(cat $part/status)\n"
    )
    python.chmod(0o755)
    for part, status in {"a": 0, "b": 1, "c": 5}.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "status").write_text(str(status))
    words = ["make", "--keep-going", f"--makefile={ROOT / 'Makefile'}", "BIN=bin", "PASSED=passed"]

    def make(*parts):
        done = subprocess.run(
            [*words, f"PARTS={' '.join(parts)}", "parts"],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        ran = (tmp_path / "ran").read_text(encoding="utf-8").split()
        return done.returncode, ran, done.stderr

    assert make("a", "b", "c")[:2] == (2, ["a", "b", "c"])
    (tmp_path / "b/status").write_text("0")
    assert make("a", "b", "c")[:2] == (0, ["a", "b", "c", "b"])
    status, ran, told = make("a", "d")
    assert (status, len(ran)) == (2, 4)
    assert "passed/d.passed" in told  # pytest would find no test in it, and no fault


def test_the_quickstart_writes_where_git_does_not_look():
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (out,) = re.findall(r"lit_probattn compare .*?--out (\S+)", makefile, re.DOTALL)
    assert f"{out.split('/')[0]}/" in ignored
    assert f"`{out}/report.md`" in README


def gains() -> dict[str, list[str]]:
    """Return the cells of the README's table of gains, by variant."""
    table = README.split("| variant | parameters | multiply-adds |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


# Names of the table, and the presets with the settings that they mean.
VARIANTS = {
    "softmax, 4 heads": ("softmax", {"num_heads": 4}),
    "sMGK, 4 heads": ("smgk", {}),
    "MGK, 4 heads": ("mgk", {}),
    "MGK with hard E-step, 4 heads": ("mgk_hard_e", {}),
    "Hard FiSH, 8 heads from 2 score maps": ("hard_fish", {}),
    "Hard MiSH, 8 heads from 2 score maps": ("hard_mish", {}),
    "Hard GFiSH, 8 heads from 2 score maps": ("hard_gfish", {}),
    "FiSH (with noise), 8 heads from 2 score maps": ("fish", {}),
    "GFiSH (with noise), 8 heads from 2 score maps": ("gfish", {}),
}


def test_counts_of_the_table_of_gains_are_those_of_the_layers():
    """Parameters and multiply-adds, width 512 at 4096 tokens, over softmax with 8 heads."""
    baseline = lit_probattn.create("softmax", embed_dim=512, num_heads=8).cost(4096)
    assert list(gains()) == list(VARIANTS)
    for name, (preset, settings) in VARIANTS.items():
        layer = lit_probattn.create(preset, embed_dim=512, head_dim=64, **settings)
        cost = layer.cost(4096)
        shown = [float(cell) for cell in gains()[name][:2]]
        counted = [cost.num_parameters / baseline.num_parameters, cost.macs / baseline.macs]
        assert shown == [round(value, 2) for value in counted], name


SIDES_ON_A_GPU = {
    "softmax, 4 heads": "softmax4_triton",
    "sMGK, 4 heads": "smgk4_triton",
    "MGK, 4 heads": "mgk4_triton",
    "MGK with hard E-step, 4 heads": "mgk4_hard_triton",
    "Hard FiSH, 8 heads from 2 score maps": "hard_fish_2_of_8_triton",
    "Hard GFiSH, 8 heads from 2 score maps": "hard_gfish_2_of_8_triton",
    "FiSH (with noise), 8 heads from 2 score maps": "noisy_fish_2_of_8_triton",
}


def test_times_on_a_gpu_are_those_of_the_report():
    rows = pd.read_csv(ROOT / "reports/h200_202611/kernels/rows.csv")
    rows = rows[rows.place.str.endswith("forward + backward") & rows.side.notna()]
    seconds = rows.pivot_table("graph_s", "place", "side")
    for name, cells in gains().items():
        shown = ["–", "–"]
        if name in SIDES_ON_A_GPU:
            mine = seconds[SIDES_ON_A_GPU[name]]
            ratios = [mine / seconds[side] for side in ("softmax8_cudnn", "softmax8_triton")]
            shown = [f"{ratio.min():.2f} – {ratio.max():.2f}" for ratio in ratios]
        assert cells[4:] == shown, name


def test_names_of_the_table_of_gains_are_the_presets():
    """`Hard FiSH` has the heads that the table names, and the comparison changes neither."""
    entry = attention_entry("configs/attention/hard_fish.yaml")["init_args"]
    assert (entry["num_heads"], entry["num_global_heads"]) == (8, 2)
    words = next(words for words in commands() if words[1:2] == ["compare"])
    assert [dict(read_row(word).set) for word in words if word.startswith("hard_fish")] == [{}]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 80


def test_the_comparison_is_the_same_wherever_it_stands():
    pages = ("README.md", "docs/quick_start.md", "docs/comparisons.md")
    first, *others = (
        next(words for words in commands(page) if words[1:2] == ["compare"]) for page in pages
    )
    assert others == [first] * 2

"""What commands write replaces what they have written, and no file of a user's."""

from __future__ import annotations

import os
import shutil

import pandas as pd
import pytest
import yaml

from examples.studies import step_ratio
from lit_probattn.__main__ import main
from lit_probattn.analysis.results import Results
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import refuse_to_replace
from lit_probattn.experiments.page import Made, Page
from profiling.cli import main as profiling_main
from tests.profiling.helpers import sweep
from tests.support.helpers import error_of
from tests.support.paths import ROOT
from tests.support.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("sketches")
MINE = "my own words\n"
SIZES = "--embed_dim 16 --seq_len 8 --num_heads 2 --attention softmax"
REPORT = "report --config small.yaml --results rows"
# What is run in a folder with the rows of a sweep -> files of which each alone is in the way.
DOORS = {
    f"ask --write_sweep out/a.yaml {SIZES}": ["a.yaml"],
    "demo --steps 1 --no-open --out out": ["demo.html"],
    f"{REPORT} --out out": ["report.md", "rows.csv", "ratios.csv", "figures/a.png"],
    "report --index out": ["README.md"],
    "sweep --config small.yaml --out out": ["rows.csv", "rows.jsonl"],
    "profiling kernels --model --head-dims 64 --out out": ["report.md", "rows.csv", "report.html"],
    "step_ratio --out out": ["report.md", "ratios.csv", "figures/a.svg"],
}
QUICK = [door for door in DOORS if not door.startswith(("demo", "sweep", "step_ratio"))]
IN_THE_WAY = [(door, name) for door, names in DOORS.items() for name in names]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a sweep of two points, its rows, and a report."""
    place = tmp_path_factory.mktemp("made")
    config = sweep(grid={"embed_dim": [8], "seq_len": [8]})
    text = yaml.safe_dump(config.model_dump(mode="json", exclude_none=True))
    (place / "small.yaml").write_text(text)
    words = ["--config", str(place / "small.yaml"), "--out", str(place / "rows")]
    assert profiling_main(["sweep", *words]) == 0
    made = Made("a command", "a processor", "python 3", "abc1234")
    Page("study", "A report", made, "It is so.", []).write(place / "out/one")
    return place


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of it, as the working folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line: str) -> int:
    program, *words = line.split()
    programs = {"profiling": profiling_main, "step_ratio": step_ratio.main}
    return programs[program](words) if program in programs else main([program, *words])


@pytest.mark.parametrize(("door", "name"), IN_THE_WAY)
@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_a_file_of_a_users_stays(folder, door, name, kind, capsys):
    path = folder / "out" / name
    path.parent.mkdir(exist_ok=True, parents=True)
    if kind == "file":
        path.write_text(MINE)
    else:
        path.symlink_to("nothing")
    capsys.readouterr()
    assert run(door) in (1, 2)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert f"out/{name} exists" in told.err
    assert told.err.count("\n") == 1
    assert (
        path.read_text(encoding="utf-8") == MINE
        if kind == "file"
        else os.readlink(path) == "nothing"
    )


@pytest.mark.parametrize(
    "door", mostly_slow(QUICK, [door for door in QUICK if not door.startswith(REPORT)])
)
def test_what_it_wrote_itself_is_replaced(folder, door):
    assert run(door) == 0
    assert run(door) == 0


def test_a_study_of_a_run_leaves_files_of_a_users(tmp_path):
    mine = tmp_path / "rank/rank_heads.csv"
    mine.parent.mkdir()
    mine.write_text(MINE)
    with pytest.raises(ConfigError, match=r"rank_heads\.csv exists"):
        Results(tmp_path, "rank", "analyse rank")
    assert mine.read_text(encoding="utf-8") == MINE


def test_a_study_that_was_interrupted_is_made_again(tmp_path, monkeypatch):
    """Its tables cannot say whose they are, and its data are written last."""

    def written() -> None:
        results = Results(tmp_path, "rank", "analyse rank")
        results.table(pd.DataFrame({"head": [0, 1]}), "heads")
        results.write("Ranks", "They are low.")

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Page, "data", full)
        with pytest.raises(OSError, match="no space"):
            written()
    (tmp_path / "rank/rank_heads.csv").write_text("head\n")
    written()
    names = {"report.md", "report.json", "rank_heads.csv"}
    assert {path.name for path in (tmp_path / "rank").iterdir()} == names


def test_a_report_that_was_interrupted_is_made_again(tmp_path, monkeypatch):
    made = Made("a command", "a processor", "python 3", "abc1234")
    report = Page("study", "A report", made, "It is so.", [], tables={"rows": "a\n1\n"})

    def full(path, text):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lit_probattn.experiments.page.replace_text", full)
        with pytest.raises(OSError, match="no space"):
            report.write(tmp_path)
    (tmp_path / "rows.csv").write_text("a\n")
    rows = [tmp_path / "rows.csv"]
    refuse_to_replace(rows, tmp_path / "report.md")
    report.write(tmp_path)
    (tmp_path / "report.md").unlink()
    with pytest.raises(ConfigError, match=r"rows\.csv exists"):
        refuse_to_replace(rows, tmp_path / "report.md")


def test_reports_of_the_clone_can_be_made_again():
    """Their heads say that they are ours."""
    for rows in ROOT.glob("reports/*/rows.csv"):
        refuse_to_replace([rows], rows.parent / "report.md")


@pytest.mark.parametrize(
    "line",
    [
        "sweep --config small.yaml --out /proc/x",
        f"{REPORT} --out small.yaml",
        f"ask {SIZES} --write_sweep small.yaml/a.yaml",
    ],
)
def test_a_place_that_cannot_be_is_one_line(folder, line, capsys):
    capsys.readouterr()
    assert line.rpartition(" ")[2] in error_of(line, run)

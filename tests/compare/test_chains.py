"""Runs that begin with others: order, sharing, identity, failures, what they hand on."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.command import Counted, make_runs, missing_by_task
from lit_probattn.compare.flags import Place
from lit_probattn.compare.model import counts
from lit_probattn.compare.protocol import Options, refuse_unknown_tasks
from lit_probattn.compare.report import Report
from lit_probattn.compare.runs import INIT_FROM, TOKENISER, Run, share_of
from lit_probattn.compare.tables import read_table, read_tasks
from lit_probattn.reproduce.__main__ import main
from lit_probattn.training.checkpoints import step_of
from lit_probattn.training.run_record import read_starts
from tests.compare.test_report import keep
from tests.compare.test_runner import commands_run, runner
from tests.compare.tiny import (
    TABLE,
    TASKS,
    log_of,
    measure_nothing,
    program,
    run_here,
    tiny_runs,
    write_tables,
)
from tests.support.helpers import error_of
from tests.support.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("sketches")
LISTOPS = TASKS["listops"]
CHAIN = {
    "first": LISTOPS,
    "second": {**LISTOPS, "starts_from": "first", "shortened_alone": True},
    "tuned": {**LISTOPS, "starts_from": "second"},
    "other": {**LISTOPS, "starts_from": "second"},
}
CHAINED = {
    **TABLE,
    "tasks": ["second", "tuned", "other"],
    "rows": {
        name: {**row, "published": {"second": 40.0, "tuned": 50.0, "other": 60.0}}
        for name, row in TABLE["rows"].items()
    },
}


def chained(folder, only=(), seeds=(3,), options=None, table=None, tasks=None):
    """Runs of a table of chains that the stand-in program runs."""
    contents = {"table": table or CHAINED, "tasks": tasks or CHAIN}
    return tiny_runs(folder, only, options, seeds=seeds, **contents)


def named(runs):
    return [(run.task.name, run.row.name, run.seed) for run in runs]


def given(run):
    """Flags of a run's `fit`."""
    words = shlex.split(log_of(run)[0])[5:]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("jobs", mostly_slow([1, 3], [1]))
def test_starts_run_first_once_and_for_all(tmp_path, jobs, monkeypatch):
    if jobs == 1:
        run_here(monkeypatch)
    seeds = (3, 4) if jobs == 1 else (3,)  # starting a process takes a tenth of a second
    _, runs = chained(tmp_path, ["tuned", "other", "softmax_2"], seeds)
    tasks = ("first", "second", "tuned", "other")
    assert sorted(named(runs)) == sorted((t, "softmax_2", s) for s in seeds for t in tasks)
    lines = []
    mine = share_of(runs, 0, 1)
    outcome = runner(jobs, lines)(mine)
    assert (outcome.ran, outcome.skipped, outcome.failed) == (4 * len(seeds), {}, {})
    assert all(commands_run(run) == ["fit", "test"] for run in runs)
    for run in runs:
        if run.start is None:
            assert "--run.init_from" not in given(run)
            continue
        assert given(run)["--run.init_from"] == f"{run.start.version()}/best"
        done = next(i for i, line in enumerate(lines) if f"{run.start.label}: test" in line)
        begun = next(i for i, line in enumerate(lines) if f"{run.label}: starts" in line)
        assert done < begun
    assert {run.start.name for run in runs if run.task.name in ("tuned", "other")} == {
        run.name for run in runs if run.task.name == "second"
    }


def test_what_is_only_asked_for_has_its_starts(tmp_path):
    _, runs = chained(tmp_path, ["second", "mgk_1"])
    assert named(runs) == [("first", "mgk_1", 3), ("second", "mgk_1", 3)]
    _, runs = chained(tmp_path, ["tuned", "mgk_1"], options=Options(shortened=True))
    assert named(runs) == [("second", "mgk_1", 3), ("tuned", "mgk_1", 3)]  # begins from nothing
    weights = Options(settings={"tuned:run.init_from": "theirs.ckpt"})
    _, runs = chained(tmp_path, ["tuned", "mgk_1"], options=weights)
    assert named(runs) == [("tuned", "mgk_1", 3)]
    assert "theirs.ckpt" in runs[0].fit_arguments()


def test_another_start_makes_another_run(tmp_path):
    def digests(setting=None, seed=3):
        options = Options(settings={} if setting is None else {setting: 0.25})
        _, runs = chained(tmp_path, ["softmax_2"], (seed,), options)
        return {run.task.name: run.digest for run in runs}

    plain = digests()
    changed = {
        key: {name for name, digest in digests(key).items() if digest != plain[name]}
        for key in ("first:model.init_args.lr", "second:model.init_args.lr", "tuned:run.monitor")
    }
    assert changed["first:model.init_args.lr"] == {"first", "second", "tuned", "other"}
    assert changed["second:model.init_args.lr"] == {"second", "tuned", "other"}
    assert changed["tuned:run.monitor"] == {"tuned"}
    assert not set(plain.values()) & set(digests(seed=4).values())
    alone = {**CHAIN, "tuned": LISTOPS}
    _, runs = chained(tmp_path, ["tuned", "softmax_2"], tasks=alone)
    assert runs[0].digest != plain["tuned"]


def test_settings_are_those_of_the_tasks_that_a_pattern_names(tmp_path):
    key = "model.init_args.lr"
    options = Options(settings={key: 0.5, f"s*:{key}": 0.25, f"other:{key}": 0.125})
    _, runs = chained(tmp_path, ["softmax_2"], options=options)
    rates = {run.task.name: run.config["model"]["init_args"]["lr"] for run in runs}
    assert rates == {"first": 0.5, "second": 0.25, "tuned": 0.5, "other": 0.125}
    with pytest.raises(
        ConfigError, match=r"unknown task 'tunde'; did you mean 'tuned'\?; tasks: a, tun"
    ):
        refuse_unknown_tasks(["a", "tuned"], Options(settings={"tunde:a.b": 1}))


def test_a_chain_that_was_killed_resumes_where_it_was(tmp_path, monkeypatch):
    """The second run of a chain has its checkpoints up to step 9, the others after it nothing."""
    run_here(monkeypatch)
    _, runs = chained(tmp_path, ["softmax_2"])
    first, second, third, _ = runs
    (tmp_path / "FAIL").write_text("second")
    assert runner()(runs, attempts=1).ran == 1
    (tmp_path / "FAIL").unlink()
    for path in (second.version() / "checkpoints").iterdir():
        if step_of(path) > 9:
            path.unlink()
    lines = []
    assert runner(1, lines)(runs).ran == 3
    assert "already finished" in lines[0]
    assert "resumes from step 9 of 16" in lines[1]
    assert [commands_run(run) for run in (first, third)] == [["fit", "test"]] * 2
    assert commands_run(second) == ["fit", "fit", "test"]
    assert [start["first"] for start in read_starts(second.version())] == [0, 9]


def test_what_begins_with_a_failure_is_skipped_in_a_line(tmp_path, monkeypatch):
    run_here(monkeypatch)
    _, runs = chained(tmp_path)
    (tmp_path / "FAIL").write_text("second-mgk")
    lines = []
    outcome = runner(1, lines)(runs)
    failed = "second, MGK, 1 head, seed 3"
    assert list(outcome.failed) == [failed]
    reason = f"it depends on {failed}, which failed"
    assert outcome.skipped == {f"{t}, MGK, 1 head, seed 3": reason for t in ("tuned", "other")}
    assert sum(line.endswith(f"skipped: {reason}") for line in lines) == 2
    assert outcome.ran == 5  # `first` of both rows, and the other row
    (tmp_path / "FAIL").unlink()
    again = runner()(runs)
    assert (again.ran, again.skipped) == (3, {})


def test_a_start_that_fails_once_is_waited_for(tmp_path, monkeypatch):
    run_here(monkeypatch)
    _, runs = chained(tmp_path, ["softmax_2"])
    (tmp_path / "FAIL_ONCE").touch()
    outcome = runner(2)(runs)
    assert (outcome.ran, outcome.skipped, outcome.failed) == (4, {}, {})


def test_shards_do_not_tear_chains(tmp_path):
    _, runs = chained(tmp_path, seeds=(3, 4))
    shares = [share_of(runs, index, 3) for index in range(3)]
    assert sorted(run.name for share in shares for run in share) == sorted(run.name for run in runs)
    assert sorted(map(len, shares)) == [4, 4, 8]
    for share in shares:
        for place, run in enumerate(share):
            assert run.start is None or run.start.name in [c.name for c in share[:place]]


def test_all_seeds_may_begin_with_one(tmp_path):
    _, runs = chained(tmp_path, ["softmax_2"], (3, 4, 5), Options(start_seed=4))
    assert sorted(named(runs)) == sorted(
        [("first", "softmax_2", 4), ("second", "softmax_2", 4)]
        + [(task, "softmax_2", seed) for task in ("tuned", "other") for seed in (3, 4, 5)]
    )
    assert len({run.name for run in runs}) == len(runs)
    table, own = chained(tmp_path, ["softmax_2"], (4,))
    pairs = zip(own, [run for run in runs if run.seed == 4], strict=True)
    assert all(one.name == other.name for one, other in pairs)  # the seed's own are the same runs
    for run in runs:
        keep(run, 30.0)
    made = Report(table, runs, "command")
    made.write(tmp_path / "out")
    written = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "with seed 4, so the spread excludes the training on the first task" in written


def test_the_report_has_the_starts_too(tmp_path):
    table, runs = chained(tmp_path)
    for run in runs:
        keep(run, 30.0)
    text = Report(table, runs, "command").write(tmp_path / "out")
    written = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    tasks = [line.split(" | ")[0][2:] for line in text.splitlines()[2:]]
    assert list(dict.fromkeys(tasks)) == ["first", "second", "tuned", "other"]
    assert "8 of 8 runs are finished." in written
    assert (
        "Runs start from the trained model of their row: second from first; tuned from second; "
        "other from second, with the same seed" in written
    )
    assert all(f"\n{name}:\n" in written for name in CHAIN)  # differences of protocol


def test_the_command_runs_chains(tmp_path, capsys, monkeypatch):
    run_here(monkeypatch)
    measure_nothing(monkeypatch)
    written = []
    monkeypatch.setattr(Report, "write", lambda report, folder: written.append(report) or "")
    write_tables(tmp_path / "tables", CHAINED, CHAIN)
    places = ["--runs", str(tmp_path / "runs"), "--launch", shlex.join(program(tmp_path))]
    words = ["tiny", "--tables", str(tmp_path / "tables"), *places, "--data_dir", str(tmp_path)]
    words += ["--seeds", "3", "--only", "tuned"]
    (tmp_path / "FAIL").write_text("first-softmax")
    assert main([*words, "--attempts", "1"]) == 1
    assert "3 of 6 runs finished (3 new); 1 failed, 0 in other processes, 2 skipped, 0 tasks" in (
        capsys.readouterr().out
    )
    (tmp_path / "FAIL").unlink()
    assert main(words) == 0
    assert "6 of 6 runs finished (3 new); 0 failed, 0 in other processes, 0 tasks" in (
        capsys.readouterr().out
    )
    assert [sum(run.result() is not None for run in report.runs) for report in written[-1:]] == [6]
    assert "--set thir:a: unknown task 'thir'" in error_of([*words, "--set", "thir:a=1"], main)


def test_a_circle_of_several_starts_is_refused(tmp_path):
    wrong = {**CHAIN, "second": {**LISTOPS, "starts_from": "tuned"}}
    folder = write_tables(tmp_path / "tables", CHAINED, wrong)
    with pytest.raises(ConfigError, match="starts_from is circular: second -> tuned -> second"):
        read_tasks(folder)


def test_a_seed_of_starts_is_for_chains(tmp_path):
    tables = write_tables(tmp_path / "tables")
    words = ["tiny", "--tables", str(tables), "--runs", str(tmp_path), "--start_seed", "1"]
    line = error_of([*words, "--dry-run"], main)
    assert "--start_seed: no run of tiny starts from another run" in line


SENTENCES = (
    "The {0} cat sat on mat {0}. A dog {1} ran to the town of Paris {0}. Then it slept well.\n"
)


@pytest.fixture
def bert(tmp_path):
    """A row of a real table, small, its places and settings."""
    (tmp_path / "text.txt").write_text("".join(SENTENCES.format(i, i % 7) for i in range(60)))
    questions = [
        {"id": str(i), "question": "Who ran?", "answers": [{"text": f"dog {i}", "answer_start": 2}]}
        for i in range(6)
    ]
    paragraphs = [
        {"context": f"A dog {i} ran to Paris.", "qas": [asked]} for i, asked in enumerate(questions)
    ]
    content = {"version": "1.1", "data": [{"title": "x", "paragraphs": paragraphs}]}
    for name in ("train.json", "dev.json"):
        (tmp_path / name).write_text(json.dumps(content))
    settings = {
        "bert_*:data.init_args.path": str(tmp_path / "text.txt"),
        "bert_*:data.init_args.vocab_limit": 90,
        "bert_*:data.init_args.val_fraction": 0.2,
        "bert_*:data.init_args.test_fraction": 0.2,
        "squad:data.init_args.path": str(tmp_path),
    }
    options = Options(shortened=True, settings=settings)
    place = Place(runs=tmp_path / "runs", cache_dir=str(tmp_path / "cache"))
    return make_runs(read_table("low_rank_table2b"), ["squad", "size_32"], [0], options, place)


def test_data_have_the_tokeniser_of_the_start(bert, tmp_path):
    start, run = bert
    assert (start.task.name, run.task.name) == ("bert_pretraining_long", "squad")
    assert run.links()[TOKENISER] == f"<tokeniser of {start.name}>"  # it is not made yet
    made = Counted()
    assert made.prepare([run]) == {}
    data = run.data()
    data.setup()
    assert data.tokeniser_digest == start.data().tokeniser_digest
    folder = Path(run.links()[TOKENISER])
    assert folder.parent == tmp_path / "cache"
    assert start.run_name.startswith(f"{start.name}-data")
    assert run.links()[INIT_FROM] == tmp_path / "runs" / start.run_name / "0" / "best"
    sizes = {part.task.name: counts(part)["parameters"] for part in bert}
    table = 64 * (start.data().vocab_size + 64 + 2 + 2)
    assert all(table < size < 30522 * 64 for size in sizes.values())


def test_a_tokeniser_that_is_named_is_kept(bert, tmp_path):
    start, run = bert
    start.data().prepare_data()
    folder = str(start.data().cache.folder)
    settings = {**run.options.settings, f"squad:{TOKENISER}": folder}
    own = Run(run.task, run.row, 0, replace(run.options, settings=settings), run.place)
    assert TOKENISER not in own.links()
    assert own.digest != run.digest


def test_missing_data_of_a_start_are_told_with_what_begins_with_it(bert, tmp_path):
    (tmp_path / "text.txt").unlink()
    failed = Counted().prepare(bert)
    assert "text.txt: no such file or folder" in failed["bert_pretraining_long"]
    assert failed["squad"] == "it starts from bert_pretraining_long, whose data cannot be read"
    assert list(missing_by_task(bert)) == ["bert_pretraining_long"]

"""`lit-probattn compare`: any variants on any task, read from names."""

from __future__ import annotations

import shlex

import pandas as pd
import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_probattn.__main__ import main
from lit_probattn.base import allowed_code
from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place, flags
from lit_probattn.compare.model import counts
from lit_probattn.compare.own import make_table, read_row
from lit_probattn.compare.protocol import ATTENTION, Options, differing, refuse_unlogged_metrics
from lit_probattn.configs import compose, parse_settings
from lit_probattn.records.figures import readable
from tests.compare.tiny import program, run_here
from tests.support.helpers import error_of
from tests.support.patching import check_figures
from tests.support.paths import ROOT

TASK = "tiny/lra_listops"


def test_names_become_rows_with_options():
    table = make_table([TASK], ["softmax", "smgk num_heads=1", "hard_gfish num_global_heads=4"])
    assert table.baseline == "softmax"
    assert [row.label for row in table.rows.values()] == [
        "softmax, 8 heads",
        "smgk, 1 head",
        "hard_gfish num_global_heads=4, 8 heads",
    ]
    assert [dict(row.overrides) for row in table.rows.values()] == [
        {},
        {f"{ATTENTION}.num_heads": 1},
        {f"{ATTENTION}.num_global_heads": 4},
    ]
    (task,) = table.tasks.values()
    assert (task.name, task.config) == ("lra_listops_tiny", f"configs/tasks/{TASK}.yaml")
    (metric,) = task.metrics.values()
    assert (metric.key, metric.unit, metric.scale) == ("test/accuracy", "%", 100)


def test_options_that_all_rows_set_are_given_once():
    table = make_table([TASK], ["softmax dropout=0", "smgk num_heads=1 dropout=0 num_components=3"])
    assert [row.label for row in table.rows.values()] == [
        "softmax, 8 heads",
        "smgk num_components=3, 1 head",
    ]
    assert table.shared_options == "dropout=0"
    assert "dropout" not in table.title
    assert [row.overrides[f"{ATTENTION}.dropout"] for row in table.rows.values()] == [0, 0]
    alone = make_table([TASK], ["softmax dropout=0"])
    assert (alone.rows["softmax_dropout=0"].label, alone.shared_options) == (
        *("softmax dropout=0, 8 heads", ""),
    )


@pytest.mark.parametrize("name", ["own.yaml", "softmax.yaml"])
def test_variants_of_one_name_are_told_apart_by_their_files(name, tmp_path, monkeypatch):
    """Curves, tables and titles know them by these labels."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text((ROOT / "configs/attention/mgk.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    table = make_table([TASK], [f"a/{name}", f"b/{name}", "softmax", f"a/{name} num_heads=2"])
    labels = [readable(row.label) for row in table.rows.values()]
    assert len(set(labels)) == 4
    assert (f"a/{name}" in labels[0], f"b/{name}" in labels[1]) == (True, True)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((bool, text) for text in ("False", "True", "false", "off", "yes")),
        *((float, text) for text in (".5", "1.", "1e-3", "3")),
        *((list[float], text) for text in ("[.5, 1e-3]", "[1, 2]")),
        *((str, text) for text in ("1:30", "nan", "2021-01-01", "010", "a #b", "*x", "", "x=y")),
    ],
)
def test_a_setting_is_what_fit_has_for_the_same_text(kind, text):
    """In this process, where models are built of it, and in the commands of runs."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--key", type=kind)
    expected = parser.parse_args([f"--key={text}"]).key
    found = parse_settings([f"key={text}"])
    assert found["key"] == expected
    assert parser.parse_args(flags(found)).key == expected


def test_dotted_keys_are_settings_of_one_variant():
    row = read_row("mgk model.init_args.lr=0.01 dropout=0.0")
    assert row.overrides == {f"{ATTENTION}.dropout": 0.0, "model.init_args.lr": 0.01}


def test_edited_code_of_a_variant_makes_another_run(tmp_path, monkeypatch):
    """The finished runs of the old code would be reported as those of the new."""
    monkeypatch.setenv(allowed_code.VARIABLE, "edited")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited").mkdir()
    (tmp_path / "edited/__init__.py").touch()
    (tmp_path / "edited/helper.py").touch()
    code = "from lit_probattn.attention import SoftmaxAttention as X"
    (tmp_path / "edited/attention.py").write_text(code)
    entry = {"class_path": "edited.attention.X", "init_args": {"num_heads": 4}}
    text = yaml.safe_dump({"model": {"init_args": {"attention": entry}}})
    (tmp_path / "x.yaml").write_text(text)
    table = make_table([TASK], ["softmax", str(tmp_path / "x.yaml")])

    def names():
        return [run.name for run in make_runs(table, (), (0,), Options(), Place(tmp_path))]

    before = names()
    assert names() == before
    (tmp_path / "edited/helper.py").write_text("SHARPNESS = 2\n")
    after = names()
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_only_selects_tasks_and_rows_by_patterns():
    table = make_table([TASK, "tiny/own_pairs"], ["softmax", "mgk", "smgk"])
    names = {(task.name, row.name) for task, row in table.select(["lra_*", "*mgk"])}
    assert names == {("lra_listops_tiny", "mgk"), ("lra_listops_tiny", "smgk")}


def test_a_language_model_is_compared_by_what_selects_its_checkpoints():
    (task,) = make_table(["wikitext103_small"], ["softmax"]).tasks.values()
    (metric,) = task.metrics.values()
    assert metric.name == "ppl"
    assert metric.value({"test/tokens_sliding": 3, "test/ppl_sliding": 7.5}) == 7.5
    refuse_unlogged_metrics(task, compose([task.config], {}))
    (task,) = make_table(["wikitext103_small"], ["softmax"], ["test/loss"]).tasks.values()
    assert [(m.key, m.unit) for m in task.metrics.values()] == [("test/loss", "nats")]


def test_a_task_without_a_model_is_one_line(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("run: {monitor: val/loss}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own\.yaml: the file does not set model\.class_path"):
        make_table([str(path)], ["softmax"])


@pytest.mark.parametrize(("task", "unit"), [("d4rl", "squared error"), ("uea", "nats")])
def test_losses_have_the_unit_of_their_task(task, unit):
    (entry,) = make_table([task], ["softmax"]).tasks.values()
    assert [(m.key, m.unit) for m in entry.metrics.values()] == [("test/loss", unit)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--task", TASK, "--attention", "sofmax"], "unknown attention 'sofmax'; did you mean 's"),
        (["--task", "tiny/listops", "--attention", "mgk"], "unknown task 'tiny/listops'; did you"),
        (["--task", TASK, "--attention", "mgk num_head=2"], "did you mean 'num_heads'?"),
        (["--task", TASK, "--attention", "mgk heads"], "expected KEY=VALUE, received 'heads'"),
        (["--task", TASK, "--attention", "mgk", "mgk"], "duplicate --attention 'mgk'"),
        (["--task", TASK, "--attention", "mgk", "configs/attention/mgk.yaml"], "duplicate"),
        (["--task", TASK, "--attention", "softmax", "softmax num_heads=8"], "duplicate"),
        (["--task", TASK, TASK, "--attention", "mgk"], "duplicate --task lra_listops_tiny"),
        (["--task", TASK, "--attention", "mgk", "--seeds", "1", "2", "1"], "--seeds: duplicate 1"),
        (["--task", TASK, "--attention", "mgk", "--name", "a/b"], "--name must be the name of a"),
        (["--task", TASK, "--attention", " "], "--attention ' ': expected NAME KEY=VALUE"),
        (
            ["--task", TASK, "--attention", "softmax", "mgk data.init_args.batch_size=4"],
            "lra_listops_tiny: the variants differ in data.init_args.batch_size, so their scores "
            "are not comparable: use --set to set these for all",
        ),
        (
            ["--task", TASK, "--attention", "softmax", "mgk trainer.max_steps=4"],
            "the variants differ in trainer.max_steps",
        ),
        (
            ["--task", TASK, "--attention", "mgk", "--data.batchsize", "4", "--dry-run"],
            "lra_listops_tiny, mgk, 4 heads: unknown key 'data.init_args.batchsize'",
        ),
        (
            ["--task", TASK, "--attention", "mgk num_heads=2", "mgk num_heads=two", "--dry-run"],
            "lra_listops_tiny, mgk, two heads: model.init_args.attention.init_args.num_heads",
        ),
        (
            ["--task", TASK, "--attention", "softmax", "mgk e_step=hrd", "--dry-run"],
            "model.init_args.attention.init_args.e_step",
        ),
        (
            ["--task", TASK, "--attention", "softmax", "mgk dropout=2", "--dry-run"],
            "model.init_args.attention.init_args.dropout must be in [0, 1), received 2",
        ),
        (
            ["--task", TASK, "--attention", "mgk", "--metric", "test/*", "--dry-run"],
            "--metric: expected the name of a score, received the pattern 'test/*'",
        ),
    ],
)
def test_bad_input_is_one_line(words, expected):
    assert expected in error_of(["compare", *words])


def test_settings_that_the_data_refuse_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "pairs.csv").write_text("text,label\nIt rains.,wet\nIt shines.,dry\n")
    monkeypatch.chdir(tmp_path)
    words = ["--task", "tiny/own_pairs", "--attention", "softmax", "--runs", str(tmp_path / "runs")]
    given = [
        "data.init_args.path=pairs.csv",
        "data.init_args.tokenizer=somewhere",
        "data.init_args.vocab_limit=300",
    ]
    assert main(["compare", *words, "--seeds", "0", "--set", *given]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("skipped: ")]
    assert "own_pairs_tiny: vocab_limit " in line
    assert "tokenizer=somewhere is set" in line
    assert "unset one of them" in line


def test_settings_beside_the_attention_are_told_apart():
    same = {"model": {"init_args": {"lr": 0.1, "attention": {"class_path": "A"}}}}
    other = {"model": {"init_args": {"lr": 0.2, "attention": {"class_path": "B"}}}}
    assert differing({"a": same, "b": other}) == ["model.init_args.lr"]
    assert differing({"a": same, "b": same}) == []


def test_variants_run_over_seeds_and_are_reported(tmp_path, monkeypatch, capsys):
    """With a program that stands in for training; its accuracy is 25 + seed, mixtures + 10."""
    check_figures(monkeypatch)
    run_here(monkeypatch)
    counted = {}

    def counts_of_row(run):
        if run.row.name not in counted:
            counted[run.row.name] = counts(run)
        return counted[run.row.name]

    monkeypatch.setattr("lit_probattn.compare.command.check_arguments", lambda words: None)
    for module in ("command", "measured"):
        monkeypatch.setattr(f"lit_probattn.compare.{module}.counts", counts_of_row)
    monkeypatch.chdir(tmp_path)
    launch = shlex.join(program(tmp_path))
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {
                    "init_args": {
                        "attention": {
                            "class_path": "lit_probattn.attention.MGKAttention",
                            "init_args": {"num_heads": 1, "num_components": 2},
                        }
                    }
                }
            }
        )
    )
    rows = ["softmax", "smgk num_heads=1 model.init_args.lr=0.01", "own.yaml"]
    words = ["compare", "--task", TASK, "--attention", *rows, "--seeds", "0", "2"]
    words += ["--accelerator", "cpu", "--launch", launch, "--data_dir", str(tmp_path)]
    assert main(words) == 0
    out = tmp_path / "runs/reproduce/reports/compare-lra_listops_tiny"
    text = (out / "report.md").read_text(encoding="utf-8")
    table = pd.read_csv(out / "ratios.csv").set_index("row")
    assert list(table["mean"]) == pytest.approx([26.0, 36.0, 26.0])
    assert list(table["num_seeds"]) == [2, 2, 2]
    assert (
        "**Rows of lra_listops_tiny also differ in settings other than attention: "
        "`model.init_args.lr`.**" in text
    )
    assert "Cheapest on lra_listops_tiny, ratio to the baseline: parameters: smgk" in text
    assert "Unequal settings" in text  # own.yaml has no attention dropout
    assert "Minutes: mean" in text  # explains the columns it shows
    assert "FLOP ratio" not in text
    measured = pd.read_csv(out / "rows.csv").groupby("row")["full parameters_ratio"].first()
    assert measured["softmax"] == 1
    assert (out / "figures/learning_curves.png").is_file()
    assert ".** Loss: mean of" in text  # the claim in bold, then the caption
    assert "6 of 6 runs finished (6 new)" in capsys.readouterr().out

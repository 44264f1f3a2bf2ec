"""The shipped tables: every printed number has a run, every run can be built."""

from __future__ import annotations

import csv
import inspect
import json
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place
from lit_probattn.compare.model import build_task
from lit_probattn.compare.protocol import (
    ATTENTION,
    Options,
    deciding,
    differences,
    draws_noise_at_eval,
    run_config,
    setting,
    switched,
)
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import (
    AVERAGE,
    Kind,
    kinds,
    read_published,
    read_table,
    read_tasks,
)
from lit_probattn.configs import attention_entry, compose, flatten, read_yaml
from lit_probattn.experiments.expectations import digits_of
from lit_probattn.reproduce import uea
from lit_probattn.tasks.base import Task
from tests.compare.tiny import TABLE, TASKS, write_tables
from tests.reproduce.small_tables import two_blocks
from tests.support.paths import ROOT, shipped
from tests.support.runs import printed_config
from tests.support.slow import mostly_slow

FITS = sorted(path.stem for path in shipped("table") if read_yaml(path).get("kind") == "fits")
# MGK: 10 tables, its variances and the text; FiSH: 13, two sections and the text; fixed head size:
# 4; value-aware: 3.
TABLES = 38


def printed(name: str) -> dict[tuple[str, str, str, str, str], float]:
    rows = [row for row in read_published() if row["table"] == name]
    keys = ("task", "method", "heads", "metric", "split")
    found = {tuple(row[k] for k in keys): float(row["value"]) for row in rows}
    assert len(found) == len(rows), "a number is printed once"
    return found


def test_every_table_with_numbers_is_known_and_every_kind_is_supported():
    known = kinds()
    assert sum("figure" not in name for name in known) == TABLES
    assert {row["table"] for row in read_published()} <= set(known)
    assert {part["kind"] for part in known.values()} == set(get_args(Kind))
    for part in known.values():
        assert part["title"]


@pytest.mark.parametrize("name", FITS)
def test_every_printed_number_stands_beside_its_run(name):
    table = read_table(name)
    found = {}
    for row in table.rows.values():
        for task, values in row.published.items():
            entry = next(iter(table.tasks.values())) if task == AVERAGE else table.tasks[task]
            for metric, value in values.items():
                key = (task, row.method, row.heads, *entry.metrics[metric].printed)
                found[key] = value
        for task, values in row.spread.items():
            for metric, value in values.items():
                number, split = table.tasks[task].metrics[metric].printed
                found[task, row.method, row.heads, f"{number}_pm", split] = value
    assert found == printed(name)


@pytest.mark.parametrize("name", FITS)
def test_numbers_have_the_decimals_of_their_column(name):
    """YAML reads 110.30 as 110.3, which is not all numbers from 110.25 to 110.35."""
    table, printed = read_table(name), [row for row in read_published() if row["table"] == name]
    for task in table.tasks.values():
        for metric in task.metrics.values():
            key = {"task": task.name} | dict(zip(("metric", "split"), metric.printed, strict=True))
            texts = [row["value"] for row in printed if key.items() <= row.items()]
            if any(metric.name in row.published.get(task.name, {}) for row in table.rows.values()):
                assert table.digits(metric.name) == max(map(digits_of, texts))


LOW_RANK = [name for name in FITS if name.startswith("low_rank")]
TOTALS = {
    "low_rank_table1": [336.2, 336.2, 336.2],
    "low_rank_table2a": [167.7, 192.9, 218.1, 318.9],
    "low_rank_table2b": [129.9, 142.5, 167.7, 218.1],
    "low_rank_table3a": [214.1, 251.8, 289.6, 327.4],
}


@pytest.mark.parametrize("name", mostly_slow(LOW_RANK, ["low_rank_table2a", "low_rank_table3a"]))
def test_models_of_the_low_rank_tables_have_the_printed_parameters(name):
    """Of the model that is pre-trained, whose blocks are alike; these, rounded, are printed."""
    table = read_table(name)
    task, found = table.tasks["bert_pretraining_long"], []
    for row in table.rows.values():
        run, counts = Run(task, row, 0), []
        sizes = run.config["model"]["init_args"]
        all_blocks = sizes["num_layers"]
        for sizes["num_layers"] in (1, 2):
            with torch.device("meta"):
                model = build_task(run, run.data()).model
            counts.append(sum(weights.numel() for weights in model.parameters()))
        total = counts[0] + (all_blocks - 1) * (counts[1] - counts[0])
        found.append(task.metrics["params"].value({"parameters": total}))
        assert round(found[-1]) == row.published[task.name]["params"]
    assert [round(value, 1) for value in found] == TOTALS[name]


def test_rows_of_the_low_rank_tables_go_through_the_published_chain():
    assert len(LOW_RANK) == 4
    for name in LOW_RANK:
        table = read_table(name)
        runs = make_runs(table, [], [0], Options(), Place())
        assert len(runs) == 4 * len(table.rows)
        for row in table.rows:
            chain = {run.task.name: run for run in runs if run.row.name == row}
            steps = {task: run.max_steps for task, run in chain.items()}
            assert (steps["bert_pretraining"], steps["bert_pretraining_long"]) == (450_000, 50_000)
            sizes = ("embed_dim", "head_dim", "num_layers", "mlp_dim")
            models = [run.config["model"]["init_args"] for run in chain.values()]
            assert len({tuple(model[size] for size in sizes) for model in models}) == 1
            assert models[0]["num_layers"] == 24
            assert chain["squad"].start.name == chain["mnli"].start.name
            assert chain["squad"].start.start.name == chain["bert_pretraining"].name
        short = make_runs(table, [], [0], Options(shortened=True), Place())
        assert len(short) == 3 * len(table.rows)
        for run in short:
            row, given = table.rows[run.row.name], run.config["model"]["init_args"]
            for key in ("embed_dim", "head_dim", "mlp_dim"):
                full = row.overrides[f"model.init_args.{key}"]
                assert full == 8 * given[key]
            assert given["num_layers"] == 2


def test_tables_2a_and_2b_share_the_chain_of_their_common_row():
    one, other = (
        make_runs(read_table(f"low_rank_table2{letter}"), [row], [0], Options(), Place())
        for letter, row in (("a", "heads_8"), ("b", "size_128"))
    )
    assert [run.name for run in one] == [run.name for run in other]
    assert [run.task.name for run in one] == [
        *("bert_pretraining", "bert_pretraining_long", "squad", "mnli")
    ]


def test_the_numbers_of_the_uea_table_stand_in_its_own_file():
    table, unknown = uea.make_table(uea.TABLE, Place(data_dir="none"))
    assert unknown == {}
    content = yaml.safe_load(uea.TABLE.read_text(encoding="utf-8"))
    numbers = printed("fish_table6")
    columns = {
        "softmax": "Softmax (reproduced)",
        "softmax_reported": "Softmax (reported by source)",
        "gfish": "GFiSH",
    }
    found = {}
    for archive in table.tasks:
        for column, value in content["archives"][archive]["published"].items():
            found[f"uea_{archive}", columns[column]] = value
    for column, value in content["published_average"].items():
        found["uea_average", columns[column]] = value
    assert found == {key[:2]: value for key, value in numbers.items()}
    for row in table.rows.values():
        column = columns[content["variants"][row.name]["published"]]
        mine = {key[0]: value for key, value in found.items() if key[1] == column}
        assert {f"uea_{task}": number["test"] for task, number in row.published.items()} == mine


def test_noisy_rows_are_evaluated_with_their_noise():
    """As published: the released code never asks whether it trains."""
    tables = [*map(read_table, FITS), uea.make_table(uea.TABLE, Place(data_dir="none"))[0]]
    noisy = {}
    for table in tables:
        for task, row in table.pairs():
            for released in (False, True):
                config = run_config(task, row, Options(as_released=released))
                if setting(config, f"{ATTENTION}.noise") not in (None, "none"):
                    noisy[table.name, row.name, released] = draws_noise_at_eval(config)
    methods = {(table, name.partition("_")[0]) for table, name, _ in noisy}
    assert methods == {
        *(("fish_table1", "fish"), ("fish_table1", "gfish"), ("fish_table6", "gfish")),
        *(("fish_table10", "fish"), ("fish_table10", "mish"), ("fish_table11", "gfish")),
        *(("fish_table2", "fish"), ("fish_table2", "gfish"), ("fish_ast", "fish")),
        *(("fish_table4", "fish"), ("fish_table4", "gfish"), ("fish_ast", "gfish")),
        *(("fish_table3", "lfish"), ("fish_table3", "glfish"), ("fish_table7", "gfish")),
    }
    assert [name for name, drawn in noisy.items() if drawn is not True] == []


def test_the_uea_table_as_published_counts_padding_and_says_so():
    """The default leaves padded steps out of batch norm, which the report lists."""
    keys = ("model.init_args.norm_positions", "data.init_args.pad_to")
    shown, ours = {}, Options()
    for select_on, options in (("val", ours), ("test", Options(as_published=True))):
        table, _ = uea.make_table(uea.TABLE, Place(data_dir="none"), select_on=select_on)
        for task, row in table.pairs():
            config = run_config(task, row, options)
            found = {d.key: (d.published, d.here) for d in differences(task, row, options)}
            is_batch = task.settings["model.init_args.norm"] == "batch"
            expected = ("all", "max") if is_batch and options is not ours else ("real", "longest")
            assert tuple(setting(config, key) for key in keys) == expected
            shown[options is ours, is_batch] = tuple(found.get(key) for key in keys)
            # What is undecided in the papers is decided in the file: after the mixing, as printed.
            if row.name == "gfish_4":
                assert setting(config, f"{ATTENTION}.scale_position") == "after"
    nothing = (None, None)
    assert shown.pop((True, True)) == (("all", "real"), ("max", "longest"))
    assert shown == {(True, False): nothing, (False, True): nothing, (False, False): nothing}


@pytest.mark.parametrize(
    ("name", "batches", "test"),
    [("listops", 62, None), ("text", 781, None), ("retrieval", 565, "all")],
)
def test_the_arena_as_published_is_evaluated_in_the_authors_way(name, batches, test):
    """Every setting reaches the configuration, the default has none of them, and the list says."""
    task = read_tasks()[name]
    row = next(row for task_, row in read_table("mgk_table1").pairs() if task_.name == name)
    keys = {"data.init_args.parity_eval": batches, "run.test_during_training": test}
    for options, expected in ((Options(), {}), (Options(as_published=True), keys)):
        config = run_config(task, row, options)
        assert {key: setting(config, key) for key in keys} == {k: expected.get(k) for k in keys}
        shown = {d.key: d.published for d in switched(task, options)}
        assert shown == (dict(task.published) if expected else {})
    assert not any("whole splits" in note for note in task.not_in_config)
    assert differences(task, row, Options(as_published=True)) == []


def test_reports_on_listops_list_that_its_expressions_are_generated():
    """The papers read the released files; the reduced protocol cannot."""
    task = read_tasks()["listops"]
    row = read_table("mgk_table1").rows["softmax_8"]
    found = {d.key: (d.published, d.here) for d in differences(task, row, Options())}
    assert found["data.init_args.source"] == ("released", "generated")
    for more in ({}, {"steps": 100}):
        config = run_config(task, row, Options(as_published=True, **more))
        assert setting(config, "data.init_args.source") == "released"
    for more in ({"shortened": True}, {"max_seq_len": 512}):
        short = run_config(task, row, Options(as_published=True, **more))
        assert setting(short, "data.init_args.source") == "generated"


def test_published_file_is_tidy():
    with (ROOT / "configs/reproduce/published.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["table", "task", "method", "heads", "metric", "split", "value"]
    assert all(len(row) == 7 and float(row[-1]) == float(row[-1]) for row in rows[1:])


BUILT: set[str] = set()  # models of all tables: what several have is built once
FEW = [(name, "options") for name in FITS[::8]]
TRAINING = set(inspect.signature(Task.__init__).parameters)


@pytest.mark.filterwarnings("ignore:shifted keys with dot-product scores")  # rows of MGK's table 6
@pytest.mark.parametrize(
    ("name", "differ_by"),
    mostly_slow([*FEW, *((name, "values") for name in FITS)], FEW),
)
def test_runs_can_be_built(name, differ_by):
    """Models on meta tensors, with the attention of the paper and that of the released code.

    None has an option without effect.

    By options: of the models of a task that differ by numbers alone, the first is built.
    """
    table, rows = read_table(name), set()
    assert table.seeds
    assert len(set(table.seeds)) == len(table.seeds)
    for task, row in table.pairs():
        for options in (Options(), Options(as_released=True), Options(as_published=True)):
            rows.add(row.name)
            run = Run(task, row, 0, options)
            model = run.config["model"]
            sizes = {k: v for k, v in model["init_args"].items() if k not in TRAINING}
            if differ_by == "options":
                sizes = {
                    k: v if isinstance(v, str | bool) else 0 for k, v in flatten(sizes).items()
                }
            key = json.dumps([task.name, model["class_path"], sizes], sort_keys=True)
            if key not in BUILT:
                BUILT.add(key)
                two_blocks(model)
                with torch.device("meta"):
                    build_task(run, run.data())
    assert set(table.rows) == rows


def test_same_models_of_two_tables_are_one_run():
    first, second = read_table("mgk_table3"), read_table("fish_table1")
    runs = [Run(t.tasks["wikitext_small"], t.rows["softmax_8"], 1) for t in (first, second)]
    assert runs[0].name == runs[1].name
    other = Run(first.tasks["wikitext_small"], first.rows["softmax_4"], 1)
    assert len({runs[0].digest, other.digest, Run(*first.pairs()[0], 2).digest}) == 3


@pytest.mark.parametrize(
    "task",
    mostly_slow(
        ["listops", "text", "retrieval", "wikitext_small", "imagenet"],
        ["retrieval", "wikitext_small"],
    ),
)
def test_composed_configuration_is_the_command_lines(task):
    table = next(t for t in map(read_table, FITS) if task in t.tasks)
    row = next(r for r in table.rows.values() if task in r.published)
    run = Run(table.tasks[task], row, 5, Options(shortened=True))
    parsed = flatten(printed_config(run.fit_arguments()))
    mine = deciding(run.config)
    assert parsed["seed_everything"] == 5
    assert {key: parsed[key] for key in mine} == mine


def test_default_protocol_is_the_task_files():
    for name in FITS:
        for task, row in read_table(name).pairs():
            config = run_config(task, row, Options())
            own = compose([task.config], task.settings)
            assert config["data"] == own["data"]
            assert config["trainer"] == own["trainer"]
            given = config["model"]["init_args"]["attention"]
            assert given["class_path"] == attention_entry(row.attention)["class_path"]


def test_scores_of_the_fixed_head_size_models_take_part_in_no_choice():
    """Section 4.1: the development set, which is the one reported, selects no checkpoint."""
    fine_tuned = {"squad": "test", "mnli": "validate"}
    for name in ("low_rank_table1", "low_rank_table2a", "low_rank_table2b", "low_rank_table3a"):
        pairs = [p for p in read_table(name).pairs() if p[0].name in fine_tuned]
        assert pairs
        for task, row in pairs:
            words = Run(task, row, 0).evaluate_arguments(fine_tuned[task.name], {}, Path("run"))
            assert words[words.index("--ckpt_path") + 1] == "last"


def test_the_lists_of_differences_name_decay_and_variances():
    assert any("warmup_linear" in note for note in read_tasks()["masked_lm"].not_in_config)
    rows = {
        row.label: row
        for name in ("mgk_table3", "mgk_table10")
        for row in read_table(name).rows.values()
    }
    of_code = {label for label, row in rows.items() if row.set.get("variance") == "code_lm"}
    told = {label for label, row in rows.items() if any("3√D" in n for n in row.not_in_config)}
    assert told == of_code != set()


def test_every_task_is_used():
    used = {
        part.name
        for name in FITS
        for task in read_table(name).tasks.values()
        for part in task.chain()
    }
    assert used == set(read_tasks())


@pytest.mark.parametrize("wrong", ["listop", "softmax_9"])
def test_unknown_names_are_refused(wrong):
    with pytest.raises(ConfigError, match="did you mean"):
        read_table("mgk_table1").select([wrong])
    with pytest.raises(ConfigError, match="configuration file not found"):
        read_table("mgk_table11")


def test_selection():
    table = read_table("mgk_table1")
    assert len(table.select([])) == 33
    assert len(table.select(["listops"])) == 11
    chosen = table.select(["listops", "text", "mgk_*", "softmax_8"])
    assert len(chosen) == 2 * 4


@pytest.mark.parametrize("name", FITS)
def test_every_task_has_its_baseline_among_its_rows(name):
    """Else its rows would be compared with nothing."""
    table = read_table(name)
    for task in table.tasks:
        assert table.baseline_of(task) in [row.name for t, row in table.pairs() if t.name == task]


def test_baselines_of_unknown_tasks_and_rows_are_refused(tmp_path):
    for baselines, message in (
        ({"listop": "mgk_1"}, "baselines: unknown task listop; tasks: "),
        ({"listops": "mgk_7"}, "unknown baseline mgk_7; rows: softmax_2, mgk_1"),
    ):
        folder = write_tables(tmp_path, {**TABLE, "baselines": baselines})
        with pytest.raises(ConfigError, match=message):
            read_table("tiny", folder)


def test_missing_and_unknown_keys_of_entries_are_named(tmp_path):
    row, listops = TABLE["rows"]["mgk_1"], TASKS["listops"]
    rows = {**TABLE["rows"], "mgk_1": {**row, "override": {}}}
    trend = {"over": "heads", "rows": {"mgk_1": 1}, "say": "rises", "says": "rises"}
    metric = {**listops["metrics"]["test"], "scales": 2}
    bare = {key: value for key, value in listops.items() if key != "config"}
    wrong = {
        r"tiny.yaml: row mgk_1: unknown key 'override'; did you mean 'overrides'": (
            {**TABLE, "rows": rows},
            TASKS,
        ),
        r"tiny.yaml: trends: unknown key 'say'; did you mean 'says'": (
            {**TABLE, "trends": [trend]},
            TASKS,
        ),
        r"tasks.yaml: task listops: unknown key 'lengths'; did you mean 'length'": (
            TABLE,
            {**TASKS, "listops": {**listops, "lengths": {}}},
        ),
        r"tasks.yaml: task listops does not set config": (TABLE, {**TASKS, "listops": bare}),
        r"tasks.yaml: task listops: metric test: unknown key 'scales'; did you mean 'scale'": (
            TABLE,
            {**TASKS, "listops": {**listops, "metrics": {"test": metric}}},
        ),
    }
    for message, (table, tasks) in wrong.items():
        with pytest.raises(ConfigError, match=message):
            read_table("tiny", write_tables(tmp_path, table, tasks))

"""Command lines and configuration files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.tables import kinds, read_table
from lit_probattn.configs import read_yaml
from lit_probattn.reproduce.__main__ import main as reproduce
from lit_probattn.reproduce.figures.runs import RunFigure
from lit_probattn.reproduce.figures.tables import rows_of_tables
from profiling.cli import main as profiling_main
from tests.bad_inputs.cases import Case, command_error, data_command, fit, on_folder
from tests.compare.tiny import TABLE, TASKS, finished, write_tables
from tests.support.paths import ROOT
from tests.support.runs import TASK, arguments, write_attention

ANOTHER_TASK = """\
model: {class_path: lit_probattn.tasks.SequenceClassifier}
data: {class_path: datamodules.ListOps}
"""
ATTENTION = "model.init_args.attention"
SMGK = str(ROOT / "configs/attention/smgk.yaml")


@on_folder
def _files(folder: Path, *text_or_name: str) -> str:
    """A fit with config files in this order: TASK, ATTENTION, or a text."""
    names = {"TASK": TASK, "ATTENTION": write_attention(folder)}
    command = ["fit"]
    for number, text in enumerate(text_or_name):
        path = folder / f"{number}.yaml"
        if text not in names:
            path.write_text(text)
        command += ["--config", names.get(text, str(path))]
    return command_error(command)


@on_folder
def _analysis(folder: Path, **change: object) -> str:
    """FiSH's table 8 with other entries; None takes one away."""
    tables = ROOT / "configs/reproduce"
    for name in ("fish_table11", "mgk_table1", "mgk_table3", "tasks", "published"):
        (source,) = tables.glob(f"{name}.*")
        shutil.copy(source, folder)
    content = {**read_yaml(tables / "fish_table8.yaml"), **change}
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "fish_table8.yaml").write_text(yaml.safe_dump(kept))
    folders = ["--tables", str(folder), "--runs", str(folder / "runs")]
    return command_error(["fish_table8", *folders, "--report"], reproduce)


@on_folder
def _config(folder: Path, text: str | bytes) -> str:
    """A file after task and attention."""
    path = folder / "wrong.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return command_error(arguments("fit", folder, "--config", str(path)))


@on_folder
def _chains(folder: Path, *words: str, start: str = "first", **table: object) -> str:
    """`reproduce tiny` of a table whose task begins with another one."""
    task = TASKS["listops"]
    tasks = {**TASKS, "listops": {**task, "starts_from": start}, "first": task}
    write_tables(folder / "tables", {**TABLE, **table}, tasks)
    places = ["--tables", str(folder / "tables"), "--runs", str(folder / "runs")]
    return command_error(["reproduce", "tiny", *places, *words, "--dry-run"])


def _reproduce(*words: str) -> Callable[[Path], str]:
    """A command of `python -m lit_probattn.reproduce`."""
    return lambda folder: command_error([*words, "--runs", str(folder)], reproduce)


@on_folder
def _claim(folder: Path, claim: str) -> str:
    """A figure of the runs of a table, with a claim."""
    tables = write_tables(folder / "tables")
    (tables / "tiny_figure.yaml").write_text(
        "{title: Tiny, kind: figure, runs: {tiny: [listops]}, panels: [],\n"
        f"  says: {{one: {{says: It is so., holds: [{{{claim}}}]}}}}}}\n"
    )
    (run,) = make_runs(
        read_table("tiny", tables), ["listops", "mgk_1"], [3], Options(), Place(folder)
    )
    finished(run, run_folder=str(folder))
    table = kinds(tables)["tiny_figure"]
    made = rows_of_tables(table, Place(folder), False)
    try:
        _ = RunFigure(made, [run], "", part=table).findings
    except ConfigError as error:
        return f"error: {error}"
    raise AssertionError("nothing is refused")


def _cases_of_tables() -> Iterator[Case]:
    case = partial(Case, "Tables")
    yield case("`--set listop:model.init_args.lr=1`", _chains("--set", "listop:a.b=1"))
    yield case("`starts_from` an unknown task", _chains(start="fir"))
    yield case("a task that `starts_from` itself", _chains(start="listops"))
    other = ["reproduce", "mgk_table1", "--only", "listops", "--start_seed", "1", "--dry-run"]
    yield case("`--start_seed` without chains", lambda _: command_error(other))
    trend = {"over": "heads", "rows": {"softmax_2": 2, "mgk_1": 1}, "says": "rises"}
    for what, wrong in {
        "a trend of an unknown row": {"rows": {"mgk_2": 2}},
        "a trend of an unknown task": {"tasks": ["listop"]},
        "a trend that grows": {"says": "grows"},
    }.items():
        yield case(what, _chains(trends=[{**trend, **wrong}]))


@on_folder
def _sweep_claim(folder: Path, claim: str) -> str:
    """A sweep whose report has a claim."""
    content = read_yaml(ROOT / "configs/profiling/mgk_figure15.yaml")
    content["report"]["paper"][0]["holds"] = [yaml.safe_load(f"{{{claim}}}")]
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    words = ["sweep", "--config", str(folder / "sweep.yaml"), "--dry-run"]
    return command_error(words, profiling_main)


def _figures() -> Iterator[Case]:
    """Figures of papers, and what is said of them."""
    case = partial(Case, "Figures of papers")
    yield case("`reproduce mgk_figure17`", _reproduce("mgk_figure17"))
    yield case("`mgk_figure3 --seeds 1`", _reproduce("mgk_figure3", "--seeds", "1"))
    yield case("`mgk_figure3 --report`, unmeasured", _reproduce("mgk_figure3", "--report"))
    yield case("`mgk_figure1 --only mgk_8`", _reproduce("mgk_figure1", "--only", "mgk_8"))
    is_lower = "rows: [mgk_1], is: lower, than: softmax_2"
    for what, claim in {
        "of an unknown row": "rows: [mgk_9], is: lower, than: softmax_2, value: test",
        "of an unknown value": f"{is_lower}, value: tset",
        "that is `larger`": "rows: [mgk_1], is: larger, than: softmax_2, value: test",
        "of a curve without `at`": f"{is_lower}, curve: train/loss",
        "of the end of a curve": f"{is_lower}, curve: train/loss, at: end",
        "with an unknown key": f"{is_lower}, value: test, then: 3",
        "without another side": "rows: [mgk_1], is: lower, value: test",
    }.items():
        yield case(f"a claim {what}", _claim(claim))
    for what, claim in {
        "with two conditions": "below: 1, reaches: 0.5",
        "of an unknown variant": "variants: [mgk4], below: 1",
        "with `blow`": "blow: 1",
    }.items():
        yield case(f"a claim on costs {what}", _sweep_claim(claim))


def cases() -> Iterator[Case]:
    """Command lines, then tables, then files."""
    line = partial(Case, "Command line")
    yield line("no command", lambda _: command_error([]))
    yield line("`fitt`", lambda _: command_error(["fitt"]))
    yield line("`--trainer.max_step 4`", fit("--trainer.max_step", "4"))
    yield line("`--model.init_args.num_layer 4`", fit("--model.init_args.num_layer", "4"))
    yield line("`--seed_every 4`, a shortened flag", fit("--seed_every", "4"))
    yield line("`--data.init_args.batch 4`", fit("--data.init_args.batch", "4"))
    yield line("`--run.nme x`", fit("--run.nme", "x"))
    yield line("`num_head` of the attention", fit(f"--{ATTENTION}.init_args.num_head", "4"))
    yield line("an unknown variant", fit(f"--{ATTENTION}", "lit_probattn.attention.MGKAtention"))
    yield line("a class that is no attention", fit(f"--{ATTENTION}.class_path", "torch.nn.Linear"))
    yield line(
        "a module that does not exist", fit(f"--{ATTENTION}.class_path", "nowhere.Attention")
    )
    yield line("an unknown task", fit("--model", "lit_probattn.tasks.SequenceClasifier"))
    yield line("an unknown data set", fit("--data", "datamodules.Listops"))
    yield line("`num_layers four`", fit("--model.init_args.num_layers", "four"))
    yield line("`schedule onecycle`", fit("--model.init_args.schedule", "onecycle"))
    yield line("`trainer.precision 17`", fit("--trainer.precision", "17"))
    yield line("`seed_everything x`", fit("--seed_everything", "x"))
    yield line("`--run.name ../../x`", fit("--run.name", "../../x"))
    yield line("an empty `--ckpt_path`", fit("--ckpt_path", ""))
    yield line("`num_layers 100000000`", fit("--model.init_args.num_layers", "100000000"))
    yield line("`dict_kwargs` of the attention", fit(f"--{ATTENTION}.dict_kwargs", "{num_head: 1}"))
    yield line("`monitor_mode largest`", fit("--run.monitor_mode", "largest"))
    yield line("`monitor val/loss` alone", fit("--run.monitor", "val/loss"))
    named = ("fit", "--attention", "smgk", "--task")
    yield line("`--task lra_listop`", lambda _: command_error([*named, "lra_listop"]))
    yield line("`--task` without a name", lambda _: command_error([*named]))
    yield line("`--task` twice", lambda _: command_error([*named, "uea", "--task", "uea"]))
    yield line("an attention as task", lambda _: command_error([*named, SMGK]))
    yield from _cases_of_tables()
    data_case = partial(Case, "Commands of datamodules")
    yield data_case("`preparee`", data_command("preparee", "text"))
    yield data_case("`prepare listop`", data_command("prepare", "listop"))
    yield data_case("`--num_tran 3`", data_command("prepare", "listops", "--num_tran", "3"))
    yield data_case("`--num_train many`", data_command("prepare", "listops", "--num_train", "many"))
    yield data_case(
        "`check` before `prepare`", data_command("check", "listops", "--cache_dir", "DIR")
    )
    file_case = partial(Case, "Configuration files")
    missing = str(ROOT / "configs/tasks/lra_listop.yaml")
    yield file_case(
        "a file that does not exist", lambda _: command_error(["fit", "--config", missing])
    )
    yield file_case("the attention file first", _files("ATTENTION", "TASK"))
    yield file_case("no task file", _files("ATTENTION"))
    yield file_case("no attention file", _files("TASK"))
    yield file_case("two task files", _files("TASK", "ATTENTION", ANOTHER_TASK))
    yield file_case("a folder", lambda f: command_error(["fit", "--config", str(f)]))
    yield file_case("a key twice", _config("trainer: {max_steps: 3}\ntrainer: {devices: 1}"))
    yield file_case("a number as a key", _config("trainer: {1: 3}"))
    yield file_case("an alias of itself", _config("trainer: &a {callbacks: *a}"))
    yield file_case("no YAML: `model: [1,`", _config("model: [1,"))
    yield file_case("an empty file", _config(""))
    yield file_case("a list", _config("- 1"))
    yield file_case("bytes that are no text", _config(b"\xff\xfe\x00model"))
    yield file_case("`trainer: {max_step: 3}`", _config("trainer: {max_step: 3}"))
    yield file_case("`mdel: {…}`", _config("mdel: {init_args: {embed_dim: 3}}"))
    yield file_case("`batchsize`", _config("data: {init_args: {batchsize: 3}}"))
    yield file_case(
        "`num_head` of the attention",
        _config("model: {init_args: {attention: {init_args: {num_head: 3}}}}"),
    )
    by_layers = (
        "model: {init_args: {attention: {default: {class_path: MGK, init_args: {}}, LAYERS}}}"
    )
    default = "lit_probattn.attention.MGKAttention, init_args: {num_heads: 2}"
    for what, layers in {
        "attention by layers: `layer`": "layer: {0: {}}",
        "attention by layers: a layer by name": "layers: {first: {num_heads: 4}}",
        "attention by layers: a layer that the model does not have": "layers: {9: {num_heads: 4}}",
        "attention by layers: a misspelt option": "layers: {0: {num_head: 4}}",
        "attention by layers: a head size that is no number": "layers: {0: {head_dim: small}}",
    }.items():
        text = by_layers.replace("MGK, init_args: {}", default).replace("LAYERS", layers)
        yield file_case(what, _config(text))
    yield file_case("`model: 5`", _config("model: 5"))
    yield file_case("`trainer: [1, 2]`", _config("trainer: [1, 2]"))
    yield file_case("`num_layers: {a: 1}`", _config("model: {init_args: {num_layers: {a: 1}}}"))
    yield from _analysis_cases()
    yield from _figures()


def _analysis_cases() -> Iterator[Case]:
    case = partial(Case, "Tables of analyses")
    softmax = {"printed": ["Softmax", "8"], "runs": "fish_table11 softmax_8"}
    mean = {"printed": ["head_l2_distance_mean", "not stated"], "unit": "Frobenius"}
    mean |= {"file": "head_distance_layers.csv", "column": "mean"}
    computed = {"printed": ["a", "b", "c", "d", "e"], "unit": "", "of": "x"}
    saved = {**computed, "by": "percent_saved"}
    for given, change in {
        "no study": {"study": None},
        "an unknown study": {"study": "head_distances"},
        "a flag that the study does not have": {"flags": {"num_sample": 8}},
        "an entry that means nothing": {"base_line": "softmax_8"},
        "an unknown task": {"task": "wikitext_smal"},
        "a baseline that is no row": {"baseline": "softmax_9"},
        "a row of a table that does not have it": {
            "rows": {"softmax_8": {**softmax, "runs": "fish_table11 softmax_9"}}
        },
        "a row of a table of another task": {
            "rows": {"softmax_8": {**softmax, "runs": "mgk_table1 softmax_8"}}
        },
        "a row that is not printed": {"rows": {"softmax_8": {**softmax, "printed": ["MGK", "8"]}}},
        "a row without a model": {"rows": {"softmax_8": {"printed": ["Softmax", "8"]}}},
        "a row with runs and an attention": {"rows": {"a": {**softmax, "set": {}}}},
        "a value with a misspelt key": {"values": {"mean": {**mean, "columns": 1}}},
        "an unknown reduction": {"values": {"mean": {**mean, "reduce": "median"}}},
        "a computed number in an unknown way": {"computed": [{**computed, "by": "guess"}]},
        "a computed number that is not printed": {"computed": [saved]},
        "a computed number of nothing": {"computed": [{"by": "percent_saved"}]},
        "no finished run to report": {"notes": []},
    }.items():
        yield case(given, _analysis(**change))

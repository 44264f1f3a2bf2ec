"""What a user got wrong is one line on stderr with exit code 2; a fault keeps its traceback."""

from __future__ import annotations

import re

import pytest

import lit_probattn.__main__
from lit_probattn.__main__ import stored_help
from lit_probattn.base.errors import DEBUG_VARIABLE, ConfigError
from lit_probattn.cli.app import RunCLI, main
from lit_probattn.cli.errors import exit_status
from lit_probattn.cli.files import check_early
from lit_probattn.cli.jsonargparse_internals import option_names
from lit_probattn.training.run_folder import RunSettings
from tests.support.fresh import fresh_python
from tests.support.helpers import error_of
from tests.support.paths import ROOT
from tests.support.runs import TASK, arguments, write_attention
from tests.support.slow import mostly_slow

ATTENTION = "model.init_args.attention"
WRONG = [
    # One of each place that rejects; tests/bad_inputs has more, and their whole messages.
    (["--trainer.max_step", "4"], "'trainer.max_step'; did you mean 'trainer.max_steps'"),
    ([f"--{ATTENTION}.num_head", "4"], "num_head' .*did you mean 'num_heads'"),
    (
        [f"--{ATTENTION}", "lit_probattn.attention.MGKAtention"],
        "did you mean 'lit_probattn.attention.MGKAttention'.*available: .*SoftmaxAttention",
    ),
    ([f"--{ATTENTION}.dict_kwargs", "{foo: 1}"], "for lit_prob.* backend, bias, dropout, "),
    (["--run", "null"], "^error: run: expected a mapping, received 'null'$"),
    (["--model.init_args.schedule", "onecycle"], "schedule: expected one of 'one_cycle'"),
    ([f"--{ATTENTION}.init_args.num_heads", "0"], f"{ATTENTION}.init_args.num_heads must be"),
    (["--run.keep_checkpoints", "1"], "run.keep_checkpoints must be at least 2, received 1"),
    (
        ["--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "9"],
        "batch_size=8.*accumulate_grad_batches=3",
    ),
    (  # validations would be in the middle of steps
        ["--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "5"],
        "val_check_interval .* multiple of .*batches 2, received 5: set 6, or 10 for 5 opt",
    ),
    (["--trainer.strategy", "dpp"], "invalid strategy name"),
    (
        ["--trainer.strategy", "ddp_spawn", "--trainer.accelerator", "cpu"],
        "trainer.strategy must start this command once per process",
    ),
    (["--config", "configs"], "configs is a folder; expected a YAML file"),
]
# As one above: another key or class, another check of a constructor or of the trainer. What a plan
# of a run rejects: tests/training/test_run_folder.py.
MORE = [
    (["--data.init_args.batch_size", "0"], "data.init_args.batch_size must be at least 1"),
    (["--run.name", "../../escape"], r"run.name must be .* one folder .* '../../escape'"),
    (["--ckpt_path", "last"], "nothing to continue: .*auto"),
    (["--ckpt_path", ""], "--ckpt_path is empty: "),
    (["--model.num_layer", "4"], "num_layer' .*did you mean 'num_layers'"),
    (["--data.init_args.batch", "4"], "batch' for datamodules.Synthetic; did you mean"),
    (["--conf", "x"], "did you mean 'config'"),
    ([f"--{ATTENTION}", "SoftmaxAtention"], "did you mean 'lit_probattn.attention.Softmax"),
    (
        [f"--{ATTENTION}.class_path", "torch.nn.Linear"],
        "not a class of the expected type.*available",
    ),
    ([f"--{ATTENTION}.class_path", "nowhere.Attention"], "no module named 'nowhere' .available: "),
    (["--model", "lit_probattn.tasks.SequenceClasifier"], "did you mean .*SequenceClassifier"),
    (
        ["--trainer.logger", "WandbLogger"],
        "^error: trainer.logger: (WandbLogger requires the package wandb|No API key)",
    ),
    (["--trainer.max_steps", "17"], "exceeds schedule_steps 16"),
    (
        ["--trainer.accumulate_grad_batches", "2", "--trainer.overfit_batches", "3"],
        "overfit_batches .* multiple of .*batches 2, received 3: set 4, or 6",
    ),
    (["--model.init_args.warmup_steps", "16"], "warmup_steps 16 and schedule_steps 16"),
    ([f"--{ATTENTION}.init_args.num_kv_heads", "3"], "num_kv_heads must divide num_heads"),
    (["--config", "/dev/null"], "/dev/null is not a regular file; expected a YAML file"),
]
CASES = [*WRONG, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


@pytest.mark.parametrize(("more", "expected"), CASES, ids=lambda value: str(value)[:60])
def test_wrong_input_is_one_line(tmp_path, more, expected):
    line = error_of(arguments("fit", tmp_path, *more))
    assert re.search(expected, line), line
    assert not list((tmp_path / "runs").glob("*/*"))  # no folder is left behind


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("name", "/absolute", "/absolute"),
        ("name", "../../escape", r"\.\./\.\./escape"),
        ("name", "two\nlines", r"two\\nlines"),
        ("version", "..", r"\.\."),
    ],
)
def test_a_name_or_version_is_one_folder(key, value, shown):
    with pytest.raises(ConfigError, match=rf"run.{key} must be the name of one folder.*'{shown}'"):
        RunSettings(**{key: value})


LAYERS = (
    "model: {init_args: {attention: {layers: {0: {num_heads: 4}, 1: {%s}}, default: "
    "{class_path: lit_probattn.attention.MGKAttention, init_args: {num_heads: 2}}}}}"
)
WRONG_FILES = [
    ("mdel: {init_args: {embed_dim: 3}}", "'mdel.init_args.embed_dim'; did you mean 'model'"),
    ("model: {init_args: {attention: {init_args: {num_head: 3}}}}", "did you mean 'num_heads'"),
    ("model: [1,", r"wrong.yaml:\d+: not valid YAML"),
    ("- 1", "expected a mapping, received list"),
    ("", "expected a mapping, received NoneType"),
    # one layer of several
    (
        LAYERS % "num_head: 4",
        r"attention.init_args.layers.1.init_args.num_head' .*did you mean 'num_heads'",
    ),
    (LAYERS % "num_heads: four", "layers.1.init_args.num_heads: expected int, received 'four'"),
    (
        LAYERS % "class_path: lit_probattn.attention.MGKAtention",
        "layers.1: unknown class .*did you mean",
    ),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_FILES, ids=lambda value: str(value)[-40:])
def test_wrong_file_is_one_line(tmp_path, text, expected):
    (tmp_path / "wrong.yaml").write_text(text)
    command = arguments("fit", tmp_path, "--config", str(tmp_path / "wrong.yaml"))
    line = error_of(command)
    assert re.search(expected, line), line


def test_order_of_files(tmp_path):
    attention = write_attention(tmp_path)
    line = error_of(["fit", "--config", attention, "--config", TASK])
    assert f"put the task file first: --config {TASK} --config {attention}" in line
    assert "no task file" in error_of(["fit", "--config", attention])
    assert "no attention variant: add --att" in error_of(["fit", "--config", TASK])
    for command in ("fit", "test"):
        assert "add --task NAME --attention NAME, for exam" in error_of([command])


def test_missing_file_names_the_nearest():
    line = error_of(["fit", "--config", str(ROOT / "configs/tasks/lra_listop.yaml")])
    assert "not found" in line
    assert "configs/tasks/lra_listops.yaml'" in line


@pytest.mark.parametrize(("command", "expected"), [(["fitt"], "'fitt'"), ([], "subcommand")])
def test_wrong_command(command, expected):
    assert expected in error_of(command, main)


def test_tasks_of_slurm_that_nothing_starts_are_one_line(tmp_path, monkeypatch):
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    line = error_of(arguments("fit", tmp_path))
    assert "SLURM_NTASKS is 2 and SLURM_NTASKS_PER_NODE is not set" in line
    assert "SLURM_JOB_NAME=interactive to run one process" in line


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_a_rank_that_is_no_number_is_one_line(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    told = error_of(["fit", "--task", "tiny/lra_text"], lit_probattn.__main__.main)
    assert told.startswith(f"error: environment variable {name}: expected an integer, received 'x'")


def broken():
    return int("x")


def wrong():
    raise ConfigError("num_heads must be at least 1")


def test_a_fault_keeps_its_traceback():
    with pytest.raises(ValueError, match="invalid literal"):
        exit_status(broken)


def test_a_fault_in_a_constructor_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_probattn.tasks.SequenceClassifier.model_class", None)
    with pytest.raises(TypeError, match="not callable"):
        main(arguments("fit", tmp_path))


def test_debug_shows_the_traceback_of_every_error(monkeypatch, capsys):
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(ConfigError, match="num_heads must be at least 1"):
        exit_status(wrong)
    assert "error: num_heads must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("off", ["0", ""])
def test_debug_may_be_off(monkeypatch, off):
    monkeypatch.setenv(DEBUG_VARIABLE, off)
    assert "num_heads must be at least 1" in error_of(wrong, exit_status)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--trainer.max_stepz", "4"], "unknown key 'trainer.max_stepz'; did you mean 'trainer.ma"),
        (["--atention", "smgk"], "unknown key 'atention'; did you mean 'attention'?"),
        ([], "no attention variant: add --attention NAME"),
    ],
)
def test_wrong_keys_are_found_before_lightning_is_imported(more, expected):
    code = (
        "import sys\n"
        "from lit_probattn.__main__ import main\n"
        f"assert main(['fit', '--config', {TASK!r}, *{more!r}]) == 2\n"
        "print(sorted({'torch', 'lightning', 'torchmetrics'} & set(sys.modules)))\n"
    )
    done = fresh_python("-c", code)
    assert done.stdout.splitlines() == ["[]"]
    assert done.stderr.startswith(f"error: {expected}")


@pytest.mark.parametrize(
    "command", mostly_slow(["fit", "validate", "test", "predict"], ["fit", "test"])
)
def test_the_early_check_accepts_what_the_parser_accepts(command, tmp_path, monkeypatch):
    """Options of the parser, and keys in their values."""
    text, options = str(stored_help(command)), []
    words = [command, "--config", TASK, "--config", write_attention(tmp_path)]

    def stop(_, parser, __):
        options.extend(option_names(parser))
        raise SystemExit(0)

    monkeypatch.setattr(RunCLI, "parse_arguments", stop)
    with pytest.raises(SystemExit):
        RunCLI(words)
    assert len(options) > 60
    for name in (
        set(options) - {"config", "trainer"} - ({"run.init_from"} if command != "fit" else set())
    ):
        check_early([*words, f"--{name}=x"], text)
    inside = ["--trainer.callbacks+=x", "--trainer.logger.init_args.save_dir=x", "--model.x=1"]
    check_early([*words, *inside], text)
    (tmp_path / "more.yaml").write_text("trainer: {max_time: {hours: 1}, plugins: [{a: 1}]}")
    check_early([*words, "--config", str(tmp_path / "more.yaml")], text)

"""`profiling/cuda.sh`, with a program in the place of `timeout` that notes each call."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib import import_module

import pytest

import profiling.cli
from lit_probattn.reproduce.__main__ import make_parser as reproduce_parser
from profiling.kernels.config import load_kernels
from profiling.sweep.config import load_sweep
from tests.support.paths import ROOT, shipped

PARSERS = {"profiling": profiling.cli.make_parser(), "lit_probattn.reproduce": reproduce_parser()}


@pytest.fixture
def script(tmp_path):
    """Run the script; returns exit status, errors, and (minutes, command) of each call."""
    log = tmp_path / "calls"
    (tmp_path / "timeout").write_text(
        '#!/bin/sh\nshift 4\necho "$*" >> "$CALLS"\ncase "$*" in $FAILS) exit 3;; esac\n'
    )
    for name in ("timeout", "python"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o755)

    def run(*parts, fails="none", **environment):
        log.write_text("")
        place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(log), "FAILS": fails}
        place |= {"PYTHON": str(tmp_path / "python"), "OUT": str(tmp_path / "out"), **environment}
        command = ["bash", str(ROOT / "profiling/cuda.sh"), *parts]
        done = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True)
        lines = log.read_text(encoding="utf-8").replace(f"{tmp_path}/", "").splitlines()
        calls = [line.split(" ", 1) for line in lines]
        return done.returncode, done.stderr, calls

    return run


def test_every_command_exists_and_has_a_time_limit(script, capsys):
    status, _, calls = script(DATA="releases")
    assert status == 0
    assert len(calls) > 25
    for minutes, call in calls:
        assert re.fullmatch(r"[1-9]\d*m", minutes)
        _, dash_m, module, *arguments = shlex.split(call)
        assert dash_m == "-m"
        if module == "pytest":
            assert (ROOT / arguments[-1]).is_dir()
            continue
        if module.startswith("examples."):
            with pytest.raises(SystemExit):
                import_module(module).main(["--help"])
            known = set(re.findall(r"--\w+", capsys.readouterr().out))
            assert {word for word in arguments if word.startswith("--")} <= known
            continue
        options = PARSERS[module].parse_args(arguments)
        if config := getattr(options, "config", None):
            load = load_kernels if options.command == "kernels" else load_sweep
            assert load(config).device == "cuda"
    measured = {shlex.split(call)[5] for _, call in calls if " --config " in call}
    assert measured == {
        path.stem for path in shipped("measurement") if path.stem.endswith("_cuda")
    } - {"mgk_table7_cuda"}, "reproduce mgk_table7 runs that one"


def test_what_failed_is_named_and_tried_again_and_what_passed_is_not(script):
    status, errors, first = script("tests", fails="*--train-steps*")
    assert (status, len(first)) == (1, 2)
    assert re.fullmatch(r"not finished: profiling kernels --train-steps .*\n", errors)
    status, _, second = script("tests")
    assert status == 0
    assert second == [call for call in first if "--train-steps" in call[1]]
    assert script("tests")[2] == []


def test_limits_and_parts_are_chosen(script):
    assert [minutes for minutes, _ in script("models", MINUTES="7")[2]] == ["7m", "5m"] * 2
    status, errors, calls = script("models", "pairs")
    assert (status, calls) == (2, [])
    assert errors.startswith("error: unknown part pairs")

"""`lit-probattn`: one program; its commands, their help at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module

import pytest

import lit_probattn
import profiling.__main__
from lit_probattn import __main__ as door
from lit_probattn.__main__ import COMMANDS, RUN, main, usage
from tests.commands.help_texts import FOLDER, NAMES, PROFILING, made_with, printed
from tests.support.helpers import error_of
from tests.support.slow import mostly_slow

HEAVY = {"torch", "lightning", "numpy", "pandas", "sympy", "triton", "jsonargparse"}


def test_the_program_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text == usage()
    shown = [
        line.split()[0]
        for line in text.splitlines()
        if line.startswith("  ") and line[2:3].isalpha()
    ]
    assert set(shown) >= {*RUN, *COMMANDS}
    assert main([]) == 2
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_handed_its_words(name, monkeypatch):
    command = COMMANDS[name]
    given = []

    class StandIn:
        @staticmethod
        def main(arguments):
            given.append(arguments)
            return 7

    def stand_in(module):
        given.append(module)
        return StandIn

    monkeypatch.setattr(door, "import_module", stand_in)
    assert main([name, "--flag", "value"]) == 7
    assert given == [command.module, [*command.words, "--flag", "value"]]
    assert callable(import_module(command.module).main)


@pytest.mark.parametrize("name", mostly_slow([*NAMES, PROFILING], {"compare", "sweep", PROFILING}))
def test_stored_help_is_the_parsers(name, monkeypatch, capsys):
    """After a change: `python -m tests.commands.help_texts`."""
    monkeypatch.setattr(sys, "argv", ["profiling", "--help"])
    assert (profiling.__main__.main() if name == PROFILING else main([name, "--help"])) == 0
    text = capsys.readouterr().out
    assert "usage:" in text
    if (FOLDER / "made_with.txt").read_text(encoding="utf-8").strip() != made_with():
        pytest.skip(f"stored with {(FOLDER / 'made_with.txt').read_text(encoding='utf-8').strip()}")
    assert text == printed(name)


def test_there_is_no_text_of_a_command_that_is_gone():
    assert {path.stem for path in FOLDER.iterdir()} == {*NAMES, PROFILING, "made_with"}


def test_the_version(capsys, monkeypatch):
    # Of the machine: what other programs say of it takes seconds.
    monkeypatch.setattr("torch.utils.collect_env.run", lambda command: (1, "", "not asked"))
    assert main(["--version"]) == 0
    told = capsys.readouterr().out
    assert re.match(r"lit_probattn \d+\.\d+\S*, python 3", told)
    assert re.search(r", lightning \d.*; revision \S+$", told)
    assert len(re.findall("lit.probattn", told)) == 1
    assert re.match(r"\d+\.\d+", lit_probattn.__version__)
    assert main(["--version", "--verbose"]) == 0
    first, library, *machine = capsys.readouterr().out.splitlines()
    assert first == told.strip()
    assert library.startswith("backend native: ")
    assert any(line.startswith("PyTorch version: ") for line in machine)
    assert main(["--version", "--loud"]) == 2
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lit_probattn.no_such_name


def test_help_version_and_overviews_import_nothing_heavy():
    modules = "lit_probattn", "lit_probattn.analysis", "profiling"
    words = ["--help", "fit --help", "compare -h", "sweep -h", "--version"]
    cases = [(modules[0], line.split()) for line in words]
    cases += [(modules[1], ["--help"]), (modules[1], []), (modules[2], ["--help"])]
    code = f"""
import runpy, sys
for module, sys.argv[1:] in {cases}:
    print("=", end="")
    try: runpy.run_module(module, run_name="__main__")
    except SystemExit as end: assert not end.code
    assert not {HEAVY} & set(sys.modules), (module, sys.argv)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.split("=")
    assert [text.startswith("usage: ") for text in shown[-3:]] == [True] * 3


def test_an_unknown_command_is_told_the_valid_ones():
    told = error_of(["zzz"], main)
    assert told.startswith("error: unknown command 'zzz'; valid: analyse, ask, check, ")


@pytest.mark.skipif(os.name != "posix", reason="redirections of a shell")
@pytest.mark.parametrize("words", ["list attention", "fit --task nothing"])
def test_commands_run_with_standard_streams_closed(words, tmp_path):
    """Some schedulers start programs so; Python then has no sys.stdout and no sys.stderr."""
    command = f"{sys.executable} -m lit_probattn {words}"
    for closed, shown in ((">&- 2>errors", "2>errors"), ("2>&-", "")):
        expected = subprocess.run(
            f"{command} >/dev/null {shown}", shell=True, cwd=tmp_path, check=False
        )
        done = subprocess.run(f"{command} {closed}", shell=True, cwd=tmp_path, check=False)
        assert done.returncode == expected.returncode
    assert "Traceback" not in (tmp_path / "errors").read_text(encoding="utf-8")
    code = "import sys, subprocess; from lit_probattn.base.progress import prepare_streams as door;"
    code += "door(); closed = 'import sys; sys.exit(None in (sys.stdout, sys.stderr))'; "
    code += "sys.exit(subprocess.run([sys.executable, '-c', closed]).returncode)"
    command = f'{sys.executable} -c "{code}" >&- 2>&-'
    assert subprocess.run(command, shell=True, check=False).returncode == 0


def test_output_that_the_caller_has_switched_off_stays_off():
    code = "import contextlib; from lit_probattn.__main__ import main\n"
    code += "with contextlib.redirect_stdout(None): main(['list', 'attention'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b""


@pytest.mark.skipif(os.name != "posix", reason="pipes of a shell")
@pytest.mark.parametrize("words", [["list", "attention"], ["--help"]])
def test_a_reader_that_goes_is_no_fault(words):
    """As `lit-probattn list attention | head -0`; here nobody reads from the first."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "lit_probattn", *words],
        **{"stdout": writing, "stderr": subprocess.PIPE, "text": True, "check": False},
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", [["--task", "lra_listop"], ["--task=lra_listop", "--attention"]])
def test_a_name_without_a_file_is_told_before_anything_slow_is_imported(words):
    program = [sys.executable, "-X", "importtime", "-m", "lit_probattn", "fit", *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: unknown task 'lra_listop'; did you mean 'lra_listops'")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()[:-1]}
    assert "lit_probattn.base.config_files" in imported
    # Configurations are read with jsonargparse, in some 50 ms.
    assert not imported & (HEAVY - {"jsonargparse"})

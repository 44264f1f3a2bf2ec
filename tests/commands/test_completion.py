"""Completion scripts name commands and configurations, at once and without PyTorch."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from lit_probattn.__main__ import COMMANDS, RUN, main
from lit_probattn.base.config_files import named_files


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_script_names_commands_and_configurations(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["--print-completion", shell]) == 0
    text = capsys.readouterr().out
    for name in (*RUN, *COMMANDS):
        assert name in text
    for name in [*named_files("task"), *named_files("attention"), *named_files("trainer")]:
        assert name in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash is installed")
def test_bash_completes(tmp_path, capsys):
    pytest.importorskip("shtab")
    main(["--print-completion", "bash"])
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    code = (
        f"source '{script}'; COMP_WORDS=(lit-probattn fit --attention smgk_h); COMP_CWORD=3; "
        'COMP_LINE="lit-probattn fit --attention smgk_h"; COMP_POINT=${#COMP_LINE}; '
        'eval "$(complete -p lit-probattn | sed -E "s/.*-F ([^ ]+) .*/\\1/")" lit-probattn smgk_h '
        '--attention; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["smgk_hard_e"], done.stderr


@pytest.mark.parametrize(
    ("words", "received"), [([], "nothing"), (["fish"], "fish"), (["bash", "zsh"], "bash zsh")]
)
def test_another_shell_is_one_line(words, received, capsys):
    assert main(["--print-completion", *words]) == 2
    expected = f"error: --print-completion: expected one of bash, zsh, tcsh, received {received}\n"
    assert capsys.readouterr() == ("", expected)


def test_without_shtab_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert capsys.readouterr().err.endswith("pip install 'lit-probattn[completion]'\n")

"""The commands of docs/distributed.md and of the SLURM scripts parse, and name what exists."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
import yaml

from tests.house.test_readme import without_checkpoint
from tests.support.paths import ROOT
from tests.support.runs import printed_config
from tests.support.slow import every_nth

DOCS = ROOT / "docs"
SCRIPTS = sorted((DOCS / "slurm").glob("*.sbatch"))
# What the scripts take from SLURM and from their own arguments.
VALUES = {
    **{"TASK": "configs/tasks/lra_listops.yaml", "ATTENTION": "configs/attention/smgk.yaml"},
    **{"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8", "variant": "mlk", "seed": "2"},
}


def fits(text: str) -> list[list[str]]:
    """Arguments of every `fit` in a text, continuation lines joined."""
    joined = text.replace("\\\n", " ")
    for name, value in VALUES.items():
        joined = re.sub(rf"\$\{{?{name}\b\}}?", value, joined)
    found = re.findall(r"(?:-m lit_probattn|lit-probattn) (fit .*)", joined)
    lines = (re.sub(r'"?\$@"?|&$|\$\(basename[^)]*\)', " ", line).strip() for line in found)
    return [shlex.split(line, comments=True) for line in lines]


def commands() -> list[list[str]]:
    blocks = re.findall(
        r"```bash\n(.*?)```", (DOCS / "distributed.md").read_text(encoding="utf-8"), re.DOTALL
    )
    return [
        fit
        for text in (*blocks, *(s.read_text(encoding="utf-8") for s in SCRIPTS))
        for fit in fits(text)
    ]


@pytest.mark.parametrize(
    "arguments",
    every_nth(2, [pytest.param(w, id=" ".join(w)[-60:]) for w in without_checkpoint(commands())]),
)
def test_fit_commands_parse(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert printed_config(arguments)["trainer"]["max_steps"] > 0


def test_there_are_commands_to_check():
    assert len(commands()) >= 7


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_slurm_scripts_are_shell_and_ask_for_the_signal(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    assert re.search(r"^#SBATCH --signal=(B:)?USR1@\d+$", text, re.MULTILINE)
    assert re.search(r"^#SBATCH --requeue$", text, re.MULTILINE)
    assert "--ckpt_path auto" in text
    (log,) = re.findall(r"^#SBATCH --output=(.*)/", text, re.MULTILINE)
    assert f"mkdir -p {log}" in text, "SLURM writes no log into a folder that is not there"
    assert f"mkdir -p {log}" in (DOCS / "distributed.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["ddp", "ddp_multinode", "fsdp"])
def test_timeouts_are_minutes_and_nothing_looks_for_unused_parameters(name):
    strategy = yaml.safe_load((ROOT / f"configs/trainer/{name}.yaml").read_text(encoding="utf-8"))[
        "trainer"
    ]
    options = strategy["strategy"]["init_args"]
    hours, minutes, seconds = map(int, options["timeout"].split(":"))
    assert 1 <= 60 * hours + minutes + seconds / 60 <= 15
    assert not options.get("find_unused_parameters", False)

"""docs/own_variant.md by the letter: as the console script, modules in the working folder."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from lit_probattn.__main__ import main
from lit_probattn.attention.own.contract import CHECKS
from lit_probattn.base import allowed_code
from lit_probattn.configs import build_attention
from profiling.measure.rows import read_rows
from tests.profiling.helpers import count_by_torch_alone
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/own_variant.md").read_text(encoding="utf-8")


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A working folder with the files of the page, not on Python's path; commands by their name."""
    (tmp_path / "own_variant.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.S)[1])
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.S):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    outside = [path for path in sys.path if path and Path(path) != ROOT / "examples"]
    monkeypatch.setattr(sys, "path", outside)
    monkeypatch.setenv(allowed_code.VARIABLE, "")
    blocks = re.findall(r"```\nlit-probattn (.*?)```", PAGE, re.S)
    lines = "".join(blocks).replace("\\\n", "").replace("lit-probattn ", "").splitlines()
    yield {line.split()[0]: shlex.split(line) for line in lines}
    sys.modules.pop("own_variant", None)


def test_check_fit_and_compare_find_the_module(page, capsys):
    """The example keeps every promise; fit parses and prints; compare plans its four runs."""
    assert main([*page["check"], "--init_args", "sharpness=5", "num_heads=3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" ", 1)[0].strip() for line in shown[:-1]] == list(CHECKS)
    number = len(CHECKS)
    assert shown[-1] == f"own_variant.CosineAttention: {number} of {number} checks passed"
    sys.modules.pop("own_variant")
    with pytest.raises(SystemExit) as end:
        main([*page["fit"], "--print_config"])
    assert end.value.code == 0
    assert "own_variant.CosineAttention" in capsys.readouterr().out
    sys.modules.pop("own_variant")
    assert main([*page["compare"], "--dry-run"]) == 0
    assert "cosine" in capsys.readouterr().out


def test_ask_takes_the_variant(page, capsys):
    assert main(page["ask"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert [row[1:3] for row in rows if row[1] == "cosine.yaml"] == [["cosine.yaml", "4"]]
    assert len(rows) == 3


@pytest.mark.usefixtures("sketches")
def test_a_sweep_and_its_report_take_the_variant(page, monkeypatch, capsys):
    count_by_torch_alone(monkeypatch)
    sweep = Path("cosine_sweep.yaml")
    assert "measure: [cost, memory, time]" in sweep.read_text(encoding="utf-8")
    text = sweep.read_text(encoding="utf-8").replace("[cost, memory, time]", "[cost]")
    assert "seq_len: [128, 256]" in text
    sweep.write_text(text.replace("[128, 256]", "[128]"), encoding="utf-8")
    assert main(page["sweep"]) == 0
    rows = read_rows("runs/profiling/cosine/rows.jsonl")
    assert {row.status for row in rows} == {"ok"}
    assert "CosineAttention" in {row.attention_class for row in rows}
    assert main(page["report"]) == 0


@pytest.mark.parametrize("types", [("", "", ""), (": int", ": int", ": float ")])
def test_types_of_arguments_need_not_be_written(page, types):
    """A layer is built with and without; no number is lost."""
    text = Path("own_variant.py").read_text(encoding="utf-8")
    old = "embed_dim, num_heads, *, sharpness=10.0"
    first, second, third = types
    new = f"embed_dim{first}, num_heads{second}, *, sharpness{third}= 3.0"
    Path("own_variant.py").write_text(text.replace(old, new), encoding="utf-8")
    assert new in Path("own_variant.py").read_text(encoding="utf-8")
    allowed_code.allow("own_variant")
    layer = build_attention("own_variant.CosineAttention", {"num_heads": 2}, 8, None)
    assert (layer.num_heads, layer.head_dim) == (2, 4)
    assert layer.log_sharpness.exp().flatten().tolist() == pytest.approx([3.0, 3.0])

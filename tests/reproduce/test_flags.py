"""The table from the authors' flags to our files: files and options exist, the page is current."""

from __future__ import annotations

import inspect

import pytest
import torch
import yaml

from lit_probattn.base.config_files import find
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import class_of, read_yaml
from lit_probattn.reproduce.flags import FILE, main, make_page, read_flags
from tests.support.paths import ROOT, shipped

CODE = read_flags(ROOT / FILE)
ROWS = [row for one in CODE for row in one.rows]


def entry(row):
    return read_yaml(f"configs/attention/{row.attention}")["model"]["init_args"]["attention"]


def test_the_page_is_made_from_the_table(tmp_path, capsys):
    assert (ROOT / "docs/as_released.md").read_text(encoding="utf-8") == make_page(read_flags()), (
        "write it: python -m lit_probattn.reproduce.flags --write docs/as_released.md"
    )
    assert main(["--write", str(tmp_path / "page.md")]) == 0
    assert main([]) == 0
    assert capsys.readouterr().out == (tmp_path / "page.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("row", "task"),
    [pytest.param(row, row.task or one.task, id=row.flags) for one in CODE for row in one.rows],
)
def test_files_and_options_of_a_row_exist(row, task):
    task = find(f"configs/tasks/{task}")
    assert task.is_file()
    names = inspect.signature(class_of(read_yaml(task)["model"]["class_path"])).parameters
    own = {}
    for name, value in row.set.items():
        part, _, option = name.partition(".")
        assert part in ("model", "attention")
        if part == "model":
            assert option in names
        else:
            own[option] = value
    if row.attention is None:
        assert row.note or row.task or row.set
        assert not own
        return
    given = entry(row)
    options = {**given["init_args"], **own}
    if "max_positions" in options:
        options["max_positions"] = 16
    layer = class_of(given["class_path"])(48, head_dim=4, **options).eval()
    assert layer(torch.randn(2, 16, 48), is_causal=True).shape == (2, 16, 48)


def test_every_released_file_is_named():
    folder = ROOT / "configs"
    paths = (*shipped("attention"), *shipped("task"))
    files = {p.relative_to(folder).as_posix() for p in paths if "as_released" in p.parts}
    named = {f"attention/{row.attention}" for row in ROWS if row.attention}
    named |= {f"tasks/{row.task}" for row in ROWS if row.task}
    assert files <= named, sorted(files - named)


def test_what_the_code_intends_is_said():
    """A file that begins with `intended` is what a row intends; others are what a row does."""
    for row in ROWS:
        if row.attention and row.attention.rpartition("/")[2].startswith("intended"):
            assert row.intends, row.flags


def test_a_row_that_is_none_is_refused(tmp_path):
    path = tmp_path / "flags.yaml"
    rows = [{"flags": "--x", "does": "mgk.yaml", "intends": "smgk.yaml"}]
    path.write_text(yaml.safe_dump([{"name": "x", "code": "y", "task": "z", "rows": rows}]))
    with pytest.raises(ConfigError, match="row --x: expected one of does and intends"):
        read_flags(path)
    with pytest.raises(ConfigError, match="is part of the source"):
        read_flags(tmp_path / "none.yaml")


def test_linear_attention_of_type_4():
    """Sums of φ(q)·φ(k)/√E plus 1e-5: features as they are, the eps of the table."""
    row = next(row for row in ROWS if row.flags == "--attn_type 4")
    given = entry(row)
    options = {name.partition(".")[2]: value for name, value in row.set.items()}
    cls = class_of(given["class_path"])
    layer = cls(24, head_dim=16, **{**given["init_args"], **options, "num_heads": 2}).double()
    x = 3 * torch.randn(2, 7, 24, dtype=torch.float64) - 20  # small features: the eps is felt
    q, k, v = (
        proj(x).unflatten(-1, (2, 16)).transpose(1, 2)
        for proj in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    phi = torch.nn.functional.elu
    scores = ((phi(q) + 1) @ (phi(k) + 1).mT / 16**0.5).tril()
    maps = scores / (scores.sum(-1, keepdim=True) + 1e-5)
    expected = layer.out_proj((maps @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, is_causal=True), expected, rtol=0, atol=1e-12)

"""Write the page that maps flags and layer names of the authors' code to this package.

    python -m lit_probattn.reproduce.flags
    python -m lit_probattn.reproduce.flags --write docs/as_released.md

The rows are those of configs/released_flags.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lit_probattn.base.arguments import Parser
from lit_probattn.base.config_files import find
from lit_probattn.base.errors import ConfigError, reports
from lit_probattn.compare.tables import record
from lit_probattn.convert.layer_names import LAYOUTS
from lit_probattn.records.tables import markdown_table

FILE = Path("configs/released_flags.yaml")
_INTRODUCTION = """# As released

The authors' code does not always compute what the papers describe ([findings](findings.md)). The
entries of `configs/attention/as_released.bundle.yaml` are attention as in the code. If a flag has
no effect in the code, a separate entry is the *intended* behaviour.
`python -m lit_probattn.reproduce.flags --write docs/as_released.md` writes this page from
`configs/released_flags.yaml`.

Combine an attention file with a task:
`lit-probattn fit --task lra_listops --attention as_released/lra/smgk`. Options in the column *add*
are abbreviated: `model.x` is `--model.x`, `attention.x` is
`--model.attention.x`."""
_LAYERS = """## State dicts of layers

`lit_probattn.convert.layer_names.load_layer(layout, tensors, layer)` loads the state dict of a
layer of another code base into a layer of this package; `layer_state` returns the converted state
dict. Both layers must have the same heads, head size and options; for the authors' modules, these
are those of the files above. Rows of `key_proj` are ordered by head, component and entry."""


@dataclass(frozen=True)
class Flags:
    """One row.

    Args:
        flags: flags of the authors' code.
        does, intends: file below configs/attention that computes what the code does, or what it
            intends to do; None without attention.
        task: file below configs/tasks, if it is not that of the code base.
        set: options to add.
        note: further remarks.
    """

    flags: str
    does: str | None = None
    intends: str | None = None
    task: str | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def attention(self) -> str | None:
        """File below configs/attention, or None."""
        return self.does or self.intends


@dataclass(frozen=True)
class CodeBase:
    """The rows of one code base.

    Args:
        name: its name.
        code: its address.
        task: file below configs/tasks of rows without one.
        rows: the rows.
    """

    name: str
    code: str
    task: str
    rows: Sequence[Flags]


def read_flags(path: Path = FILE) -> list[CodeBase]:
    """Return the table.

    Raises:
        ConfigError: the file is missing, or a row has unknown keys.
    """
    place = find(path)
    if not place.is_file():
        raise ConfigError(f"missing file {path}, which is part of the source repository")
    content = yaml.safe_load(place.read_text(encoding="utf-8"))
    return [
        record(CodeBase, str(path), {**one, "rows": [_row(row, path) for row in one["rows"]]})
        for one in content
    ]


def _row(entry: Mapping[str, Any], path: Path) -> Flags:
    where = f"{path}: row {entry.get('flags')}"
    found = record(Flags, where, entry)
    if found.does and found.intends:
        raise ConfigError(f"{where}: expected one of does and intends")
    return found


def make_page(table: Sequence[CodeBase]) -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION]
    for one in table:
        rows = [[f"`{row.flags}`", _file(row), _options(row), row.note] for row in one.rows]
        lines = markdown_table(pd.DataFrame(rows, columns=["flags", "file", "add", "note"]))
        parts += [f"## {one.name}\n\n`{one.code}`. Task: `{one.task}`.", lines]
    layouts = [[f"`{name}`", layout.source] for name, layout in LAYOUTS.items()]
    parts += [_LAYERS, markdown_table(pd.DataFrame(layouts, columns=["layout", "layer"]))]
    return "\n\n".join(parts) + "\n"


def _file(row: Flags) -> str:
    if row.attention is None:
        return f"task `{row.task}`" if row.task else ""
    told = f"`{row.attention}`" + (f" after task `{row.task}`" if row.task else "")
    return f"intended: {told}" if row.intends else told


def _options(row: Flags) -> str:
    return ", ".join(f"`{name} {value}`" for name, value in row.set.items())


@reports(ConfigError, OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the page; return the exit status."""
    parser = Parser("python -m lit_probattn.reproduce.flags", __doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page to this file")
    options = parser.parse_args(arguments)
    text = make_page(read_flags())
    if options.write is None:
        print(text, end="")
    else:
        options.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the page that maps flags and layer names of the authors' code to this package.

    python -m lit_probattn.reproduce.flags
    python -m lit_probattn.reproduce.flags --write docs/as_released.md

The rows are those of configs/released_flags.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lit_probattn.base.arguments import Parser
from lit_probattn.base.config_files import find
from lit_probattn.base.errors import ConfigError, reports
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
        attention: file below configs/attention, or None.
        intended: whether the file computes the intended instead of the actual behaviour.
        task: file below configs/tasks.
        own_task: whether the row names a separate task.
        options: options to add.
        note: further remarks.
    """

    flags: str
    attention: str | None
    intended: bool
    task: str
    own_task: bool
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class CodeBase:
    """The rows of one code base."""

    name: str
    code: str
    rows: list[Flags]


def read_flags(path: Path = FILE) -> list[CodeBase]:
    """Return the table.

    Raises:
        ConfigError: the file is missing, or a row has unknown keys.
    """
    place = find(path)
    if not place.is_file():
        raise ConfigError(f"missing file {path}, which is part of the source repository")
    content = yaml.safe_load(place.read_text(encoding="utf-8"))
    return [CodeBase(one["name"], one["code"], list(_rows(one, path))) for one in content]


def _rows(part: dict[str, Any], path: Path) -> Iterator[Flags]:
    for row in part["rows"]:
        unknown = set(row) - {"flags", "does", "intends", "task", "set", "note"}
        if unknown or ("does" in row and "intends" in row):
            raise ConfigError(
                f"{path}: row {row.get('flags')}: expected one of does and intends, and flags, "
                f"task, set, note, received {', '.join(sorted(row))}"
            )
        yield Flags(
            flags=row["flags"],
            attention=row.get("does", row.get("intends")),
            intended="intends" in row,
            task=row.get("task", part["task"]),
            own_task="task" in row,
            options=row.get("set", {}),
            note=row.get("note", ""),
        )


def make_page(table: Sequence[CodeBase]) -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION]
    for one in table:
        rows = [[f"`{row.flags}`", _file(row), _options(row), row.note] for row in one.rows]
        lines = markdown_table(pd.DataFrame(rows, columns=["flags", "file", "add", "note"]))
        usual = next(row.task for row in one.rows if not row.own_task)
        parts += [f"## {one.name}\n\n`{one.code}`. Task: `{usual}`.", lines]
    layouts = [[f"`{name}`", layout.source] for name, layout in LAYOUTS.items()]
    parts += [_LAYERS, markdown_table(pd.DataFrame(layouts, columns=["layout", "layer"]))]
    return "\n\n".join(parts) + "\n"


def _file(row: Flags) -> str:
    if row.attention is None:
        return f"task `{row.task}`" if row.own_task else ""
    told = f"`{row.attention}`" + (f" after task `{row.task}`" if row.own_task else "")
    return f"intended: {told}" if row.intended else told


def _options(row: Flags) -> str:
    return ", ".join(f"`{name} {value}`" for name, value in row.options.items())


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

"""Rows of a long study, kept as they are found, so that an interrupted study goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lit_probattn.base.files import append_lines, replace_text


class RowStore:
    """JSON lines in `<study>.partial.jsonl`: settings first, then a row per line.

    Rows of other settings are dropped, and half a last line, which a killed process leaves.

    Args:
        path: the file.
        settings: everything that the rows depend on.
        key: columns that tell a row from the others.
    """

    def __init__(self, path: Path, settings: dict[str, Any], key: Sequence[str]) -> None:
        self.path, self.key = path, tuple(key)
        self.rows: list[dict[str, Any]] = []
        text = json.dumps(settings, sort_keys=True, default=str)
        if path.is_file():
            first, *rest = path.read_text().splitlines() or [""]
            if first == text:
                self.rows = [row for line in rest if (row := _parse(line)) is not None]
        self._keys = {self._key_of(row) for row in self.rows}
        replace_text(path, "".join(f"{line}\n" for line in (text, *map(json.dumps, self.rows))))

    def __len__(self) -> int:
        return len(self.rows)

    def _key_of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self.key)

    def has(self, **key: Any) -> bool:
        """Whether a row with this key is kept."""
        return self._key_of(key) in self._keys

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, unless one with its key is kept already."""
        if self.has(**row):
            return
        self.rows.append(row)
        self._keys.add(self._key_of(row))
        append_lines(self.path, [json.dumps(row)])

    def finish(self) -> pd.DataFrame:
        """Return all rows and remove the file."""
        self.path.unlink(missing_ok=True)
        return pd.DataFrame(self.rows)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None

"""Rows of a long study, kept as they are found, so that an interrupted study goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd


class RowStore:
    """JSON lines in `<study>.partial.jsonl`: settings first, then a row per line.

    Rows of other settings are dropped; half a last line, of a killed process, too.

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
        lines = [text, *(json.dumps(row) for row in self.rows)]
        path.write_text("\n".join(lines) + "\n")

    def __len__(self) -> int:
        return len(self.rows)

    def _key_of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self.key)

    def has(self, **key: Any) -> bool:
        """Whether the row with this key is there."""
        return self._key_of(key) in self._keys

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row; one that is there already is left as it is."""
        if self.has(**row):
            return
        self.rows.append(row)
        self._keys.add(self._key_of(row))
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

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

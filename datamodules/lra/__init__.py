"""Tasks of the Long Range Arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from datamodules.core.files import find_set, not_found

RELEASE = (
    "the Long Range Arena release (github.com/google-research/long-range-arena, lra_release.gz)"
)


def find_tables(
    title: str,
    files: Mapping[str, str],
    folders: Sequence[str],
    data_dir: Path,
    origin: str = "",
    options: str = "",
    otherwise: str = "",
) -> dict[str, Path]:
    """Return the path of each split's file in one of the folders, or raise a MissingDataError."""
    found = find_set(title, (data_dir / folder for folder in folders), files)
    if found is not None:
        return found
    what = f"the released files {', '.join(files.values())} are"
    expected = f"in {data_dir} itself or in its {', '.join(folders[1:])}"
    origin, command = f"They are part of {RELEASE}{origin}", title.lower() + options
    raise not_found(title, what, expected, origin, command, data_dir, otherwise)

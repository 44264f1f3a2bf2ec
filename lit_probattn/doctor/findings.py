"""One line of the doctor's report."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """What was found."""

    section: str  # heading
    name: str  # what was looked at
    status: Literal["ok", "note", "problem"]  # note: worth knowing; problem: will stop a run
    text: str  # what was found, and for a problem what to do


def size(num_bytes: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"

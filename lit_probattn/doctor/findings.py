"""One line of the doctor's report."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """What was found.

    Args:
        section: heading.
        name: what was looked at.
        status: `ok`, `note` (worth knowing) or `problem` (will stop a run).
        text: what was found, and for a problem what to do.
    """

    section: str
    name: str
    status: Literal["ok", "note", "problem"]
    text: str


def size(num_bytes: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"

"""What is printed where the terminal cannot show every character."""

from __future__ import annotations

import io
import sys


def replace_unprintable() -> None:
    """Have stdout and stderr print `?` for characters that their encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

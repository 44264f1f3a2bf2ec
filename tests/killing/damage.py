"""`python -m tests.killing.damage {cut,flip} FILE`: what disks and copies do to a checkpoint."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path


def cut(path: Path) -> None:
    """Take the last 1000 bytes away."""
    os.truncate(path, path.stat().st_size - 1000)


def flip(path: Path) -> None:
    """Change one bit in the middle of the largest tensor; PyTorch alone would load it."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
    data = bytearray(path.read_bytes())
    name, extra = (
        int.from_bytes(data[largest.header_offset + at : largest.header_offset + at + 2], "little")
        for at in (26, 28)
    )
    data[largest.header_offset + 30 + name + extra + largest.file_size // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {"cut": cut, "flip": flip}

if __name__ == "__main__":
    DAMAGE[sys.argv[1]](Path(sys.argv[2]))
    print(f"damaged ({sys.argv[1]}): {Path(sys.argv[2]).name}")

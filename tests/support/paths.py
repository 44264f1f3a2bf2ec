"""Folders of the repository."""

from pathlib import Path

from lit_probattn.base.config_files import named_files

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
# Real data beside a checkout, where somebody put it; tests that want it skip when it is absent.
SHARED_DATA = ROOT.parent / "shared" / "data"


def shipped(kind: str) -> list[Path]:
    """Return where the shipped configurations of a kind lie, as `find` has it, in order."""
    return sorted(path for path in named_files(kind).values() if path.is_relative_to(CONFIGS))

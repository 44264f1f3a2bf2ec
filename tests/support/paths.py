"""Folders of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
# Real data beside a checkout, where somebody put it; tests that want it skip when it is absent.
SHARED_DATA = ROOT.parent / "shared" / "data"

"""What a page consists of, and how a headless Chromium shows it, where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def browse(path: Path, *flags: str, query: str = "") -> str:
    """Open a page, with `?…` behind its address; return what the browser prints."""
    profile = path.parent / ".profile"
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*map(str, words), "--disable-dev-shm-usage", *flags, path.absolute().as_uri() + query],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def elements(path: Path, query: str = "") -> str:
    """Return the page's HTML after its scripts have run."""
    return browse(path, "--dump-dom", query=query)


def screenshot(path: Path, file: Path, size: tuple[int, int] = (1100, 1600)) -> np.ndarray:
    """Return the pixels of a page, (height, width, 3)."""
    browse(path, f"--screenshot={file}", f"--window-size={size[0]},{size[1]}", "--hide-scrollbars")
    return np.asarray(Image.open(file).convert("RGB"))


_VOID = {"meta", "br", "img", "hr", "input", "link"}


class Page(HTMLParser):
    """Tags with their attributes, and the texts inside each kind of tag; tags must close in order.

    Raises:
        AssertionError: a tag closes that is not the innermost, or one stays open.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop(), (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def attributes(self, tag: str, name: str) -> list[str]:
        """Return an attribute of all tags of a kind that have it."""
        return [given[name] or "" for kind, given in self.tags if kind == tag and name in given]

    def addresses(self) -> list[str]:
        """Return everything that the page would load or lead to."""
        loads = [("a", "href"), ("link", "href"), ("img", "src"), ("script", "src")]
        return [address for pair in loads for address in self.attributes(*pair)]

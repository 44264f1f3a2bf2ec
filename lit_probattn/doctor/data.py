"""Which releases and caches are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from datamodules import REGISTRY, Synthetic
from datamodules.core.errors import DataError
from datamodules.lra import aan, cifar, imdb, listops_release, pathfinder_release
from datamodules.pictures.files import find_root
from datamodules.series.archive import ARCHIVES, BUNDLED, find_archive
from datamodules.text.wikitext_release import Corpus, find_release
from lit_probattn.doctor.findings import Finding, size

SECTION = "Data"
_CORPORA: tuple[Corpus, ...] = ("wikitext-103", "wikitext-2")


def folders(data_dir: str | None, cache_dir: str | None) -> tuple[Path, Path]:
    """Folders of releases and of caches, by the same rules as in a run."""
    data = Synthetic(data_dir=data_dir, cache_dir=cache_dir)
    return data.data_dir, data.cache_dir


def check_data(data_dir: str | None, cache_dir: str | None) -> Iterator[Finding]:
    """A line for each data set: its release, and its caches."""
    data, caches = folders(data_dir, cache_dir)
    yield Finding(SECTION, "folders", "ok", f"releases in {data}, caches in {caches}")
    for name in REGISTRY:
        look = _LOOK.get(name)
        if look is None:
            continue
        found, text = look(data)
        cached = _caches(caches, name)
        yield Finding(SECTION, name, "ok" if found or cached else "note", f"{text}{cached}")


def _caches(folder: Path, task: str) -> str:
    """What is cached of a task; whole caches have a meta.json."""
    found = sorted(path.parent for path in folder.glob(f"{task}-*/meta.json"))
    if not found:
        return ""
    num_bytes = sum(path.stat().st_size for part in found for path in part.iterdir())
    return f"; {len(found)} caches, {size(num_bytes)}"


def _release(find: Callable[[Path], Any]) -> Callable[[Path], tuple[bool, str]]:
    """Look for one release."""

    def look(data: Path) -> tuple[bool, str]:
        try:
            found = find(data)
        except DataError as error:
            return False, str(error)
        place = next(iter(found.values())) if isinstance(found, dict) else found
        return True, f"found, {getattr(place, 'name', place)}"

    return look


def _listops(data: Path) -> tuple[bool, str]:
    found, text = _release(listops_release.find_release)(data)
    return True, text if found else "no release; it is generated when it is needed"


def _pathfinder(data: Path) -> tuple[bool, str]:
    present = []
    for side in (32, 128):
        for difficulty in pathfinder_release.FOLDERS:
            try:
                pathfinder_release.find_release(data, side, difficulty)
            except DataError as error:
                missing = str(error)
            else:
                present.append(f"{side} {difficulty}")
    return bool(present), f"found {', '.join(present)}" if present else missing


def _uea(data: Path) -> tuple[bool, str]:
    present = []
    for name in ARCHIVES:
        try:
            find_archive(name, data, "released")
        except DataError:
            continue
        present.append(name)
    listed = f" ({', '.join(present)})" if present else ""
    bundled = f"; {' and '.join(BUNDLED)} come with the package aeon (source bundled)"
    return bool(present), f"{len(present)} of {len(ARCHIVES)} archives{listed}{bundled}"


def _wikitext(data: Path) -> tuple[bool, str]:
    looked = {name: _release(partial(find_release, corpus=name))(data) for name in _CORPORA}
    present = [name for name, (found, _) in looked.items() if found]
    if present:
        return True, f"found {', '.join(present)}"
    return False, looked[_CORPORA[0]][1]


_LOOK: dict[str, Callable[[Path], tuple[bool, str]]] = {
    "listops": _listops,
    "text": _release(imdb.find_release),
    "retrieval": _release(aan.find_release),
    "image": _release(cifar.find_release),
    "pathfinder": _pathfinder,
    "imagenet": _release(find_root),
    "uea": _uea,
    "wikitext103": _wikitext,
}

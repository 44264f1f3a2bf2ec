"""Which releases and caches are on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datamodules import REGISTRY, Synthetic
from datamodules.core.errors import DataError
from datamodules.lra import aan, cifar, imdb, listops_release, pathfinder_release
from datamodules.pictures.files import find_root
from datamodules.series.archive import ARCHIVES, BUNDLED, find_archive
from datamodules.text import releases
from datamodules.trajectories.environments import ENVIRONMENTS, QUALITIES, environment_named
from datamodules.trajectories.files import find_file
from lit_probattn.doctor.findings import Finding, size

SECTION = "Data"


def folders(data_dir: str | None, cache_dir: str | None) -> tuple[Path, Path]:
    """Return the folders of releases and of caches, by the same rules as in a run."""
    data = Synthetic(data_dir=data_dir, cache_dir=cache_dir)
    return data.data_dir, data.cache_dir


def check_data(data_dir: str | None, cache_dir: str | None) -> Iterator[Finding]:
    """Yield a line for each data set: its release, and its caches."""
    data, caches = folders(data_dir, cache_dir)
    yield Finding(SECTION, "folders", "ok", f"releases in {data}, caches in {caches}")
    for name in REGISTRY:
        if name in _LOOK:
            found, text = _LOOK[name](data)
            cached = _caches(caches, name)
            yield Finding(SECTION, name, "ok" if found or cached else "note", f"{text}{cached}")


def _caches(folder: Path, task: str) -> str:
    """Say what is cached of a task; whole caches have a meta.json."""
    found = [path.parent for path in folder.glob(f"{task}-*/meta.json")]
    num_bytes = sum(path.stat().st_size for part in found for path in part.iterdir())
    return f"; {len(found)} caches, {size(num_bytes)}" if found else ""


Look = Callable[[Path], tuple[bool, str]]


def _release(find: Callable[[Path], Any]) -> Look:
    """Look for one release."""

    def look(data: Path) -> tuple[bool, str]:
        try:
            found = find(data)
        except DataError as error:
            return False, str(error)
        place = next(iter(found.values())) if isinstance(found, dict) else found
        place = place[0] if isinstance(place, list) else place
        return True, f"found, {getattr(place, 'name', place)}"

    return look


def _parts(find: Callable[..., Any], parts: Iterable[str], data: Path) -> tuple[list[str], str]:
    """Return the parts of a release that are found, and the message of the first that is not."""
    looked = {part: _release(partial(find, part))(data) for part in parts}
    present = [part for part, (found, _) in looked.items() if found]
    return present, next((text for found, text in looked.values() if not found), "")


def _several(find: Callable[[str, Path], Any], *parts: str) -> Look:
    """Look for a release of several parts."""

    def look(data: Path) -> tuple[bool, str]:
        present, missing = _parts(find, parts, data)
        return bool(present), f"found {', '.join(present)}" if present else missing

    return look


def _table(table: Mapping[str, releases.Release]) -> Look:
    return _several(lambda name, data: table[name].find(data), *table)


def _listops(data: Path) -> tuple[bool, str]:
    found, text = _release(listops_release.find_release)(data)
    return True, text if found else "no release; it is generated when needed"


def _pathfinder(part: str, data: Path) -> Path:
    side, difficulty = part.split()
    return pathfinder_release.find_release(data, int(side), difficulty)


def _uea(data: Path) -> tuple[bool, str]:
    present, _ = _parts(lambda name, data: find_archive(name, data, "released"), ARCHIVES, data)
    listed = f" ({', '.join(present)})" if present else ""
    bundled = f"; {' and '.join(BUNDLED)} come with the package aeon (source bundled)"
    return bool(present), f"{len(present)} of {len(ARCHIVES)} archives{listed}{bundled}"


def _trajectories(part: str, data: Path) -> Path:
    env, quality = part.split()
    return find_file(environment_named(env), quality, data)


_LOOK: dict[str, Look] = {
    "question_answering": _table(releases.SQUAD),
    "text_pairs": _table(releases.PAIRS),
    "listops": _listops,
    "text": _release(imdb.find_release),
    "retrieval": _release(aan.find_release),
    "image": _release(cifar.find_release),
    "pathfinder": _several(
        _pathfinder, *(f"{side} {d}" for side in (32, 128) for d in pathfinder_release.FOLDERS)
    ),
    "imagenet": _release(find_root),
    "lm1b": _release(releases.lm1b().find),
    "uea": _uea,
    "iwslt14": _release(releases.IWSLT14.find),
    "wmt14": _release(releases.wmt14().find),
    "trajectories": _several(
        _trajectories, *(f"{env} {quality}" for env in ENVIRONMENTS for quality in QUALITIES)
    ),
    "wikitext103": _table({k: v for k, v in releases.WIKITEXT.items() if k != "other"}),
}

"""Where configuration files lie, and their names: `smgk` is `attention/smgk.yaml` of a folder.

A path is looked for as it is given, from the working folder; then in the folders that
LIT_PROBATTN_CONFIGS lists; then in those that come with the package: `configs/` of a checkout,
`lit_probattn/_configs/` of an installed wheel. A leading `configs/` stands for any of these
folders. Names are looked for in the folders only.

Only the standard library is imported, so that names are listed at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from lit_probattn.base.errors import ConfigError, nearest

VARIABLE = "LIT_PROBATTN_CONFIGS"
# Kind of a file -> its folder, and what `lit-probattn list` calls its files.
KINDS = {
    "task": ("tasks", "tasks"),
    "attention": ("attention", "attention"),
    "trainer": ("trainer", "trainers"),
    "measurement": ("profiling", "measurements"),
    "table": ("reproduce", "tables"),
}
_PACKAGE = Path(__file__).parents[1]


def output_folder(path: Path, flag: str = "--out") -> Path:
    """Make the folder that a command writes into.

    Raises:
        ConfigError: it cannot be made; the message names the flag.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be a folder: {error.strerror}") from error
    return path


# What a file in a folder of its own adds to the name of a run; elsewhere its stem does.
_STEMS = (
    (r"tasks/tiny/([^/]+)", r"\1_tiny"),
    (r"as_released/lra/([^/]+)", r"code_lra_\1"),
    (r"as_released/lm/(intended_[^/]+|linear)", r"code_lm_\1"),
    (r"as_released/lm/([^/]+)", r"code_lm_as_released_\1"),
    (r"as_released/translation/([^/]+)", r"translation_\1"),
)


# ---- folders -----------------------------------------------------------------------------------


def shipped() -> Path:
    """Return the folder of configurations that comes with the package."""
    packed = _PACKAGE / "_configs"
    return packed if packed.is_dir() else _PACKAGE.parent / "configs"


def folders() -> list[Path]:
    """Return the folders of configurations: a user's own, then the shipped one.

    Raises:
        ConfigError: LIT_PROBATTN_CONFIGS names something that is no folder.
    """
    words = os.environ.get(VARIABLE, "").split(os.pathsep)
    own = [Path(word).expanduser() for word in words if word]
    for folder in own:
        if not folder.is_dir():
            raise ConfigError(f"{VARIABLE}: {folder} is no folder")
    return [*own, shipped()]


def _places(path: Path, root: Path) -> Iterator[Path]:
    """Yield where a file or folder may lie, the first choice first."""
    yield root / path
    if path.is_absolute() or ".." in path.parts:
        return
    rest = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    for folder in folders():
        yield folder / rest


# ---- paths -------------------------------------------------------------------------------------


def find(path: str | Path, root: Path = Path()) -> Path:
    """Return where a configuration file or folder lies, as seen from `root`.

    Where nothing is found, the path is returned as it is.

    Raises:
        ConfigError: see `folders`.
    """
    given = Path(path)
    return next((place for place in _places(given, root) if place.exists()), root / given)


def files_in(folder: str | Path, pattern: str = "*.yaml") -> dict[str, Path]:
    """Return the files of a folder wherever `find` would look, by their path inside it, sorted.

    Of files with the same path the first is meant.
    """
    found: dict[str, Path] = {}
    for place in _places(Path(folder), Path()):
        for path in place.glob(pattern):
            found.setdefault(path.relative_to(place).as_posix(), path)
    return dict(sorted(found.items()))


def run_stem(path: str | Path) -> str:
    """Return what a file adds to the name of a run; files of different folders differ in it."""
    name = Path(path).with_suffix("").as_posix()
    for pattern, stem in _STEMS:
        found = re.fullmatch(rf"(?:.*/)?{pattern}", name)
        if found is not None:
            return found.expand(stem)
    return Path(path).stem


# ---- names -------------------------------------------------------------------------------------


def named_files(kind: str) -> dict[str, Path]:
    """Return the files of a kind by name, in order: the names of a folder, then of those inside."""
    found: dict[str, Path] = {}
    for folder in folders():
        inside = folder / KINDS[kind][0]
        for path in inside.rglob("*.yaml"):
            found.setdefault(path.relative_to(inside).with_suffix("").as_posix(), path)
    return {name: found[name] for name in sorted(found, key=lambda name: (name.count("/"), name))}


def list_attention() -> list[str]:
    """Return the names of attention configurations, which `lit_probattn.create` takes."""
    return list(named_files("attention"))


def file_named(kind: str, name: str) -> str:
    """Return the path of a file by its kind and name; a path (`….yaml`) is returned as it is.

    Args:
        kind: one of `KINDS`.
        name: `smgk`, `tiny/lra_listops`.

    Raises:
        ConfigError: no file has this name; it names the nearest.
    """
    if Path(name).suffix in (".yaml", ".yml") or Path(name).is_absolute():
        return name
    if name and ".." not in Path(name).parts:
        for folder in folders():
            found = folder / KINDS[kind][0] / f"{name}.yaml"
            if found.is_file():
                return str(_shown(found))
    hint = nearest(name, named_files(kind), most=3)
    more = f"`lit-probattn list {KINDS[kind][1]}` shows all; a path ends in .yaml"
    raise ConfigError(f"unknown {kind} {name!r}{hint}; {more}")


def _shown(path: Path) -> Path:
    """Return a path from the working folder where it lies inside, as one types it."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path.absolute()

"""Restrict the code that a configuration can run to installed packages and allowed modules.

A configuration names classes, whose modules are imported and thereby run. Modules in the working
folder, for example next to a downloaded configuration, are therefore not imported without
`--allow_code MODULE`. Child processes read the allowed modules from LIT_PROBATTN_ALLOW_CODE.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

OUR_PACKAGES = ("lit_probattn", "datamodules", "profiling")
VARIABLE = "LIT_PROBATTN_ALLOW_CODE"
FLAG = "--allow_code"
HELP = "module outside installed packages that configurations may name; may be repeated"


class RefusedCodeError(BaseException):
    """A module was not imported; the message is one line.

    It is not an Exception, which parsers would report as a value of the wrong type.
    """


class _NotOnPathError(RefusedCodeError, ModuleNotFoundError):
    """A module of the working folder, which Python does not search; optional imports fall back."""


def allow(module: str) -> None:
    """Allow configurations to name a module, in this process and its child processes."""
    names = [*_allowed(), module]
    os.environ[VARIABLE] = ",".join(dict.fromkeys(names))


def take_flags(arguments: Sequence[str]) -> list[str]:
    """Remove `--allow_code MODULE` from arguments, and allow these modules."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, prefix_chars="-")
    add_flag(parser)
    return parser.parse_known_args(arguments)[1]


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--allow_code MODULE` to a program."""
    parser.add_argument(FLAG, action=_Allow, metavar="MODULE", default=argparse.SUPPRESS, help=HELP)


class _Allow(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        allow(values)


@contextmanager
def guarded() -> Iterator[None]:
    """Reject imports of modules that are neither installed nor allowed.

    Raises:
        RefusedCodeError: such an import was attempted, or an allowed module cannot be imported.
    """
    for name in _allowed():  # outside the guard, which does not apply to their imports
        _import_allowed(name)
    guard = _Guard()
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)


def _import_allowed(name: str) -> None:
    """Import an allowed module, also from the working folder, like `python -m`.

    The working folder is last on the path, so it cannot shadow other modules.
    """
    if name in sys.modules:
        return
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise RefusedCodeError(f"{FLAG} {name}: {import_failure(error)}") from error


def import_failure(error: BaseException) -> str:
    """Return the error of an import in one line."""
    kind = "" if isinstance(error, ImportError) else f"importing it raised {type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


def _allowed() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def files_of_allowed(module: str) -> dict[str, Path]:
    """Return the Python files of an allowed top-level module, by path below its folder.

    Empty for other modules.
    """
    if module not in {name.partition(".")[0] for name in _allowed()}:
        return {}
    spec = PathFinder.find_spec(module, [*sys.path, os.getcwd()])
    place = None if spec is None else _place(spec)
    if place is None:
        return {}
    if place.is_file() and place.name != "__init__.py":
        return {place.name: place}
    folder = place.parent if place.is_file() else place
    return {str(path.relative_to(folder.parent)): path for path in sorted(folder.rglob("*.py"))}


class _Guard:
    """Import hook before Python's finders; submodules are treated like their package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if path is not None:
            return
        finders = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        kind = RefusedCodeError
        if spec is None:  # the installed program does not search the working folder
            spec, kind = PathFinder.find_spec(name, [os.getcwd()]), _NotOnPathError
            spec = spec if spec is not None and spec.has_location else None  # not any folder
        place = None if spec is None else _place(spec)
        if place is not None and not _is_installed(name, place):
            raise kind(
                f"{name} ({place}) is not an installed package and was not imported: add {FLAG} "
                f"{name} if you trust its code (in Python: import it before)"
            )


def _place(spec: ModuleSpec) -> Path | None:
    """Return the path of a module; None if it is built in."""
    if spec.has_location and spec.origin:
        return Path(spec.origin).resolve()
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]).resolve() if folders else None


def _is_installed(name: str, place: Path) -> bool:
    ours = [Path(__file__).parents[2]] if name in OUR_PACKAGES else []
    python = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    sites = [*site.getsitepackages(), site.getusersitepackages()]
    roots = [*ours, *(Path(root).resolve() for root in (*python, *sites))]
    if any(place.is_relative_to(root) for root in roots):
        return True
    return any(place.is_relative_to(root) for root in _roots_of(name))


def _roots_of(name: str) -> Iterator[Path]:
    """Yield the folders of the distributions that contain a module of this name."""
    for title in (*metadata.packages_distributions().get(name, ()), name):
        try:
            distribution = metadata.distribution(title)
        except metadata.PackageNotFoundError:
            continue
        yield Path(str(distribution.locate_file(""))).resolve()
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            yield Path(url2pathname(urlparse(str(origin["url"])).path)).resolve()

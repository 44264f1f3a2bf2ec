"""Locations and names of configuration files: `smgk` is `attention/smgk.yaml` of a folder.

A path is resolved relative to the working folder, then in the folders of LIT_PROBATTN_CONFIGS, then
in the shipped folder: `configs/` of a checkout, `lit_probattn/_configs/` of an installed wheel. A
leading `configs/` means any of these folders. Names are resolved only in the folders.

A bundle, `NAME.bundle.yaml`, contains several small files of its folder. The key of an entry is the
file's path in that folder without the suffix, and the comment above the key is the file's comment:
`tiny/uea:` in `tasks/tiny.bundle.yaml` is the file `tasks/tiny/uea.yaml`. A file that also exists
with the same path, or in two bundles, raises an error. Two keys are not entries:

    under: model.init_args.attention  # key of each file that contains its entry
    shared: {sizes: &sizes {…}}       # anchors for all entries

and `base: tiny/uea` in an entry means that entry with changes, merged key by key.

At import only the standard library is needed, so that names are listed quickly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError, nearest, prefixed

VARIABLE = "LIT_PROBATTN_CONFIGS"
# Kind of a file -> its folder, and its name in `lit-probattn list`.
KINDS = {
    "task": ("tasks", "tasks"),
    "attention": ("attention", "attention"),
    "trainer": ("trainer", "trainers"),
    "measurement": ("profiling", "measurements"),
    "table": ("reproduce", "tables"),
}
_PACKAGE = Path(__file__).parents[1]
_BUNDLE = ".bundle.yaml"
_MOST_LEVELS = 3000  # of YAML that the loader in C takes
_KEY = re.compile(r"^([\w./-]+):", re.MULTILINE)
_UNDER, _SHARED, _BASE = "under", "shared", "base"
_DEEPEST = 3  # a bundle is at most this many folders above its files


def output_folder(path: Path) -> Path:
    """Create the output folder of a command.

    Raises:
        ConfigError: it cannot be created; the message names --out.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be a folder: {error.strerror}") from error
    return path


# Part of the name of a run for a file in a separate folder; otherwise it is the stem.
_STEMS = (
    (r"tasks/tiny/([^/]+)", r"\1_tiny"),
    (r"as_released/lra/([^/]+)", r"code_lra_\1"),
    (r"as_released/lm/(intended_[^/]+|linear)", r"code_lm_\1"),
    (r"as_released/lm/([^/]+)", r"code_lm_as_released_\1"),
    (r"as_released/translation/([^/]+)", r"translation_\1"),
)


# ---- folders -----------------------------------------------------------------------------------


def shipped() -> Path:
    """Return the folder of configurations shipped with the package."""
    packed = _PACKAGE / "_configs"
    return packed if packed.is_dir() else _PACKAGE.parent / "configs"


def folders() -> list[Path]:
    """Return the folders of configurations: those of the user, then the shipped one.

    Raises:
        ConfigError: an entry of LIT_PROBATTN_CONFIGS is not a folder.
    """
    words = os.environ.get(VARIABLE, "").split(os.pathsep)
    own = [Path(word).expanduser() for word in words if word]
    for folder in own:
        if not folder.is_dir():
            raise ConfigError(f"{VARIABLE}: {folder} is not a folder")
    return [*own, shipped()]


def _places(path: Path, root: Path) -> Iterator[Path]:
    """Yield the possible locations of a file or folder, by priority."""
    yield root / path
    if path.is_absolute() or ".." in path.parts:
        return
    rest = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    for folder in folders():
        yield folder / rest


# ---- paths -------------------------------------------------------------------------------------


def find(path: str | Path, root: Path = Path()) -> Path:
    """Return the location of a configuration file or folder relative to `root`.

    If it is not found, the path is returned unchanged.

    Raises:
        ConfigError: see `folders`.
    """
    given = Path(path)
    there = (place for place in _places(given, root) if place.exists() or bundle_of(place))
    return next(there, root / given)


def is_there(path: str | Path) -> bool:
    """Return whether `find` finds a file, or an entry of a bundle."""
    place = find(path)
    return place.is_file() or bundle_of(place) is not None


def files_in(folder: str | Path) -> dict[str, Path]:
    """Return the files of a folder in all locations of `find`, by their path inside it, sorted.

    The first file with a path counts.
    """
    found: dict[str, Path] = {}
    for place in _places(Path(folder), Path()):
        for path in _files_of(place, "*.yaml"):
            if path.parent == place:
                found.setdefault(path.name, path)
    return dict(sorted(found.items()))


def _files_of(folder: Path, pattern: str = "**/*.yaml") -> Iterator[Path]:
    """Yield the files in a folder that match a pattern, then those of its bundles."""
    bundles = []
    for path in _visible(folder.glob(pattern), folder):
        if is_bundle(path):
            bundles.append(path)
        else:
            yield path
    for above in [*folder.parents][: _DEEPEST - 1]:
        bundles += _bundles_in(above)
    for bundle in bundles:
        held = (bundle.parent / f"{name}.yaml" for name in names_in(bundle))
        yield from (path for path in held if path.is_relative_to(folder))


def _bundles_in(folder: Path) -> list[Path]:
    return sorted(_visible(folder.glob(f"*{_BUNDLE}"), folder))


def _visible(paths: Iterable[Path], folder: Path) -> Iterator[Path]:
    """Yield the paths in a folder that are not hidden, as an editor's links and copies are."""
    for path in paths:
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def run_stem(path: str | Path) -> str:
    """Return a file's part of the name of a run, which differs between folders."""
    name = Path(path).with_suffix("").as_posix()
    for pattern, stem in _STEMS:
        found = re.fullmatch(rf"(?:.*/)?{pattern}", name)
        if found is not None:
            return found.expand(stem)
    return Path(path).stem


def comment_of(path: Path) -> list[str]:
    """Return the lines of the leading comment of a file, without `# `.

    Args:
        path: path returned by `find`.
    """
    bundle, lines = bundle_of(path), []
    text = (bundle or path).read_text(encoding="utf-8", errors="replace").splitlines()
    if bundle is not None:
        key = f"{_name_in(bundle, path)}:"
        start = next(number for number, line in enumerate(text) if line.startswith(key))
        text = [*reversed(text[:start])]
    for line in text:
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return lines[::-1] if bundle is not None else lines


# ---- bundles -----------------------------------------------------------------------------------


def is_bundle(path: Path) -> bool:
    """Return whether a file is a bundle according to its name."""
    return path.name.endswith(_BUNDLE)


def bundle_of(path: Path) -> Path | None:
    """Return the bundle that contains a file; None if it is a regular file or in no bundle.

    Raises:
        ConfigError: the file also exists, two bundles contain it, or a bundle cannot be read.
    """
    if path.suffix != ".yaml" or is_bundle(path):
        return None
    holding = [
        bundle
        for folder in [*path.parents][:_DEEPEST]
        for bundle in _bundles_in(folder)
        if _name_in(bundle, path) in names_in(bundle)
    ]
    places = [path, *holding] if path.exists() else holding
    if len(places) > 1:
        first, second, *_ = places
        kind = "a file" if first == path else f"in {first}"
        raise ConfigError(f"duplicate {path}: {kind} and in {second}; keep one")
    return holding[0] if holding else None


def names_in(bundle: Path) -> list[str]:
    """Return the entries of a bundle, in order.

    Raises:
        ConfigError: it cannot be read.
    """
    with prefixed(f"cannot read {bundle}", OSError, UnicodeDecodeError):
        state = bundle.stat()
        return list(_names_in(bundle, state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=64)
def _names_in(bundle: Path, _changed: int, _size: int) -> tuple[str, ...]:
    keys = _KEY.findall(bundle.read_text(encoding="utf-8"))
    return tuple(key for key in keys if key not in (_UNDER, _SHARED))


def _name_in(bundle: Path, path: Path) -> str:
    return path.relative_to(bundle.parent).with_suffix("").as_posix()


def entry_of(bundle: Path, content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file in a bundle.

    Args:
        bundle: path returned by `bundle_of`.
        content: content of the bundle.
        path: the file.

    Raises:
        ConfigError: the entry is not a mapping, or its `base` is unknown or circular.
    """
    entry = _entry(bundle, content, (_name_in(bundle, path),))
    under = content.get(_UNDER, "")
    if not isinstance(under, str):
        raise ConfigError(f"{bundle}: {_UNDER} must be a key with dots, received {under!r}")
    for key in reversed(under.split(".") if under else []):
        entry = {key: entry}
    return entry


def _entry(bundle: Path, content: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the last of the entries `names`, each the base of the previous one."""
    entry = content.get(names[-1])
    if not isinstance(entry, Mapping):
        kind = type(entry).__name__
        raise ConfigError(f"{bundle}: {names[-1]} must be a mapping, received {kind}")
    own = {key: value for key, value in entry.items() if key != _BASE}
    if _BASE not in entry:
        return merge(own)
    base = entry[_BASE]
    if base in names:
        raise ConfigError(f"{bundle}: {_BASE} is circular: {' -> '.join([*names, base])}")
    known = names_in(bundle)
    if base not in known:
        hint = nearest(str(base), known)
        raise ConfigError(f"{bundle}: {names[-1]}: unknown {_BASE} {base!r}{hint}")
    return merge(_entry(bundle, content, [*names, base]), own)


def merge(*contents: Mapping[str, Any]) -> dict[str, Any]:
    """Merge configurations key by key into a new one; later ones override earlier ones."""
    merged: dict[str, Any] = {}
    for content in contents:
        for key, value in content.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


# ---- names -------------------------------------------------------------------------------------


def named_files(kind: str) -> dict[str, Path]:
    """Return the files of a kind by name, in order: those of a folder before its subfolders."""
    found: dict[str, Path] = {}
    for folder in folders():
        inside = folder / KINDS[kind][0]
        for path in _files_of(inside):
            found.setdefault(path.relative_to(inside).with_suffix("").as_posix(), path)
    return {name: found[name] for name in sorted(found, key=lambda name: (name.count("/"), name))}


def list_attention() -> list[str]:
    """Return the names of attention configurations, which `lit_probattn.create` accepts."""
    return list(named_files("attention"))


def file_named(kind: str, name: str) -> str:
    """Return the path of a file by its kind and name; a path (`….yaml`) is returned unchanged.

    Args:
        kind: one of `KINDS`.
        name: for example `smgk` or `tiny/lra_listops`.

    Raises:
        ConfigError: the name is unknown; the message has the nearest.
    """
    if Path(name).suffix in (".yaml", ".yml") or Path(name).is_absolute():
        return name
    if name and ".." not in Path(name).parts:
        for folder in folders():
            found = folder / KINDS[kind][0] / f"{name}.yaml"
            if found.is_file() or bundle_of(found):
                return str(_shown(found))
    hint = nearest(name, named_files(kind), most=3)
    more = f"`lit-probattn list {KINDS[kind][1]}` shows all; a path ends in .yaml"
    raise ConfigError(f"unknown {kind} {name!r}{hint}; {more}")


def _shown(path: Path) -> Path:
    """Return a path relative to the working folder if it is inside."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path.absolute()


def load_yaml(text: str, checks: type = object) -> Any:
    """Return the content of a YAML text, by PyYAML's loader in C where it is safe.

    It takes a seventh of the time.

    Args:
        text: YAML.
        checks: class whose methods come before those of PyYAML's loader.

    Raises:
        yaml.YAMLError: the text is not YAML.
        RecursionError: it is nested too deeply.
    """
    import yaml  # names are completed without it

    fast = getattr(yaml, "CSafeLoader", None)
    if fast is not None and _is_flat(text):
        with contextlib.suppress(yaml.YAMLError):  # of which the other says more
            return yaml.load(text, _loader(checks, fast))
    return yaml.load(text, _loader(checks, yaml.SafeLoader))


@functools.cache
def _loader(checks: type, loader: type) -> Any:
    return type("Loader", (loader,) if checks is object else (checks, loader), {})


def _is_flat(text: str) -> bool:
    """Whether no value is nested too deeply for the C loader, which would end the process.

    A value has at most as many levels as there are brackets before it and columns to its left.
    """
    columns = max(map(len, text.splitlines()), default=0)
    return text.count("[") + text.count("{") + columns < _MOST_LEVELS

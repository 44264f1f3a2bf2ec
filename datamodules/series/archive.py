"""The UEA multivariate archive: names, published sizes, expected file locations."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Literal

from datamodules.core.files import find_files
from lit_probattn.base.errors import DataError, MissingDataError, nearest

ArchiveSource = Literal["released", "bundled"]

# Archives included in the optional package aeon.
BUNDLED = ("BasicMotions", "JapaneseVowels")

# Folders below data_dir that can contain an archive's folder, in search order.
_PARENTS = ("", "UEA", "uea", "Multivariate_ts", "UEA/Multivariate_ts", "uea/Multivariate_ts")


@dataclass(frozen=True)
class ArchiveSize:
    """Published size of an archive; `max_length` is the maximum over both files."""

    num_train: int
    num_test: int
    num_features: int
    max_length: int
    num_classes: int


# The 30 archives of the 2018 collection, with sizes from its published table; None if releases or
# tables contradict each other, so that there is no reliable size.
ARCHIVES: dict[str, ArchiveSize | None] = {
    "ArticularyWordRecognition": ArchiveSize(275, 300, 9, 144, 25),
    "AtrialFibrillation": ArchiveSize(15, 15, 2, 640, 3),
    "BasicMotions": ArchiveSize(40, 40, 6, 100, 4),
    "CharacterTrajectories": ArchiveSize(1422, 1436, 3, 182, 20),
    "Cricket": ArchiveSize(108, 72, 6, 1197, 12),
    "DuckDuckGeese": None,
    "EigenWorms": None,
    "Epilepsy": ArchiveSize(137, 138, 3, 206, 4),
    "ERing": None,
    "EthanolConcentration": ArchiveSize(261, 263, 3, 1751, 4),
    "FaceDetection": ArchiveSize(5890, 3524, 144, 62, 2),
    "FingerMovements": ArchiveSize(316, 100, 28, 50, 2),
    "HandMovementDirection": None,
    "Handwriting": ArchiveSize(150, 850, 3, 152, 26),
    "Heartbeat": ArchiveSize(204, 205, 61, 405, 2),
    "InsectWingbeat": None,
    "JapaneseVowels": ArchiveSize(270, 370, 12, 29, 9),
    "Libras": ArchiveSize(180, 180, 2, 45, 15),
    "LSST": ArchiveSize(2459, 2466, 6, 36, 14),
    "MotorImagery": ArchiveSize(278, 100, 64, 3000, 2),
    "NATOPS": ArchiveSize(180, 180, 24, 51, 6),
    "PEMS-SF": ArchiveSize(267, 173, 963, 144, 7),
    "PenDigits": ArchiveSize(7494, 3498, 2, 8, 10),
    "PhonemeSpectra": ArchiveSize(3315, 3353, 11, 217, 39),
    "RacketSports": ArchiveSize(151, 152, 6, 30, 4),
    "SelfRegulationSCP1": ArchiveSize(268, 293, 6, 896, 2),
    "SelfRegulationSCP2": ArchiveSize(200, 180, 7, 1152, 2),
    "SpokenArabicDigits": ArchiveSize(6599, 2199, 13, 93, 10),
    "StandWalkJump": ArchiveSize(12, 15, 4, 2500, 3),
    "UWaveGestureLibrary": ArchiveSize(120, 320, 3, 315, 8),
}


@dataclass(frozen=True)
class ArchiveFiles:
    """The two files of an archive, and the version of its release."""

    train: Path
    test: Path
    version: str


def check_name(name: str) -> None:
    """Raise a DataError that names the nearest archive if `name` is unknown."""
    if name not in ARCHIVES:
        raise DataError(_unknown(name))


def _unknown(name: str) -> str:
    hint = nearest(name, ARCHIVES, lists=False) or "."
    return (
        f"unknown archive {name!r}{hint} The UEA multivariate collection has {', '.join(ARCHIVES)}"
    )


def find_archive(name: str, data_dir: Path, source: ArchiveSource) -> ArchiveFiles:
    """Return the files of an archive in `data_dir`, or the copies in aeon (`bundled`).

    A name outside the collection refers to the user's files.

    Raises:
        MissingDataError: A file is missing; the message gives its expected location and its
            official source.
    """
    if source == "bundled":
        return _bundled(name)
    if Path(name).name != name:
        raise DataError(f"name must not contain folders, received {name!r}")
    folders = [data_dir / parent / own for parent in _PARENTS for own in (name, "")]
    found = _files(name, folders)
    if found is not None:
        return ArchiveFiles(**found, version=_declared_version(found["train"].parent))
    if name not in ARCHIVES:
        raise MissingDataError(
            f"{_unknown(name)}. Your own files are read from "
            f"{data_dir / name}, as {name}_TRAIN.ts and {name}_TEST.ts"
        )
    hint = ""
    if name in BUNDLED:
        hint = ", or set source to bundled (--data.init_args.source bundled) for aeon's copy"
    raise MissingDataError(
        f"{name}: no {name}_TRAIN.ts and {name}_TEST.ts in {data_dir / name} (nor directly in "
        f"{data_dir}, nor below its folders UEA and Multivariate_ts). Download "
        f"{name}.zip from https://www.timeseriesclassification.com (or all of "
        f"Multivariate2018_ts.zip) and unpack it there{hint}"
    )


def _declared_version(folder: Path) -> str:
    """Return the content of a file VERSION next to the archive, else `unknown`."""
    path = folder / "VERSION"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "unknown"


def _bundled(name: str) -> ArchiveFiles:
    if name not in BUNDLED:
        raise MissingDataError(
            f"aeon does not include {name}{nearest(name, BUNDLED, lists=False)}; it has "
            f"{' and '.join(BUNDLED)}: for other archives use source=released"
        )
    spec = importlib.util.find_spec("aeon")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise MissingDataError(
            f"source=bundled reads {name} from the package aeon, which is not installed: "
            f'pip install "lit-probattn[series]", or use source=released'
        )
    folder = Path(places[0]) / "datasets" / "data" / name
    found = _files(name, [folder])
    if found is None:
        raise MissingDataError(f"{folder} is missing from the installed package aeon")
    return ArchiveFiles(**found, version=f"aeon {importlib.metadata.version('aeon')}")


def _files(name: str, folders: Iterable[Path]) -> dict[str, Path] | None:
    form = {split: (f"{escape(name)}_{split.upper()}.ts",) for split in ("train", "test")}
    found = find_files(name, folders, (form,))
    return None if found is None else {split: paths[0] for split, paths in found.items()}

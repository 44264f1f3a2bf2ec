"""The UEA multivariate archive: its names, its published sizes, where its files are expected."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datamodules.core.errors import DataError, MissingDataError

__all__ = ["ARCHIVES", "BUNDLED", "ArchiveFiles", "ArchiveSize", "check_name", "find_archive"]

ArchiveSource = Literal["released", "bundled"]

# Archives that the optional package aeon carries.
BUNDLED = ("BasicMotions", "JapaneseVowels")

# Folders below data_dir in which an archive's own folder may lie, in the order of the search.
_PARENTS = ("", "UEA", "uea", "Multivariate_ts", "UEA/Multivariate_ts", "uea/Multivariate_ts")


@dataclass(frozen=True)
class ArchiveSize:
    """Published size of an archive.

    Args:
        num_train, num_test: series of both files.
        num_features: dimensions of a series.
        max_length: longest series of both files.
        num_classes: classes.
    """

    num_train: int
    num_test: int
    num_features: int
    max_length: int
    num_classes: int


# The 30 archives of the 2018 collection. Sizes by its published table; None where releases or
# tables disagree with each other, so that there is nothing to hold a file to.
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
    """The two files of an archive.

    Args:
        train, test: their paths.
        version: what is known of the release beside the files' hashes.
    """

    train: Path
    test: Path
    version: str


def check_name(name: str) -> None:
    """Refuse a name that is no archive, naming the nearest one.

    Raises:
        DataError: unknown name.
    """
    if name in ARCHIVES:
        return
    by_lower = {known.lower(): known for known in ARCHIVES}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.4)
    starts = [known for lower, known in by_lower.items() if name and lower.startswith(name.lower())]
    nearest = starts[:1] or [by_lower[lower] for lower in close]
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise DataError(
        f"{name!r} is no archive of the UEA multivariate collection{hint} "
        f"Valid are {', '.join(ARCHIVES)}"
    )


def find_archive(name: str, data_dir: Path, source: ArchiveSource) -> ArchiveFiles:
    """Return the files of an archive.

    Args:
        name: name of the archive.
        data_dir: folder of the releases; read if `source` is `released`.
        source: `bundled` takes the files that aeon carries.

    Raises:
        DataError: unknown name.
        MissingDataError: one of the files is not there; the message says where it is expected and
            where it comes from.
    """
    check_name(name)
    if source == "bundled":
        return _bundled(name)
    for parent in _PARENTS:
        for folder in (data_dir / parent / name, data_dir / parent):
            train, test = (folder / f"{name}_{part}.ts" for part in ("TRAIN", "TEST"))
            if train.is_file() and test.is_file():
                return ArchiveFiles(train, test, _declared_version(folder))
            if train.is_file() or test.is_file():
                missing = test if train.is_file() else train
                raise MissingDataError(f"{missing} is missing; its other half is in {folder}")
    hint = ""
    if name in BUNDLED:
        hint = ", or set source to bundled (--data.init_args.source bundled) for aeon's copy"
    raise MissingDataError(
        f"{name}: no {name}_TRAIN.ts and {name}_TEST.ts in {data_dir / name} (nor directly in "
        f"{data_dir}, nor below its folders UEA and Multivariate_ts). Nothing is downloaded: take "
        f"{name}.zip from https://www.timeseriesclassification.com (or all of "
        f"Multivariate2018_ts.zip) and unpack it there{hint}"
    )


def _declared_version(folder: Path) -> str:
    """Content of a file VERSION beside the archive, or `unknown`: `.ts` files carry none."""
    path = folder / "VERSION"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "unknown"


def _bundled(name: str) -> ArchiveFiles:
    if name not in BUNDLED:
        raise MissingDataError(
            f"aeon does not carry {name}, only {' and '.join(BUNDLED)}; use source released"
        )
    spec = importlib.util.find_spec("aeon")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise MissingDataError(
            f"source bundled reads {name} from the package aeon, which is not installed: "
            f'pip install "lit-probattn[uea]", or use source released'
        )
    folder = Path(places[0]) / "datasets" / "data" / name
    train, test = (folder / f"{name}_{part}.ts" for part in ("TRAIN", "TEST"))
    for path in (train, test):
        if not path.is_file():
            raise MissingDataError(f"{path} is missing from the installed package aeon")
    return ArchiveFiles(train, test, f"aeon {importlib.metadata.version('aeon')}")

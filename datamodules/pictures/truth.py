"""Classes of the validation pictures of ImageNet where all of them lie in one folder.

Three forms are read: `ILSVRC2012_validation_ground_truth.txt` of the development kit, whose line i
is the class of picture i, as a number that `meta.mat` beside it explains, or as the folder name of
the class; and `LOC_val_solution.csv`, which names the pictures.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from datamodules.core.errors import DataError, MissingDataError

__all__ = ["read_ground_truth"]

_KIT = "ILSVRC2012_validation_ground_truth.txt"
_TABLE = "LOC_val_solution.csv"
_PLACES = (
    "",
    "val",
    "devkit",
    "data",
    "devkit/data",
    "ILSVRC2012_devkit_t12/data",
    "../ILSVRC2012_devkit_t12/data",
    "../../..",
)


def read_ground_truth(root: Path, names: Sequence[str], given: Path | None = None) -> list[str]:
    """Return the class (folder name) of each picture.

    Args:
        root: Folder that holds `val`.
        names: File names of the pictures, sorted.
        given: The file. None means one of the usual names in the usual places.

    Raises:
        MissingDataError: There is no such file, or `meta.mat` is missing.
        DataError: The file does not fit the pictures.
    """
    path = _find(root) if given is None else given
    if not path.is_file():
        raise MissingDataError(f"ground-truth file not found: {path}")
    if path.suffix == ".csv":
        return _from_table(path, names)
    lines = path.read_text(encoding="utf-8").split()
    if len(lines) != len(names):
        raise DataError(
            f"{path} has {len(lines)} lines, but {root / 'val'} has {len(names)} pictures: "
            "expected one line for each picture"
        )
    if all(line.isdecimal() for line in lines):
        classes = _class_of_number(path.with_name("meta.mat"))
        unknown = [line for line in lines if int(line) not in classes]
        if unknown:
            raise DataError(f"{path}: class number {unknown[0]} is not in meta.mat")
        lines = [classes[int(line)] for line in lines]
    return [lines[_position(name, index)] for index, name in enumerate(names)]


def _position(name: str, index: int) -> int:
    """Return the line of a picture: its number in the name, which must be its place in the list."""
    number = re.search(r"_(\d+)\.\w+$", name)
    if number is None or int(number[1]) != index + 1:
        raise DataError(
            f"picture {name} stands at place {index + 1} of the sorted names: expected "
            f"ILSVRC2012_val_{index + 1:08d}; the ground-truth file goes by these numbers"
        )
    return index


def _find(root: Path) -> Path:
    for place in _PLACES:
        for name in (_KIT, _TABLE):
            if (root / place / name).is_file():
                return root / place / name
    raise MissingDataError(
        f"{root / 'val'} has no class folders, so a file with the classes is needed: expected "
        f"{root / _KIT} with meta.mat beside it (both from ILSVRC2012_devkit_t12.tar.gz), or "
        f"{root / _TABLE}, or the path as ground_truth"
    )


def _class_of_number(path: Path) -> dict[int, str]:
    """Read `meta.mat`: class number -> folder name of the 1000 leaf classes."""
    if not path.is_file():
        raise MissingDataError(
            f"{path} not found: it says which class each number of the ground-truth file is"
        )
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(
            f"reading {path} needs scipy: pip install scipy, or move the pictures into val/<wnid>/"
        ) from error
    synsets = loadmat(path, squeeze_me=True)["synsets"]
    leaves = [s for s in synsets.ravel() if int(s["num_children"]) == 0]
    return {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in leaves}


def _from_table(path: Path, names: Sequence[str]) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"ImageId", "PredictionString"} <= set(rows[0]):
        raise DataError(f"{path}: expected columns ImageId and PredictionString")
    classes = {row["ImageId"]: row["PredictionString"].split()[:1] for row in rows}
    missing = [name for name in names if not classes.get(name.rpartition(".")[0])]
    if missing:
        raise DataError(f"{path} has no class for {missing[0]} ({len(missing)} such pictures)")
    return [classes[name.rpartition(".")[0]][0] for name in names]

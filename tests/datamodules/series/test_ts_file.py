"""Malformed `.ts` files: each is refused with its file and line. Good ones are read as written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from datamodules.series.ts_file import read_ts
from lit_probattn.base.errors import DataError

HEADER = """# a comment
@problemName Tiny
@timeStamps false
@missing false
@univariate false
@dimensions 2
@equalLength false
@classLabel true Up Down
@data
"""
GOOD = HEADER + "1,2,3:4,5,6:Up\n-1.5,2e1:0.25,+7:Down\n"
FIRST = 10  # line of the first series


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "Tiny_TRAIN.ts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def without(tag: str) -> str:
    return "".join(line for line in GOOD.splitlines(True) if not line.startswith(tag))


# By what is wrong; tests/bad_inputs compares the messages with its page.
BAD = {
    "unknown label": GOOD + "1:2:Sideways\n",
    "missing dimension": GOOD + "1,2:Up\n",
    "one dimension too many": GOOD + "1:2:3:Up\n",
    "no label": GOOD + "1,2\n",
    "question mark undeclared": GOOD + "1,?:2,3:Up\n",
    "NaN undeclared": GOOD + "1,2:NaN,3:Up\n",
    "infinite": GOOD + "1,inf:2,3:Up\n",
    "beyond float32": GOOD + "1,1e39:2,3:Up\n",
    "no number": GOOD + "1,two:2,3:Up\n",
    "number of Python's": GOOD + "1,1_0:2,3:Up\n",
    "empty value": GOOD + "1,:2,3:Up\n",
    "empty dimension": GOOD + ":2:Up\n",
    "ragged dimensions": GOOD + "1,2:3:Up\n",
    "empty line": GOOD + "\n1:2:Up\n",
    "ragged undeclared": GOOD.replace("@equalLength false", "@equalLength true"),
    "ragged by silence": without("@equalLength"),
    "other length than declared": GOOD.replace(
        "@equalLength false", "@equalLength true\n@seriesLength 4"
    ),
    "all missing": HEADER.replace("@missing false", "@missing true") + "?,NaN:1,2:Up\n",
    "header without data": HEADER,
    "no @data": HEADER.replace("@data\n", ""),
    "empty file": "",
    "byte-order mark": "\ufeff" + GOOD,
    "no classes": without("@classLabel"),
    "class labels false": GOOD.replace("@classLabel true Up Down", "@classLabel false"),
    "labels that aeon takes for one": GOOD.replace("Up Down", "up UP"),
    "regression": GOOD.replace("@classLabel", "@targetLabel true\n@classLabel"),
    "time stamps": GOOD.replace("@timeStamps false", "@timeStamps true"),
    "typo in a tag": GOOD.replace("@missing", "@missinq"),
    "no boolean": GOOD.replace("@missing false", "@missing no"),
    "no number of dimensions": GOOD.replace("@dimensions 2", "@dimensions two"),
    "a lone @": GOOD.replace("@missing false", "@"),
    "tag twice": GOOD.replace("@missing false", "@missing false\n@missing true"),
    "data before @data": GOOD.replace("@data\n", ""),
    "not text": GOOD.encode() + b"\xff\xfe1:2:Up\n",
}


def test_good_file_is_read_as_written(tmp_path: Path) -> None:
    file = read_ts(write(tmp_path, GOOD))
    assert file.labels == ["Up", "Down"]
    assert file.lines == [FIRST, FIRST + 1]
    np.testing.assert_array_equal(file.series[0], np.float32([[1, 4], [2, 5], [3, 6]]))
    np.testing.assert_array_equal(file.series[1], np.float32([[-1.5, 0.25], [20, 7]]))


def test_carriage_returns_change_nothing(tmp_path: Path) -> None:
    expected = read_ts(write(tmp_path, GOOD))
    file = read_ts(write(tmp_path, GOOD.replace("\n", "\r\n")))
    assert file.labels == expected.labels
    assert file.header == expected.header
    for found, wanted in zip(file.series, expected.series, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_declared_missing_values_become_nan(tmp_path: Path) -> None:
    text = HEADER.replace("@missing false", "@missing true") + "1,?,nan:4,5,NaN:Up\n1:2:Down\n"
    file = read_ts(write(tmp_path, text))
    expected = np.float32([[1, 4], [np.nan, 5], [np.nan, np.nan]])
    np.testing.assert_array_equal(file.series[0], expected)


@pytest.mark.parametrize("order", [1, -1])
def test_one_feature_and_several_are_refused(order: int, tmp_path: Path) -> None:
    tags = "\n".join(["@univariate true", "@dimensions 2"][::order])
    text = GOOD.replace("@univariate false\n", "").replace("@dimensions 2", tags)
    with pytest.raises(DataError, match=r"@univariate true.*@dimensions"):
        read_ts(write(tmp_path, text))


def test_values_are_those_that_aeon_reads(tmp_path: Path) -> None:
    """An independent reader; it also takes files that ours refuses."""
    datasets = pytest.importorskip("aeon.datasets")
    for name, text in (("a", GOOD), ("b", GOOD.replace("1,2,3", "1e-3,2.5,.3"))):
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, text)
        values, labels = datasets.load_from_ts_file(str(path))
        file = read_ts(path)
        assert [label.lower() for label in file.labels] == [str(each).lower() for each in labels]
        for ours, theirs in zip(file.series, values, strict=True):
            np.testing.assert_array_equal(ours, np.asarray(theirs, dtype=np.float32).T)

"""Released ListOps files: what is written is read back; what is wrong is named with its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from datamodules import ListOps
from datamodules.lra.listops_generator import TOKENS
from datamodules.lra.listops_release import read_split
from lit_probattn.base.errors import DataError
from tests.support.listops import export_release, to_line

HEADER = "Source\tTarget\n"
GOOD = "( ( ( [MAX 4 ) 3 ) ] )\t4\n"
NESTED = "( ( ( [SM ( ( ( ( [MED 9 ) 2 ) 4 ) ] ) ) 8 ) ] )\t2\n"


def generated(folder: Path) -> ListOps:
    return ListOps(
        data_dir=str(folder),
        num_train=60,
        num_val=11,
        num_test=7,
        min_length=4,
        max_length=40,
        max_depth=4,
        max_args=5,
    )


@pytest.mark.parametrize("place", [".", "listops-1000", "lra_release/lra_release/listops-1000"])
def test_generated_data_survives_the_release_format(tmp_path: Path, place: str) -> None:
    first = generated(tmp_path / "generated")
    first.setup()
    export_release(first, tmp_path / "raw" / place)
    second = ListOps(source="released", data_dir=str(tmp_path / "raw"))
    second.setup()
    for name, count in {"train": 60, "val": 11, "test": 7}.items():
        assert len(second.split(name)) == count
        for index in range(count):
            ours, theirs = first.split(name)[index], second.split(name)[index]
            np.testing.assert_array_equal(ours.values, theirs.values)
            assert (ours.target, ours.sample_id) == (theirs.target, index)


def write(folder: Path, text: str | bytes, name: str = "basic_train.tsv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    return folder / name


def read(path: Path) -> tuple[list[list[str]], list[int]]:
    tokens, targets = read_split(path, lambda count: None)
    return [[TOKENS[token] for token in row] for row in tokens], targets


def test_tokens_of_known_lines(tmp_path: Path) -> None:
    words, targets = read(write(tmp_path, HEADER + GOOD + NESTED))
    assert words == [
        ["[MAX", "4", "3", "]"],
        ["[SM", "[MED", "9", "2", "4", "]", "8", "]"],
    ]
    assert targets == [4, 2]
    assert to_line(bytes(TOKENS.index(word) for word in words[0])) == GOOD.split("\t")[0]
    assert to_line(bytes(TOKENS.index(word) for word in words[1])) == NESTED.split("\t")[0]


@pytest.mark.parametrize(
    "text",
    [
        HEADER + GOOD.rstrip(),  # no newline at the end
        (HEADER + GOOD).replace("\n", "\r\n"),
        "\ufeff" + HEADER + GOOD,
        HEADER + "(  (  ( [MAX 4 ) 3 )  ] )\t4\n",  # other spacing
    ],
    ids=["no last newline", "CRLF", "BOM", "spacing"],
)
def test_harmless_differences_are_accepted(tmp_path: Path, text: str) -> None:
    assert read(write(tmp_path, text)) == ([["[MAX", "4", "3", "]"]], [4])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + GOOD.replace("\t4", "\t4\t4"), r"tsv:2: expected one tab .* received 2"),
        (HEADER + GOOD.replace(" 3 ", " 13 "), r"tsv:2: unknown token '13'"),
        (HEADER + GOOD.replace(" 3 ", " \x01 "), r"tsv:2: unknown token '\\x01'"),
        (
            HEADER + GOOD.replace("\t4", "\t-1"),
            r"tsv:2: .* a digit 0..9, received '-1'",
        ),
        (HEADER + GOOD.replace("\t4", "\t"), r"tsv:2: the value must be a digit 0..9, received ''"),
        (HEADER + ") ( ( ( [MAX 4 ) 3 ) ] (\t4\n", r"tsv:2: unbalanced parentheses"),
        (HEADER + "( 4 ] )\t4\n", r"tsv:2: unbalanced brackets: a `\]` has no operator"),
        (HEADER + "( 4 4 )\t4\n", r"tsv:2: expected one expression, received 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_wrong_file_leaves_no_cache(tmp_path: Path) -> None:
    write(tmp_path, HEADER + GOOD)
    write(tmp_path, HEADER + GOOD, "basic_val.tsv")
    write(tmp_path, HEADER + GOOD + GOOD[:7], "basic_test.tsv")
    data = ListOps(source="released", data_dir=str(tmp_path), batch_size=1)
    with pytest.raises(DataError, match=r"basic_test\.tsv:3: expected one tab"):
        data.prepare_data()
    assert [path.suffix for path in (tmp_path / ".cache").iterdir()] == [".lock"]
    write(tmp_path, HEADER + GOOD + NESTED, "basic_test.tsv")
    data.setup()
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [1, 1, 2]


def test_expressions_that_would_be_truncated_are_refused(tmp_path: Path) -> None:
    """A truncated expression does not determine its value."""
    for name in ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv"):
        write(tmp_path, HEADER + GOOD + NESTED, name)
    ListOps(source="released", data_dir=str(tmp_path), max_length_tokens=8).setup()
    data = ListOps(source="released", data_dir=str(tmp_path), max_length_tokens=7)
    message = r"1 of 2 expressions of train have more than max_length_tokens=7 tokens \(up to 8\)"
    with pytest.raises(DataError, match=message):
        data.setup()

"""Errors of the data are one line, whatever the names of files contain."""

from __future__ import annotations

import pickle
import zipfile

import pytest

from datamodules import LabelledTexts
from datamodules.text.source import PlainText
from datamodules.text.wikitext103 import find_release
from lit_probattn.base.errors import DataError, MissingDataError


@pytest.mark.parametrize("kind", [DataError, MissingDataError])
def test_a_message_is_one_line(kind):
    error = kind("größe\n中 文\u2028.txt is damaged")
    assert str(error) == "größe\\n中 文\\u2028.txt is damaged"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_relative_path_is_named_with_the_folder_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDataError) as caught:
        LabelledTexts(path="mine.csv")
    assert str(caught.value) == f"mine.csv: no such file or folder in {tmp_path}"
    with pytest.raises(MissingDataError, match=r"^/no/mine.csv: no such file or folder$"):
        LabelledTexts(path="/no/mine.csv")


def test_a_name_inside_an_archive_may_hold_a_line_end(tmp_path):
    path = tmp_path / "text.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a\nb.txt", b"\xff\xff\n")
    with pytest.raises(DataError) as caught:
        list(PlainText([path], "a\nb.txt").blocks())
    assert "text.zip:a\\nb.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{6: b"\xea\x00"}, {8: b"\x00\x08", 46: b"\xe8\xe8"}],
    ids=["version 23.4", "name that is no UTF-8"],
)
def test_a_damaged_table_of_contents_is_one_line(tmp_path, changes):
    """What fuzzing found: the standard library raises more than BadZipFile."""
    path = tmp_path / "wikitext-103-v1.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("wikitext-103/wiki.test.tokens", "a \n")
    content = bytearray(path.read_bytes())
    start = content.index(b"PK\x01\x02")
    for place, value in changes.items():
        content[start + place : start + place + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"wikitext-103-v1.zip is not a zip archive or is corrupt"):
        find_release(tmp_path, "wikitext-103")

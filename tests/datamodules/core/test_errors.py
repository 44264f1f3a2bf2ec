"""Errors of the data are one line, whatever the names of files contain."""

from __future__ import annotations

import pickle
import zipfile

import pytest

from datamodules.core.errors import DataError, MissingDataError
from datamodules.text.source import PlainText


@pytest.mark.parametrize("kind", [DataError, MissingDataError])
def test_a_message_is_one_line(kind):
    error = kind("größe\n中 文\u2028.txt is damaged")
    assert str(error) == "größe\\n中 文\\u2028.txt is damaged"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_name_inside_an_archive_may_hold_a_line_end(tmp_path):
    path = tmp_path / "text.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a\nb.txt", b"\xff\xff\n")
    with pytest.raises(DataError) as caught:
        list(PlainText([path], "a\nb.txt").blocks())
    assert "text.zip:a\\nb.txt" in str(caught.value)
    assert "\n" not in str(caught.value)

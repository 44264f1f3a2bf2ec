"""Tables of one's own: quotes, keys and labels, right or refused with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from datamodules.core.tables import labels_of, read_released, read_table
from lit_probattn.base.errors import DataError

ROWS = [("pos" if i % 2 else "neg", f"text {i}") for i in range(30)]


def write(path: Path, rows: list[tuple[str, str]]) -> Path:
    separator = "\t" if path.suffix == ".tsv" else ","
    lines = [separator.join(row) for row in [("label", "text"), *rows]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize("later", ["", 'he said "no"', '"a second one'])
def test_a_quote_that_is_left_open_is_refused_with_its_line(tmp_path, ending, later):
    rows = list(ROWS)
    rows[5] = ("pos", '"a text that begins with a quote')
    if later:
        rows[20] = ("neg", later)
    with pytest.raises(DataError, match=rf"mine\.{ending}, line 7: .*quote"):
        read_table(write(tmp_path / f"mine.{ending}", rows))


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_value_of_several_lines_is_said(tmp_path, ending):
    """A quote that is closed rows later looks like one, so it is not passed over in silence."""
    rows = list(ROWS)
    rows[5], rows[25] = ("pos", '"a text that begins'), ("neg", 'and ends here"')
    table = read_table(write(tmp_path / f"mine.{ending}", rows))
    assert len(table.locations) == 10
    (note,) = table.notes
    assert "line 7" in note
    assert "21 lines" in note
    assert read_table(write(tmp_path / f"other.{ending}", ROWS)).notes == []


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("blank", ["\n", "\r\n\r\n"])
def test_blank_lines_before_the_header_are_skipped(tmp_path, separator, blank):
    path = tmp_path / ("mine.tsv" if separator == "\t" else "mine.csv")
    lines = [separator.join(row) for row in [("label", "text"), *ROWS]]
    path.write_bytes((blank + "\n".join(lines)).encode())
    table = read_table(path)
    assert list(zip(*table.columns.values(), strict=True)) == ROWS
    first = blank.count("\n") + 2
    assert list(table.locations) == [*range(first, first + len(ROWS))]
    path.write_bytes(f"{blank}label\na\n".encode())
    with pytest.raises(DataError, match=f"line {first - 1}: only one column"):
        read_table(path)


def test_quotes_within_a_text_stay(tmp_path):
    rows = [("pos", 'he said "no"'), ("neg", '"quoted, ""twice"""')]
    table = read_table(write(tmp_path / "mine.csv", rows))
    assert table.columns["text"] == ['he said "no"', 'quoted, "twice"']


def test_released_tables_keep_quotes_and_skip_empty_lines(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_bytes(b'text\tmore\tlabel\r\nhe said "no\tx\t1\r\n\n"so\ty\t0\n')
    table = read_released(path, ("text", "label"))
    assert table.columns["text"] == ['he said "no', '"so']
    assert table.columns["label"] == ["1", "0"]
    assert table.locations == [2, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b", "label": 1, "more": 2}', "line 2: .*'more'.*first line"),
        ('{"text": "b", "label": 0, "label": 1}', "duplicate key 'label'"),
    ],
)
def test_lines_of_json_with_other_keys_are_refused(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "a", "label": 0}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_table(path)


def test_text_of_two_bytes_a_character_is_told_from_a_wrong_table(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes("label,text\na,b\n".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"line 1: .*NUL.*UTF-8"):
        read_table(path)


@pytest.mark.parametrize(
    ("written", "labels"),
    [
        (["1", "1.0", "2"], ["1", "1", "2"]),  # as a column of whole numbers with gaps is written
        (["01", "1", "001", "2"], ["01", "1", "001", "2"]),
        (["01", "1", "1.0"], ["01", "1", "1.0"]),
        (["1e3", "1000"], ["1e3", "1000"]),
        (["12345678901234567", "12345678901234568"], ["12345678901234567", "12345678901234568"]),
        (["0.5", "0.25", "-1"], ["0.5", "0.25", "-1"]),
        (["café", "cafe\u0301", "tea"], ["café", "café", "tea"]),
    ],
)
def test_labels_are_one_class_only_where_they_are_one_number(tmp_path, written, labels):
    path = write(tmp_path / "mine.csv", [(label, f"text {i}") for i, label in enumerate(written)])
    assert labels_of(read_table(path), "label") == labels


def test_up_to_twenty_labels_may_all_differ(tmp_path):
    rows = [(f"name {i}", f"text {i}") for i in range(21)]
    assert len(labels_of(read_table(write(tmp_path / "a.csv", rows[:20])), "label")) == 20
    with pytest.raises(DataError, match="label has 21 different values in 21 rows"):
        labels_of(read_table(write(tmp_path / "b.csv", rows)), "label")

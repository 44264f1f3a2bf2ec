"""Texts with labels in tables of one's own."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules import LabelledTexts
from datamodules.core.cache import default_root
from lit_probattn.base.errors import DataError

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


def rows(count: int = 90, seed: int = 0) -> list[tuple[str, Any]]:
    """Made texts, all different, and labels."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        words = [draw.choice(WORDS) for _ in range(draw.randint(2, 9))]
        made.append((f"{' '.join(words)} n{seed}-{number}", ("dog", "cat", "newt")[number % 3]))
    return made


def write(path: Path, content: list[tuple[str, Any]], names=("text", "label")) -> Path:
    """Write a table by the end of its name."""
    records = [dict(zip(names, row, strict=True)) for row in content]
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writerows([names, *content])
    return path


def data(path: Path, **options: Any) -> LabelledTexts:
    made = LabelledTexts(path=str(path), **{"batch_size": 4, **options})
    made.setup()
    return made


def texts_of(made: LabelledTexts, name: str) -> list[tuple[str, str]]:
    split = made.split(name)
    found = (split[i] for i in range(len(split)))
    return [(made.decode(x.values).strip(), made.classes[x.target]) for x in found]


@pytest.mark.parametrize(
    ("ending", "options"),
    [
        *(("csv", {}), ("tsv", {}), ("jsonl", {}), ("parquet", {})),
        ("csv", {"tokens": "subwords", "vocab_limit": 300}),
    ],
)
def test_every_format_gives_back_what_was_written(tmp_path, ending, options):
    """From the only file of a folder, whatever its name."""
    content = [(text.replace("eta", 'e,"t\ta'), label) for text, label in rows()]
    write(tmp_path / f"reviews.{ending}", content)
    made = data(tmp_path, **options)
    assert made.classes == ["cat", "dog", "newt"]
    assert (made.vocab_size, made.num_classes) == (options.get("vocab_limit", 256) + 1, 3)
    found = [pair for name in ("train", "val", "test") for pair in texts_of(made, name)]
    assert sorted(found) == sorted(content)
    assert all(len(texts_of(made, name)) > 2 for name in ("train", "val", "test"))


def test_columns_are_guessed_by_usual_names_and_said_in_one_line(tmp_path, logged):
    path = write(tmp_path / "mine.csv", rows(), ("Review", "Sentiment"))
    made = data(path)
    (line,) = logged.messages
    assert "mine.csv: texts from column 'Review', labels from 'Sentiment'" in line
    assert made.notes == [line]
    logged.records.clear()
    data(path, text_column="Review", label_column="Sentiment")
    assert logged.messages == []


def test_the_default_cache_is_that_of_the_folder_with_the_files(tmp_path, monkeypatch):
    monkeypatch.delenv("LIT_PROBATTN_CACHE", raising=False)
    (tmp_path / "mine").mkdir()
    for path in (write(tmp_path / "mine/a.csv", rows()), tmp_path / "mine"):
        made = LabelledTexts(path=str(path))
        assert made.cache_dir == default_root(tmp_path / "mine")
        assert made.data_dir == tmp_path / "mine"
    named = LabelledTexts(path=str(path), data_dir=str(tmp_path))
    assert named.cache_dir == default_root(tmp_path)


def test_files_of_splits_are_found_in_a_folder(tmp_path):
    for number, name in enumerate(("Train", "dev", "mine_test")):
        write(tmp_path / f"{name}.jsonl", rows(30 - number, seed=number))
    made = data(tmp_path)
    assert [len(made.split(name)) for name in ("train", "val", "test")] == [30, 29, 28]
    assert texts_of(made, "val") == rows(29, seed=1)


def test_a_given_test_file_leaves_only_validation_to_divide_off(tmp_path):
    train = write(tmp_path / "a.csv", rows(60))
    made = data(train, test_path=str(write(tmp_path / "b.csv", rows(9, seed=1))))
    assert texts_of(made, "test") == rows(9, seed=1)
    assert len(made.split("train")) + len(made.split("val")) == 60


def test_numbers_are_classes_by_their_value(tmp_path):
    content = [(text, (10, 2, -1)[i % 3]) for i, (text, _) in enumerate(rows())]
    for ending in ("csv", "parquet"):
        assert data(write(tmp_path / f"n.{ending}", content)).classes == ["-1", "2", "10"]


def test_a_class_of_one_text_stays_in_training_with_a_note(tmp_path):
    for number in range(12):  # wherever the hash puts it
        content = [*rows(), (f"alone {number}", "rare")]
        made = data(write(tmp_path / f"{number}.csv", content))
        assert (f"alone {number}", "rare") in texts_of(made, "train")
        if len(made.notes) > 1:
            assert made.notes[1] == "classes too small to split, all in training: rare"
            return
    pytest.fail("never divided off")


@pytest.mark.parametrize("tokens", ["characters", "words"])
def test_unknown_tokens_are_those_that_training_has_not(tmp_path, tokens):
    train, test = write(tmp_path / "train.csv", rows(40)), [("omega beta q", "cat")]
    made = data(train, test_path=str(write(tmp_path / "t.csv", test)), tokens=tokens)
    unknown, count = made.facts["counts"]["test"], made.split("test").lengths.sum()
    if tokens == "words":
        assert (unknown, count) == (2, 4)  # omega, q; the end of the line is known
        assert texts_of(made, "test") == [("<unk> beta <unk>", "cat")]
    else:
        assert (unknown, count) == (1, 13)
        assert texts_of(made, "test") == [("omega beta �", "cat")]
    assert all(len(set(made.split("train")[i].values)) > 1 for i in range(5))


@pytest.mark.parametrize(("min_count", "unknown"), [(1, 0), (2, 1), (3, 3)])
def test_rare_words_are_unknown_in_training_too(tmp_path, min_count, unknown):
    """So that `<unk>` is learned: `single` occurs once, `pair` twice, all others three times."""
    texts = ["often single", "often pair", "pair often"]
    parts = {name: write(tmp_path / f"{name}.csv", rows(9, n)) for n, name in enumerate("ab")}
    train = write(
        tmp_path / "train.csv", [(text, ["dog", "cat", "newt"][i]) for i, text in enumerate(texts)]
    )
    paths = {"val_path": str(parts["a"]), "test_path": str(parts["b"])}
    made = data(train, **paths, tokens="words", min_count=min_count)
    assert made.facts["counts"]["train"] == unknown


def test_a_limit_keeps_the_most_frequent_words(tmp_path):
    content = [(f"often often sometimes x{i}", "ab"[i % 2]) for i in range(40)]
    made = data(write(tmp_path / "a.csv", content), tokens="words", vocab_limit=3)
    assert made.vocab_size == 4
    assert texts_of(made, "train")[0][0] == "often often <unk> <unk>"


def test_a_checkpoint_of_other_classes_is_refused(tmp_path):
    made = data(write(tmp_path / "a.csv", rows()))
    made.load_state_dict(made.state_dict())
    with pytest.raises(DataError, match="class 1 was bird and is now dog"):
        made.load_state_dict({"classes": ["cat", "bird", "newt"]})


@pytest.mark.parametrize("tokens", ["bytes", "characters", "words", "subwords"])
def test_a_checkpoint_of_another_learned_vocabulary_is_refused(tmp_path, tokens):
    """Of the same size: the ids would denote other tokens."""
    options = {"tokens": tokens} | ({"vocab_limit": 300} if tokens != "bytes" else {})
    swap = str.maketrans("aeiou", "eioua")
    content = [(text.translate(swap), label) for text, label in rows()]
    made, other = (
        data(write(tmp_path / f"{name}.csv", part), **options)
        for name, part in (("a", rows()), ("b", content))
    )
    with pytest.raises(DataError, match="vocabulary"):
        made.load_state_dict({"classes": made.classes})  # unknown
    made.load_state_dict(made.state_dict())
    if tokens == "bytes":
        other.load_state_dict(made.state_dict())
    else:
        with pytest.raises(DataError, match=rf"vocabulary of {tokens} .*b\.csv.*new_path"):
            other.load_state_dict(made.state_dict())


def test_every_line_end_is_a_newline(tmp_path):
    """Those of Windows and of old Macintosh files, too."""
    content = [(f"one\r\ntwo\rthree\n{text}", label) for text, label in rows()]
    made = data(write(tmp_path / "mine.jsonl", content))
    for name in ("train", "val", "test"):
        for text, _ in texts_of(made, name):
            assert text.startswith("one\ntwo\nthree\n")
            assert "\r" not in text


def test_long_texts_are_cut_off(tmp_path):
    made = data(write(tmp_path / "a.csv", rows()), max_length=7)
    batch = next(iter(made.val_dataloader()))
    assert batch["inputs"].shape[1] == 7
    assert made.split("val").num_cut == len(made.split("val"))
    np.testing.assert_array_less(0, batch["inputs"])


def test_a_table_that_the_package_datasets_wrote(tmp_path):
    """Dataset.to_parquet of datasets 5.2: large strings, a ClassLabel, its metadata."""
    path = tmp_path / "train.parquet"
    path.write_bytes((Path(__file__).parent / "hub.parquet").read_bytes())
    data = LabelledTexts(path=str(path), tokens="words", cache_dir=str(tmp_path / "cache"))
    data.prepare_data()
    data.setup()
    assert data.classes == ["0", "1"]
    assert sum(len(data.split(name)) for name in ("train", "val", "test")) == 40


def test_one_column_is_not_text_and_label(tmp_path):
    path = write(tmp_path / "mine.csv", rows())
    with pytest.raises(DataError, match=r"text_column and label_column are both 'label'"):
        data(path, text_column="label")


def test_a_quote_closed_late_is_in_the_notes_of_the_data(tmp_path):
    content = rows()
    path = write(tmp_path / "train.csv", content)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[5], lines[25] = '"opened,dog', 'closed",dog'
    path.write_text("\n".join(lines) + "\n")
    assert any("starting at line 6" in note for note in data(path).notes)


def test_a_file_of_no_split_is_named(tmp_path, logged):
    for seed, name in enumerate(("train", "test", "extra")):
        write(tmp_path / f"{name}.csv", rows(seed=seed))
    data(tmp_path)
    assert "extra.csv denotes no split" in logged.text

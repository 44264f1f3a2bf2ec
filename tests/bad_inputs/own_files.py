"""Data of the user's own: tables of texts, running text, series, pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from datamodules import ImageFolder, LabelledTexts, OwnSeries, OwnText
from datamodules.__main__ import main as data_main
from tests.bad_inputs.cases import Case, command_error, data_error, in_code

HEADER = "review,label\n"
GOOD = "".join(f"text number {i},{'yes' if i % 2 else 'no'}\n" for i in range(20))


@in_code
def texts(folder: Path, content: str | bytes, name: str = "mine.csv", **options: object) -> None:
    """A table of texts."""
    raw = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(raw)
    LabelledTexts(path=str(folder / name), **options).setup()  # type: ignore[arg-type]


def _overlapping(folder: Path) -> None:
    (folder / "train.csv").write_text(HEADER + GOOD)
    (folder / "test.csv").write_text(HEADER + "".join(GOOD.splitlines(keepends=True)[:2]))
    LabelledTexts(path=str(folder)).setup()


def _unlearnable(folder: Path) -> None:
    (folder / "train.csv").write_text(HEADER + GOOD)
    (folder / "test.csv").write_text(HEADER + "another text,maybe\n")
    LabelledTexts(path=str(folder)).setup()


@in_code
def _new(folder: Path, content: str, stage: str | None, name: str = "new.csv") -> None:
    """A table of new samples, beside that of training."""
    (folder / "mine.csv").write_text(HEADER + GOOD)
    (folder / "new.csv").write_text(content)
    data = LabelledTexts(path=str(folder / "mine.csv"), new_path=str(folder / name))
    data.setup(stage)
    data.test_dataloader()


def _folder_without_a_table(folder: Path) -> None:
    (folder / "notes.doc").write_text("x")
    LabelledTexts(path=str(folder))  # not yet read


def _rows(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@in_code
def _parquet(folder: Path, name: str, values: object) -> None:
    """A table with a further column."""
    columns = [["a text", "another text"], ["yes", "no"], values]
    table = pa.table([*map(pa.array, columns)], names=["text", "label", name])
    pq.write_table(table, folder / "mine.parquet")
    LabelledTexts(path=str(folder / "mine.parquet")).setup()


def _texts_cases() -> Iterator[Case]:
    case = partial(Case, "Own texts with labels (CSV, TSV, JSON lines, Parquet)")
    yield case("no path", data_error(lambda folder: LabelledTexts()))
    missing = data_error(lambda folder: LabelledTexts(path=str(folder / "mine.csv")))
    yield case("no such file", missing)
    yield case("a folder without a table", data_error(_folder_without_a_table))
    yield case("another ending", texts(HEADER + GOOD, "mine.xlsx"))
    yield case("an empty file", texts(""))
    yield case("only a header", texts(HEADER))
    yield case("one column", texts("review\n" + "a text\n" * 9))
    columns = texts("words,kind\n" + GOOD)
    yield case("columns without usual names", columns)
    wrong = texts(HEADER + GOOD, text_column="reviews")
    yield case("a column that is not there", wrong)
    yield case("a column twice", texts("label,label\n" + GOOD))
    yield case("a blank line, then one column", texts("\nreview\n" + "a text\n" * 9))
    yield case("a column of a Parquet file twice", _parquet("label", ["yes", "no"]))
    late = pa.array([1, 2**62], pa.timestamp("us"))
    yield case("a time far beyond the year 9999", _parquet("when", late))
    yield case("a comma too many", texts(HEADER + GOOD + "good, but long,yes\n"))
    yield case("an empty text", texts(HEADER + GOOD + " ,yes\n"))
    yield case("an empty label", texts(HEADER + GOOD + "a text,\n"))
    yield case("words and numbers as labels", texts(HEADER + GOOD + "a text,1\n"))
    one = texts(HEADER + GOOD.replace(",no", ",yes"))
    yield case("one class only", one)
    numbers = texts("text,label\n" + "".join(f"text {i},{i}.5\n" for i in range(50)))
    yield case("a label of its own for every row", numbers)
    yield case("too few texts", texts(HEADER + "a,yes\nb,no\n"))
    latin = texts((HEADER + GOOD).encode() + "schön,yes\n".encode("latin-1"))
    yield case("another encoding than UTF-8", latin)
    good = {"text": "a text", "label": "yes"}
    broken = texts(_rows(good) + "{'text': 1}\n", "mine.jsonl")
    yield case("JSON lines: a line that is no JSON", broken)
    yield case("JSON lines: a list", texts("[1, 2]\n", "mine.jsonl"))
    lacking = texts(_rows(good, {"text": "b"}), "mine.jsonl")
    yield case("JSON lines: a label is missing", lacking)
    number = texts(_rows(good, {"text": 5, "label": "no"}), "mine.jsonl")
    yield case("JSON lines: a number as text", number)
    mixed = texts(_rows(good, {"text": "b", "label": 1}), "mine.jsonl")
    yield case("JSON lines: labels of two types", mixed)
    yield case("a damaged Parquet file", texts("PAR1", "mine.parquet"))
    yield case("the same text in two splits", data_error(_overlapping))
    yield case("a class without training texts", data_error(_unlearnable))
    yield case("shares of 1", texts(HEADER + GOOD, val_fraction=0.5, test_fraction=0.5))
    yield case("an unknown unit", texts(HEADER + GOOD, tokens="letters"))
    unlabelled = "review\n" + "a text\n" * 9
    yield case("new texts: none", _new(unlabelled, "predict", "none.csv"))
    yield case("new texts: for training", _new(unlabelled, "fit"))
    yield case("new texts: scores without labels", _new(unlabelled, "test"))
    yield case("new texts: another class", _new(HEADER + "a text,yes\nb,maybe\n", "test"))
    rare = texts(HEADER + GOOD, tokens="words", min_count=100)
    yield case("no word that is frequent enough", rare)


@in_code
def text(folder: Path, change: Callable[[Path], object], **options: object) -> None:
    """A folder of text."""
    change(folder)
    OwnText(path=str(folder), **{"batch_size": 2, **options}).setup()  # type: ignore[arg-type]


def _equal_splits(folder: Path) -> None:
    for name in ("train", "val", "test"):
        (folder / f"{name}.txt").write_text("the same text\n" * 9)


def _two_of_one_split(folder: Path) -> None:
    for name in ("train", "val", "valid", "test"):
        (folder / f"{name}.txt").write_text(f"{name} text\n" * 9)


def _text_cases() -> Iterator[Case]:
    case = partial(Case, "Own running text (files and folders)")
    yield case("no path", data_error(lambda folder: OwnText()))
    yield case("an empty folder", text(lambda folder: None))
    yield case("an empty file", text(lambda f: (f / "mine.txt").write_text("")))
    yield case("one line", text(lambda f: (f / "mine.txt").write_text("a few words\n")))
    latin = text(lambda f: (f / "mine.txt").write_bytes(b"\xe9t\xe9 en\n" * 99))
    yield case("another encoding than UTF-8", latin)
    alone = text(lambda f: (f / "train.txt").write_text("some text\n" * 99))
    two = text(lambda f: [(f / n).write_text(f"{n}\n" * 99) for n in ("train.txt", "test.txt")])
    yield case("a single training file of equal lines", alone)
    yield case("no file for one of the splits", two)
    yield case("equal files for two splits", text(_equal_splits))
    yield case("two files for one split", text(_two_of_one_split))


def _check_cases() -> Iterator[Case]:
    case = partial(Case, "Own texts (`data check PATH`)")

    def check(*words: str) -> Callable[[Path], str]:
        return lambda f: command_error(["check", *(w.format(f) for w in words)], data_main)

    def nothing_known(folder: Path) -> str:
        (folder / "mine.doc").write_text("x")
        return command_error(["check", str(folder / "mine.doc")], data_main)

    yield case("no such file", check("{}/mine.csv"))
    yield case("an unknown kind", check("{}", "--kind", "txet"))
    yield case("a file of no known kind", nothing_known)


@in_code
def series(folder: Path, content: str, name: str = "mine.csv", **options: object) -> None:
    """A table of series."""
    (folder / name).write_text(content)
    OwnSeries(path=str(folder / name), **options).setup()  # type: ignore[arg-type]


@in_code
def _arrays(folder: Path, **arrays: object) -> None:
    np.savez(folder / "mine.npz", **arrays)  # type: ignore[arg-type]
    OwnSeries(path=str(folder / "mine.npz")).setup()


def _other_features(folder: Path) -> None:
    for name, feature in (("train", "left"), ("test", "right")):
        rows = "".join(f"{name}{i},{t},{i}{t},{'ab'[i % 2]}\n" for i in range(9) for t in range(2))
        (folder / f"{name}.csv").write_text(f"id,time,{feature},label\n{rows}")
    OwnSeries(path=str(folder)).setup()


@in_code
def _other_steps(folder: Path, new: str) -> None:
    """New series whose columns are `new`, for training on t0, t1 and label."""
    rows = "".join(f"{i},{i + 1},{'ab'[i % 2]}\n" for i in range(9))
    (folder / "mine.csv").write_text(f"t0,t1,label\n{rows}")
    (folder / "new.csv").write_text(f"{new}\n1,2,3\n")
    OwnSeries(path=str(folder / "mine.csv"), new_path=str(folder / "new.csv")).setup()


def _series_cases() -> Iterator[Case]:
    case = partial(Case, "Own series (CSV, NumPy)")
    long = "id,time,value,label\n"
    yield case("a word among the values", series("t0,t1,label\n1,2,a\n3,x,b\n"))
    yield case("no column of labels", series("t0,t1\n1,2\n"))
    yield case("a series without values", series("t0,t1,label\n1,2,a\n,,b\n"))
    yield case("two labels in one series", series(long + "s,0,1,a\ns,1,2,b\n"))
    yield case("a time twice", series(long + "s,0,1,a\ns,0,2,a\n"))
    yield case("an id column that is not there", series(long + "s,0,1,a\n", id_column="ids"))
    yield case("no value column", series("id,time,label\ns,0,a\ns,1,a\n"))
    yield case("a row without an id", series(long + "s,0,1,a\n,1,2,a\n"))
    yield case("a column without a name", series(",time,id,value,label\n0,0,s,1,a\n1,1,s,2,a\n"))
    yield case("a time, but no id", series("time,value,label\n0,1,a\n1,2,b\n"))
    yield case("other features in the test file", data_error(_other_features))
    yield case("new series: another step", _other_steps("t1,t0,t2"))
    yield case("new series: a column after the steps", _other_steps("t0,t1,Outcome"))
    columns = series(GOOD, "mine.ts", label_column="label")
    yield case("a column of a `.ts` file", columns)
    yield case("arrays of other names", _arrays(data=np.zeros((4, 3)), label=np.arange(4)))
    yield case("fewer labels than series", _arrays(x=np.zeros((4, 3)), y=np.arange(3)))
    yield case("a damaged `.npz`", series("PK", "mine.npz"))


@in_code
def pictures(folder: Path, *names: str, again: str = "", broken: str = "") -> None:
    """A folder of pictures, each of its own colour."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    if again:
        shutil.copy(folder / names[0], folder / again)
    if broken:
        (folder / broken).write_bytes(b"\x89PNG broken")
    made = ImageFolder(path=str(folder), image_size=16, batch_size=1)
    made.setup()
    for name in ("train", "val", "test"):
        list(map(made.split(name).__getitem__, range(len(made.split(name)))))


def _empty_split(folder: Path) -> None:
    for name in ("cat", "dog"):
        (folder / "val" / name).mkdir(parents=True)
        (folder / "train" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(folder / "train" / name / "1.png")
    ImageFolder(path=str(folder)).setup()


def _pictures_cases() -> Iterator[Case]:
    case = partial(Case, "Own pictures (folders)")
    some = [f"{c}/{i}.png" for c in ("cat", "dog") for i in range(9)]
    three = [f"{s}/{name}" for s in ("train", "val", "test") for name in (some[0], some[9])]
    yield case("an empty folder", pictures())
    yield case("one class", pictures("cat/1.png", "cat/2.png"))
    yield case("two pictures", pictures("cat/1.png", "dog/1.png"))
    yield case("a picture that is none", pictures(*some, broken="dog/5.png"))
    yield case("an unknown class in a split", pictures(*three, "val/newt/1.png"))
    yield case("a split without pictures", data_error(_empty_split))
    yield case("a picture in two splits", pictures(*three, again="val/dog/7.png"))


def cases() -> Iterator[Case]:
    """Tables, text, the command that looks at them, series, pictures."""
    yield from _texts_cases()
    yield from _text_cases()
    yield from _check_cases()
    yield from _series_cases()
    yield from _pictures_cases()

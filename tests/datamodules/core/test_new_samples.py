"""New samples in place of the test split, read with what was learned from the training data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageFolder, LabelledTexts, OwnSeries, OwnText, TextPairs
from datamodules.core.base import DataModule
from datamodules.core.report import outline
from lit_probattn.base.errors import DataError
from tests.datamodules.images.test_folder import write as write_images
from tests.datamodules.series.test_own import cases, write_long, write_rows
from tests.datamodules.text.test_labelled import rows, write


def of_test(made: DataModule) -> list[dict[str, Any]]:
    made.setup("predict")
    return list(made.predict_dataloader())


def texts(path: Path, **options: Any) -> LabelledTexts:
    write(path / "mine.csv", rows())
    given = {"tokens": "words", "min_count": 1, "batch_size": 4, **options}
    return LabelledTexts(path=str(path / "mine.csv"), **given)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_texts_without_labels_are_read_with_the_vocabulary_of_training(tmp_path, suffix):
    before = texts(tmp_path)
    before.setup()
    new = write(tmp_path / f"new.{suffix}", [("theta alpha unseen",), ("beta",)], ["text"])
    made = texts(tmp_path, new_path=str(new))
    (batch,) = of_test(made)
    assert batch["target"].tolist() == [-1, -1]
    assert [made.decode(row) for row in batch["inputs"]] == ["theta alpha <unk>\n", "beta\n"]
    made.load_state_dict(before.state_dict())  # neither the vocabulary nor the classes changed
    for name in ("train", "val"):
        one, other = before.split(name), made.split(name)
        assert [x.values.tolist() for x in one] == [x.values.tolist() for x in other]


def test_labels_are_numbered_as_in_training(tmp_path):
    new = write(tmp_path / "new.csv", [("theta", "newt"), ("beta", "newt")])
    made = texts(tmp_path, new_path=str(new))
    made.setup("test")
    (batch,) = made.test_dataloader()
    assert [made.classes[number] for number in batch["target"]] == ["newt", "newt"]


@pytest.mark.parametrize("names", [("Review", "Sentiment"), ("review", " SENTIMENT ")])
@pytest.mark.parametrize("option", ["val_path", "test_path", "new_path"])
def test_columns_of_training_precede_usual_names(tmp_path, option, names):
    """In any case of their letters, as usual names."""
    write(tmp_path / "mine.csv", rows(), ("Review", "Sentiment"))
    more = [("alpha", "theta beta", "toad", "newt"), ("alpha", "beta theta", "toad", "newt")]
    other = write(tmp_path / "more.csv", more, ("text", names[0], "label", names[1]))
    given = {"tokens": "words", "min_count": 1, option: str(other)}
    made = LabelledTexts(path=str(tmp_path / "mine.csv"), **given)
    made.setup("test" if option == "new_path" else None)
    split = made.split("val" if option == "val_path" else "test")
    assert [made.decode(x.values) for x in split] == ["theta beta\n", "beta theta\n"]
    assert {made.classes[x.target] for x in split} == {"newt"}


@pytest.mark.parametrize("kind", [LabelledTexts, OwnSeries])
def test_a_changed_reader_has_another_cache(tmp_path, kind, monkeypatch):
    """Otherwise what it read before its change is used."""
    mine = write(tmp_path / "mine.csv", rows())
    before = kind(path=str(mine)).cache_spec.name
    assert kind(path=str(mine)).cache_spec.name == before
    monkeypatch.setattr(kind, "reader_version", kind.reader_version + 1)
    assert kind(path=str(mine)).cache_spec.name != before


@pytest.mark.parametrize("missing", ["", None])
def test_an_empty_column_of_labels_is_none(tmp_path, missing):
    suffix = "csv" if missing == "" else "jsonl"
    new = write(tmp_path / f"new.{suffix}", [("theta", missing), ("beta", missing)])
    (batch,) = of_test(texts(tmp_path, new_path=str(new)))
    assert batch["target"].tolist() == [-1, -1]


def test_only_some_labels_are_refused(tmp_path):
    new = write(tmp_path / "new.csv", [("theta", "newt"), ("beta", "")])
    with pytest.raises(DataError, match=r"line 3: label 'label' is empty"):
        of_test(texts(tmp_path, new_path=str(new)))


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_training_and_validation_refuse_new_samples(tmp_path, stage):
    new = write(tmp_path / "new.csv", [("theta",)], ["text"])
    with pytest.raises(DataError, match="test and predict only"):
        texts(tmp_path, new_path=str(new)).setup(stage)


@pytest.mark.parametrize("name", ["none.csv", "notes.md", "."])
def test_a_path_that_is_not_a_table_is_refused(tmp_path, name):
    (tmp_path / "notes.md").touch()
    with pytest.raises(DataError, match=r"new_path|expected a file name|no such file"):
        of_test(texts(tmp_path, new_path=str(tmp_path / name)))


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "new.csv"
    write(path, [("theta",)], ["text"])
    made = texts(tmp_path, new_path=str(path))
    of_test(made)
    write(path, [("alpha beta",)], ["text"])
    (batch,) = of_test(texts(tmp_path, new_path=str(path)))
    assert made.decode(batch["inputs"][0]) == "alpha beta\n"


def test_new_texts_follow_a_changed_vocabulary(tmp_path):
    """The cache of new samples belongs to one version of the training file."""
    new = write(tmp_path / "new.csv", [("theta",)], ["text"])
    of_test(texts(tmp_path, new_path=str(new)))
    swapped = [(text.replace("theta", "omega"), label) for text, label in rows()]
    made = LabelledTexts(
        path=str(write(tmp_path / "mine.csv", swapped)),
        tokens="words",
        min_count=1,
        new_path=str(new),
    )
    (batch,) = of_test(made)
    assert made.decode(batch["inputs"][0]) == "<unk>\n"


def test_samples_of_the_training_file_are_counted_in_a_note(tmp_path):
    new = write(tmp_path / "new.csv", [*rows()[:3], ("theta", "newt")])
    made = texts(tmp_path, new_path=str(new))
    made.setup()
    assert "new.csv: 3 of 4 texts are also in mine.csv" in made.notes


def test_the_note_is_given_by_every_command(tmp_path, capsys):
    """`predict` builds the cache of the new samples that `test` reads."""
    new = write(tmp_path / "new.csv", [*rows()[:3], ("theta", "newt")])
    for stage in ("predict", "test"):
        texts(tmp_path, new_path=str(new)).setup(stage)
        told = capsys.readouterr().err
        assert told.count("new.csv: 3 of 4 texts are also in mine.csv\n") == 1


def test_a_report_counts_the_unknown_words_of_the_new_texts(tmp_path):
    new = write(tmp_path / "new.csv", [("theta unseen",), ("unseen",)], ["text"])
    made = texts(tmp_path, new_path=str(new))
    made.setup()
    lines = list(outline(made))
    assert "<unk> in test: 2 of 5 tokens (40.00 %)" in lines
    assert any(line.startswith("test: 2 texts") for line in lines)


def test_pairs_without_labels(tmp_path):
    content = [(text, text.upper(), label) for text, label in rows()]
    write(tmp_path / "mine.csv", content, ("premise", "hypothesis", "label"))
    new = write(tmp_path / "new.csv", [("alpha", "beta gamma")], ("premise", "hypothesis"))
    made = TextPairs(path=str(tmp_path / "mine.csv"), new_path=str(new), vocab_limit=200)
    (batch,) = of_test(made)
    assert batch["target"].tolist() == [-1]
    assert made.decode(batch["inputs"][0]) == "alpha beta gamma"
    with pytest.raises(DataError, match="new_path applies to corpus=own"):
        TextPairs(corpus="sst2", new_path=str(new))


@pytest.mark.parametrize("option", ["new_path", "test_path"])
def test_a_file_whose_second_texts_are_not_found_is_refused(tmp_path, option):
    """Its first texts alone would be classified."""
    content = [(text, text.upper(), label) for text, label in rows()]
    write(tmp_path / "mine.csv", content, ("question", "sentence", "label"))
    other = write(tmp_path / "other.csv", content[:4], ("question", "passage", "label"))
    made = TextPairs(path=str(tmp_path / "mine.csv"), vocab_limit=200, **{option: str(other)})
    with pytest.raises(DataError, match=r"other\.csv: 1 text in each row, .* training has 2"):
        of_test(made)


def test_series_are_normalised_as_in_training(tmp_path):
    write_long(tmp_path / "mine.csv", cases())
    lines = [["n", 0, 5.0, 100.0], ["n", 1, 7.0, 300.0]]
    new = write_rows(tmp_path / "new.csv", ["id", "time", "left", "right"], lines)
    made = OwnSeries(path=str(tmp_path / "mine.csv"), new_path=str(new), pad_multiple=1)
    (batch,) = of_test(made)
    train: Any = made.split("train")
    steps = np.concatenate([train.series(i) for i in range(len(train))]).astype(np.float64)
    expected = (np.array([[5, 100], [7, 300]]) - steps.mean(0)) / steps.std(0, ddof=1)
    torch.testing.assert_close(batch["inputs"][0].double(), torch.from_numpy(expected))
    assert batch["target"].tolist() == [-1]


def test_arrays_without_labels(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 5, 3)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=np.array(["up", "down"] * 15))
    np.savez(tmp_path / "new.npz", x=x[:2])
    path, new = str(tmp_path / "mine.npz"), str(tmp_path / "new.npz")
    (batch,) = of_test(OwnSeries(path=path, new_path=new, normalization="none", pad_multiple=1))
    np.testing.assert_array_equal(batch["inputs"], x[:2])
    np.savez(tmp_path / "new.npz", x=x[:2, :, :2])
    with pytest.raises(DataError, match="2 features, those of training 3"):
        of_test(OwnSeries(path=path, new_path=new))


def test_a_folder_of_images_without_labels(tmp_path):
    root = write_images(tmp_path / "mine")
    new = write_images(tmp_path / "new", count=3, seed=1)
    flat = tmp_path / "flat"
    flat.mkdir()
    for name in ("cat", "dog"):
        for file in (new / name).iterdir():
            shutil.copy(file, flat / f"{name}-{file.name}")
    given: dict[str, Any] = {"path": str(root), "image_size": 16, "batch_size": 8}
    made = ImageFolder(**given, new_path=str(flat))
    (unlabelled,) = of_test(made)
    assert unlabelled["target"].tolist() == [-1] * 6
    assert [made.name_of("test", i) for i in (0, 5)] == ["cat-1-0.png", "dog-1-2.png"]
    labelled = ImageFolder(**given, new_path=str(new))
    labelled.setup("test")
    (batch,) = labelled.test_dataloader()
    assert batch["target"].tolist() == [0, 0, 0, 1, 1, 1]
    assert labelled.name_of("test", 5) == "dog/1-2.png"
    torch.testing.assert_close(batch["inputs"], unlabelled["inputs"])


def test_folders_of_other_classes_or_without_images_are_refused(tmp_path):
    given: dict[str, Any] = {"path": str(write_images(tmp_path / "mine")), "image_size": 16}
    new = tmp_path / "new"
    (new / "eel").mkdir(parents=True)
    with pytest.raises(DataError, match="class eel is missing from the training data"):
        of_test(ImageFolder(**given, new_path=str(new)))
    (new / "eel").rmdir()
    with pytest.raises(DataError, match=r"new_path: .*no images"):
        of_test(ImageFolder(**given, new_path=str(new)))
    picture = new / "one.png"
    Image.new("RGB", (20, 20)).save(picture)
    with pytest.raises(DataError, match=r"new_path: .*expected a folder"):
        of_test(ImageFolder(**given, new_path=str(picture)))


def test_a_new_running_text_is_scored_with_the_vocabulary_of_training(tmp_path, logged):
    lines = (f"one two three four five six n{number}\n" for number in range(200))
    (tmp_path / "mine.txt").write_text("".join(lines))
    (tmp_path / "new.txt").write_text("three unseen\nfive\n")
    given: dict[str, Any] = {"path": str(tmp_path / "mine.txt"), "tokens": "words"}
    before = OwnText(**given)
    before.setup()
    made = OwnText(**given, new_path=str(tmp_path / "new.txt"), num_prompts=1, prompt_len=2)
    made.setup("test")
    assert made.vocabulary.digest == before.vocabulary.digest
    (batch,) = made.test_dataloader()
    assert made.decode(batch["inputs"][0].tolist()) == "three <unk>\nfive"
    (prompt,) = made.predict_dataloader()
    assert made.decode(prompt["inputs"][0].tolist()) == "three <unk>"
    assert "1 of 5 tokens of the test text are missing from the vocabulary" in logged.text
    assert made.counts["test"] == 5
    assert (made.num_unknown["test"], made.counts["train"]) == (
        1,
        before.counts["train"],
    )
    with pytest.raises(DataError, match=r"new_path: .*expected a file"):
        OwnText(**given, new_path=str(tmp_path)).setup("test")


def test_the_cache_of_new_samples_is_built_with_that_of_training(tmp_path, monkeypatch):
    """Once per node, in `prepare_data`; every process opens it in `setup`."""
    new = write(tmp_path / "new.csv", [("theta",)], ["text"])
    texts(tmp_path, new_path=str(new)).prepare_data()
    other = texts(tmp_path, new_path=str(new))
    monkeypatch.setattr(LabelledTexts, "store_new", None)  # nothing is built again
    (batch,) = of_test(other)
    assert other.decode(batch["inputs"][0]) == "theta\n"


def test_another_split_of_predictions_is_refused(tmp_path):
    new = write(tmp_path / "new.csv", [("theta",)], ["text"])
    with pytest.raises(DataError, match="replaces the test split"):
        texts(tmp_path, new_path=str(new), predict_split="val")


def test_results_identify_the_content_of_new_samples(tmp_path):
    path = write(tmp_path / "new.csv", [("theta", "newt")])
    assert texts(tmp_path).provenance == {}
    one = texts(tmp_path, new_path=str(path)).provenance
    write(path, [("alpha", "newt")])
    other = texts(tmp_path, new_path=str(path)).provenance
    assert one.keys() == other.keys() == {"new_sha256"}
    assert one != other


def test_results_identify_the_content_of_new_images(tmp_path):
    """Commands name a result by it before they open the splits."""
    new = write_images(tmp_path / "new", count=3, seed=1)
    mine = write_images(tmp_path / "mine")

    def digest():
        images = ImageFolder(path=str(mine), image_size=16, new_path=str(new))
        return images.provenance["new_sha256"]

    one, other = new / "cat/1-0.png", new / "dog/1-0.png"
    contents = [path.read_bytes().ljust(4096, b"\0") for path in (one, other)]
    found = []
    for first, second in (contents, reversed(contents)):  # of equal sizes
        one.write_bytes(first)
        other.write_bytes(second)
        found.append(digest())
    shutil.copy(one, new / "dog/more.png")
    assert len({*found, digest()}) == 3


def test_an_unknown_class_of_an_array_is_refused_without_naming_columns(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 5))
    np.savez(tmp_path / "mine.npz", x=x, y=np.array(["up", "down"] * 15))
    np.savez(tmp_path / "new.npz", x=x[:1] + 1, y=np.array(["left"]))
    made = OwnSeries(path=str(tmp_path / "mine.npz"), new_path=str(tmp_path / "new.npz"))
    with pytest.raises(
        DataError, match=r"class 'left' is missing from the training data; correct it$"
    ):
        of_test(made)


def test_new_texts_need_no_names_of_features_in_the_cache(tmp_path, monkeypatch):
    new = write(tmp_path / "new.csv", [("theta",)], ["text"])
    found = texts(tmp_path).facts
    known = {name: value for name, value in found.items() if name not in ("features", "steps")}
    monkeypatch.setattr(LabelledTexts, "facts", known)
    (batch,) = of_test(texts(tmp_path, new_path=str(new)))
    assert batch["target"].tolist() == [-1]

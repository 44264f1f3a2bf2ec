"""`lit-probattn data`: what it prints, and how it refuses."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from datamodules import REGISTRY
from datamodules.__main__ import main
from datamodules.own_data import kind_of
from tests.datamodules.images.made import picture
from tests.datamodules.lra import files as lra
from tests.datamodules.text import made as made_text
from tests.datamodules.text.translation import made as made_translation
from tests.support.forks import Forked
from tests.support.helpers import error_of

SIZES = {"num_train": 64, "num_val": 8, "num_test": 8, "min_length": 4, "max_length": 30}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("s1,2020-01-01 10:00:00,1.5,up", "series"),
        ("s1,2020-01-01T10:00+01:00,1.5,up", "series"),
        ("s1,10:00:00,1.5,up", "series"),
        ("s1,2020-01-01 10:00:00,a film,up", "texts"),
    ],
)
def test_times_are_values_of_a_series(row, kind, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(f"id,time,value,label\n{row}\n")
    assert kind_of(str(path)) == kind


def test_texts_may_begin_with_a_number(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("text,label\n1984,up\n" + "a good film,down\n" * 9)
    assert kind_of(str(path)) == "texts"


def test_prepare_then_check(tmp_path: Path, capsys) -> None:
    options = [*SMALL, "--data_dir", str(tmp_path / "my data")]
    error = error_of(["check", "listops", *options], main, 1)
    _, _, *command = shlex.split(re.search("`(.*)`", error)[1])
    assert main(command) == 0
    prepared = capsys.readouterr().out
    assert main(["check", "listops", *options]) == 0
    checked = capsys.readouterr().out
    assert "train: 64 samples, lengths min" in prepared
    assert "num_classes 10, vocab_size 32, max_seq_len 2048" in checked
    assert "published train: 96000; here 64: DIFFERENT" in checked
    assert "sha256 " in checked
    assert "train_tokens.npy" in checked


@pytest.mark.parametrize("form", ["folder", "files"])
def test_the_command_in_the_error_prepares_own_pairs(form, tmp_path: Path) -> None:
    texts = [f"text {number} of {5 + number % 7} words" for number in range(30)]
    for name, part in (("train", texts[:20]), ("val", texts[20:])):
        rows = [f"{text},{'ab'[number % 2]}" for number, text in enumerate(part)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows, ""]))
    named = ["--path", str(tmp_path)]
    if form == "files":
        paths = [str(tmp_path / f"{name}.csv") for name in ("train", "val")]
        named = ["--path", paths[0], "--val_path", paths[1]]
    options = [*named, "--cache_dir", str(tmp_path / "cache")]
    error = error_of(["check", "text_pairs", *options], main, 1)
    command = shlex.split(error.split("`")[1])
    assert main(command[2:]) == 0
    assert main(["check", "text_pairs", *options]) == 0


def write_listops(folder: Path) -> None:
    for name in ("train", "val", "test"):
        (folder / f"basic_{name}.tsv").write_text("Source\tTarget\n( ( [SM 4 ) ] )\t4\n")


PUBLISHED = {
    "listops": (["--source=released", "--batch_size=1"], write_listops, ["test: 2000; here 1"]),
    "image": (
        [],
        lra.write_cifar,
        [
            *("train: 45000; here 45", "val: 5000; here 5"),
            "train+val: 50000 (5000 per class); here 50",
            "test: 10000 (1000 per class); here 10",
        ],
    ),
    "pathfinder": (
        ["--difficulty", "hard", "--batch_size=4"],
        lra.write_pathfinder,
        ["train: 160000; here 32", "val: 20000; here 4", "test: 20000; here 4"],
    ),
    "retrieval": (
        [],
        lra.write_pairs,
        ["train: 147086; here 64", "val: 18090; here 9", "test: 17437; here 11"],
    ),
    "wikitext103": (
        ["--batch_size=4", "--segment_len=7"],
        made_text.write,
        ["words of the vocabulary: 267735; here 37", "tokens of the test text: 245569; here "],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_check_compares_a_release_with_its_published_sizes(name, tmp_path: Path, capsys) -> None:
    options, write, lines = PUBLISHED[name]
    write(tmp_path)
    assert main(["check", name, *options, "--data_dir", str(tmp_path)]) == 1
    needed = " ".join(options[:2]) if name == "pathfinder" else ""
    assert f"prepare {name} {needed}" in capsys.readouterr().err
    assert main(["prepare", name, *options, "--data_dir", str(tmp_path)]) == 0
    assert main(["check", name, *options, "--data_dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    for line in lines:
        assert re.search(rf"^published {re.escape(line)}.*: DIFFERENT$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "listops", "--num_tr", "5"], "--num_tr; did you mean '--num_train'"),
        (["prepare", "listops", "--generator=5"], "--generator; did you mean '--generator_seed'"),
        (["prepare", "listops", "--source", "web"], "source.*web"),
        (["prepare", "listops", "--num_train"], "num_train.*expected one argument"),
        (["prepare", "text", "stray"], "stray"),
        (["prepare", "synthetic", "--batch_size", "-3"], "batch_size must be at least 1"),
        (["check", "listops", "--num_val", "3", "--num_val=4"], "duplicate --num_val; keep one"),
        (["check", "a.csv", "--kind", "texts", "--kind", "text"], "duplicate --kind; keep one"),
        (["check", "a/b.csv", "--path", "b.csv"], "a/b.csv: --path names other data; keep one"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str) -> None:
    error = error_of(arguments, main)
    assert re.search(message, error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["prepare", "text"],
        ["prepare", "listops", "--source", "released"],
        ["prepare", "listops", "--max_length", "7"],
        ["check", "text"],
    ],
)
def test_wrong_data_is_one_line(arguments: list[str], tmp_path: Path, capsys) -> None:
    assert main([*arguments, "--data_dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_help_names_every_option(capsys) -> None:
    assert main(["--help"]) == 0
    assert ", ".join(sorted(REGISTRY)) in " ".join(capsys.readouterr().out.split())
    assert main([]) == 2
    with pytest.raises(SystemExit) as end:
        main(["prepare", "text", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in ("--split {held_out,test_as_val}", "--data_dir", "LIT_PROBATTN_CACHE"):
        assert option in text


@pytest.mark.slow  # the arrows of tests/house/test_imports.py say it of every file
def test_the_root_logger_is_left_alone(monkeypatch) -> None:
    """A handler would keep the stderr of this call for those of a later one."""
    monkeypatch.setattr(logging.root, "handlers", [])
    assert main(["check", "synthetic"]) == 0
    assert logging.root.handlers == []


def test_interrupting_keeps_nothing(tmp_path: Path) -> None:
    command = ["prepare", "listops", "--num_processes", "2", "--data_dir", str(tmp_path)]

    def work() -> int:
        # A background job inherits an ignored SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return main(command)

    process = Forked(work, dict(os.environ), tmp_path / "log")
    # Python loses a signal that arrives while it forks: wait for both workers.
    started = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(6000):
        if len(started.read_text(encoding="utf-8").split()) == 2:
            break
        time.sleep(0.01)
    time.sleep(0.3)
    assert list(tmp_path.glob(".cache/.listops-*.tmp-new"))
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    error = (tmp_path / "log").read_text(encoding="utf-8")
    assert "interrupted; no cache was written" in error
    assert "Traceback" not in error
    assert [path.suffix for path in (tmp_path / ".cache").iterdir()] == [".lock"]


def write_reviews(path: Path) -> Path:
    rows = (f"this is the review {i} of many,{'good' if i % 3 else 'bad'}" for i in range(60))
    path.write_text("\n".join(["review,label", *rows]), encoding="utf-8")
    return path


def test_check_shows_what_is_in_own_texts(tmp_path: Path, capsys) -> None:
    path = write_reviews(tmp_path / "mine.csv")
    assert main(["check", str(path), "--tokens", "words", "--min_count=3"]) == 0
    shown = capsys.readouterr().out
    sizes = [
        int(n) for n in re.findall(r"^(?:train|val|test): (\d+) texts, lengths min 8", shown, re.M)
    ]
    assert len(sizes) == 3
    assert sum(sizes) == 60
    assert len(re.findall(r"^  classes: bad \d+, good \d+$", shown, re.M)) == 3
    sample = "^sample [0-9]+, (good|bad): this is the review <unk> of many$"
    assert len(re.findall(sample, shown, re.M)) == 3
    assert re.search(r"^<unk> in train: (\d+) of \d+ tokens \(12.50 %\)$", shown, re.M)
    options = f"--data.path {path} --data.tokens words --data.min_count=3"
    assert shown.splitlines()[-1].endswith(options)


def test_check_shows_what_is_in_own_text(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(500)))
    assert main(["check", str(path), "--segment_len", "8"]) == 0
    shown = capsys.readouterr().out
    assert "<unk> in val: 0 of " in shown
    assert len(re.findall("^sample at token [0-9]+: ", shown, re.M)) == 3
    assert "--task own_text " in shown


def test_check_shows_what_is_in_parallel_text(tmp_path: Path, capsys) -> None:
    folder = made_translation.write(tmp_path / "text")
    options = ["--merges=40", "--max_tokens=256"]
    assert main(["check", str(folder), *options]) == 0
    shown = capsys.readouterr().out
    assert "steps per epoch: 7 at max_tokens 256" in shown
    assert "train: 60 pairs, lengths min " in shown
    assert len(re.findall("^test pair [123]: .* \\| ", shown, re.M)) == 3
    assert "--task translation " in shown
    line = error_of(["check", str(folder / "train.de"), "--kind", "translation"], main, 1)
    assert "expected a folder, or an archive" in line
    assert main(["check", "translation", f"--path={folder}", *options]) == 0
    assert capsys.readouterr().out.splitlines() == shown.splitlines()[:-1]


def test_check_says_what_speaks_against_training(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("LIT_PROBATTN_CACHE", str(tmp_path / "cache"))
    for target, name in enumerate(("cat", "dog")):
        (tmp_path / "few" / name).mkdir(parents=True)
        for number in range(8):
            picture(100 * target + number).save(tmp_path / "few" / name / f"{number}.png")
    assert main(["check", str(tmp_path / "few"), "--image_size=16"]) == 0
    warnings = [x for x in capsys.readouterr().out.splitlines() if x.startswith("warning: ")]
    assert "14 training samples are fewer than one step at batch_size 32" in warnings[0]
    assert "val has 1 samples, so its accuracy has a resolution of 100 %, none of " in warnings[1]
    assert warnings[2].startswith("warning: test has 1 samples")
    assert len(warnings) == 3
    assert main(["check", str(write_reviews(tmp_path / "mine.csv"))]) == 0
    assert "warning" not in capsys.readouterr().out

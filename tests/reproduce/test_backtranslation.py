"""Noisy back-translation: the noise, and the folder of text that is made."""

from __future__ import annotations

import pytest

from lit_probattn.reproduce.backtranslation import Filter, Noise, main, whole_words
from tests.analysis.made import translator
from tests.support.helpers import error_of, with_options

WORDS = [f"w{i}" for i in range(23)]
QUIET = {"deletion": 0.0, "filler": 0.0, "swap": 0}
NOISY = {"deletion": 0.1, "filler": 0.1, "swap": 3}  # the command's


def test_without_noise_nothing_changes():
    assert Noise(**QUIET)(WORDS, 0, "line") == WORDS


def test_noise_is_a_function_of_seed_and_sentence():
    noise = Noise(**NOISY)
    assert noise(WORDS, 3, "a") == noise(WORDS, 3, "a")
    assert noise(WORDS, 3, "a") != noise(WORDS, 4, "a")
    assert noise(WORDS, 3, "a") != noise(WORDS, 3, "b")


@pytest.mark.parametrize("swap", [1, 3])
def test_no_word_moves_further_than_it_may(swap):
    noise, moves = Noise(**{**QUIET, "swap": swap}), set()
    for number in range(200):
        found = noise(WORDS, 0, str(number))
        assert sorted(found) == sorted(WORDS)
        moves |= {abs(found.index(word) - place) for place, word in enumerate(WORDS)}
    assert moves == set(range(swap + 1))


def test_shares_of_left_out_and_replaced_words():
    """Within five standard deviations of 0.1 each."""
    noise, kept, filled, total = Noise(**{**NOISY, "swap": 0}), 0, 0, 400 * len(WORDS)
    for number in range(400):
        found = noise(WORDS, 1, str(number))
        kept += len(found)
        filled += found.count("<unk>")
    assert abs(kept / total - 0.9) < 5 * (0.09 / total) ** 0.5
    assert abs(filled / kept - 0.1) < 5 * (0.09 / kept) ** 0.5


def test_one_word_always_stays():
    assert all(Noise(**{**NOISY, "deletion": 0.99})(["one", "two"], 0, str(n)) for n in range(50))


def test_the_pieces_of_a_word_stay_together():
    assert whole_words("a@@ b c d@@ e@@ f") == ["a@@ b", "c", "d@@ e@@ f"]
    found = Noise(**{**QUIET, "swap": 3})(whole_words("a@@ b c d@@ e@@ f"), 0, "x")
    assert sorted(found) == ["a@@ b", "c", "d@@ e@@ f"]


def test_pairs_of_unlike_lengths_are_left_out():
    keep = Filter(most=6, ratio=1.5)
    assert keep(["a"] * 6, ["b"] * 4)
    assert not keep(["a"] * 4, ["b"] * 7)
    assert not keep(["a"] * 3, ["b"] * 5)
    assert not keep([], ["b"])


def write_text(folder):
    """Parallel text from the target to the source of the reverse model."""
    folder.mkdir()
    for stem, count in (("train", 5), ("valid", 2), ("test", 3)):
        for language, word in (("yot", "0o 1o"), ("toy", "n0 v1")):
            text = "".join(f"{word} {stem}{n}\n" for n in range(count))
            (folder / f"{stem}.{language}").write_text(text)
    (folder / "mono.toy").write_text("n3 v1 a0 n2\nn0 v0 a1 n1 p\n\nn1 v1 a2 n3\n")
    return folder


def command(folder, out, *more):
    words = [
        *("--reverse", str(translator()), "--monolingual", str(folder / "mono.toy")),
        *("--parallel", str(folder), "--out", str(out), "--device", "cpu", "--max_ratio", "9"),
    ]
    return with_options(words, *more)


def test_the_folder_has_the_parallel_text_several_times_and_the_new_pairs(tmp_path, capsys):
    text, out = write_text(tmp_path / "text"), tmp_path / "out"
    assert main(command(text, out, "--upsample", "3", "--length_penalty", "0.6")) == 0
    told = capsys.readouterr().out
    target = (out / "train.toy").read_text(encoding="utf-8").splitlines()
    source = (out / "train.yot").read_text(encoding="utf-8").splitlines()
    assert source[:15] == 3 * (text / "train.yot").read_text(encoding="utf-8").splitlines()
    assert target[:15] == 3 * (text / "train.toy").read_text(encoding="utf-8").splitlines()
    mono = (text / "mono.toy").read_text(encoding="utf-8").splitlines()
    assert len(source) == len(target) > 15
    assert set(target[15:]) <= {line for line in mono if line}
    assert f"{len(target) - 15} of 4 lines became pairs" in told
    assert (out / "valid.yot").read_text(encoding="utf-8") == (text / "valid.yot").read_text(
        encoding="utf-8"
    )
    assert (out / "test.toy").read_text(encoding="utf-8") == (text / "test.toy").read_text(
        encoding="utf-8"
    )
    assert "is complete: choose another folder" in error_of(command(text, out), main)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--deletion", "1"), "--deletion must be in [0, 1), received 1.0"),
        (("--swap", "-1"), "--swap: must be at least 0, received -1"),
        (("--upsample", "-1"), "--upsample: must be at least 0, received -1"),
        (("--monolingual", "nowhere.txt"), "--monolingual nowhere.txt: No such file"),
        (("--parallel", "nowhere"), "missing train.yot and train.toy"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, more, message):
    text = write_text(tmp_path / "text")
    assert message in error_of(command(text, tmp_path / "out", *more), main)


def test_monolingual_text_is_read_like_parallel_text(tmp_path, capsys):
    """Without a byte-order mark; a line that is not UTF-8 is named before any is translated."""
    text, out = write_text(tmp_path / "text"), tmp_path / "out"
    mono = text / "mono.toy"
    mono.write_bytes(b"\xef\xbb\xbf" + mono.read_bytes())
    assert main(command(text, out)) == 0
    assert "\ufeff" not in (out / "train.toy").read_text(encoding="utf-8")
    mono.write_bytes(b"n3 v1\nn3 v\xe9\n")
    message = error_of(command(text, tmp_path / "other"), main)
    assert "mono.toy: line 2 is not UTF-8" in message
    assert not (tmp_path / "other").exists()


def test_lines_that_are_too_long_for_the_model_are_left_out(tmp_path):
    text, out = write_text(tmp_path / "text"), tmp_path / "out"
    mono = text / "mono.toy"
    before = mono.read_text()
    mono.write_text(f"{'n0 ' * 2000}\n{before}")
    assert main(command(text, out)) == 0
    mono.write_text(before)
    assert main(command(text, tmp_path / "short")) == 0
    assert contents(out) == contents(tmp_path / "short")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["train.yot", "train.toy", "valid.toy", "code", "dict.yot.txt"])
def test_text_of_others_is_not_replaced(tmp_path, capsys, name):
    text, out = write_text(tmp_path / "text"), tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine\n")
    for folder in (out, text):
        before = contents(folder)
        assert main(command(text, folder)) == 2
        assert contents(folder) == before
    assert f"{out / name} exists" in capsys.readouterr().err


def test_an_interrupted_command_replaces_its_own_text(tmp_path, monkeypatch):
    text, out = write_text(tmp_path / "text"), tmp_path / "out"
    assert main(command(text, tmp_path / "whole")) == 0
    with monkeypatch.context() as patch:
        patch.setattr("lit_probattn.reproduce.backtranslation._write", interrupt)
        assert main(command(text, out)) != 0
    assert (out / "valid.yot").read_text() == "half"
    assert main(command(text, out)) == 0
    assert contents(out) == contents(tmp_path / "whole")


def interrupt(path, lines):
    path.write_text("half")
    raise KeyboardInterrupt

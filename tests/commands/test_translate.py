"""`translate`: lines of standard input, in their order, by a tiny model of a made-up language."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from lit_probattn.__main__ import main
from lit_probattn.commands.translate import batches, read_lines
from tests.analysis.made import checkpoint, translator

pytest.importorskip("sacrebleu")
LINES = ["n3 v1 a0 n2 p", "", "n0 v0 a1 n1", "n1 v2 a2 n0 p n2 v0 a0 n4", "  ", "n5 v1 a1 n3"]


@pytest.fixture
def translate(open_once, monkeypatch, capsys):
    def call(*words, lines=LINES, checkpoint=None):
        checkpoint = checkpoint or translator()
        data = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        capsys.readouterr()
        try:
            status = main(["translate", str(checkpoint), "--device", "cpu", *words])
        except SystemExit as stop:  # of the parser
            status = stop.code
        told = capsys.readouterr()
        return status, told.out, told.err

    return call


def test_lines_keep_their_order_and_empty_ones_stay_empty(translate):
    status, out, _ = translate()
    found = out.split("\n")[:-1]
    assert status == 0
    assert len(found) == len(LINES)
    assert [bool(line) for line in found] == [bool(line.strip()) for line in LINES]
    alone = [translate(lines=[line])[1].rstrip("\n") for line in LINES[2:4]]
    assert found[2:4] == alone


def test_groups_of_lines_hold_so_many_tokens():
    lengths = {1: 5, 2: 9, 3: 2, 4: 5, 5: 30}
    groups = list(batches(lengths, 18))
    assert groups == [[5], [2, 1], [4, 3]]
    for group in groups[1:]:
        assert len(group) * max(lengths[n] for n in group) <= 18


def test_several_translations_have_number_rank_and_score(translate, tmp_path):
    table = tmp_path / "table.parquet"
    status, out, err = translate("--n_best", "2", "--out", str(table))
    rows = [line.split("\t") for line in out.splitlines()]
    assert status == 0
    assert [row[:2] for row in rows] == [[str(n), str(r)] for n in (1, 3, 4, 6) for r in (1, 2)]
    for best, second in zip(rows[::2], rows[1::2], strict=True):
        assert float(best[2]) >= float(second[2])
    kept = pd.read_parquet(table)
    assert kept["translation"].tolist() == [row[3] for row in rows]
    assert kept["source"].tolist()[:2] == [LINES[0]] * 2
    assert str(table) in err


def test_greedy_is_a_beam_of_one_and_draws_repeat(translate):
    _, greedy, _ = translate("--beam_size", "1")
    assert greedy.count("\n") == len(LINES)
    lines, draw = LINES[2:3], ("--temperature", "1.5", "--seed", "3")
    drawn = translate(*draw, lines=lines)[1]
    assert translate(*draw, lines=lines)[1] == drawn
    assert drawn != translate("--temperature", "1.5", "--seed", "4", lines=lines)[1]


def test_the_mean_of_checkpoints_translates(translate):
    lines = LINES[2:3]
    status, out, _ = translate(lines=lines, checkpoint=translator() / "average-1")
    assert status == 0
    assert out == translate(lines=lines, checkpoint=translator() / "last")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--beam_size", "0"), "--beam_size must be at least 1, received 0"),
        (("--n_best", "2", "--temperature", "1"), "--n_best applies to searching"),
        (("--top_p", "0.5"), "--top_p=0.5 has no effect with temperature=0.0"),
        (("--max_tokens", "0"), "--max_tokens: must be at least 1, received 0"),
        (("--out", "a.txt"), "--out must end in .parquet, received a.txt"),
    ],
)
def test_wrong_flags_are_one_line(translate, words, message):
    status, _, err = translate(*words)
    assert status == 2
    (line,) = err.splitlines()
    assert message in line


def test_ends_of_lines_of_other_systems_are_no_text():
    assert list(read_lines(io.BytesIO(b"a b\r\nc\n\nd"))) == ["a b", "c", "", "d"]


def test_a_byte_order_mark_is_no_text():
    assert [*read_lines(io.BytesIO("\ufeffn3\nn1\n".encode()))] == ["n3", "n1"]


def test_runs_of_other_tasks_are_refused(translate, tmp_path):
    status, _, err = translate(checkpoint=checkpoint(tmp_path, "sequence", "SoftmaxAttention"))
    assert status == 2
    assert "is a run of SequenceClassifier, which does not translate" in err

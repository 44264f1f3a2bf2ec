"""The AAN pairs: bytes kept as they are, pairs in batches, one copy of each text, bad lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from datamodules import Retrieval
from datamodules.core.order import FILL
from lit_probattn.base.errors import DataError
from tests.datamodules.lra.files import PAIR_FILES, pair_lines, write_pairs


def retrieval(folder: Path, **options) -> Retrieval:
    return Retrieval(**{"data_dir": str(folder), "batch_size": 4, **options})


def with_train(folder: Path, lines: list[bytes]) -> Path:
    """A release whose training file has these lines."""
    write_pairs(folder)
    (folder / PAIR_FILES["train"]).write_bytes(b"".join(lines))
    return folder


def texts(data: Retrieval, split: str) -> list[tuple[bytes, bytes, int]]:
    data.setup()
    found = data.split(split)
    samples = [found[index] for index in range(len(found))]
    return [(*(bytes((t - 1).tolist()) for t in s.values), s.target) for s in samples]


@pytest.mark.parametrize("place", [".", "tsv_data", "lra_release/lra_release/tsv_data"])
def test_pairs_are_the_columns_of_the_files(tmp_path: Path, place: str) -> None:
    write_pairs(tmp_path / place)
    data = retrieval(tmp_path)
    for seed, (split, count) in enumerate((("train", 64), ("val", 9), ("test", 11))):
        expected = [line.rstrip(b"\n").split(b"\t") for line in pair_lines(count, seed)]
        assert texts(data, split) == [(a, b, int(float(y))) for y, _, _, a, b in expected]
    assert (data.vocab_size, data.num_classes, data.max_seq_len) == (512, 2, 4096)


def test_quotes_and_any_bytes_are_text(tmp_path: Path) -> None:
    first, second = b'"a "" b', bytes(b for b in range(256) if b not in b"\t\n\r") + b'"'
    lines = [b"1.0\tA\tB\t" + first + b"\t" + second + b"\r\n", b"0\tA\tB\t'\"\t\n"]
    data = retrieval(with_train(tmp_path, lines), batch_size=1)
    assert texts(data, "train") == [(first, second, 1), (b"'\"", b"", 0)]


def test_ids_lengths_and_cuts(tmp_path: Path) -> None:
    long = b"x" * 3999 + b"yz" + b"w" * 12000
    data = retrieval(with_train(tmp_path, [b"1.0\tA\tB\tab\t" + long + b"\n"]), batch_size=1)
    data.setup()
    (sample,) = [data.split("train")[0]]
    assert sample.values[0].tolist() == [ord("a") + 1, ord("b") + 1]
    assert len(sample.values[1]) == 4000
    assert sample.values[1][-1] == ord("y") + 1
    assert data.split("train").lengths.tolist() == [len(long)]
    assert data.split("train").num_cut == 1
    whole = retrieval(tmp_path, max_length_tokens=10000)
    whole.setup()
    assert len(whole.split("train")[0].values[1]) == 10000
    assert whole.max_seq_len == 16384
    assert len(list((tmp_path / ".cache").glob("retrieval-*"))) == 1, "lengths share a cache"


def test_batches_hold_both_texts(tmp_path: Path) -> None:
    data = retrieval(write_pairs(tmp_path), eval_batch_size=5, pad_multiple=8)
    data.setup()
    batches = list(data.val_dataloader())
    assert [b["sample_ids"].tolist() for b in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    batches.append(data.collate()([data.split("val")[8], data.split("val")[FILL]]))
    assert batches[-1]["sample_ids"].tolist() == [8, FILL]
    rows = texts(data, "val")
    for batch in batches:
        longest = int(batch["key_mask"].sum(-1).max())
        assert batch["inputs"].shape == batch["key_mask"].shape
        assert batch["inputs"].shape[1:] == (2, -(-longest // 8) * 8)
        assert batch["inputs"].dtype == torch.int64
        assert not batch["inputs"][~batch["key_mask"]].any()
        assert (batch["inputs"][batch["key_mask"]] > 0).all()
        for row, sample in enumerate(batch["sample_ids"].clamp_min(0).tolist()):
            for side in (0, 1):
                real = batch["inputs"][row, side][batch["key_mask"][row, side]] - 1
                assert bytes(real.tolist()) == rows[sample][side]
            assert batch["target"][row] == rows[sample][2]
    full = retrieval(tmp_path, pad_to="max")
    full.setup()
    assert next(iter(full.train_dataloader()))["inputs"].shape == (4, 2, 4096)


def test_each_text_is_stored_once(tmp_path: Path) -> None:
    texts = [b"one", b"two", b"three"]
    lines = [b"1.0\tA\tB\t%b\t%b\n" % (a, b) for a in texts for b in texts]
    for name in PAIR_FILES.values():
        (tmp_path / name).write_bytes(b"".join(lines))
    data = retrieval(tmp_path)
    data.setup()
    assert len(data.open().array("texts_offsets")) == 3 + 1
    assert bytes(data.open().array("texts_tokens")) == b"onetwothree"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1.0\tA\tB\tone\ttwo\tthree\n", "expected 4 tabs .* received 5"),
        (b"\n", "expected 4 tabs .* received 0"),
        (b'"1.0"\tA\tB\tone\ttwo\n', r"the label must be 0.0 or 1.0, received '\"1.0\"'"),
        (b"0_1\tA\tB\tone\ttwo\n", "received '0_1'"),
        (b"1e0\tA\tB\tone\ttwo\n", "received '1e0'"),
        (b"0.5\tA\tB\tone\ttwo\n", "received '0.5'"),
        (b"nan\tA\tB\tone\ttwo\n", "received 'nan'"),
        (b"label\tid1\tid2\ttext1\ttext2\n", "received 'label'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    good = pair_lines(5, 0)
    with_train(tmp_path, [*good[:2], line, *good[2:]])
    with pytest.raises(DataError, match=message) as error:
        retrieval(tmp_path).prepare_data()
    assert str(error.value).startswith(f"{tmp_path / PAIR_FILES['train']}:3: ")
    assert not list((tmp_path / ".cache").glob("retrieval-*"))


def test_a_file_cut_off_in_its_last_line_is_refused(tmp_path: Path) -> None:
    lines = pair_lines(5, 0)
    data = retrieval(with_train(tmp_path, [*lines[:-1], lines[-1][:-4]]))
    with pytest.raises(DataError, match=r"train\.tsv:5: .* newline"):
        data.prepare_data()
    with pytest.raises(DataError, match=r"train\.tsv: the file is empty"):
        retrieval(with_train(tmp_path, [])).prepare_data()

"""Edited inputs: a clear error or correct data. Defects that fuzzing found, one by one."""

from __future__ import annotations

import io
import itertools
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image as PilImage

from datamodules.images.samples import open_image
from datamodules.lra import cifar
from datamodules.lra.pathfinder_release import Entry, images
from datamodules.series.ts_file import read_ts
from datamodules.text.source import ParquetText, PlainText
from datamodules.text.wikitext103 import find_release
from lit_probattn.base.errors import DataError
from lit_probattn.training.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from tests.datamodules.lra.files import python2_pickle
from tests.datamodules.series.test_ts_file import GOOD as GOOD_TS
from tests.fuzzing.binary_targets import parquet_content, zip_content
from tests.fuzzing.targets import Target, all_targets, bounded
from tests.support.helpers import error_of
from tests.support.runs import arguments
from tests.support.slow import every_nth

TARGETS = all_targets()
# A training command takes half a second, a file a few milliseconds.
COMMANDS = ("flags", "configs")


@pytest.mark.parametrize("name", every_nth(2, [pytest.param(name, id=name) for name in TARGETS]))
def test_edited_input_is_refused_clearly_or_read_right(name):
    TARGETS[name].run(2 if name in COMMANDS else 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_edited_inputs(name):
    for number in range(2):
        TARGETS[name].run(60 if name in COMMANDS else 1500, number)


# ---- what it found --------------------------------------------------------------------------


def test_the_time_that_was_given_is_kept(monkeypatch):
    target = Target("made", st.integers(), lambda *_: "accepted")
    monkeypatch.setattr("tests.fuzzing.targets.monotonic", itertools.count().__next__)
    target.run(200, 1, until=5)
    assert target.answers["accepted"] == 6


def test_an_archive_whose_table_of_contents_is_damaged_gives_no_weights(tmp_path):
    """One byte there makes PyTorch's reader take a weight for a folder, and read other bytes."""
    path = tmp_path / "step-00000003.ckpt"
    save_checkpoint({"global_step": 3, "state_dict": {"w": torch.arange(60.0)}}, path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    entry = (
        content.index(b"archive/data/0", start) - 46
    )  # a record of the table, and its attributes
    content[entry + 38] ^= 0x10
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # the checksums of the members do not notice
    with pytest.raises(
        CheckpointError, match=r"step-00000003.ckpt is corrupt: checksum of the file"
    ):
        load_checkpoint(path)


def test_checkpoints_of_other_programs_need_no_seal(tmp_path):
    path = tmp_path / "step-00000003.ckpt"
    torch.save({"global_step": 3, "state_dict": {"w": torch.ones(3)}}, path)
    assert load_checkpoint(path)["global_step"] == 3


def damaged_png(path):
    """A picture with one byte of its pixels changed; its checksums are stale."""
    stream = io.BytesIO()
    PilImage.fromarray(np.full((32, 32), 7, dtype=np.uint8)).save(stream, "PNG", compress_level=0)
    content = bytearray(stream.getvalue())
    content[content.index(b"IDAT") + 100] ^= 1
    path.write_bytes(content)
    return path


def test_a_picture_with_a_wrong_checksum_is_refused(tmp_path):
    path = damaged_png(tmp_path / "sample_0.png")
    with pytest.raises(DataError, match=r"sample_0.png is corrupt"):
        list(images([Entry("0.npy:1", path, 1)], 32, lambda _: None))
    with pytest.raises(DataError, match=r"sample_0.png: unreadable image"):
        open_image(path)


def test_a_pickle_that_would_fill_the_memory_is_refused_at_once():
    with bounded(5), pytest.raises(DataError, match="memo index 4294967295"):
        cifar._parse("test_batch", b"\x80\x02}r\xff\xff\xff\xff.")


def test_an_array_instead_of_a_batch_is_refused():
    content = python2_pickle(np.zeros(3, dtype=np.uint8))
    with pytest.raises(DataError, match=r"expected a dict with data and labels .*ndarray"):
        cifar._parse("test_batch", content)


def test_a_zip_with_a_damaged_member_is_refused(tmp_path):
    path = tmp_path / "wikitext-103-v1.zip"
    content = bytearray(zip_content())
    content[0] ^= 1
    path.write_bytes(content)
    source = find_release(tmp_path, "wikitext-103")["train"]
    assert isinstance(source, PlainText)
    with pytest.raises(DataError, match=r"wiki.train.tokens is corrupt: Bad magic number"):
        list(source.blocks())


def test_a_damaged_page_of_parquet_is_one_line(tmp_path):
    path = tmp_path / "train-00000-of-00001.parquet"
    content = bytearray(parquet_content())
    content[4] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000-of-00001.parquet is not a Parquet") as error:
        list(ParquetText((path,)).blocks())
    assert "\n" not in str(error.value)


def test_several_dimensions_of_a_univariate_file_are_refused(tmp_path):
    path = tmp_path / "Tiny_TRAIN.ts"
    path.write_text(GOOD_TS.replace("@univariate false", "@univariate true"))
    with pytest.raises(DataError, match=r"Tiny_TRAIN.ts:.*@univariate true") as error:
        read_ts(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("model.init_args.embed_dim", "expected int, received null"),
        ("model.init_args.attention.init_args.dropout", "expected float, received "),
        ("data.init_args.batch_size", "expected int, received null"),
    ],
)
def test_null_where_a_value_is_needed(tmp_path, flag, expected):
    assert f"{flag}: {expected}" in error_of(arguments("fit", tmp_path, f"--{flag}", "null"))

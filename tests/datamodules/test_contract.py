"""What every data module promises, on tiny data of each."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import shlex
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from datamodules.__main__ import main as command_line
from datamodules.core.base import CachedDataModule
from lit_probattn.base.errors import DataError, MissingDataError
from lit_probattn.commands.data import main as data_command
from tests.datamodules.test_options import CLASSES, TABLE, digest, placed
from tests.support.slow import every_nth

NAMES = ("train", "val", "test")


def built(name: str, folder: Path, **options: Any) -> Any:
    """The data module over what is in `folder`, not prepared; its cache is beside the folder."""
    given = {"cache_dir": str(folder.parent / "cache"), **TABLE[name].given, **options}
    return CLASSES[name](**placed(folder, given))


def opened(name: str, folder: Path, **options: Any) -> Any:
    """Write the data unless they are there, and set the data module up."""
    if not folder.exists():
        folder.mkdir()
        TABLE[name].write(folder)
    data = built(name, folder, **options)
    data.prepare_data()
    data.setup()
    return data


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Callable[[str], Any]:
    """Return the data module of a name, set up once for the tests that do not change it."""
    folder = tmp_path_factory.mktemp("shared")

    @cache
    def get(name: str) -> Any:
        (folder / name).mkdir()
        return opened(name, folder / name / "data")

    return get


def rows_of(data: Any, split: str) -> list[dict[str, Any]]:
    """What each sample of a split is in a batch of its own, but for its number."""
    collate = data.collate_of(split) if hasattr(data, "collate_of") else data.collate()
    found = [digest(collate([data.split(split)[i]])) for i in range(len(data.split(split)))]
    return [{k: v for k, v in row.items() if k != "sample_ids"} for row in found]


@pytest.mark.parametrize("name", TABLE)
def test_a_pickled_split_is_the_same_and_has_the_place_of_its_arrays(name, shared):
    data = shared(name)
    for split in ("val", "test"):
        pickled = pickle.dumps(data.split(split))
        if isinstance(data, CachedDataModule):
            assert str(data.cache_dir).encode() in pickled
        before = rows_of(data, split)
        data.splits[split] = pickle.loads(pickled)
        assert rows_of(data, split) == before


@pytest.mark.parametrize("name", TABLE)
def test_evaluation_has_every_sample_once(name, shared):
    data = shared(name)
    for split in ("val", "test"):
        batches = list(getattr(data, f"{split}_dataloader")())
        ids = [int(i) for batch in batches for i in batch["sample_ids"] if i >= 0]
        assert sorted(ids) == list(range(len(data.split(split))))


@pytest.mark.parametrize(
    "name", ["synthetic", "uea", "imagenet", "trajectories", "translation", "masked_text"]
)
def test_a_worker_gives_the_same_batches(name, tmp_path):
    alone, helped = (
        [digest(batch) for batch in itertools.islice(data.train_dataloader(), 3)]
        for data in (opened(name, tmp_path / "data", num_workers=n) for n in (0, 1))
    )
    assert alone == helped


# Of these a cache is made; the others read their files anew, or generate what they give.
GENERATED = ("listops", "synthetic", "toy_translation")
FROM_FILES = [
    name
    for name, cls in CLASSES.items()
    if issubclass(cls, CachedDataModule) and name not in GENERATED
]


# Files and folders that are neither samples nor labels.
UNREAD = {"batches.meta", "README", "0_0.txt", "urls_pos.txt", "labeledBow.feat"}
UNREAD |= {"vocab.bpe.32000"}
UNREAD |= {"unanswered", "wrong", "uneven"}  # folders of other data


@pytest.mark.parametrize("name", FROM_FILES)
def test_files_are_left_alone_and_a_change_of_any_makes_the_cache_stale(name, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    TABLE[name].write(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    data = opened(name, folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    paths = [path for path in before if not UNREAD & {*path.relative_to(folder).parts}]
    for path in paths[:: -(-len(paths) // 12)]:
        content = before[path]
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match=r"has changed|is empty or truncated"):
            built(name, folder).open()
        path.write_bytes(content)
    data.open()  # with the files as they were


CACHED = [pytest.param(name, id=name) for name in ("listops", "toy_translation", *FROM_FILES)]


@pytest.mark.parametrize("name", every_nth(4, CACHED))
def test_the_command_in_the_message_builds_the_missing_cache(name, tmp_path):
    TABLE[name].write(tmp_path / "data")
    data = built(name, tmp_path / "data")
    with pytest.raises(MissingDataError, match="no cache of") as error:
        data.open()
    (command,) = re.findall("`(.*)`", str(error.value))
    assert command_line(shlex.split(command)[2:]) == 0
    data.open()


@pytest.mark.parametrize("given", [{}, {"tokens": "bytes"}])
def test_the_command_in_the_message_replaces_values_of_the_task(given, tmp_path):
    """`data prepare own_texts` starts from the file of the task, where tokens are words."""
    folder = tmp_path / "data"
    folder.mkdir()
    TABLE["own_texts"].write(folder)
    options = {"path": str(folder / "table.csv"), "cache_dir": str(tmp_path / "cache"), **given}
    data = CLASSES["own_texts"](**options)
    with pytest.raises(MissingDataError, match="no cache of") as error:
        data.open()
    (command,) = re.findall("`(.*)`", str(error.value))
    assert data_command(shlex.split(command)[2:]) == 0
    data.open()


def test_the_command_in_the_message_has_paths_without_quotes(tmp_path):
    TABLE["own_texts"].write(tmp_path)
    data = CLASSES["own_texts"](path=tmp_path / "table.csv", cache_dir=tmp_path / "cache")
    with pytest.raises(MissingDataError) as error:
        data.open()
    for flag in (f"--path {tmp_path}/table.csv", f"--cache_dir {tmp_path}/cache"):
        assert flag in str(error.value)


@pytest.mark.parametrize("name", ["own_series", "own_texts", "text_pairs"])
def test_the_order_of_rows_changes_no_split(name, tmp_path):
    before = opened(name, tmp_path / "data")
    head, *rows = (tmp_path / "data/table.csv").read_text(encoding="utf-8").splitlines()
    random.Random(1).shuffle(rows)
    (tmp_path / "data/table.csv").write_text("\n".join([head, *rows]) + "\n")
    after = opened(name, tmp_path / "data")
    for split in NAMES:
        first, second = (Counter(map(repr, rows_of(d, split))) for d in (before, after))
        assert first == second

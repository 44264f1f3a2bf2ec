"""Caches: built once, complete or absent, and never used when damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import resource
import signal
import sys
import time
from dataclasses import FrozenInstanceError
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from datamodules.core import cache as caches
from datamodules.core.cache import (
    CacheSpec,
    CacheWriter,
    ensure_cache,
    hash_sources,
    open_cache,
)
from lit_probattn.base.errors import DataError, MissingDataError
from tests.support.forks import Forked
from tests.support.runs import in_child, in_ranks, kill_me

SPEC = CacheSpec("numbers", {"count": 7})


def build(writer: CacheWriter) -> None:
    writer.add("a", np.arange(7))
    writer.add("b", np.ones((2, 3), dtype=np.uint8))


def fail(writer: CacheWriter) -> None:
    raise MissingDataError("the source is not here")


def no_build(writer: CacheWriter) -> None:
    raise AssertionError("built again")


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def test_the_identity_of_a_cache_and_an_opened_cache_cannot_be_changed(tmp_path: Path) -> None:
    cache = ensure_cache(tmp_path, SPEC, build)
    for value, name in ((SPEC, "settings"), (cache, "meta")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, {})


def test_settings_have_folders_of_their_own(tmp_path: Path) -> None:
    other = CacheSpec("numbers", {"count": 8})
    ensure_cache(tmp_path, SPEC, build)
    with pytest.raises(MissingDataError, match="no cache of numbers"):
        open_cache(tmp_path, other)


def flip(folder: Path) -> None:
    data = bytearray((folder / "b.npy").read_bytes())
    data[-1] ^= 1
    (folder / "b.npy").write_bytes(data)


def remove(folder: Path) -> None:
    (folder / "a.npy").unlink()


def change_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}))


def no_size(folder: Path) -> None:
    change_meta(folder, files={"a.npy": {}})


def deep_meta(folder: Path) -> None:
    (folder / "meta.json").write_text('{"a":' * 100_000)


def no_files(folder: Path) -> None:
    change_meta(folder, files={})


def objects(folder: Path) -> None:
    """An array of Python objects, which are read by running code, under the right checksum."""
    np.save(folder / "a.npy", np.array([print], dtype=object), allow_pickle=True)
    content = (folder / "a.npy").read_bytes()
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    files = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["files"]
    change_meta(folder, files={**files, "a.npy": {**files["a.npy"], **facts}})


# More are on the page of bad inputs.
DAMAGES = {
    deep_meta: "meta.json is missing or unreadable",
    no_files: "meta.json does not list a.npy, b.npy",
    objects: "a.npy is not an array of numbers",
    flip: "b.npy does not match its checksum",
    remove: "a.npy is missing",
    no_size: "meta.json is unreadable",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_repaired(tmp_path: Path, damage, logged) -> None:
    ensure_cache(tmp_path, SPEC, build)
    damage(tmp_path / SPEC.name)
    with pytest.raises(DataError, match=DAMAGES[damage]):
        open_cache(tmp_path, SPEC)
    with pytest.raises(MissingDataError, match=rf"{DAMAGES[damage]}.*the source is not here"):
        ensure_cache(tmp_path, SPEC, fail)
    ensure_cache(tmp_path, SPEC, build)
    cache = ensure_cache(tmp_path, SPEC, no_build)  # once
    assert isinstance(cache.array("a"), np.memmap)
    np.testing.assert_array_equal(cache.array("a"), np.arange(7))
    assert cache.array("b").dtype == np.uint8
    assert "rebuilding it" in logged.text
    assert visible(tmp_path) == [SPEC.name]


def test_a_changed_source_makes_the_cache_stale(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("one")
    spec = CacheSpec("numbers", {}, lambda: [source] if source.exists() else [])
    ensure_cache(tmp_path, spec, build)
    source.write_text("one")  # another time, the same content
    open_cache(tmp_path, spec)
    before = source.stat()
    source.write_text("two")  # the same size and time, as a copy that keeps times leaves it
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"source\.txt has changed"):
        open_cache(tmp_path, spec)
    source.unlink()  # a cache outlives its source
    open_cache(tmp_path, spec)


def test_a_changed_folder_makes_the_cache_stale(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    file = folder / "deep" / "one.txt"
    file.write_text("one")
    spec = CacheSpec("numbers", {}, lambda: [folder])
    ensure_cache(tmp_path / "cache", spec, build)
    os.utime(file, (1, 1))  # another time, the same content
    ensure_cache(tmp_path / "cache", spec, no_build)
    for change in (lambda: file.write_text("two"), lambda: (folder / "more.txt").touch()):
        change()
        with pytest.raises(DataError, match="texts has changed"):
            open_cache(tmp_path / "cache", spec)
        ensure_cache(tmp_path / "cache", spec, build)


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / split / "0000.parquet" for split in ("train", "test")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(path.parent.name)
    spec = CacheSpec("numbers", {}, lambda: paths)
    cache = ensure_cache(tmp_path / "cache", spec, build)
    assert sorted(cache.meta["sources"]) == ["test/0000.parquet", "train/0000.parquet"]
    paths[0].write_text("other")
    with pytest.raises(DataError, match=r"train/0000\.parquet has changed"):
        open_cache(tmp_path / "cache", spec)


@pytest.mark.parametrize("absolute", [(), (0,), (1,), (0, 1)], ids=str)
def test_sources_of_one_name_may_be_relative(tmp_path: Path, absolute, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [Path("a/x.csv"), Path("b/x.csv")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(str(path))
    named = [path.absolute() if n in absolute else path for n, path in enumerate(paths)]
    spec = CacheSpec(SPEC.task, SPEC.settings, lambda: named)
    cache = ensure_cache(tmp_path / "cache", spec, build)
    assert sorted(cache.meta["sources"]) == ["a/x.csv", "b/x.csv"]
    ensure_cache(tmp_path / "cache", spec, no_build)


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(writer: CacheWriter) -> None:
        build(writer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_cache(tmp_path, SPEC, interrupted)
    assert visible(tmp_path) == []


def test_an_interrupted_process_is_cleaned_up_after(tmp_path: Path) -> None:
    def killed(writer: CacheWriter) -> None:
        writer.add("a", np.arange(7))
        kill_me()

    assert in_child(lambda: bool(ensure_cache(tmp_path, SPEC, killed))) == -signal.SIGKILL
    assert any(name.startswith(f".{SPEC.name}.tmp-") for name in visible(tmp_path))
    with pytest.raises(MissingDataError):
        open_cache(tmp_path, SPEC)
    ensure_cache(tmp_path, SPEC, build)
    assert visible(tmp_path) == [SPEC.name]


def test_processes_build_once(tmp_path: Path) -> None:
    def slow(writer: CacheWriter) -> None:
        with (tmp_path / "built").open("a", encoding="utf-8") as file:
            file.write("once ")
        time.sleep(0.2)
        build(writer)

    def work() -> int:
        return int(ensure_cache(tmp_path / "caches", SPEC, slow).array("a").sum())

    assert in_ranks(work, 3) == [21] * 3
    assert (tmp_path / "built").read_text(encoding="utf-8") == "once "


def test_a_process_that_waits_says_for_whom(tmp_path: Path, logged) -> None:
    """At once, and in a form that is shown without any set-up of logging."""
    started = tmp_path / "started"

    def slow(writer: CacheWriter) -> None:
        started.touch()
        sys.stdin.readline()
        build(writer)

    builder = Forked(
        lambda: ensure_cache(tmp_path / "caches", SPEC, slow) is None, os.environ, has_stdin=True
    )
    while not started.exists():
        assert builder.poll() is None
        time.sleep(0.01)
    Timer(0.2, builder.stdin.close).start()
    ensure_cache(tmp_path / "caches", SPEC, no_build)
    assert builder.wait() == 0
    (record,) = [record for record in logged.records if "is being built" in record.getMessage()]
    assert record.levelno >= logging.WARNING
    assert f"is being built by process {builder.pid} on " in record.getMessage()
    assert visible(tmp_path / "caches") == [SPEC.name]


def test_a_full_disk_is_told_with_a_remedy(tmp_path: Path) -> None:
    def fill(writer: CacheWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    message = r"no space left on device.*free some space, or set cache_d"
    with pytest.raises(DataError, match=message):
        ensure_cache(tmp_path, SPEC, fill)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_a_streamed_array_is_the_pieces_after_one_another(tmp_path: Path, dtype) -> None:
    pieces = [np.arange(5), np.zeros((2, 3)), np.zeros(0), np.arange(100, 120)]

    def build(writer: CacheWriter) -> None:
        with writer.stream("all", dtype) as append:
            for piece in pieces:
                append(piece)

    cache = ensure_cache(tmp_path, CacheSpec("streamed", {"dtype": str(dtype)}), build)
    array = cache.array("all")
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.concatenate([piece.ravel() for piece in pieces]))


# ---- sources that change, and places that are taken ----------------------------------------------


def test_a_source_that_grows_while_it_is_read_makes_no_cache(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("first half")
    spec = CacheSpec("numbers", {}, lambda: [source])

    def read(writer: CacheWriter) -> None:
        writer.add("a", np.frombuffer(source.read_bytes(), dtype=np.uint8))

    def read_while_it_is_copied(writer: CacheWriter) -> None:
        read(writer)
        source.write_text("first half, second half")

    with pytest.raises(DataError, match=r"source\.txt changed while"):
        ensure_cache(tmp_path / "caches", spec, read_while_it_is_copied)
    assert visible(tmp_path / "caches") == []
    found = ensure_cache(tmp_path / "caches", spec, read).array("a")
    assert bytes(found) == b"first half, second half"


def test_a_source_that_is_gone_makes_the_cache_stale_unless_all_are(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text(name)

    def read(writer: CacheWriter) -> None:
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()))
        writer.add("a", np.frombuffer(text.encode(), dtype=np.uint8))

    spec = CacheSpec("numbers", {}, lambda: sorted(folder.iterdir()))
    for gone, left in (("b", b"a"), ("a", b"a")):  # of the last one, the cache is what remains
        ensure_cache(tmp_path / "caches", spec, read)
        (folder / gone).unlink()
        assert bytes(ensure_cache(tmp_path / "caches", spec, read).array("a")) == left


def test_hashes_of_sources_are_those_of_their_content_and_read_only_what_changed(
    tmp_path: Path, monkeypatch
) -> None:
    sources = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for source in sources[:2]:
        source.write_text(source.stem)
    spec = CacheSpec("numbers", {}, lambda: [path for path in sources if path.exists()])
    ensure_cache(tmp_path / "caches", spec, build)
    sources[1].write_text("another text")
    sources[2].write_text("a source that the cache does not know")
    read: list[Path] = []

    def digest_of(path: Path) -> str:
        read.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}
    monkeypatch.setattr(caches, "file_digest", digest_of)
    assert hash_sources(tmp_path / "caches", spec) == expected
    assert read == sources[1:]
    for source in sources:
        source.unlink()
    kept = {name: hashlib.sha256(name[:1].encode()).hexdigest() for name in ("a.txt", "b.txt")}
    assert hash_sources(tmp_path / "caches", spec) == kept
    assert hash_sources(tmp_path / "elsewhere", spec) is None


def test_a_limit_of_file_sizes_is_told_as_a_full_disk(tmp_path: Path) -> None:
    """NumPy's own writer raises an error without a number there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DataError, match="free some space, or set cache_dir"):
            ensure_cache(tmp_path, SPEC, lambda writer: writer.add("a", np.zeros(50_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert visible(tmp_path) == []


def test_an_array_is_stored_as_numpy_stores_it(tmp_path: Path) -> None:
    arrays = {
        "strided": np.arange(12, dtype=np.int16).reshape(3, 4).T,
        "flags": np.array([True, False]),
        "texts": np.array([b"ab", b"c"]),
        "half": np.ones((2, 1, 3), dtype=np.float16),
    }

    def add(writer: CacheWriter) -> None:
        for name, array in arrays.items():
            writer.add(name, array)

    cache = ensure_cache(tmp_path, SPEC, add)
    for name, array in arrays.items():
        np.save(tmp_path / "own.npy", np.ascontiguousarray(array))
        assert (cache.folder / f"{name}.npy").read_bytes() == (tmp_path / "own.npy").read_bytes()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (SPEC.name, rf"{SPEC.name}.*remove"),
        (f".{SPEC.name}.builder", rf".{SPEC.name}.builder.*remove"),
        ("caches", r"is not writable .*cache_dir.*LIT_PROBATTN_CACHE"),
        (f".{SPEC.name}.tmp-new", None),  # is replaced
    ],
)
def test_what_is_in_the_way_of_a_cache_is_named(tmp_path: Path, place, message) -> None:
    if place.endswith("builder"):
        (tmp_path / place).mkdir()
    else:
        (tmp_path / place).touch()
    root = tmp_path / "caches" if place == "caches" else tmp_path
    if message is None:
        ensure_cache(root, SPEC, build)
        return
    with pytest.raises(DataError, match=message) as caught:
        ensure_cache(root, SPEC, build)
    assert "\n" not in str(caught.value)

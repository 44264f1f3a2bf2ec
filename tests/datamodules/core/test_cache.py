"""Caches: built once, complete or absent, and never used when damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
from dataclasses import FrozenInstanceError
from itertools import chain
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from datamodules.core.cache import CacheSpec, CacheWriter, ensure_cache, open_cache
from lit_probattn.base.errors import DataError, MissingDataError
from tests.support.paths import ROOT

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


def test_built_once_and_memory_mapped(tmp_path: Path) -> None:
    ensure_cache(tmp_path / "new", SPEC, build)
    cache = ensure_cache(tmp_path / "new", SPEC, no_build)
    assert isinstance(cache.array("a"), np.memmap)
    np.testing.assert_array_equal(cache.array("a"), np.arange(7))
    assert cache.array("b").dtype == np.uint8
    assert visible(tmp_path / "new") == [SPEC.name]


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


def cut(folder: Path) -> None:
    path = folder / "a.npy"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    data = bytearray((folder / "b.npy").read_bytes())
    data[-1] ^= 1
    (folder / "b.npy").write_bytes(data)


def remove(folder: Path) -> None:
    (folder / "a.npy").unlink()


def remove_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


def cut_meta(folder: Path) -> None:
    (folder / "meta.json").write_text('{"format_version": 1, "fi')


def other_version(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    (folder / "meta.json").write_text(json.dumps({**meta, "format_version": 99}))


def other_settings(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    (folder / "meta.json").write_text(json.dumps({**meta, "settings": {"count": 6}}))


def other_kind(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    (folder / "meta.json").write_text(json.dumps({**meta, "files": ["a.npy"]}))


def no_size(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    (folder / "meta.json").write_text(json.dumps({**meta, "files": {"a.npy": {}}}))


def deep_meta(folder: Path) -> None:
    (folder / "meta.json").write_text('{"a":' * 100_000)


def no_files(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    (folder / "meta.json").write_text(json.dumps({**meta, "files": {}}))


def objects(folder: Path) -> None:
    """An array of Python objects, which are read by running code, under the right checksum."""
    np.save(folder / "a.npy", np.array([print], dtype=object), allow_pickle=True)
    content, meta = (
        (folder / "a.npy").read_bytes(),
        json.loads((folder / "meta.json").read_text(encoding="utf-8")),
    )
    meta["files"]["a.npy"]["bytes"] = len(content)
    meta["files"]["a.npy"]["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))


DAMAGES = {
    deep_meta: "meta.json is missing or unreadable",
    no_files: "meta.json does not list a.npy, b.npy",
    objects: "a.npy is not an array of numbers",
    cut: "a.npy has 183 bytes, expected 184",
    flip: "b.npy does not match its checksum",
    remove: "a.npy is missing",
    remove_meta: "meta.json is missing",
    cut_meta: "meta.json is missing or unreadable",
    other_version: "format 99, expected 3",
    other_settings: "other settings",
    other_kind: "meta.json is unreadable",
    no_size: "meta.json is unreadable",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_repaired(tmp_path: Path, damage, caplog) -> None:
    ensure_cache(tmp_path, SPEC, build)
    damage(tmp_path / SPEC.name)
    with pytest.raises(DataError, match=DAMAGES[damage]):
        open_cache(tmp_path, SPEC)
    with pytest.raises(MissingDataError, match=rf"{DAMAGES[damage]}.*the source is not here"):
        ensure_cache(tmp_path, SPEC, fail)
    np.testing.assert_array_equal(ensure_cache(tmp_path, SPEC, build).array("a"), np.arange(7))
    assert "rebuilding it" in caplog.text
    assert visible(tmp_path) == [SPEC.name]


def test_a_changed_source_makes_the_cache_stale(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("one")
    spec = CacheSpec("numbers", {}, lambda: [source] if source.exists() else [])
    ensure_cache(tmp_path, spec, build)
    source.write_text("one")  # another time, the same content
    open_cache(tmp_path, spec)
    source.write_text("two")
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


def test_a_cache_of_before_folders_were_watched_is_found(tmp_path: Path) -> None:
    ensure_cache(tmp_path / "cache", CacheSpec("numbers", {}), build)
    (tmp_path / "texts").mkdir()
    ensure_cache(
        tmp_path / "cache", CacheSpec("numbers", {}, lambda: [tmp_path / "texts"]), no_build
    )


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(writer: CacheWriter) -> None:
        build(writer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_cache(tmp_path, SPEC, interrupted)
    assert visible(tmp_path) == []


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    head = (
        "import os, signal, sys, time\nimport numpy as np\nfrom datamodules.core.cache import *\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_interrupted_process_is_cleaned_up_after(tmp_path: Path) -> None:
    killed = run(
        """
        def build(writer):
            writer.add("a", np.arange(7))
            os.kill(os.getpid(), signal.SIGKILL)
        root = __import__("pathlib").Path(sys.argv[1])
        ensure_cache(root, CacheSpec("numbers", {"count": 7}), build)
        """,
        str(tmp_path),
    )
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert any(name.startswith(f".{SPEC.name}.tmp-") for name in visible(tmp_path))
    with pytest.raises(MissingDataError):
        open_cache(tmp_path, SPEC)
    ensure_cache(tmp_path, SPEC, build)
    assert visible(tmp_path) == [SPEC.name]


def test_two_processes_build_once(tmp_path: Path) -> None:
    code = """
    def build(writer):
        print("built", flush=True)
        writer.add("a", np.arange(7))
        time.sleep(0.5)
        writer.add("b", np.arange(3))
    root = __import__("pathlib").Path(sys.argv[1])
    cache = ensure_cache(root, CacheSpec("numbers", {"count": 7}), build)
    print(int(cache.array("a").sum()), flush=True)
    """
    processes = [run(code, str(tmp_path / "caches")) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(chain(*outputs)) == ["21", "21", "21", "built"]


def test_a_process_that_waits_says_for_whom(tmp_path: Path, caplog) -> None:
    """At once, and in a form that is shown without any set-up of logging."""
    code = """
    root = __import__("pathlib").Path(sys.argv[1])
    def build(writer):
        writer.add("a", np.arange(7))
        print("building", flush=True)
        sys.stdin.readline()
    ensure_cache(root, CacheSpec("numbers", {"count": 7}), build)
    """
    builder = run(code, str(tmp_path))
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    Timer(0.3, builder.stdin.close).start()
    ensure_cache(tmp_path, SPEC, no_build)
    assert builder.wait(60) == 0
    (record,) = [record for record in caplog.records if "is being built" in record.message]
    assert record.levelno >= logging.WARNING
    assert f"is being built by process {builder.pid} on " in record.message
    assert visible(tmp_path) == [SPEC.name]


def test_a_full_disk_is_told_with_a_remedy(tmp_path: Path) -> None:
    def fill(writer: CacheWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        DataError, match=r"no space left on device.*free some space, or set cache_d"
    ):
        ensure_cache(tmp_path, SPEC, fill)


def test_a_file_in_the_way_of_the_temporary_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f".{SPEC.name}.tmp-new").touch()
    ensure_cache(tmp_path, SPEC, build)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"is not writable .*cache_dir.*LIT_PROBATTN_CACHE"):
        ensure_cache(tmp_path / "file" / "caches", SPEC, build)


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


def from_file(path: Path) -> tuple[CacheSpec, object]:
    """A cache of the bytes of a file."""

    def read(writer: CacheWriter) -> None:
        writer.add("a", np.frombuffer(path.read_bytes(), dtype=np.uint8))

    return CacheSpec("numbers", {"count": 7}, lambda: [path]), read


def test_a_source_that_grows_while_it_is_read_makes_no_cache(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("first half")
    spec, read = from_file(source)

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


def test_other_content_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    """As a copy that keeps times leaves it."""
    source = tmp_path / "source.txt"
    source.write_text("old")
    spec, read = from_file(source)
    ensure_cache(tmp_path / "caches", spec, read)
    before = source.stat()
    source.write_text("new")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.stat().st_mtime_ns == before.st_mtime_ns
    assert bytes(ensure_cache(tmp_path / "caches", spec, read).array("a")) == b"new"


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


@pytest.mark.parametrize("place", [SPEC.name, f".{SPEC.name}.builder"])
def test_what_is_in_the_way_of_a_cache_is_named(tmp_path: Path, place: str) -> None:
    if place.startswith("."):
        (tmp_path / place).mkdir()
    else:
        (tmp_path / place).touch()
    with pytest.raises(DataError, match=rf"{place}.*remove") as caught:
        ensure_cache(tmp_path, SPEC, build)
    assert "\n" not in str(caught.value)

"""Files of text: ListOps, Retrieval, IMDB, WikiText, vocabularies; and caches."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from datamodules import ListOps, Retrieval, Text
from datamodules.core.cache import CacheSpec, ensure_cache, open_cache
from tests.bad_inputs.cases import Case, data_error, in_code
from tests.datamodules.core.test_cache import SPEC, build, change_meta, flip
from tests.datamodules.lra.files import PAIR_FILES, pair_lines, write_pairs
from tests.datamodules.lra.test_listops_release import GOOD, HEADER
from tests.datamodules.lra.test_text import REVIEWS, member, write_archive
from tests.datamodules.text import made as made_text

# ---- ListOps --------------------------------------------------------------------------------


@in_code
def listops(folder: Path, train: str | bytes) -> None:
    """A release with another training file."""
    for name in ("val", "test"):
        (folder / f"basic_{name}.tsv").write_text(HEADER + GOOD)
    content = train if isinstance(train, bytes) else train.encode()
    (folder / "basic_train.tsv").write_bytes(content)
    ListOps(source="released", data_dir=str(folder)).prepare_data()


def _listops_cases() -> Iterator[Case]:
    case = partial(Case, "ListOps (`.tsv`)")
    nowhere = data_error(lambda f: ListOps(source="released", data_dir=str(f)).prepare_data())
    yield case("no file", nowhere)
    yield case("an empty file", listops(""))
    yield case("only a header", listops(HEADER))
    yield case("no header", listops(GOOD))
    yield case("no tab", listops(HEADER + GOOD.replace("\t", " ")))
    yield case("an empty line", listops(HEADER + GOOD + "\n" + GOOD))
    yield case("an unknown token", listops(HEADER + GOOD.replace("[MAX", "[AVG")))
    yield case("a byte that is not text", listops((HEADER + GOOD).encode().replace(b"3", b"\xff")))
    yield case("a wrong value", listops(HEADER + GOOD.replace("\t4", "\t3")))
    yield case("no digit", listops(HEADER + GOOD.replace("\t4", "\t10")))
    yield case("unbalanced parentheses", listops(HEADER + "( ( [MAX 4 ) 3 ) ] )\t4\n"))
    yield case("unbalanced brackets", listops(HEADER + "( ( [MAX 4 ) 3 )\t4\n"))
    yield case("no arguments", listops(HEADER + "( ( [MAX ] ) ] )\t4\n"))
    yield case("cut off in a line", listops((HEADER + GOOD + GOOD)[:-8]))


# ---- Retrieval ------------------------------------------------------------------------------


@in_code
def retrieval(folder: Path, line: bytes) -> None:
    """A release whose training file ends with another line."""
    write_pairs(folder, train=2)
    path = folder / PAIR_FILES["train"]
    path.write_bytes(b"".join(pair_lines(2, 0)) + line)
    Retrieval(data_dir=str(folder)).prepare_data()


def _retrieval_cases() -> Iterator[Case]:
    case = partial(Case, "Retrieval (`.tsv`)")
    yield case("three columns", retrieval(b"1.0\ta\tb\n"))
    yield case("a label of 2", retrieval(b"2.0\ta\tb\tone\ttwo\n"))
    yield case("no label", retrieval(b"\ta\tb\tone\ttwo\n"))
    yield case("no test file", data_error(_half_of_retrieval))


def _half_of_retrieval(folder: Path) -> None:
    write_pairs(folder)
    (folder / PAIR_FILES["test"]).unlink()
    Retrieval(data_dir=str(folder)).prepare_data()


# ---- IMDB -----------------------------------------------------------------------------------


@in_code
def imdb(folder: Path, change: Callable[[Path], object]) -> None:
    """An archive of reviews that `change` writes."""
    change(folder / "aclImdb_v1.tar.gz")
    Text(data_dir=str(folder), val_fraction=0.2).prepare_data()


def _cut_archive(path: Path) -> None:
    write_archive(path)
    path.write_bytes(path.read_bytes()[:-20])


def _imdb_cases() -> Iterator[Case]:
    case = partial(Case, "IMDB (archive)")
    one_class = {name: data for name, data in REVIEWS.items() if "test/pos" not in name}
    link = member("aclImdb/train/pos/99_9.txt", tarfile.SYMTYPE)
    yield case("nothing", imdb(lambda path: None))
    yield case("cut off", imdb(_cut_archive))
    yield case("no archive", imdb(lambda path: path.write_bytes(b"reviews")))
    yield case("a member outside its folder", imdb(lambda p: write_archive(p, [member("../x")])))
    yield case("a link", imdb(lambda p: write_archive(p, [link])))
    yield case("a class without reviews", imdb(lambda p: write_archive(p, reviews=one_class)))


# ---- WikiText -------------------------------------------------------------------------------


@in_code
def wikitext(folder: Path, change: Callable[[Path], object], **options: object) -> None:
    """A corpus that is changed before it is read."""
    made_text.write(folder)
    change(folder)
    made_text.data(folder, **options).setup()


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _raw_archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "wikitext-103-v1.zip", "w") as archive:
        archive.writestr("wikitext-103-raw/wiki.train.raw", "text")
    for name in made_text.NAMES:
        (folder / f"wiki.{name}.tokens").unlink()


@in_code
def _vocabulary(folder: Path, text: bytes) -> None:
    made_text.write(folder)
    (folder / "vocabulary.txt").write_bytes(text)
    made_text.data(folder, vocab_file=str(folder / "vocabulary.txt")).setup()


def _wikitext_cases() -> Iterator[Case]:
    case = partial(Case, "WikiText and vocabularies (token files)")
    lost = wikitext(lambda folder: (folder / "wiki.valid.tokens").unlink())
    yield case("no validation text", lost)
    yield case("an empty file", wikitext(_write("wiki.test.tokens", b"")))
    yield case("a byte that is not UTF-8", wikitext(_write("wiki.test.tokens", b"a\nb \xff\n")))
    yield case("too short for one segment", wikitext(_write("wiki.train.tokens", b"<unk> b\n")))
    yield case("the raw archive", wikitext(_raw_archive, corpus="wikitext-103"))
    yield case("a table smaller than the vocabulary", wikitext(lambda f: None, vocab_size=3))
    yield case("a word twice", _vocabulary(b"<eos>\n<unk>\na\na\n"))
    yield case("two words on a line", _vocabulary(b"<eos>\n<unk>\na b\n"))
    yield case("a vocabulary without `<eos>`", _vocabulary(b"<unk>\na\n"))
    yield case("a vocabulary without `<unk>`", _vocabulary(b"<eos>\na\n"))
    yield case("a vocabulary that is not text", _vocabulary(b"\xff\xfe"))


# ---- caches ---------------------------------------------------------------------------------


@in_code
def cache(folder: Path, change: Callable[[Path], object]) -> None:
    """A cache that is changed before it is opened."""
    ensure_cache(folder, SPEC, build)
    change(folder / SPEC.name)
    open_cache(folder, SPEC)


def _grown_source(folder: Path) -> None:
    source = folder / "source.txt"
    source.write_text("one")
    spec = CacheSpec("numbers", {}, lambda: [source])
    ensure_cache(folder, spec, build)
    source.write_text("two more")
    open_cache(folder, spec)


def _cache_cases() -> Iterator[Case]:
    case = partial(Case, "Caches")
    cut = cache(lambda f: (f / "a.npy").write_bytes((f / "a.npy").read_bytes()[:-1]))
    yield case("none", data_error(lambda folder: open_cache(folder, SPEC)))
    yield case("a file is cut off", cut)
    yield case("one byte changed", cache(flip))
    yield case("a file is missing", cache(lambda folder: (folder / "a.npy").unlink()))
    yield case("no `meta.json`", cache(lambda folder: (folder / "meta.json").unlink()))
    yield case("`meta.json` is cut off", cache(lambda f: (f / "meta.json").write_text('{"fo')))
    yield case("`meta.json` holds a list", cache(lambda f: (f / "meta.json").write_text("[1]")))
    yield case("another format version", cache(partial(change_meta, format_version=99)))
    yield case("made for other settings", cache(partial(change_meta, settings={"count": 6})))
    yield case("`files` is not a mapping", cache(partial(change_meta, files=[1])))
    yield case("the release has changed since", data_error(_grown_source))


def cases() -> Iterator[Case]:
    """Every reader of text."""
    yield from _listops_cases()
    yield from _retrieval_cases()
    yield from _imdb_cases()
    yield from _wikitext_cases()
    yield from _cache_cases()

"""Parallel text: both sides, their lines, BPE codes and dictionaries; the releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from datamodules import IWSLT14, WMT14, Translation
from tests.bad_inputs.cases import Case, command_error, data_error, data_main, in_code, on_folder
from tests.datamodules.text.translation import made

_DICTIONARY = "der 3\nHund 2\n"


@in_code
def parallel(folder: Path, change: Callable[[Path], object], **options: object) -> None:
    """A folder of parallel text that is changed before it is read."""
    made.write(folder / "text")
    change(folder / "text")
    arguments = {"tokens": "words", "max_tokens": 128, **options}
    module = Translation(path=str(folder / "text"), **arguments)  # type: ignore[arg-type]
    module.prepare_data()
    module.setup()
    module._evaluation_order("test")


def _remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _line(name: str, line: bytes) -> Callable[[Path], object]:
    return lambda folder: made.strange_line(folder, name, 4, line)


@on_folder
def _write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        place = name.replace("_", ".", 1) if "dict" not in name else name.replace("_", ".")
        (folder / place).write_text(text, encoding="utf-8")


def _one_line_less(folder: Path) -> None:
    lines = (folder / "train.en").read_text("utf-8").splitlines(keepends=True)
    (folder / "train.en").write_text("".join(lines[:-1]), "utf-8")


def _dictionaries(german: str, english: str) -> Callable[[Path], object]:
    return _write(dict_de_txt=german, dict_en_txt=english)


def _codes(text: str) -> Callable[[Path], object]:
    return _write(code=text)


def _side_cases() -> Iterator[Case]:
    case = partial(Case, "Parallel text (folder or archive)")
    yield case("no path", data_error(lambda folder: Translation().prepare_data()))
    yield case(
        "no such folder", data_error(lambda f: Translation(path=str(f / "x")).prepare_data())
    )
    yield case("a file that is no archive", data_error(_no_archive))
    yield case("an archive that is cut off", data_error(_cut_archive))
    yield case("an empty folder", parallel(_empty))
    yield case("other languages", parallel(lambda f: None, source_language="fr"))
    yield case("a side that is missing", parallel(_remove("valid.en")))
    yield case("a training side that is missing", parallel(_remove("train.de")))
    yield case(
        "a split that is missing",
        parallel(lambda f: [(f / n).unlink() for n in ("test.de", "test.en")]),
    )
    yield case("sides of unequal numbers of lines", parallel(_one_line_less))
    yield case("files without a line", parallel(_write(test_de="", test_en="")))
    yield case("an empty line", parallel(_line("train.en", b"")))
    yield case("an empty line in a test file", parallel(_line("test.de", b" \r")))
    yield case(
        "another encoding than UTF-8", parallel(_line("train.de", "größer".encode("latin1")))
    )
    yield case("a sentence longer than the model", parallel(lambda f: None, max_length=9))
    yield case("a sentence longer than a batch", parallel(lambda f: None, max_tokens=9))
    yield case(
        "a sentence longer than an evaluation batch", parallel(lambda f: None, eval_max_tokens=5)
    )
    yield case("nothing left after cleaning", parallel(lambda f: None, max_words=1))
    yield case("a ratio below 1", parallel(lambda f: None, max_ratio=0.5))
    yield case("one language twice", parallel(lambda f: None, target_language="de"))
    unknown = ["check", "translation", "--path", ".", "--tokens", "bpe"]
    yield case("unknown tokens", lambda _: command_error(unknown, data_main))


def _beside_cases() -> Iterator[Case]:
    case = partial(Case, "BPE codes and dictionaries of translation")
    bpe = {"tokens": "moses_bpe"}
    yield case(
        "a line of codes that is no pair", parallel(_codes("#version: 0.2\ne n\nen\n"), **bpe)
    )
    yield case("codes of an unknown version", parallel(_codes("#version: 0.9\ne n\n"), **bpe))
    yield case("codes without merges", parallel(_codes("#version: 0.2\n"), **bpe))
    yield case("no such codes", parallel(lambda f: None, codes_file="DIR/code", **bpe))
    yield case("codes for sub-words", data_error(_codes_for_subwords))
    cut = _line("train.de", b"der gro@@ \xc3\x9fe Hund")
    yield case("text that is cut already", parallel(cut, **bpe))
    yield case("a dictionary without a count", parallel(_dictionaries("der\n", _DICTIONARY)))
    twice = parallel(_dictionaries("der 3\nder 2\n", _DICTIONARY))
    yield case("a word twice", twice)
    yield case("a special token", parallel(_dictionaries("<pad> 3\n", _DICTIONARY)))
    yield case("an empty dictionary", parallel(_dictionaries("", _DICTIONARY)))
    yield case("a dictionary that is not UTF-8", parallel(_latin_dictionary))
    lacking = parallel(_dictionaries(_DICTIONARY, _DICTIONARY))
    yield case("a dictionary that lacks the words of the text", lacking)
    one = parallel(_write(dict_de_txt=_DICTIONARY))
    yield case("a dictionary of one language", one)
    joint = parallel(_dictionaries(_DICTIONARY, "the 1\n"), joint_dictionary=True)
    yield case("two dictionaries as a joint one", joint)


def _release_cases() -> Iterator[Case]:
    case = partial(Case, "IWSLT'14 and WMT'14")
    yield case("no IWSLT'14", data_error(lambda f: IWSLT14(data_dir=str(f)).prepare_data()))
    yield case("no WMT'14", data_error(lambda f: WMT14(data_dir=str(f)).prepare_data()))
    yield case("IWSLT'14 without a test file", data_error(_half_of_iwslt))
    yield case("WMT'14 without newstest2014", data_error(_half_of_wmt))


def _no_archive(folder: Path) -> None:
    (folder / "text.doc").write_text("text")
    Translation(path=str(folder / "text.doc")).prepare_data()


def _cut_archive(folder: Path) -> None:
    (folder / "text.tar.gz").write_bytes(b"\x1f\x8b\x08\x00")
    Translation(path=str(folder / "text.tar.gz")).prepare_data()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _latin_dictionary(folder: Path) -> None:
    (folder / "dict.en.txt").write_text(_DICTIONARY)
    (folder / "dict.de.txt").write_bytes("größer 3\n".encode("latin1"))


def _codes_for_subwords(folder: Path) -> None:
    made.write(folder / "text")
    (folder / "codes").write_text("#version: 0.2\ne n\n")
    options = {"tokens": "subwords", "codes_file": str(folder / "codes")}
    Translation(path=str(folder / "text"), **options).prepare_data()  # type: ignore[arg-type]


def _half_of_iwslt(folder: Path) -> None:
    release = made.write_iwslt(folder / "de-en")
    (release / "IWSLT14.TED.tst2012.de-en.en.xml").unlink()
    IWSLT14(data_dir=str(folder)).prepare_data()


def _half_of_wmt(folder: Path) -> None:
    for name in ("train.tok.clean.bpe.32000", "newstest2013.tok.bpe.32000"):
        for language in ("de", "en"):
            (folder / f"{name}.{language}").write_text("a@@ b\n")
    WMT14(data_dir=str(folder)).prepare_data()


def cases() -> Iterator[Case]:
    """Every case of this file."""
    yield from _side_cases()
    yield from _beside_cases()
    yield from _release_cases()

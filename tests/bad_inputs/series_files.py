"""Files of time series (`.ts`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from datamodules import UEA
from datamodules.series.ts_file import read_ts
from tests.bad_inputs.cases import Case, data_error, in_code
from tests.datamodules.series.test_ts_file import BAD, GOOD, write


def _file(text: str | bytes) -> Callable[[Path], str]:
    return data_error(lambda folder: read_ts(write(folder, text)))


@in_code
def _two_files(folder: Path, train: str, test: str) -> None:
    for part, text in (("TRAIN", train), ("TEST", test)):
        (folder / f"BasicMotions_{part}.ts").write_text(text)
    UEA("BasicMotions", data_dir=str(folder)).prepare_data()


def _archive(**options: object) -> Callable[[Path], str]:
    return data_error(lambda f: UEA(**{"data_dir": str(f), **options}).prepare_data())  # type: ignore[arg-type]


def cases() -> Iterator[Case]:
    """Malformed files, then archives."""
    case = partial(Case, "UEA archives (`.ts`)")
    for given, text in BAD.items():
        yield case(given, _file(text))
    yield case("an unknown archive", _archive(name="BasicMotion"))
    yield case("no files", _archive(name="Heartbeat"))
    yield case("an unknown normalisation", _archive(name="Heartbeat", normalization="robust"))
    other = (
        GOOD.replace("@dimensions 2", "@dimensions 1").replace(":4,5,6", "").replace(":0.25,+7", "")
    )
    yield case("test series of another size", _two_files(GOOD, other))
    unseen = GOOD.replace("Up Down", "Up Down Left").replace(":Down", ":Left")
    yield case("a class without training series", _two_files(GOOD, unseen))

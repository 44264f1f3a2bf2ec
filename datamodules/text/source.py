"""The text of a split, read in blocks: a text file, a member of a zip file, Parquet shards.

Line ends are those of Python's text files ("\\n", "\\r\\n" or "\\r"), a byte-order mark is skipped,
and the last line can lack a line end.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from datamodules.core.files import DAMAGED, missing
from datamodules.core.tables import readable_parquet
from lit_probattn.base.errors import DataError, MissingDataError

_BLOCK_BYTES = 4 << 20
# Limits memory: blocks are whole lines.
MOST_LINE_BYTES = 64 << 20
_BLOCK_ROWS = 16384
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def text_files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files at a path in order: the file itself, or the visible ones below a folder.

    Raises:
        MissingDataError: The path does not exist, or the folder has no files with these suffixes.
    """
    if not path.exists():
        raise missing(path)
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes)
    files = [p for p in found if p.is_file() and not p.name.startswith(".")]
    if not files:
        raise MissingDataError(
            f"{path}: this folder contains no text; expected files ending in {', '.join(suffixes)}"
        )
    return files


class Block(NamedTuple):
    """Whole lines of text, each ended by a newline, and the position of the next block."""

    text: str
    position: int


@dataclass(frozen=True)
class TextSource:
    """The text of one split; positions count bytes of text, or rows of Parquet shards."""

    paths: tuple[Path, ...]

    unit = "bytes"

    @property
    def name(self) -> str:
        """Name for messages."""
        return ", ".join(map(str, self.paths))

    @property
    def size(self) -> int:
        """End position."""
        raise NotImplementedError

    def blocks(self, start: int = 0) -> Iterator[Block]:
        """Yield the blocks from a position returned with an earlier block."""
        raise NotImplementedError

    def identity(self) -> list[Any]:
        """Return names, sizes and times of the files, which must not change until a job ends."""
        states = [(path, path.stat()) for path in self.paths]
        return [[str(path), state.st_size, state.st_mtime_ns] for path, state in states]


@dataclass(frozen=True)
class PlainText(TextSource):
    """A UTF-8 text file, or a member of a zip file.

    Args:
        member: Name in the archive; None for a plain file.
    """

    member: str | None = None

    @property
    def name(self) -> str:
        """Path, and name in the archive if there is one."""
        return str(self.paths[0]) if self.member is None else f"{self.paths[0]}:{self.member}"

    @property
    def size(self) -> int:
        """Number of bytes of text."""
        if self.member is None:
            return self.paths[0].stat().st_size
        with self._archive() as archive:
            return archive.getinfo(self.member).file_size

    def identity(self) -> list[Any]:
        """Return the identity of the file, and the name in the archive."""
        return [*super().identity(), self.member]

    def blocks(self, start: int = 0) -> Iterator[Block]:
        """Yield blocks of about 4 MiB; raises DataError for invalid bytes, lines or archives."""
        with self._open() as file:
            file.seek(start)
            position = start
            while raw := file.read(_BLOCK_BYTES) + file.readline(MOST_LINE_BYTES):
                if not raw.endswith(b"\n") and len(raw) >= MOST_LINE_BYTES:
                    line = self._line_of(position + raw.rfind(b"\n") + 1)
                    raise DataError(
                        f"{self.name}, line {line}: longer than {MOST_LINE_BYTES} bytes; split the "
                        "text into shorter lines"
                    )
                yield Block(self._decode(raw, position), position + len(raw))
                position += len(raw)

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.paths[0]) as archive:
                yield archive
        except DAMAGED as error:
            raise DataError(f"{self.name} is corrupt: {error}") from None

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self.member is None:
            with self.paths[0].open("rb") as file:
                yield file
            return
        with self._archive() as archive, archive.open(self.member) as packed:
            yield cast(BinaryIO, io.BufferedReader(cast(Any, packed), _BLOCK_BYTES))

    def _decode(self, raw: bytes, position: int) -> str:
        if position == 0:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            offset = position + error.start
            raise DataError(
                f"{self.name}, line {self._line_of(offset)}: byte {offset} is not UTF-8 "
                f"({error.reason}); convert the file to UTF-8"
            ) from None
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text if text.endswith("\n") or not text else f"{text}\n"

    def _line_of(self, offset: int) -> int:
        with self._open() as file:
            return file.read(offset).count(b"\n") + 1


@dataclass(frozen=True)
class ParquetText(TextSource):
    """Parquet shards with a column `text`; each row is a line, with or without a newline."""

    unit = "rows"

    @cached_property
    def _rows(self) -> list[int]:
        """Number of rows of each shard."""
        return [self._shard(path).metadata.num_rows for path in self.paths]

    @property
    def size(self) -> int:
        """Number of rows of all shards."""
        return sum(self._rows)

    def blocks(self, start: int = 0) -> Iterator[Block]:
        """Yield blocks of at most 16384 rows; raises DataError for missing text or corruption."""
        position = 0
        for path, count in zip(self.paths, self._rows, strict=True):
            if position + count <= start:
                position += count
                continue
            for rows in self._batches(path):
                skip = max(0, start - position)
                if skip < len(rows):
                    text = self._join(rows[skip:], path, position + skip)
                    yield Block(text, position + len(rows))
                position += len(rows)

    def _batches(self, path: Path) -> Iterator[list[str | None]]:
        """Yield the rows of a shard in batches."""
        with readable_parquet(path):
            for batch in self._shard(path).iter_batches(_BLOCK_ROWS, columns=["text"]):
                yield batch.column(0).to_pylist()

    def _shard(self, path: Path) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with readable_parquet(path):
            shard = pq.ParquetFile(path)
        kinds = {field.name: field.type for field in shard.schema_arrow}
        kind = kinds.get("text")
        if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            columns = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
            raise DataError(f"{path}: expected a column `text` of strings, received {columns}")
        return shard

    def _join(self, rows: list[str | None], path: Path, first: int) -> str:
        if None in rows:
            raise DataError(f"{path}: row {first + rows.index(None)} of the split: text is missing")
        lines = (str(row).replace("\r\n", "\n").replace("\r", "\n") for row in rows)
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


@dataclass(frozen=True)
class JoinedText(TextSource):
    """Several texts as one; positions count over all parts.

    Args:
        parts: The texts.
    """

    parts: tuple[TextSource, ...]

    @property
    def name(self) -> str:
        """Name of the first part, and the number of others."""
        more = len(self.parts) - 1
        return self.parts[0].name + (f" and {more} more" if more else "")

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Unit of positions."""
        return self.parts[0].unit

    @property
    def size(self) -> int:
        """Total size of all parts."""
        return sum(part.size for part in self.parts)

    def blocks(self, start: int = 0) -> Iterator[Block]:
        """Yield the converted blocks of all parts."""
        first = 0
        for part in self.parts:
            size = part.size
            convert = self.conversion_of(part) if first + size > start else None
            if convert is not None:
                for block in part.blocks(max(0, start - first)):
                    yield Block(convert(block.text), first + block.position)
            first += size

    def conversion_of(self, part: TextSource) -> Callable[[str], str] | None:
        """Return the function that converts the blocks of a part; None skips the part."""
        raise NotImplementedError

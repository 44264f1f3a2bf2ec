"""The user's running text for language models: a file, or a folder of files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.base import SPLITS, Split
from datamodules.core.cache import Cache, CacheWriter, ensure_cache
from datamodules.core.division import Divided, divide
from datamodules.core.files import expand
from datamodules.core.new_samples import NewSamples, new_spec
from datamodules.core.own import (
    SHOWN_SAMPLES,
    AtPath,
    beginning,
    by_split,
    length_line,
    split_of,
    warn_ignored,
)
from datamodules.text.choice import OwnTokens
from datamodules.text.segments import WindowSplit
from datamodules.text.source import JoinedText, ParquetText, PlainText, TextSource, text_files
from datamodules.text.stream import TextStream
from lit_probattn.base.errors import DataError, prefixed
from lit_probattn.base.files import digest, fingerprint

SUFFIXES = (".txt", ".text", ".md", ".rst", ".tokens", ".parquet")
# With at least this many files, a file is a document and is not divided.
_LEAST_DOCUMENTS = 20
# Otherwise: about this many pieces of whole lines, with these bounds on characters per piece.
_PIECES, _LEAST_PIECE, _LARGEST_PIECE = 100, 100, 20000
_SHOWN = 70


@dataclass(frozen=True)
class DividedText(JoinedText):
    """One split of a text that is split by a hash; positions count over all files.

    Args:
        split: The split.
        chosen: Split of each piece, by its digest.
        piece_len: Minimum number of characters of a piece; None if each file is one piece.
    """

    split: str
    chosen: dict[bytes, str]
    piece_len: int | None

    @property
    def name(self) -> str:
        """Name of the split and of the text."""
        return f"{self.split} part of {super().name}"

    def identity(self) -> list[Any]:
        """Return the identity of the files and of the split."""
        chosen = digest(repr(sorted(self.chosen.items())))
        return [*super().identity(), self.split, self.piece_len, chosen]

    def conversion_of(self, part: TextSource) -> Callable[[str], str] | None:
        """Return the function that selects the pieces of the split; None for another's file."""
        length = self.piece_len
        if length is None:
            return str if self.chosen[_fingerprint(part)] == self.split else None
        return lambda text: "".join(
            p for p in pieces(text, length) if self.chosen[fingerprint(p.encode())] == self.split
        )


def pieces(text: str, length: int) -> Iterator[str]:
    """Yield groups of whole lines with at least `length` characters."""
    lines: list[str] = []
    size = 0
    for line in io.StringIO(text, newline="\n"):
        lines.append(line)
        size += len(line)
        if size >= length:
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)


def _fingerprint(source: TextSource) -> bytes:
    return fingerprint(block.text.encode() for block in source.blocks())


class OwnText(NewSamples, AtPath, Divided, OwnTokens, TextStream):
    """The user's text as one stream of tokens per split; every line ends with `<eos>`.

    If tokens are bytes or characters, the newline is the `<eos>`. Words outside the vocabulary
    become `<unk>`.

    `path` is a text file, a Parquet file with a column `text`, or a folder of such files, searched
    recursively. If a folder has files named train, val and test, these are the splits, and others
    are ignored with a warning; only some of the three are an error. Otherwise the text is split by
    a hash: whole files if there are at least 20, else groups of lines. `new_path` is a single file.

    Args:
        **kwargs: Arguments of NewSamples, AtPath, Divided, OwnTokens and TextStream.
    """

    task = "own_text"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path, self.title = expand(self.given_path), self.given_path
        self._found: dict[str, TextSource] = {}
        self._new_text: Cache | None = None
        text_files(self.path, SUFFIXES)  # raises errors of the path immediately

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        files = {"path": str(self.path.resolve()), "shares": self.shares}
        return {**files, "split_seed": self.split_seed, **super().settings()}

    def sources(self) -> list[Path]:
        """Return the text files that are read."""
        files = text_files(self.path, SUFFIXES)
        return list(self._named(files).values()) or files

    def find(self) -> dict[str, TextSource]:
        """Return the splits: separate files, or parts of all files."""
        if not self._found:
            files = text_files(self.path, SUFFIXES)
            named = self._named(files)
            self._found = (
                self._separate(named, files) if named else self._divided(list(map(_source, files)))
            )
        return self._found

    def _named(self, files: Sequence[Path]) -> dict[str, Path]:
        """Return the file of each split by its name; empty if the text has to be divided."""
        if self.path.is_file():
            return {}
        named = [path for path in files if split_of(path.stem) is not None]
        if not named:
            return {}
        present = {split_of(path.stem) for path in named}
        missing = [name for name in SPLITS if name not in present]
        if missing:
            names = ", ".join(path.name for path in named[:5])
            raise DataError(
                f"{self.path} has {names}, but no file of {' and '.join(missing)}; add what is "
                "missing, or rename the files so that they are split automatically"
            )
        found = by_split(self.path, self._inside(files))
        return {name: self.path / found[name] for name in SPLITS}

    def _inside(self, files: Iterable[Path]) -> list[str]:
        return [str(path.relative_to(self.path)) for path in files]

    def _separate(self, named: dict[str, Path], files: Sequence[Path]) -> dict[str, TextSource]:
        """Return separate splits, which must differ; warn about other files of the folder."""
        warn_ignored(self.path, self._inside(files), self._inside(named.values()))
        self.missing_shares(named)
        found = {name: _source(path) for name, path in named.items()}
        digests: dict[bytes, TextSource] = {}
        for source in found.values():
            same = digests.setdefault(_fingerprint(source), source)
            if same is not source:
                raise DataError(
                    f"{source.name} duplicates {same.name}; every split needs different text"
                )
        return found

    def _divided(self, sources: Sequence[TextSource]) -> dict[str, TextSource]:
        length: int | None = None
        unit = "files"
        if len(sources) >= _LEAST_DOCUMENTS:
            keys = [_fingerprint(source) for source in sources]
        else:
            size = sum(len(block.text) for source in sources for block in source.blocks())
            if not size:
                raise DataError(f"{self.path} is empty: expected text")
            length = min(max(size // _PIECES, _LEAST_PIECE), _LARGEST_PIECE)
            unit = "groups of lines"
            texts = (block.text for source in sources for block in source.blocks())
            keys = [fingerprint(piece.encode()) for text in texts for piece in pieces(text, length)]
        splits = divide(str(self.path), keys, self.shares, self.split_seed, unit)
        chosen = dict(zip(keys, splits, strict=True))
        paths = tuple(path for source in sources for path in source.paths)
        return {name: DividedText(paths, tuple(sources), name, chosen, length) for name in SPLITS}

    # ---- a new text --------------------------------------------------------------------------

    def new_split(self, path: Path) -> tuple[Split, list[str]]:
        """Return the windows of a file, with the vocabulary of the training text."""
        if not path.is_file():
            raise DataError(f"new_path: {path}: expected a file")
        spec = new_spec(self, path, self.vocabulary.digest)
        self.title = f"{self.given_path} and {path}"

        def build(writer: CacheWriter) -> None:
            self.tokenise(writer, self.job(spec, {"test": _source(path)}), self.vocabulary)

        self._new_text = ensure_cache(self.cache_dir, spec, build)
        with prefixed(f"new_path: {path}", DataError, to=DataError):
            split: Any = WindowSplit(self.tokens_of("test"), self.segment_len, self.strides["test"])
        return split, []

    def has_labels(self) -> bool:
        """Return True: every token is the label of the one before it."""
        return True

    def tokens_of(self, name: str) -> np.ndarray[Any, Any]:
        """Return the token ids of a split, (num_tokens,); those of the new text are the test."""
        if self._new_text is None or name != "test":
            return super().tokens_of(name)
        return self._new_text.array("test_tokens")

    @property
    def num_unknown(self) -> dict[str, int]:
        """Number of `<unk>` tokens of each split."""
        found = super().num_unknown
        if self._new_text is not None:
            found["test"] = int(self._new_text.array("num_unknown")[0])
        return found

    # ---- report ------------------------------------------------------------------------------

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits, and three samples."""
        counts, num_unknown = self.counts, self.num_unknown
        yield f"tokens: {self.choice.unit}, vocabulary {len(self.vocabulary)}"
        for name in SPLITS:
            found, unknown = counts[name], num_unknown[name]
            lines = length_line(self._line_lengths(name), what="tokens per line")
            yield f"{name}: {found} tokens, {len(self.split(name))} samples; {lines}"
            yield f"<unk> in {name}: {unknown} of {found} tokens ({100 * unknown / found:.2f} %)"
        tokens = self.cache.array("train_tokens")
        for first in np.linspace(0, max(0, len(tokens) - 4 * _SHOWN), SHOWN_SAMPLES).astype(int):
            text = self.decode(tokens[first : first + 4 * _SHOWN].tolist())
            yield f"sample at token {first}: {beginning(text, _SHOWN)}"

    def _line_lengths(self, name: str) -> np.ndarray[Any, Any]:
        ends = np.flatnonzero(self.tokens_of(name) == self.vocabulary.end_of_line)
        return np.diff(np.concatenate([[-1], ends])) - 1


def _source(path: Path) -> TextSource:
    return ParquetText((path,)) if path.suffix.lower() == ".parquet" else PlainText((path,))

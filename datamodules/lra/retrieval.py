"""Retrieval of the Long Range Arena: are two papers linked? Both are sequences of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.base import Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.sequences import PairSplit, Ragged
from datamodules.lra import aan
from datamodules.lra.arena import ArenaTokens
from lit_probattn.base.errors import DataError
from lit_probattn.base.files import fingerprint
from lit_probattn.base.progress import progress


class Retrieval(ArenaTokens):
    """Pairs of papers of the ACL Anthology Network as bytes; 1 if they are linked, else 0.

    Ids: 0 padding, byte + 1 otherwise. Quotes and bytes that are not UTF-8 are ordinary tokens. A
    batch has two sequences per sample: `inputs` and `key_mask` (B, 2, N). The cache stores the
    first 10000 bytes of each distinct text, for all values of `max_length_tokens`.

    Source: Long Range Arena, Retrieval, as prepared by both published pipelines (the benchmark's
    and MGK's base code). Departs from the source: nothing.

    Args:
        **kwargs: Arguments of ArenaTokens (`max_length_tokens` at most 10000), ArenaData and
            DataModule.
    """

    task = "retrieval"
    num_classes = 2  # not linked and linked

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self._max_length_tokens > aan.MAX_TEXT_BYTES:
            raise DataError(
                f"max_length_tokens must be at most {aan.MAX_TEXT_BYTES}, the prefix of a text "
                f"that "
                f"the published pipelines read, received {self._max_length_tokens}"
            )
        sizes = {"train": 147086, "val": 18090, "test": 17437}
        self.published = {name: Published(size) for name, size in sizes.items()}

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache; the release is fixed."""
        return {"source": "new_aan_pairs", "tokens": "bytes", "text_bytes": aan.MAX_TEXT_BYTES}

    def sources(self) -> list[Path]:
        """Return the released files."""
        return list(aan.FILES.find_single(self.data_dir).values())

    def build(self, writer: CacheWriter) -> None:
        """Read the release line by line."""
        paths = aan.FILES.find_single(self.data_dir)
        size = sum(path.stat().st_size for path in paths.values())
        with (
            progress("Retrieval: reading the release", size, "bytes") as advance,
            writer.stream("texts_tokens", np.uint8) as append,
        ):
            texts = _Texts(append)
            pairs = {name: list(_rows(path, texts, advance)) for name, path in paths.items()}
        if not texts.offsets[-1]:
            raise DataError(f"{next(iter(paths.values())).parent}: every text is empty")
        writer.add("texts_offsets", np.array(texts.offsets, dtype=np.int64))
        for name, columns in pairs.items():
            rows, num_bytes, targets = zip(*columns, strict=True)
            writer.add(f"{name}_rows", np.array(rows, dtype=np.int32))
            writer.add(f"{name}_bytes", np.array(num_bytes, dtype=np.int32))
            writer.add(f"{name}_targets", np.array(targets, dtype=np.uint16))

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the three splits, which share the stored texts."""
        texts = Ragged.open(cache, "texts")
        splits: dict[str, Split] = {}
        for name in aan.SPLIT_FILES:
            pairs, lengths, targets = (
                np.asarray(cache.array(f"{name}_{x}")) for x in ("rows", "bytes", "targets")
            )
            splits[name] = PairSplit(
                *(texts, targets, self._max_length_tokens),
                shift=1,
                pairs=pairs,
                text_lengths=lengths,
            )
        return splits


class _Texts:
    """Writes each distinct text once, by `append`."""

    def __init__(self, append: Callable[[npt.ArrayLike], None]) -> None:
        self._append = append
        self._rows: dict[bytes, int] = {}
        self.offsets = [0]

    def row(self, text: bytes) -> int:
        """Return the index of a text, writing it if it is new."""
        digest = fingerprint(text)
        if digest not in self._rows:
            self._rows[digest] = len(self._rows)
            self._append(np.frombuffer(text, dtype=np.uint8))
            self.offsets.append(self.offsets[-1] + len(text))
        return self._rows[digest]


def _rows(path: Path, texts: _Texts, advance: Callable[[int], None]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of both texts, their sizes in bytes, and the class of each pair."""
    for pair in aan.read_pairs(path, advance):
        yield [texts.row(text) for text in pair.texts], pair.num_bytes, pair.target

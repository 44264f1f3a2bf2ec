"""Retrieval of the Long Range Arena: are two papers linked? Both are sequences of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.base import Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.sequences import PairSplit, Ragged, ragged_writer
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
                f"that the published pipelines read, received {self._max_length_tokens}"
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
        written: dict[bytes, int] = {}  # index of each distinct text, by its digest
        with (
            progress("Retrieval: reading the release", size, "bytes") as advance,
            ragged_writer(writer, "texts", np.uint8) as append,
        ):

            def row(text: bytes) -> int:
                digest = fingerprint(text)
                if digest not in written:
                    written[digest] = len(written)
                    append(np.frombuffer(text, dtype=np.uint8))
                return written[digest]

            pairs = {
                name: [
                    ([row(text) for text in pair.texts], pair.num_bytes, pair.target)
                    for pair in aan.read_pairs(path, advance)
                ]
                for name, path in paths.items()
            }
        if written.keys() == {fingerprint(b"")}:
            raise DataError(f"{next(iter(paths.values())).parent}: every text is empty")
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

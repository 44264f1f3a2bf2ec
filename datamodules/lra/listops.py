"""ListOps of the Long Range Arena: nested list operations with a value 0..9."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from datamodules.core.base import GENERATED, Generated, Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.sequences import TokenSplit, write_sequences
from datamodules.lra import listops_release
from datamodules.lra.arena import ArenaTokens
from datamodules.lra.listops_generator import (
    GENERATOR_VERSION,
    TOKENS,
    GeneratorSettings,
    generate_chunks,
)
from lit_probattn.base.arguments import (
    Count,
    Range,
    WholeNumber,
    with_defaults,
)
from lit_probattn.base.errors import DataError
from lit_probattn.base.files import fingerprint
from lit_probattn.base.processes import num_useful
from lit_probattn.base.progress import progress

# After this number of consecutive chunks without a new expression, generation stops.
_BARREN_CHUNKS = 64
# With fewer samples per process, starting a process costs more time than it saves.
_SAMPLES_PER_PROCESS = 5000


@with_defaults(num_train=96000, num_val=2000, num_test=2000, max_length_tokens=2000, vocab_size=32)
class ListOps(Generated, ArenaTokens):
    """ListOps, generated or as released.

    Ids: 0 padding; 1..4 `[MIN [MAX [MED [SM`; 5 `]`; 6..15 the digits 0..9; 16 unknown (does not
    occur in valid data). Parentheses are dropped, brackets are tokens.

    Generated data are a function of the seed, independent of the number of processes and of the
    platform: expressions in order without duplicates, the first num_train for training, then
    validation, then test. Released data are `basic_{train,val,test}.tsv`, with every line validated
    and evaluated; the generator's arguments do not apply to them.

    Source: Long Range Arena, ListOps. Departs from the source: the order of the token ids, which is
    arbitrary there.

    Args:
        source: Generate the data, or read the release in `data_dir` (or its folders listops-1000,
            lra_release/lra_release/listops-1000).
        min_length: Generated samples have more tokens than this.
        max_length: Generated samples have fewer tokens than this.
        max_depth: Depth at which every node is a digit; the root has depth 1.
        max_args: Largest number of arguments of an operator.
        generator_seed: Seed of the generator.
        num_processes: Number of generator processes. Default: chosen automatically. Does not affect
            the data.
        **kwargs: Arguments of Generated (samples of the splits), ArenaTokens, ArenaData and
            DataModule.
    """

    task = "listops"
    num_classes = 10  # the values
    num_ids = len(TOKENS) + 1

    def __init__(
        self,
        source: Literal["generated", "released"] = "generated",
        min_length: Annotated[WholeNumber, GENERATED] = 500,
        max_length: Annotated[int, GENERATED] = 2000,
        max_depth: Annotated[Count, GENERATED] = 10,
        max_args: Annotated[int, Range(2), GENERATED] = 10,
        generator_seed: Annotated[WholeNumber, GENERATED] = 0,
        num_processes: Annotated[Count | None, GENERATED] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if max_length < min_length + 2:
            raise DataError(
                "both bounds are exclusive: max_length must be at least min_length + 2 = "
                f"{min_length + 2}, received {max_length}"
            )
        if source == "generated" and max_length - 1 > self._max_length_tokens:
            raise DataError(
                f"generated expressions have up to max_length - 1 = {max_length - 1} tokens, but "
                f"max_length_tokens={self._max_length_tokens} would truncate them; raise "
                "max_length_tokens"
            )
        self.source = source
        self.generator = GeneratorSettings(
            min_length, max_length, max_depth, max_args, generator_seed
        )
        self._num_processes = num_processes
        sizes = {"train": 96000, "val": 2000, "test": 2000}
        self.published = {name: Published(size) for name, size in sizes.items()}

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        if self.source == "released":
            return {"source": "released", "tokens": list(TOKENS)}
        generator = dataclasses.asdict(self.generator)
        return {
            "source": "generated",
            "tokens": list(TOKENS),
            "generator_version": GENERATOR_VERSION,
            "num_samples": self.num_samples,
            "generator_seed": generator.pop("seed"),
            **generator,
        }

    def sources(self) -> list[Path]:
        """Return the released files; none for generated data."""
        if self.source == "generated":
            return []
        return list(listops_release.FILES.find_single(self.data_dir).values())

    def build(self, writer: CacheWriter) -> None:
        """Generate the samples, or read the release."""
        if self.source == "generated":
            self._generate(writer)
        else:
            self._read(writer)

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the three splits; raises DataError if an expression would be truncated."""
        limit = self._max_length_tokens
        splits: dict[str, Split] = {}
        for name in listops_release.SPLIT_FILES:
            split = TokenSplit.from_cache(cache, name, limit)
            if (longer := int((split.lengths > limit).sum())) > 0:
                raise DataError(
                    f"ListOps: {longer} of {len(split)} expressions of {name} have more than "
                    f"max_length_tokens={limit} tokens (up to {split.lengths.max()}), and a "
                    "truncated expression does not determine its value; raise max_length_tokens"
                )
            splits[name] = split
        return splits

    def decode(self, ids: Iterable[int]) -> str:
        """Convert token ids to text."""
        return " ".join(TOKENS[i] for i in ids)

    def _generate(self, writer: CacheWriter) -> None:
        total = sum(self.num_samples.values())
        found: dict[bytes, tuple[npt.NDArray[np.uint8], int]] = {}  # by hash, without duplicates
        barren = 0
        useful = num_useful(self._num_processes, 1 + total // _SAMPLES_PER_PROCESS)
        with (
            closing(generate_chunks(self.generator, useful)) as chunks,
            progress("ListOps: generating", total, "expressions") as advance,
        ):
            for chunk in chunks:
                before = len(found)
                for tokens, target in chunk.expressions():
                    if len(found) < total:
                        found.setdefault(fingerprint(tokens.tobytes()), (tokens, target))
                advance(len(found) - before)
                barren = 0 if len(found) > before else barren + 1
                if len(found) == total:
                    break
                if barren == _BARREN_CHUNKS:
                    settings = self.generator
                    raise DataError(
                        f"ListOps: found {len(found)} different expressions, expected "
                        f"{total}; min_length={settings.min_length}, "
                        f"max_length={settings.max_length}, max_depth={settings.max_depth} and "
                        f"max_args={settings.max_args} do not allow more"
                    )
        expressions = iter(found.values())
        for name, count in self.num_samples.items():
            pieces, targets = zip(*itertools.islice(expressions, count), strict=True)
            write_sequences(writer, name, pieces, map(len, pieces), targets)

    def _read(self, writer: CacheWriter) -> None:
        paths = listops_release.FILES.find_single(self.data_dir)
        size = sum(path.stat().st_size for path in paths.values())
        with progress("ListOps: reading the release", size, "bytes") as advance:
            for name, path in paths.items():
                tokens, targets = listops_release.read_split(path, advance)
                write_sequences(writer, name, tokens, map(len, tokens), targets)

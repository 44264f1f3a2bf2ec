"""DataModules whose splits lie in a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.core.base import DataModule, Split
from datamodules.core.cache import Cache, CacheSpec, CacheWriter, ensure_cache, open_cache
from datamodules.core.errors import DataError, MissingDataError

__all__ = ["CachedDataModule"]


class CachedDataModule(DataModule):
    """A DataModule whose splits lie in a cache made from a release or by a generator.

    Other arguments: see DataModule.
    """

    def settings(self) -> dict[str, Any]:
        """Everything that decides the content of the cache; plain JSON values."""
        raise NotImplementedError

    def sources(self) -> list[Path]:
        """Files of the release that are present and from which the cache is made."""
        return []

    def build(self, writer: CacheWriter) -> None:
        """Read or generate the data and add it to a new cache."""
        raise NotImplementedError

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Return the splits in an opened cache."""
        raise NotImplementedError

    def must_name(self) -> dict[str, Any]:
        """Settings without a default, which a command must give."""
        return {}

    @property
    def cache_spec(self) -> CacheSpec:
        """Identity of the cache."""
        return CacheSpec(self.task, self.settings(), self.sources)

    def prepare_data(self) -> None:
        """Build the cache unless a good one is there. Lightning calls it once per node."""
        ensure_cache(self.cache_dir, self.cache_spec, self.build)

    def open(self) -> Cache:
        """Open the cache and verify it.

        Raises:
            DataError: There is no good cache; the message gives the command that makes one.
        """
        try:
            return open_cache(self.cache_dir, self.cache_spec)
        except DataError as error:
            command = f"python -m datamodules prepare {self.task}"
            command += "".join(f" --{name} {value}" for name, value in self.must_name().items())
            command += f" --data_dir {self.data_dir}"
            if self.cache_dir != self.data_dir / ".cache":
                command += f" --cache_dir {self.cache_dir}"
            kind = MissingDataError if isinstance(error, MissingDataError) else DataError
            raise kind(f"{error}; run `{command}` with the same settings") from None

    def load_splits(self) -> dict[str, Split]:
        """Open the cache; without a trainer, build it first if needed."""
        if self.trainer is None:
            self.prepare_data()
        return self.splits_of(self.open())

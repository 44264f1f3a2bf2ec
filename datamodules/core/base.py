"""Base of all DataModules: settings, folders, sample order, loaders, cached splits."""

from __future__ import annotations

import inspect
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, get_args

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from datamodules.core.cache import (
    Cache,
    CacheSpec,
    CacheWriter,
    default_root,
    ensure_cache,
    hash_sources,
    open_cache,
)
from datamodules.core.files import expand
from datamodules.core.loaders import (
    Batch,
    EvaluationLoader,
    EvaluationOrders,
    TrainingLoader,
    TrainingOrders,
    ignore_stop_signals,
)
from datamodules.core.order import EvaluationOrder, MicroSteps, TrainingOrder
from datamodules.core.sequences import PadCollate
from lit_probattn.base.arguments import (
    Count,
    OnlyWith,
    WholeNumber,
    all_arguments,
    changed_arguments,
    checks_arguments,
)
from lit_probattn.base.errors import DataError, MissingDataError

_log = logging.getLogger("datamodules")

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[str, ...] = get_args(SplitName)


class Split(Protocol):
    """A map-style data set with targets and lengths. Index FILL returns a padding sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Class of each sample, shape (num_samples,)."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each sample before truncation, shape (num_samples,)."""


@dataclass(frozen=True)
class Published:
    """Published size of a split; `per_class` is None if the source does not give it."""

    num_samples: int
    per_class: int | None = None


GENERATED = OnlyWith(source="generated")  # of data that can be generated or read


class DataModule(pl.LightningDataModule):
    """Base of all DataModules.

    Args:
        data_dir: Folder of the raw releases; may be read-only. Default: the environment variable
            LIT_PROBATTN_DATA, else `data`.
        cache_dir: Folder of the caches. Default: the environment variable LIT_PROBATTN_CACHE, else
            a folder per `data_dir` in the user's cache folder (`~/.cache/lit_probattn`, or in
            XDG_CACHE_HOME).
        batch_size: Samples per optimiser step, over all ranks and accumulation steps.
        eval_batch_size: Samples per evaluation batch of one rank. Default: the size of a training
            micro-batch. Does not affect results.
        num_workers: Number of persistent loader processes per rank. Does not affect batches.
        seed: Seed of the order of training samples.
        predict_split: The split that `predict` reads.
    """

    task = ""
    shuffles = True  # whether each epoch of training is permuted
    select_on_test = False  # whether the validation split is the test split
    has_task_file = False  # whether `data prepare` starts from the file of the task of this name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            with suppress(NameError):  # types that the module does not import at run time
                cls.__init__ = checks_arguments(cls.__init__)  # type: ignore[method-assign]

    @checks_arguments
    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str | None = None,
        batch_size: Count = 32,
        eval_batch_size: Count | None = None,
        num_workers: WholeNumber = 0,
        seed: int = 0,
        predict_split: SplitName = "test",
    ) -> None:
        super().__init__()
        data = data_dir or os.environ.get("LIT_PROBATTN_DATA") or "data"
        self.data_dir = expand(data)
        cache = cache_dir or os.environ.get("LIT_PROBATTN_CACHE")
        self.cache_dir = expand(cache) if cache else default_root(self.data_dir)
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_workers, self.seed = num_workers, seed
        self.predict_split = predict_split
        self.splits: dict[str, Any] = {}
        # By split; `train+val` is the union of two splits.
        self.published: dict[str, Published] = {}
        # Remarks about the sizes, available after `setup`; one line each.
        self.notes: list[str] = []

    if TYPE_CHECKING:  # attributes, or properties if they depend on files

        @property
        def vocab_size(self) -> int | None:
            """Rows of the model's embedding table; None for float features."""

        @property
        def num_features(self) -> int | None:
            """Channels of float features; None for tokens."""

        @property
        def source_vocab_size(self) -> int | None:
            """Rows of the embedding table of source text; None except for translation."""

        @property
        def num_classes(self) -> int:
            """Number of classes."""

        @property
        def max_seq_len(self) -> int:
            """Largest padded length."""
    else:
        vocab_size = num_features = source_vocab_size = None

    @property
    def headline(self) -> str:
        """First line of a report: the sizes that define the model."""
        return (
            f"num_classes {self.num_classes}, vocab_size {self.vocab_size}, max_seq_len "
            f"{self.max_seq_len}"
        )

    @property
    def source_hashes(self) -> dict[str, str]:
        """SHA-256 of the source files, by name; empty for generated data."""
        return {}

    def present_hashes(self) -> dict[str, str] | None:
        """Return the current `source_hashes` without building a cache; None if data are missing."""
        return self.source_hashes

    def load_splits(self) -> dict[str, Split]:
        """Return the splits `train`, `val` and `test`."""
        raise NotImplementedError

    def collate(self) -> Callable[[list[Any]], Batch]:
        """Return the picklable function that collates samples into a batch."""
        raise NotImplementedError

    def collate_of(self, name: str) -> Callable[[list[Any]], Batch]:
        """Return the function that collates evaluation batches of one split."""
        return self.collate()

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits, for reports (after `setup`)."""
        for name, split in self.splits.items():
            lengths, counts = split.lengths, np.bincount(split.targets, minlength=self.num_classes)
            low, median, high, most = np.percentile(lengths, (0, 50, 90, 100)).astype(int)
            num_cut = getattr(split, "num_cut", None)
            cut = "" if num_cut is None else f", truncated {num_cut}"
            yield (
                f"{name}: {len(split)} samples, lengths min {low}, median {median}, mean "
                f"{lengths.mean():.1f}, p90 {high}, max {most}{cut}"
            )
            yield f"  samples per class: {' '.join(map(str, counts))}"

    def compare_sizes(self) -> Iterator[tuple[str, bool]]:
        """Yield lines about published sizes other than `published`, and whether they are equal."""
        yield from ()

    def setup(self, stage: str | None = None) -> None:
        """Open the splits, once."""
        if not self.splits:
            self.splits = self.load_splits()

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the training split (after `setup`)."""
        return len(self.split("train")) // self.batch_size

    def split(self, name: str) -> Any:
        """Return one split, a subclass's kind of `Split` (after `setup`)."""
        if not self.splits:
            raise RuntimeError(f"call {type(self).__name__}.setup() before using its splits")
        return self.splits[name]

    def train_dataloader(self) -> TrainingLoader:
        """Return the endless stream of this rank's micro-batches, starting at the trainer's step.

        Raises:
            DataError: The sizes are inconsistent, or trainer.max_steps is not set.
        """
        train = self.split("train")
        order = self._training_order()
        if self.trainer is not None and self.trainer.max_steps == -1:
            name, value = self.batch_setting
            raise DataError(
                "trainer.max_steps is not set; training is counted in optimiser steps. One epoch "
                f"of {type(self).__name__} is {order.steps_per_epoch} steps at {name}={value}"
            )
        return TrainingLoader(self._loader(train, order), order, self._processed)

    @property
    def batch_setting(self) -> tuple[str, int]:
        """Name and value of the setting that determines the size of an optimiser step."""
        return "batch_size", self.batch_size

    def _training_order(self) -> TrainingOrders:
        sizes = len(self.split("train")), self.batch_size, self.seed
        return TrainingOrder(*sizes, self._micro_steps(), self.shuffles)

    def val_dataloader(self) -> EvaluationLoader:
        """Return this rank's part of the validation split."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> EvaluationLoader:
        """Return this rank's part of the test split."""
        return self._evaluation_loader("test")

    def test_as_validation(self) -> EvaluationLoader:
        """Return this rank's part of the test split, batched like the validation split.

        It is used when the test split is scored at each validation during training.
        """
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> EvaluationLoader:
        """Return this rank's part of the split named by `predict_split`."""
        return self._evaluation_loader(self.predict_split)

    @property
    def predicted(self) -> str:
        """What `predict` reads, for messages."""
        return f"the {self.predict_split} split"

    def _evaluation_loader(self, name: str) -> EvaluationLoader:
        split, order = self.split(name), self._evaluation_order(name)
        return EvaluationLoader(self._loader(split, order, self.collate_of(name)), order)

    def _evaluation_order(self, name: str) -> EvaluationOrders:
        return self._in_order(self.split(name))

    def _in_order(self, split: Split) -> EvaluationOrder:
        rank, world_size = self._layout()
        rows = self.eval_batch_size
        if rows is None:
            rows = -(-self.batch_size // (world_size * self._accumulation()))
        return EvaluationOrder(len(split), rows, rank, world_size)

    def _loader(
        self,
        split: Split,
        order: TrainingOrders | EvaluationOrders,
        collate: Callable[[list[Any]], Batch] | None = None,
    ) -> DataLoader[Any]:
        dataset: Dataset[Any] = split  # type: ignore[assignment]
        return DataLoader(
            dataset,
            batch_sampler=order,
            num_workers=self.num_workers,
            collate_fn=self.collate() if collate is None else collate,
            worker_init_fn=ignore_stop_signals,
            persistent_workers=self.num_workers > 0,
            pin_memory=self._on_cuda(),
            # A separate generator: creating an iterator must not advance the global one.
            generator=torch.Generator().manual_seed(self.seed & 0x7FFFFFFF),
        )

    def _layout(self) -> tuple[int, int]:
        """Rank and number of ranks; (0, 1) without a trainer."""
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size

    def _micro_steps(self) -> MicroSteps:
        return MicroSteps(*self._layout(), self._accumulation(), self._processed)

    def _accumulation(self) -> int:
        return 1 if self.trainer is None else self.trainer.accumulate_grad_batches

    def _on_cuda(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _processed(self) -> int:
        """Number of micro-batches that the trainer has processed; 0 without a trainer."""
        if self.trainer is None:
            return 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        # With overfitting, each of Lightning's epochs repeats the same few batches.
        overfit = getattr(self.trainer, "overfit_batches", 0)
        counter: Any = progress.current if overfit else progress.total
        return counter.processed


class Padded(DataModule):
    """Sequences of variable length, padded at the end.

    Args:
        pad_to: Pad each batch to its longest sequence, or always to max_seq_len.
        pad_multiple: With `longest`, the padded length is rounded up to a multiple of this.
        **kwargs: Arguments of the parent class.
    """

    def __init__(
        self,
        *,
        pad_to: Literal["longest", "max"] = "longest",
        pad_multiple: Annotated[Count, OnlyWith(pad_to="longest")] = 64,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pad_to, self.pad_multiple = pad_to, pad_multiple

    def collate(self) -> Callable[[list[Any]], Batch]:
        """Return the function that collates samples into a padded batch."""
        return PadCollate(self.pad_to, self.pad_multiple, self.max_seq_len)


class Generated(DataModule):
    """Generated data with configurable numbers of samples.

    Args:
        num_train: Number of training samples.
        num_val: Number of validation samples.
        num_test: Number of test samples.
        **kwargs: Arguments of the parent class.
    """

    def __init__(
        self,
        *,
        num_train: Annotated[Count, GENERATED] = 512,
        num_val: Annotated[Count, GENERATED] = 128,
        num_test: Annotated[Count, GENERATED] = 128,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_samples = {"train": num_train, "val": num_val, "test": num_test}


class CachedDataModule(DataModule):
    """A DataModule whose splits are stored in a cache, built from a release or by a generator."""

    _opened: Cache | None = None
    _given: dict[str, Any]

    def __new__(cls, *values: Any, **given: Any) -> Self:
        """Store the arguments, which name the command that builds the cache."""
        made = super().__new__(cls)
        made._given = dict(zip(inspect.signature(cls).parameters, values, strict=False)) | given
        return made

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache; plain JSON values."""
        raise NotImplementedError

    def sources(self) -> list[Path]:
        """Return the source files of the cache; raises DataError if they are missing."""
        return []

    def build(self, writer: CacheWriter) -> None:
        """Read or generate the data and add it to a new cache."""
        raise NotImplementedError

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Return the splits in an opened cache."""
        raise NotImplementedError

    @property
    def cache_spec(self) -> CacheSpec:
        """Identity of the cache."""
        return CacheSpec(self.task, self.settings(), self._present_sources)

    def _present_sources(self) -> list[Path]:
        try:
            return self.sources()
        except MissingDataError:
            return []

    def prepare_data(self) -> None:
        """Build the cache unless a valid one exists. Lightning calls this once per node."""
        self._opened = ensure_cache(self.cache_dir, self.cache_spec, self.build)

    def open(self) -> Cache:
        """Open and verify the cache again.

        Raises:
            DataError: There is no valid cache; the message gives the command that builds one.
        """
        try:
            found = open_cache(self.cache_dir, self.cache_spec)
            self._opened = found
            return found
        except DataError as error:
            elsewhere = inspect.signature(DataModule).parameters.keys() - {"cache_dir"}
            named = changed_arguments(type(self), self._given)
            if self.has_task_file:
                whole, decisive = all_arguments(type(self), self._given), self.settings().keys()
                named |= {n: x for n, x in whole.items() if n in decisive and x is not None}
            named = {name: x for name, x in named.items() if name not in elsewhere}
            named["data_dir"] = str(self.data_dir)
            words = [w for name, x in named.items() for w in (f"--{name}", _as_word(x))]
            command = shlex.join(["lit-probattn", "data", "prepare", self.task, *words])
            kind = MissingDataError if isinstance(error, MissingDataError) else DataError
            raise kind(f"{error}; run `{command}`") from None

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the content, stored in the cache."""
        return self.cache.facts

    @property
    def cache(self) -> Cache:
        """The cache, opened once; without a trainer it is built first if necessary."""
        if self._opened is not None:
            return self._opened
        if self.trainer is None:
            self.prepare_data()
        return self.open()

    @property
    def source_hashes(self) -> dict[str, str]:
        """SHA-256 of the files and folders from which the cache was built, by name."""
        sources = self.cache.meta["sources"]
        return {name: str(facts["sha256"]) for name, facts in sources.items()}

    def present_hashes(self) -> dict[str, str] | None:
        """Return the hashes of the sources as they are now, without building a cache."""
        with suppress(DataError):
            if not self.sources():
                return {}  # generated
        return hash_sources(self.cache_dir, self.cache_spec)

    def load_splits(self) -> dict[str, Split]:
        """Open the splits in the cache."""
        return self.splits_of(self.cache)


def _as_word(value: object) -> str:
    """Return a value as on a command line."""
    return str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)

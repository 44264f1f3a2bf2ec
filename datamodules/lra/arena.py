"""Shared parts of the Long Range Arena tasks: files, published evaluation, pixels as tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.base import CachedDataModule, Padded
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.loaders import EvaluationOrders
from datamodules.core.order import EvaluationOrder, RotatingOrder
from datamodules.core.sequences import (
    Ragged,
    Sample,
    TokenSplit,
    batch_of,
    next_power_of_two,
)
from lit_probattn.base.arguments import Count
from lit_probattn.base.errors import DataError, require_at_least

RELEASE = (
    "the Long Range Arena release (github.com/google-research/long-range-arena, lra_release.gz)"
)
RELEASE_FOLDERS = ("lra_release", "lra_release/lra_release")  # of the unpacked archive


class ArenaData(CachedDataModule):
    """Base of the Long Range Arena tasks.

    `parity_eval` evaluates as the authors' code does. A validation during training scores this
    number of batches of `batch_size` samples, and the next one continues at the following batch
    (`RotatingOrder`); the incomplete last batch of the test split is dropped. Since all batches
    have the same size, the accuracy over all these samples is the mean of the batch accuracies. The
    samples of a validation are a function of the step, so a resumed run validates on the same ones.
    `validate` scores the whole split and `predict` reads it.

    Source: `run_tasks.py` of MGK's code on the Long Range Arena.

    Args:
        parity_eval: Number of batches per validation; published: 62 for ListOps, 781 for Text, 565
            for Retrieval, 20 for Image and 312 for Pathfinder. Default: score whole splits.
        vocab_size: Rows of the model's embedding table, at least the number of ids.
        **kwargs: Arguments of DataModule.

    Raises:
        DataError: A number is too small.
    """

    num_ids: int  # padding included
    vocab_size: int

    def __init__(
        self, *, parity_eval: Count | None = None, vocab_size: Count = 512, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        require_at_least(self.num_ids, vocab_size=vocab_size)
        self.parity_eval, self.vocab_size = parity_eval, vocab_size

    @property
    def provenance(self) -> dict[str, Any]:
        """Evaluation settings that are stored with a result; empty if whole splits are scored."""
        if self.parity_eval is None:
            return {}
        left_out = len(self.split("test")) % self.batch_size
        return {"parity_eval": self.parity_eval, "test_samples_left_out": left_out}

    def _evaluation_order(self, name: str) -> EvaluationOrders:
        whole = super()._evaluation_order(name)
        assert isinstance(whole, EvaluationOrder)
        command = None if self.trainer is None else self.trainer.state.fn
        if self.parity_eval is None or command not in ("fit", "test"):
            return whole
        layout = whole.batch_size, whole.rank, whole.world_size
        samples = len(self.split(name))
        if name == "test":
            complete = samples // self.batch_size * self.batch_size
            if not complete:
                raise DataError(
                    f"parity_eval drops the incomplete last batch, but the test split of {samples} "
                    f"samples has no other: lower batch_size={self.batch_size}, or unset "
                    "parity_eval"
                )
            return EvaluationOrder(complete, *layout)
        window = self.parity_eval * self.batch_size
        return RotatingOrder(samples, window, self.seed, self._validations_before, *layout)

    def _validations_before(self) -> int:
        """Return the number of earlier validations in this run, computed from the step.

        A validation at the end of a run, between two intervals, counts for the current interval.

        Raises:
            DataError: The validation interval is not a number of micro-batches.
        """
        assert self.trainer is not None
        processed = self._processed()
        if not processed:  # the sanity check before training
            return 0
        interval = self.trainer.val_check_batch
        if interval is None:
            raise DataError(
                "parity_eval needs validations at fixed steps: trainer.val_check_interval must "
                f"be a number of micro-batches, received {self.trainer.val_check_interval!r}"
            )
        return max(0, int(-(-processed // interval)) - 1)


class ArenaTokens(Padded, ArenaData):
    """Sequences of variable length; base of ListOps, Text and Retrieval.

    Args:
        max_length_tokens: Longer sequences are truncated; max_seq_len is this number rounded up to
            a power of two: 4000 gives 4096, 1000 gives 1024.
        **kwargs: Arguments of Padded, ArenaData and DataModule.
    """

    num_ids = 257  # bytes and padding
    max_seq_len: int

    def __init__(self, *, max_length_tokens: Count = 4000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._max_length_tokens = max_length_tokens
        self.max_seq_len = next_power_of_two(max_length_tokens)


# ---- grey images as sequences of pixels ---------------------------------------------------------

KeyMask = Literal["non_zero", "all"]


def write_images(
    writer: CacheWriter, name: str, images: Iterable[tuple[npt.NDArray[np.uint8], int]]
) -> None:
    """Write grey images of one size and their classes to a cache, one at a time."""
    targets: list[int] = []
    with writer.stream(f"{name}_pixels", np.uint8) as append:
        for image, target in images:
            append(image)
            targets.append(target)
    writer.add(f"{name}_targets", np.array(targets, dtype=np.uint16))


def pixel_split(
    cache: Cache, name: str, num_pixels: int, rows: npt.NDArray[np.int64] | None = None
) -> TokenSplit:
    """Open images stored by `write_images`; a sequence is `num_pixels` in row-major order.

    `rows` are the indices of the images in the split; default: all.
    """
    targets = np.asarray(cache.array(f"{name}_targets"))
    offsets = np.arange(len(targets) + 1, dtype=np.int64) * num_pixels
    stored = Ragged(cache.array(f"{name}_pixels"), offsets)
    return TokenSplit(stored, targets, num_pixels, rows=rows)


@dataclass(frozen=True)
class PixelCollate:
    """Collate images of one size; ids are grey values, `key_mask` is the option of `Image`."""

    key_mask: KeyMask

    def __call__(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Return `inputs` and `key_mask` (B, N), `target` and `sample_ids` (B,)."""
        inputs = torch.from_numpy(np.stack([sample.values for sample in samples]))
        mask = inputs != 0 if self.key_mask == "non_zero" else torch.ones_like(inputs).bool()
        return batch_of(samples, inputs, mask)


class ArenaPixels(ArenaData):
    """Grey images, pixel by pixel; base of Image and Pathfinder.

    Args:
        key_mask: `non_zero`, as in both published pipelines, treats black pixels as padding: they
            are neither attended to nor pooled. `all` keeps every pixel.
        **kwargs: Arguments of ArenaData and DataModule.
    """

    num_ids = 256

    def __init__(self, *, key_mask: KeyMask = "non_zero", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.key_mask: KeyMask = key_mask

    def collate(self) -> PixelCollate:
        """Return the function that collates images."""
        return PixelCollate(self.key_mask)

"""Shared parts of encoder data: tokeniser, model sizes, batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from datamodules.core.base import CachedDataModule, Padded
from datamodules.core.order import TrainingOrder, permutation
from datamodules.text.choice import Kind, TokenChoice, VocabLimit
from datamodules.text.fine_tuning.batches import TypedCollate
from datamodules.text.tokens import Tokens
from lit_probattn.base.arguments import Count, Range
from lit_probattn.base.errors import DataError


class BucketOrder(TrainingOrder):
    """Global batches of samples of similar length.

    The permuted samples of an epoch are divided into buckets of `bucket` batches; the samples of a
    bucket are sorted by length and divided into batches, and the batches of the epoch are permuted.
    The distribution over ranks is that of `TrainingOrder`, which also drops the remainder of an
    epoch.

    Args:
        lengths: Number of tokens of each sample.
        bucket: Number of batches per bucket; 1 disables sorting.
        arguments: Arguments of `TrainingOrder` after the number of samples.
    """

    def __init__(self, lengths: npt.NDArray[np.integer], bucket: int, *arguments: Any) -> None:
        super().__init__(len(lengths), *arguments)
        self._lengths, self._bucket = lengths, bucket

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        order = super()._order(epoch)
        if self._bucket == 1:
            return order
        used = order[: self.steps_per_epoch * self.batch_size]
        size = self._bucket * self.batch_size
        parts = [used[first : first + size] for first in range(0, len(used), size)]
        ranked = [part[np.argsort(self._lengths[part], kind="stable")] for part in parts]
        batches = np.concatenate(ranked).reshape(self.steps_per_epoch, self.batch_size)
        return batches[permutation(self.steps_per_epoch, ~self.seed, epoch)].reshape(-1)


class EncodedTexts(Padded, CachedDataModule):
    """BERT-style or RoBERTa-style sequences; base of data for pre-trained encoders.

    Args:
        tokenizer: Folder or file of a pre-trained encoder's tokeniser, or a cache of this kind of
            data that contains one. Default: learn a tokeniser from the training texts.
        tokens: Type of a learned tokeniser: `wordpiece`, or byte-level `bpe`.
        vocab_limit: Maximum number of tokens of a learned tokeniser.
        lower: Whether a learned WordPiece tokeniser removes case and accents.
        max_length: Maximum number of tokens per sequence.
        max_positions: Rows of the model's position embedding (max_seq_len), as in pre-trained
            weights. Default: max_length.
        vocab_size: Rows of the model's token embedding. Default: the size of the tokeniser.
        bucket: Number of training batches that are sorted by length together; 1 disables sorting.
        **kwargs: Arguments of the parent class.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        tokens: Kind = "wordpiece",
        vocab_limit: VocabLimit = 8000,
        lower: bool = True,
        max_length: Annotated[int, Range(3)] = 128,
        max_positions: Count | None = None,
        vocab_size: Count | None = None,
        bucket: Count = 50,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if max_positions is not None and max_positions < max_length:
            raise DataError(
                f"max_positions must be at least max_length={max_length}, received {max_positions}"
            )
        self.choice = TokenChoice(tokens, vocab_limit, lower=lower, file=tokenizer)
        self.max_length, self.bucket = max_length, bucket
        self._max_positions, self._vocab_size = max_positions, vocab_size

    # ---- model sizes -------------------------------------------------------------------------

    @cached_property
    def tokeniser(self) -> Tokens:
        """The tokeniser, stored in the cache."""
        return TokenChoice.read(self.cache)

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table."""
        size = len(self.tokeniser)
        if self._vocab_size is None:
            return size
        if self._vocab_size < size:
            raise DataError(
                f"vocab_size={self._vocab_size} is below the tokeniser's {size} tokens; set it to "
                f"at least {size}"
            )
        return self._vocab_size

    @property
    def max_seq_len(self) -> int:
        """Rows of the model's position embedding."""
        return self.max_length if self._max_positions is None else self._max_positions

    @property
    def num_token_types(self) -> int:
        """Number of token types: two for BERT, one for RoBERTa."""
        return 2 if self.tokeniser.pairs == "bert" else 1

    def decode(self, ids: Any) -> str:
        """Convert token ids to text without special tokens."""
        return self.tokeniser.decode_sequence(ids)

    # ---- batches -----------------------------------------------------------------------------

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that collates a batch."""
        lengths = self.pad_multiple, self.max_length
        typed = self.num_token_types == 2
        return TypedCollate(self.pad_to, *lengths, self.tokeniser.padding, typed)

    def _training_order(self) -> BucketOrder:
        settings = self.bucket, self.batch_size, self.seed, self._micro_steps()
        return BucketOrder(self.split("train").lengths, *settings)

    # ---- checkpoints -------------------------------------------------------------------------

    @property
    def tokeniser_digest(self) -> str:
        """Digest that identifies the tokeniser."""
        return self.tokeniser.digest

    def state_dict(self) -> dict[str, Any]:
        """Return the tokeniser's digest, for checkpoints."""
        return {**super().state_dict(), "tokeniser": self.tokeniser_digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise a DataError if a checkpoint was trained with another tokeniser."""
        super().load_state_dict(state_dict)
        known = state_dict.get("tokeniser", self.tokeniser_digest)  # missing in converted models
        if known != self.tokeniser_digest:
            raise DataError(
                "the checkpoint was trained with another tokeniser than the data, so ids would "
                "denote different tokens: set --data.init_args.tokenizer to its tokeniser, or use "
                "the data of its training"
            )

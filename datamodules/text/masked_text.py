"""Running text for masked language models: full sequences between begin and end tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.base import SPLITS, DataModule, Split
from datamodules.core.cache import Cache
from datamodules.core.loaders import EvaluationLoader
from datamodules.core.order import FILL
from datamodules.text.choice import of_running_text
from datamodules.text.segments import IGNORE, StreamCollate, StreamSample, WindowSplit
from datamodules.text.tokens import Tokens
from datamodules.text.wikitext103 import WikiText103
from lit_probattn.base.arguments import with_defaults
from lit_probattn.base.errors import DataError, prefixed, require_at_least

_SPECIAL = 3  # begin, end and mask have the last ids


class MaskedSplit(WindowSplit):
    """Sequences of a token stream: begin, the next segment_len − 2 tokens, end.

    A sample has `inputs` (n,), not masked yet, and `target` (n,), the same ids with IGNORE at
    begin and end. The remainder of the stream is a shorter last sequence, unless it is dropped.

    Args:
        segment_len: Number of tokens per sequence, begin and end included; at least 3.
        vocab_size: Number of ids; the last three are begin, end and mask.
        ends: Ids of begin and end if the vocabulary defines them. End tokens inside the text are
            never masked either.

    Raises:
        DataError: The text is shorter than one sequence, and short ones are dropped.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.integer],
        segment_len: int,
        vocab_size: int,
        drop_short: bool = False,
        ends: tuple[int, int] | None = None,
    ) -> None:
        self.tokens, self.length = tokens, segment_len - 2
        self.begin, self.end = ends or (vocab_size - _SPECIAL, vocab_size - _SPECIAL + 1)
        full, rest = divmod(len(tokens), self.length)
        self._count = full + (1 if rest and not drop_short else 0)
        if not self._count:
            raise DataError(
                f"the text has {len(tokens)} tokens, expected at least {self.length} for "
                f"segment_len={segment_len}"
            )

    def __getitem__(self, index: int) -> StreamSample:
        """Return one sequence."""
        first = self.length * (0 if index == FILL else index)
        piece = self.tokens[first : first + self.length].astype(np.int64)
        inputs = np.concatenate([[self.begin], piece, [self.end]])
        target = inputs.copy()
        target[0] = IGNORE
        target[inputs == self.end] = IGNORE
        return StreamSample(inputs, target, index)


@with_defaults(segment_len=512)
class MaskedText(WikiText103):
    """Text for masked language models, with the files and the cache of `WikiText103`.

    Batches have `target` (B, N), the tokens themselves, -100 at begin, end and padding. The task
    masks tokens, with new masks in every epoch.

    Source: value-aware attention (Gupta and Berant, 2021), A.1: an end token after each document,
    all documents concatenated, divided into full sequences of L − 2 tokens between begin and end.
    Departs from the source: `<eos>` ends lines, not documents, and the text is not shuffled; words
    instead of sub-words, unless `subwords`, `tokenizer_file` or `tokenizer` is set.

    Args:
        tokenizer: Folder or file of a pre-trained encoder's tokeniser (see `read_encoder`), or a
            cache that contains one. Its begin, end and mask tokens are used, and its separator ends
            lines.
        **kwargs: Arguments of WikiText103: `segment_len` is L, begin and end included, and
            `vocab_size` at least the vocabulary plus three.
    """

    sets = ("batching", "val_stride", "test_stride", "prompts", "num_prompts", "prompt_len")

    def __init__(self, *, tokenizer: str | None = None, **kwargs: Any) -> None:
        super().__init__(
            batching="segments",
            # These apply to language models only: sequences do not overlap and are not continued.
            val_stride=None,
            test_stride=None,
            prompts=None,
            num_prompts=8,
            prompt_len=32,
            **kwargs,
        )
        require_at_least(_SPECIAL, segment_len=self.segment_len)
        if tokenizer is not None:
            self._named["tokenizer"] = tokenizer
            self.choice = of_running_text(**self._named)

    @property
    def pretrained(self) -> Tokens | None:
        """The pre-trained tokeniser, or None."""
        return self.vocabulary if self._named.get("tokenizer") is not None else None

    @property
    def mask_token(self) -> int | None:
        """Id of the mask token of a pre-trained tokeniser; None means the last id."""
        return None if self.pretrained is None else self.pretrained.mask

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table: words, then begin, end and mask."""
        return self._needed if self._vocab_size is None else self._vocab_size

    @property
    def _needed(self) -> int:
        return len(self.vocabulary) + (_SPECIAL if self.pretrained is None else 0)

    def form(self, name: str) -> str:
        """Return the scoring mode of a split."""
        return "masked"

    def decode(self, ids: Any) -> str:
        """Convert token ids to text without begin, end and mask."""
        if self.pretrained is not None:
            return super().decode(ids)
        return super().decode([i for i in ids if i < self.vocab_size - _SPECIAL])

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits; raises DataError if vocab_size or the training text is too small."""
        needed, own = self._needed, self.pretrained
        if needed > self.vocab_size and own is not None:
            raise DataError(
                f"the tokeniser has {needed} tokens, but vocab_size={self.vocab_size}; set "
                f"vocab_size to at least {needed}"
            )
        if needed > self.vocab_size:
            raise DataError(
                f"the vocabulary has {needed - _SPECIAL} words, plus an id each for begin, end and "
                f"mask, but vocab_size={self.vocab_size}; set vocab_size to at least {needed}"
            )
        splits: dict[str, Any] = {}
        for name in SPLITS:
            tokens = cache.array(f"{name}_tokens")
            ends = None if own is None else (own.begin, own.separator)
            with prefixed(f"{name} split", DataError, to=DataError):
                splits[name] = MaskedSplit(
                    tokens, self.segment_len, self.vocab_size, name == "train", ends
                )
        return splits

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits."""
        for line in super().size_lines():
            yield line.replace("(segments", "(full sequences", 1)

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that collates a training batch."""
        return StreamCollate("masked")

    def predict_dataloader(self) -> EvaluationLoader:
        """Return this rank's part of the split named by `predict_split`."""
        return DataModule.predict_dataloader(self)

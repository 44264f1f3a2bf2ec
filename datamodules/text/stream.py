"""Running text for language models: one stream of tokens per split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.base import SPLITS, CachedDataModule, Split
from datamodules.core.cache import Cache, CacheSpec, CacheWriter
from datamodules.core.loaders import EvaluationLoader
from datamodules.core.order import EvaluationOrder
from datamodules.core.report import compare_size
from datamodules.text.choice import TokenChoice
from datamodules.text.job import TokenisationJob
from datamodules.text.segments import ColumnSplit, PromptSplit, StreamCollate, WindowSplit
from datamodules.text.source import TextSource
from datamodules.text.tokens import Tokens
from lit_probattn.base.arguments import Count
from lit_probattn.base.errors import DataError, prefixed
from lit_probattn.base.progress import progress

_WHAT = {
    "words": "words of the vocabulary",
    "train": "tokens of the training text",
    "val": "tokens of the validation text",
    "test": "tokens of the test text",
}
_log = logging.getLogger("datamodules")


class TextStream(CachedDataModule):
    """Text as one stream of tokens per split; base of the data sets of running text.

    Batches have `target` (B, N), the token after each of `inputs` (B, N), -100 for predictions that
    are not scored, and `form`, the evaluation mode: `segments`, `sliding` or
    `stride<n>`. Tokenisation is resumable, and its memory is limited to the vocabulary and a block
    of the text.

    Args:
        segment_len: Number of tokens of a segment or window; the model's max_seq_len.
        batching: `columns` divides the training stream into batch_size columns that are read in
            parallel, in the same order in every epoch; `segments` shuffles its segments of
            segment_len tokens (a shorter last one is dropped).
        vocab_size: Rows of the model's embedding table, at least the size of the vocabulary.
            Default: its size, which requires tokenised text when the model is built.
        val_stride: Number of tokens between the starts of validation windows. Default: segment_len,
            which gives independent segments; 1 is the sliding window of the papers.
        test_stride: Number of tokens between the starts of test windows. Default: segment_len.
        prompts: Texts that `predict` continues. Default: num_prompts excerpts of predict_split.
        num_prompts: Number of excerpts.
        prompt_len: Number of tokens of an excerpt.
        **kwargs: Arguments of DataModule.
    """

    choice: TokenChoice  # set before the constructor
    title = "text"
    max_seq_len: int

    def __init__(
        self,
        segment_len: Count = 256,
        batching: Literal["columns", "segments"] = "columns",
        vocab_size: Count | None = None,
        val_stride: Count | None = None,
        test_stride: Count | None = None,
        prompts: list[str] | None = None,
        num_prompts: Count = 8,
        prompt_len: Count = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.segment_len, self.batching = segment_len, batching
        self.max_seq_len, self.shuffles = segment_len, batching == "segments"
        self._vocab_size = vocab_size
        self.strides = {"val": val_stride or segment_len, "test": test_stride or segment_len}
        self._prompts, self._num_prompts, self._prompt_len = prompts, num_prompts, prompt_len

    # ---- implemented by subclasses -------------------------------------------------------------

    def find(self) -> dict[str, TextSource]:
        """Return the text of the splits train, val and test; raises DataError if it is missing."""
        raise NotImplementedError

    @property
    def published_counts(self) -> dict[str, int]:
        """Published counts of words and tokens, if any."""
        return {}

    # ---- sizes -------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table."""
        return len(self.vocabulary) if self._vocab_size is None else self._vocab_size

    @property
    def num_classes(self) -> int:
        """Number of rows of the embedding table: every word is a possible prediction."""
        return self.vocab_size

    @cached_property
    def vocabulary(self) -> Tokens:
        """Words and ids; the text is tokenised if necessary."""
        return TokenChoice.read(self.cache)

    def require_vocabulary_size(self) -> None:
        """Raise a DataError if the vocabulary is larger than vocab_size."""
        words = len(self.vocabulary)
        if words > self.vocab_size:
            raise DataError(
                f"the vocabulary has {words} words, but vocab_size={self.vocab_size}; set "
                f"vocab_size to at least {words}"
            )

    def decode(self, ids: Any) -> str:
        """Convert token ids to text."""
        return self.vocabulary.decode(ids)

    def form(self, name: str) -> str:
        """Return the scoring mode of a split: `segments`, `sliding` or `stride<n>`."""
        stride = self.strides.get(name, self.segment_len)
        if stride == self.segment_len:
            return "segments"
        return "sliding" if stride == 1 else f"stride{stride}"

    # ---- the cache ---------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        return self.choice.settings()

    def sources(self) -> list[Path]:
        """Return the text files."""
        found = self.find().values()
        return list(dict.fromkeys(path for source in found for path in source.paths))

    def build(self, writer: CacheWriter) -> None:
        """Tokenise the text."""
        found = self.find()
        job = self.job(self.cache_spec, found)
        text = job.text("vocabulary", lambda: self.choice.make(found["train"]).text)
        self.tokenise(writer, job, TokenChoice.store(writer, text))

    def job(self, spec: CacheSpec, texts: dict[str, TextSource]) -> TokenisationJob:
        """Return the tokenisation of texts for a cache, which resumes an interrupted one."""
        job = TokenisationJob(self.cache_dir / f".{spec.name}.partial", texts, spec.settings)
        if job.is_resumed:
            _log.warning("resuming an interrupted tokenisation in %s", job.folder)
        return job

    def tokenise(self, writer: CacheWriter, job: TokenisationJob, vocabulary: Tokens) -> None:
        """Write the tokens of every text of a job, and their numbers of `<unk>`."""
        for name, source in job.sources.items():
            title = f"{self.title}: tokenising {name}"
            with progress(title, source.size, source.unit) as advance:
                job.tokenise(name, vocabulary, advance)
            with writer.stream(f"{name}_tokens", np.int32) as append:
                for piece in job.tokens(name):
                    append(piece)
        writer.add("num_unknown", np.array([job.num_unknown(name) for name in job.sources]))
        job.remove()

    # ---- splits ------------------------------------------------------------------------------

    def load_splits(self) -> dict[str, Split]:
        """Open the splits, and warn if counts differ from the published ones."""
        splits = super().load_splits()
        if self.trainer is None or self.trainer.is_global_zero:
            for problem in self._problems():
                _log.warning("%s: %s", self.title, problem)
        return splits

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the three splits; raises DataError if vocab_size or a split is too small."""
        self.require_vocabulary_size()
        train = cache.array("train_tokens")
        splits: dict[str, Any] = {}
        if self.batching == "columns":
            splits["train"] = ColumnSplit(train, self.batch_size, self.segment_len)
        else:
            with prefixed("train split", DataError, to=DataError):
                splits["train"] = WindowSplit(train, self.segment_len, self.segment_len, True)
        for name, stride in self.strides.items():
            with prefixed(f"{name} split", DataError, to=DataError):
                splits[name] = WindowSplit(self.tokens_of(name), self.segment_len, stride)
        return splits

    def tokens_of(self, name: str) -> np.ndarray[Any, Any]:
        """Return the token ids of a split, (num_tokens,)."""
        return self.cache.array(f"{name}_tokens")

    @property
    def num_unknown(self) -> dict[str, int]:
        """Number of `<unk>` tokens of each split."""
        return dict(zip(SPLITS, self.cache.array("num_unknown").tolist(), strict=True))

    @property
    def counts(self) -> dict[str, int]:
        """Number of `words` of the vocabulary, and of tokens of each split, `<eos>` included."""
        sizes = {name: len(self.tokens_of(name)) for name in SPLITS}
        return {"words": len(self.vocabulary), **sizes}

    def _problems(self) -> Iterator[str]:
        """Yield lines about counts that differ from published ones, and about `<unk>` tokens."""
        counts = self.counts
        for name, expected in self.published_counts.items():
            if counts[name] != expected:
                yield f"{counts[name]} {_WHAT[name]}, expected the published {expected}"
        for name, number in self.num_unknown.items():
            if number:
                yield (
                    f"{number} of {counts[name]} {_WHAT[name]} are missing from the vocabulary of "
                    f"{counts['words']} words and became <unk>"
                )

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits."""
        counts, unknown = self.counts, self.num_unknown
        yield f"vocabulary: {counts['words']} words, sha256 {self.vocabulary.digest}"
        for name in SPLITS:
            form = self.batching if name == "train" else self.form(name)
            yield (
                f"{name}: {counts[name]} tokens with <eos>, {unknown[name]} unknown, "
                f"{len(self.split(name))} samples ({form}, segment_len {self.segment_len})"
            )

    def compare_sizes(self) -> Iterator[tuple[str, bool]]:
        """Yield a line for each published number, and whether the number found is equal."""
        counts = self.counts
        for name, expected in self.published_counts.items():
            found = counts[name]
            yield compare_size(_WHAT[name], expected, found)

    # ---- batches -----------------------------------------------------------------------------

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that collates a training batch."""
        return StreamCollate("segments")

    def collate_of(self, name: str) -> Callable[[list[Any]], Any]:
        """Return the function that collates a batch of one split."""
        return StreamCollate(self.form(name))

    def test_as_validation(self) -> EvaluationLoader:
        """Return this rank's part of the test split, with the stride of the validation split."""
        if self.form("test") == self.form("val"):
            return super().test_as_validation()
        split: Any = WindowSplit(self.tokens_of("test"), self.segment_len, self.strides["val"])
        order = self._in_order(split)
        return EvaluationLoader(self._loader(split, order, self.collate_of("val")), order)

    def predict_dataloader(self) -> EvaluationLoader:
        """Return this rank's part of the prompts."""
        split: Any = PromptSplit(self._prompt_tokens())
        rank, world_size = self._layout()
        rows = self.eval_batch_size or len(split)
        order = EvaluationOrder(len(split), rows, rank, world_size)
        return EvaluationLoader(self._loader(split, order, StreamCollate("prompt", True)), order)

    @property
    def predicted(self) -> str:
        """What `predict` reads, for messages."""
        return super().predicted if self._prompts is None else "prompts"

    def _prompt_tokens(self) -> list[np.ndarray[Any, Any]]:
        if self._prompts is not None:
            found = [self.vocabulary.encode(text)[0].astype(np.int64) for text in self._prompts]
            if not found or not all(map(len, found)):
                raise DataError("prompts must contain at least one text, and no empty ones")
            return found
        tokens = self.tokens_of(self.predict_split)
        starts = np.linspace(0, max(0, len(tokens) - self._prompt_len), self._num_prompts)
        pieces = (tokens[int(first) :][: self._prompt_len] for first in starts)
        return [np.asarray(piece, dtype=np.int64) for piece in pieces]

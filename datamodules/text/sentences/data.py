"""The one-billion-word benchmark (LM1B), and other text with one sentence per line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from datamodules.core.base import SPLITS, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.own import length_line
from datamodules.core.packing import PackedTraining
from datamodules.core.report import compare_size
from datamodules.text.choice import TokenChoice, VocabLimit, of_running_text
from datamodules.text.releases import HELD_OUT_SHARDS, lm1b
from datamodules.text.running import OwnText
from datamodules.text.sentences.batches import SentenceCollate, Sentences, ends_of
from datamodules.text.sentences.release import SentenceText, find_release
from datamodules.text.source import TextSource
from datamodules.text.stream import TextStream
from datamodules.text.token_batches import TokenBatches
from lit_probattn.base.arguments import Count
from lit_probattn.base.errors import DataError

_FORM = "sentences"
_SHARE = 0.1


class LM1B(PackedTraining, TokenBatches, TextStream):
    """Sentences as separate sequences of sub-words, in batches counted in tokens.

    Source: "Low-Rank Bottleneck in Multi-head Attention Models", section 4 and appendix C:
    sub-words, sequences truncated to 256. The benchmark is Chelba et al. (2013).
    Departs from the source: byte-level pair encoding, learned on the training text, instead of the
    sub-words of tensor2tensor.

    A sentence starts with `<eos>`, as if it followed another one, and ends with it. Batches
    contain sentences of similar length (`datamodules.core.token_order`), and are a function of seed
    and epoch alone. Their format is described in
    `datamodules.text.sentences.batches.SentenceCollate`.

    Args:
        corpus: `lm1b` is the release (`datamodules.text.releases.lm1b`); `other`
            any text in `data_dir`, a file or a folder, in the format of `datamodules.OwnText`:
            files named train, val and test, or files that are split by a hash.
        subwords: Number of byte-level sub-words to learn from the training text; None with
            tokenizer_file.
        tokenizer_file: Use the sub-words of this tokenizer.json, which must include `<eos>`.
        test_shards: Number of held-out shards of the release for the test split, from the first.
            Default: 1, the standard test; the paper's has about 300,000 sentences, nearly all
                shards.
        val_shards: Number of subsequent shards for validation. Default: all others.
        val_fraction: Fraction of another text that is held out for validation. Default: 0.1.
        test_fraction: Fraction of another text that is held out for the test split. Default: 0.1.
        paragraphs: Whether lines are paragraphs, which are split into sentences; headings of
            WikiText are skipped.
        max_length: Maximum number of predictions of a sentence, end included; longer sentences are
            truncated. It is the model's max_seq_len.
        **kwargs: Arguments of PackedTraining, TokenBatches and TextStream.

    Raises:
        DataError: A setting is out of range, or does not apply to the corpus.
    """

    task = "lm1b"
    title = "LM1B"

    def __init__(
        self,
        corpus: Literal["lm1b", "other"] = "lm1b",
        subwords: VocabLimit | None = 32000,
        tokenizer_file: str | None = None,
        test_shards: Count | None = None,
        val_shards: Count | None = None,
        val_fraction: float | None = None,
        test_fraction: float | None = None,
        paragraphs: bool = False,
        max_length: Count = 256,
        **kwargs: Any,
    ) -> None:
        self.choice = of_running_text(None, subwords, tokenizer_file)
        super().__init__(
            segment_len=max_length,
            batching="segments",
            val_stride=None,
            test_stride=None,
            **kwargs,
        )
        if not self.choice.by_subwords:
            raise DataError("LM1B consists of sub-words: set subwords or tokenizer_file")
        shards = {"test_shards": test_shards, "val_shards": val_shards}
        shares = {"val_fraction": val_fraction, "test_fraction": test_fraction}
        foreign = shares if corpus == "lm1b" else shards
        for name, value in foreign.items():
            if value is not None:
                raise DataError(f"{name} does not apply to corpus={corpus}; remove it")
        self.corpus, self.paragraphs = corpus, paragraphs
        self._shares = {name: _SHARE if x is None else x for name, x in shares.items()}
        self.test_shards = 1 if test_shards is None else test_shards
        left = HELD_OUT_SHARDS - self.test_shards
        self.val_shards = left if val_shards is None else val_shards
        if not 1 <= self.val_shards <= left:
            raise DataError(
                "test_shards and val_shards must be at least 1 and sum to at most "
                f"{HELD_OUT_SHARDS} held-out shards, received {self.test_shards} and "
                f"{self.val_shards}"
            )

    # ---- the cache ---------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        if self.corpus == "lm1b":
            parts: dict[str, Any] = {"shards": [self.test_shards, self.val_shards]}
        else:
            parts = {"path": str(self.data_dir.resolve()), "shares": self._shares}
        return {
            "corpus": self.corpus,
            "paragraphs": self.paragraphs,
            **parts,
            **super().settings(),
        }

    @cached_property
    def _own(self) -> OwnText:
        """Finds and splits the user's text."""
        shares: dict[str, Any] = self._shares
        return OwnText(path=str(self.data_dir), cache_dir=str(self.cache_dir), **shares)

    def sources(self) -> list[Path]:
        """Return the text files."""
        return super().sources() if self.corpus == "lm1b" else self._own.sources()

    def find(self) -> dict[str, TextSource]:
        """Return the text of the splits."""
        if self.corpus == "lm1b":
            found = find_release(self.data_dir, self.test_shards, self.val_shards)
        else:
            found = self._own.find()
        return {
            name: SentenceText(
                source.paths,
                source.parts if isinstance(source, SentenceText) else (source,),
                self.paragraphs,
            )
            for name, source in found.items()
        }

    def build(self, writer: CacheWriter) -> None:
        """Tokenise the text, and store the ends and word counts of sentences."""
        super().build(writer)
        sources, end = self.find(), TokenChoice.read(Cache(writer.folder, {})).end_of_line
        for name in SPLITS:
            tokens = np.load(writer.folder / f"{name}_tokens.npy", mmap_mode="r")
            count = 0
            with writer.stream(f"{name}_offsets", np.int64) as append:
                append([0])
                for ends in ends_of(tokens, end):
                    append(ends)
                    count += len(ends)
            if name == "train":
                continue
            words = np.concatenate(list(_words_of(sources[name])))
            if len(words) != count:
                raise DataError(
                    f"{sources[name].name}: {len(words)} lines give {count} sentences, since a "
                    "line contains <eos>, which ends a sentence; remove it from the text"
                )
            writer.add(f"{name}_words", words)

    # ---- splits ------------------------------------------------------------------------------

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the three splits; raises DataError if vocab_size or max_tokens is too small."""
        self.require_vocabulary_size()
        end = self.vocabulary.end_of_line
        splits: dict[str, Any] = {
            name: Sentences.from_cache(cache, name, end, self.max_seq_len) for name in SPLITS
        }
        lengths = splits["train"].batch_lengths(self.pad_multiple)
        self.require_tokens(lengths, "sentence", "lower max_length")
        return splits

    def form(self, name: str) -> str:
        """Return the scoring mode of a split."""
        return _FORM

    # ---- batches -----------------------------------------------------------------------------

    def row_budget(self) -> tuple[int, int, bool]:
        """Return tokens per packed row and rows per optimiser step; tokens are counted."""
        capacity = min(self.max_seq_len, self.max_tokens)
        return capacity, self.max_tokens // capacity, True

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that collates a batch."""
        return SentenceCollate(self.pad_multiple, self.max_seq_len, _FORM)

    def collate_of(self, name: str) -> Callable[[list[Any]], Any]:
        """Return the function that collates a batch of one split."""
        return self.collate()

    def _prompt_tokens(self) -> list[npt.NDArray[Any]]:
        """Return the prompts that `predict` continues, each starting at a sentence."""
        if self._prompts is not None:
            given = super()._prompt_tokens()
            end = self.vocabulary.end_of_line
            return [np.concatenate([[end], ids[:-1] if ids[-1] == end else ids]) for ids in given]
        split = self.split(self.predict_split)
        chosen = np.linspace(0, len(split) - 1, min(self._num_prompts, len(split))).astype(int)
        return [split[int(index)].inputs[: self._prompt_len] for index in chosen]

    # ---- reports -----------------------------------------------------------------------------

    def size_lines(self) -> Iterator[str]:
        """Yield lines about vocabulary, sentences, lengths, padding and samples."""
        yield f"vocabulary: {len(self.vocabulary)} sub-words, sha256 {self.vocabulary.digest}"
        for name in SPLITS:
            split = self.split(name)
            words = f", {split.num_words} words with <eos>" if split.num_words else ""
            yield (
                f"{name}: {len(split)} sentences, {split.num_tokens} tokens with <eos>{words}; "
                f"{length_line(split.lengths, split)}"
            )
        if self.pack:
            yield f"unused share of packed rows: {100 * self.packed_rows.unused:.1f} %"
        else:
            share = self.batch_lengths("train").padding_shares(self.max_tokens)[0]
            yield f"padding in training batches: {100 * share:.1f} %"
        yield f"test sentence 0: {self.decode(self.split('test')[0].target).strip()}"

    def compare_sizes(self) -> Iterator[tuple[str, bool]]:
        """Yield a line for each published number of sentences, and whether the size is equal."""
        if self.corpus != "lm1b":
            return
        found = {"train": len(self.split("train"))}
        if self.test_shards + self.val_shards == HELD_OUT_SHARDS:
            found["held out"] = len(self.split("val")) + len(self.split("test"))
        for name, count in found.items():
            expected = lm1b().counts[name]
            yield compare_size(f"sentences ({name})", expected, count)


def _words_of(source: TextSource) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the number of words of each sentence, end included, in blocks."""
    for block in source.blocks():
        lines = block.text.split("\n")[:-1]
        yield np.array([len(line.split()) + 1 for line in lines], dtype=np.int32)

"""WikiText-103 and other text in its layout, for language models."""

from __future__ import annotations

from typing import Any

from datamodules.text.choice import TokenChoice, of_running_text
from datamodules.text.source import TextSource
from datamodules.text.stream import TextStream
from datamodules.text.wikitext_release import PUBLISHED, Corpus, find_release

__all__ = ["WikiText103"]


class WikiText103(TextStream):
    """Text as one stream of words per split, `<eos>` at every line end.

    Source: MGK, ICML 2022, appendix A.1.2 and its code: words as they stand, no words dropped,
    vocabulary by frequency, columns in training, sliding windows in evaluation.
    Departs from the source: segments in evaluation are those of the one stream, not of ten columns,
    so that each token counts once and the result does not depend on the batch size.

    Files that are found: see `datamodules.text.wikitext_release.find_release`.

    Args:
        corpus: Decides the folders that are looked in and the published numbers that are compared;
            `other` is any text in `data_dir`, compared with nothing.
        segment_len: Tokens of a segment or window; the model's max_seq_len.
        vocab_file: Use this vocabulary, one word per line in the order of the ids, `<eos>` among
            them. Other words become `<unk>`. None makes it of the training text.
        subwords: Number of byte-level sub-words to train on the training text, in place of words.
            Needs the package `tokenizers`.
        tokenizer_file: Use the sub-words of this tokenizer.json, `<eos>` among them.
        test_stride: Tokens from one test window to the next. None means segment_len, which gives
            independent segments; 1 is the sliding window of the papers.
        **kwargs: Arguments of TextStream.
    """

    task = "wikitext103"
    title = "WikiText"
    units: TokenChoice

    def __init__(
        self,
        corpus: Corpus = "wikitext-103",
        segment_len: int = 256,
        vocab_file: str | None = None,
        subwords: int | None = None,
        tokenizer_file: str | None = None,
        test_stride: int | None = 1,
        **kwargs: Any,
    ) -> None:
        self._named: dict[str, Any] = {"vocab_file": vocab_file, "subwords": subwords}
        self._named["tokenizer_file"] = tokenizer_file
        units = of_running_text(**self._named)
        super().__init__(units, segment_len, test_stride=test_stride, **kwargs)
        self.corpus = self.title = corpus

    def settings(self) -> dict[str, Any]:
        """What decides the content of the cache."""
        return {"corpus": self.corpus, **super().settings()}

    def must_name(self) -> dict[str, Any]:
        """Settings that identify the cache, as far as they are not the defaults."""
        given = {"corpus": self.corpus, **self._named}
        return {k: v for k, v in given.items() if v is not None and v != "wikitext-103"}

    def find(self) -> dict[str, TextSource]:
        """Find the files of the release."""
        return find_release(self.data_dir, self.corpus)

    @property
    def published_counts(self) -> dict[str, int]:
        """Published counts of the corpus; of sub-words, or another vocabulary, there are none."""
        published = {} if self.units.by_subwords else dict(PUBLISHED.get(self.corpus, {}))
        if self.units.file is not None:
            published.pop("words", None)
        return published

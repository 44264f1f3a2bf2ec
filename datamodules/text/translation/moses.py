"""Moses' tokeniser, implemented by the package `sacremoses`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lit_probattn.base.errors import DataError


@dataclass(frozen=True)
class Moses:
    """Tokenisation and detokenisation of lines.

    Source: tokenizer.perl, lowercase.perl, normalize-punctuation.perl and
    remove-non-printing-char.perl of Moses, as called by fairseq's preparation scripts.
    Departs from the source: wherever sacremoses does.

    Args:
        language: Code of the language, such as `de`.
        lower: Whether words are lower-cased.
        aggressive: Whether hyphens between letters are split into words (`-a`).
    """

    language: str
    lower: bool = False
    aggressive: bool = False

    def words(self, line: str) -> str:
        """Return the words, separated by spaces; special characters are escaped."""
        found: str = self._tokeniser.tokenize(
            line, aggressive_dash_splits=self.aggressive, return_str=True, escape=True
        )
        return found.lower() if self.lower else found

    def normalised(self, line: str) -> str:
        """Return a line with normalised punctuation, without non-printing characters."""
        found: str = self._normaliser.normalize(line)
        return found

    def line(self, words: str) -> str:
        """Detokenise words separated by spaces."""
        found: str = self._detokeniser.detokenize(words.split(), return_str=True, unescape=True)
        return found

    @cached_property
    def _tokeniser(self) -> Any:
        return _package().MosesTokenizer(lang=self.language)

    @cached_property
    def _detokeniser(self) -> Any:
        return _package().MosesDetokenizer(lang=self.language)

    @cached_property
    def _normaliser(self) -> Any:
        return _package().MosesPunctNormalizer(lang=self.language, post_remove_control_chars=True)


def _package() -> Any:
    try:
        import sacremoses
    except ImportError:
        raise DataError(
            "Moses' tokeniser needs the package sacremoses, which is not installed: "
            "pip install 'lit-probattn[text]', or set tokens to subwords"
        ) from None
    return sacremoses

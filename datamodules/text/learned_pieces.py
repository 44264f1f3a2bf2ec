"""Vocabularies of pieces of words, learned from texts by the package `tokenizers`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from datamodules.core.errors import DataError
from datamodules.text.vocabulary import tokenizers_package, without_long_words

__all__ = ["CONTINUED", "learn_bytes", "learn_words"]

# Begins a piece that does not begin its word.
CONTINUED = "##"
# Rarer characters are unknown, as in BERT's vocabularies.
_MOST_CHARACTERS = 1000
_LEAST_COUNT = 2
_WORDS_AT_ONCE = 10_000


def learn_words(
    texts: Iterable[str], vocab_size: int, special: Sequence[str], lower_case: bool
) -> list[str]:
    """Return a WordPiece vocabulary in the order of its ids, always the same of the same texts.

    Nothing is learned of words of more than 500 characters, which BERT reads as unknown.

    The trainer numbers continued characters as it meets them, in no certain order, and breaks ties
    between pairs by these numbers; so it is given them, in order, as special tokens.

    Args:
        texts: Pieces of text that end between words.
        vocab_size: Most pieces.
        special: Come first; the second stands for unknown words.
        lower_case: Whether case and accents are dropped.

    Raises:
        DataError: There are no words, or more characters than pieces.
    """
    package = tokenizers_package("pre-trained tokenisers", "use words as tokens")
    words: Counter[str] = Counter()
    tidy = package.normalizers.BertNormalizer(lowercase=lower_case).normalize_str
    cut = package.pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    for text in texts:
        words.update(word for word, _ in cut(tidy(without_long_words(text))))
    if not words:
        raise DataError("the texts have no words: a vocabulary needs some")
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    kept = sorted(counts, key=lambda character: (-counts[character], character))[:_MOST_CHARACTERS]
    inside = {character for word in words for character in word[1:]}
    continued = [CONTINUED + character for character in sorted(inside.intersection(kept))]
    _require_room(vocab_size, len(special) + len(kept) + len(continued), "characters")
    tokenizer = package.Tokenizer(package.models.WordPiece(unk_token=special[1]))
    tokenizer.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    trainer = package.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=_LEAST_COUNT,
        special_tokens=[*special, *continued],
        initial_alphabet=sorted(kept),
        limit_alphabet=len(kept),
        continuing_subword_prefix=CONTINUED,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_repeated(words), trainer)
    found = tokenizer.get_vocab()
    return sorted(found, key=found.__getitem__)


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Yield every word as often as it was counted."""
    for word in sorted(words):
        for first in range(0, words[word], _WORDS_AT_ONCE):
            yield " ".join([word] * min(_WORDS_AT_ONCE, words[word] - first))


def learn_bytes(
    texts: Iterable[str], vocab_size: int, special: Sequence[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the ids of a byte-level vocabulary and its merges.

    The arguments are those of `learn_words`.

    Raises:
        DataError: `vocab_size` leaves no room for the bytes.
    """
    package = tokenizers_package("pre-trained tokenisers", "use words as tokens")
    alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    _require_room(vocab_size, len(alphabet) + len(special), "bytes")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_LEAST_COUNT,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(without_long_words, texts), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    # Earlier versions of the package store each merge as one text.
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return model["vocab"], [(first, second) for first, second in pairs]


def _require_room(vocab_size: int, least: int, what: str) -> None:
    if vocab_size < least:
        raise DataError(
            f"vocab_size must be at least {least}, the special tokens and the {what} of the "
            f"texts, received {vocab_size}"
        )

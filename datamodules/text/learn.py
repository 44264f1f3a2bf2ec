"""Learning tokenisers from a training text: bytes, characters, words, BPE, WordPiece."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from datamodules.text.tokens import END_OF_LINE, SPLITTING, UNKNOWN, Tokens, byte_ids
from lit_probattn.base.errors import DataError

# Special tokens of encoders, in the order of their ids in a new vocabulary.
BERT = dict(
    zip(
        ("padding", "unknown", "begin", "separator", "mask"),
        ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        strict=True,
    )
)
ROBERTA = dict(
    zip(
        ("begin", "padding", "separator", "unknown", "mask"),
        ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
        strict=True,
    )
)
# Prefix of a piece that does not start a word.
CONTINUED = "##"
# Rarer characters are unknown, as in BERT's vocabulary.
_MOST_CHARACTERS = 1000
_LEAST_COUNT = 2
_WORDS_AT_ONCE = 10_000
_MOST_LETTERS = 500  # longest word used for learning
_LONG_WORD = re.compile(rf"\w{{{_MOST_LETTERS + 1},}}|[^\w\s]{{{_MOST_LETTERS + 1},}}")

# ---- units with a list of tokens ---------------------------------------------------------------


def as_words(words: Sequence[str]) -> Tokens:
    """Return a tokeniser of words, whose ids are their indices; splits at whitespace, keeps case.

    Raises:
        DataError: A word is duplicate, empty or contains whitespace; or `<eos>` is missing.
    """
    ids: dict[str, int] = {}
    for number, word in enumerate(words):
        if word.split() != [word]:
            raise DataError(f"line {number + 1} is {word!r}: expected one word without whitespace")
        first = ids.setdefault(word, number)
        if first != number:
            raise DataError(
                f"duplicate word {word!r} in lines {first + 1} and {number + 1}; remove one of the "
                "lines"
            )
    if END_OF_LINE not in ids:
        raise DataError(f"missing {END_OF_LINE!r}, which ends every line of text; add it")
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = SPLITTING["words"]
    unknown = {"unknown": UNKNOWN} if UNKNOWN in ids else {}
    return Tokens(tokenizer, {"end_of_line": END_OF_LINE, **unknown})


def learn_words(
    texts: Iterable[str], limit: int | None = None, min_count: int = 1, unknown: bool = False
) -> Tokens:
    """Return `<eos>` and the words by decreasing frequency, ties by first occurrence.

    Source: the Transformer-XL code, which MGK's language models use; there, `<unk>` is an ordinary
    word of the corpus.

    Args:
        limit: Maximum number of tokens.
        min_count: Rarer words are dropped.
        unknown: Whether to always include `<unk>` as id 1.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    own = (END_OF_LINE, UNKNOWN) if unknown else (END_OF_LINE,)
    # most_common is a stable sort, and the counter preserves first occurrences.
    words = [w for w, n in counts.most_common() if n >= min_count and w not in own]
    if unknown and not words:
        raise DataError(
            f"no word occurs {min_count} times in the training text; lower min_count, or set "
            "tokens to bytes"
        )
    return as_words([*own, *words][:limit])


def learn_characters(texts: Iterable[str], limit: int) -> Tokens:
    """Return `<unk>`, the newline, and characters by decreasing frequency."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    counts.pop("\n", None)
    own = [UNKNOWN, "\n", *(character for character, _ in counts.most_common(limit - 2))]
    ids = {character: number for number, character in enumerate(own)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = SPLITTING["characters"]
    tokenizer.decoder = decoders.Sequence([decoders.Replace(UNKNOWN, "�"), decoders.Fuse()])
    return Tokens(tokenizer, {"end_of_line": "\n", "unknown": UNKNOWN})


def as_bytes() -> Tokens:
    """Return a tokeniser of the 256 bytes of UTF-8; the newline ends a line."""
    ids = byte_ids()
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = SPLITTING["bytes"]
    tokenizer.decoder = decoders.ByteLevel()
    newline = next(character for character, byte in ids.items() if byte == ord("\n"))
    return Tokens(tokenizer, {"end_of_line": newline})


# ---- byte-level BPE ----------------------------------------------------------------------------


def learn_subwords(texts: Iterable[str], size: int) -> Tokens:
    """Learn byte-level BPE; `<eos>` is id 0, `<unk>`, which never occurs, id 1."""
    if size < 258:
        raise DataError(f"subwords must be at least 258 (256 bytes and two more), received {size}")
    lines = (line for text in texts for line in without_long_words(text).split("\n"))
    tokenizer = byte_pairs(lines, size, special=(END_OF_LINE, UNKNOWN))
    return Tokens(tokenizer, {"end_of_line": END_OF_LINE, "unknown": UNKNOWN})


def learn_byte_pairs(texts: Iterable[str], size: int) -> Tokens:
    """Learn RoBERTa-style BPE; raises DataError if `size` is too small for the bytes."""
    _require_vocabulary_size(size, 256 + len(ROBERTA), "bytes")
    tokenizer = byte_pairs(texts, size, special=ROBERTA.values(), least=_LEAST_COUNT)
    return as_roberta(tokenizer.model, ROBERTA)


def byte_pairs(
    texts: Iterable[str],
    size: int,
    *,
    special: Iterable[str] = (),
    least: int = 0,
    blank_first: bool = False,
) -> Tokenizer:
    """Learn byte-level BPE.

    Args:
        size: Number of pieces: special ones, 256 bytes and merges.
        special: Pieces with the first ids.
        least: Rarer pairs are not merged.
        blank_first: Whether the first word of a text has a preceding blank, as the others.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank_first)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=least,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(without_long_words, texts), trainer)
    return tokenizer


def without_long_words(text: str) -> str:
    """Remove words of more than 500 characters from a text before learning.

    The time to learn is quadratic in the longest word, and base64 or code can have words of a
    million characters. Here a word is a run of letters and digits, or of other symbols.
    """
    longest = max(map(len, text.split()), default=0)
    return text if longest <= _MOST_LETTERS else _LONG_WORD.sub(" ", text)


def as_roberta(
    model: Any, special: dict[str, str], blank_first: bool = False, name: str = ""
) -> Tokens:
    """Return RoBERTa's byte-level BPE tokeniser; `name` is used in error messages."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank_first)
    tokenizer.decoder = decoders.ByteLevel()
    _mark_special(tokenizer, special, takes_blank=True)
    # Excludes whitespace from offsets; special tokens are added by `Tokens.join`.
    end, begin = (
        (special[role], tokenizer.token_to_id(special[role]) or 0)
        for role in ("separator", "begin")
    )
    tokenizer.post_processor = processors.RobertaProcessing(end, begin, True, blank_first)
    return Tokens(tokenizer, special, name)


# ---- WordPiece ---------------------------------------------------------------------------------


def learn_pieces(texts: Iterable[str], size: int, lower_case: bool = True) -> Tokens:
    """Learn BERT-style WordPiece deterministically.

    Words of more than 500 characters, which are unknown in BERT, are ignored.

    The trainer numbers continuation characters in no fixed order and breaks ties between pairs by
    these numbers; they are therefore passed as special tokens in a fixed order.

    Args:
        texts: Texts that end between words.
        size: Maximum number of pieces.
        lower_case: Whether case and accents are removed.

    Raises:
        DataError: There are no words, or more characters than pieces.
    """
    words: Counter[str] = Counter()
    tidy = normalizers.BertNormalizer(lowercase=lower_case).normalize_str
    cut = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    for text in texts:
        words.update(word for word, _ in cut(tidy(without_long_words(text))))
    if not words:
        raise DataError("the texts contain no words to learn a vocabulary from")
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    kept = sorted(counts, key=lambda character: (-counts[character], character))[:_MOST_CHARACTERS]
    inside = {character for word in words for character in word[1:]}
    continued = [CONTINUED + character for character in sorted(inside.intersection(kept))]
    _require_vocabulary_size(size, len(BERT) + len(kept) + len(continued), "characters")
    tokenizer = Tokenizer(models.WordPiece(unk_token=BERT["unknown"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=_LEAST_COUNT,
        special_tokens=[*BERT.values(), *continued],
        initial_alphabet=sorted(kept),
        limit_alphabet=len(kept),
        continuing_subword_prefix=CONTINUED,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_repeated(words), trainer)
    return as_bert(tokenizer.get_vocab(), BERT, lower_case)


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Yield every word as many times as it was counted."""
    for word in sorted(words):
        for first in range(0, words[word], _WORDS_AT_ONCE):
            yield " ".join([word] * min(_WORDS_AT_ONCE, words[word] - first))


def as_bert(
    ids: dict[str, int],
    special: dict[str, str],
    lower_case: bool = True,
    chinese: bool = True,
    strip_accents: bool | None = None,
    name: str = "",
) -> Tokens:
    """Return BERT's tokeniser; `name` is used in error messages."""
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=special["unknown"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese,
        strip_accents=strip_accents,
        lowercase=lower_case,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUED)
    _mark_special(tokenizer, special)
    return Tokens(tokenizer, special, name)


def _mark_special(tokenizer: Tokenizer, special: dict[str, str], takes_blank: bool = False) -> None:
    """Recognise special tokens in text; the mask token absorbs preceding whitespace."""
    known = tokenizer.get_vocab()
    tokens = [
        AddedToken(name, lstrip=takes_blank and role == "mask", normalized=False)
        for role, name in special.items()
        if name in known
    ]
    tokenizer.add_special_tokens(tokens)


def _require_vocabulary_size(size: int, least: int, what: str) -> None:
    if size < least:
        raise DataError(
            f"vocab_limit must be at least {least}, the number of special tokens plus the {what} "
            f"of the texts, received {size}"
        )

"""Tokens of a training text: bytes, characters, words, pairs of bytes, WordPiece."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from datamodules.text.tokens import END_OF_LINE, UNKNOWN, Tokens, byte_ids
from lit_probattn.base.errors import DataError

__all__ = ["BERT", "CONTINUED", "ROBERTA", "as_bert", "as_bytes", "as_roberta", "as_words"]
__all__ += ["learn_byte_pairs", "learn_characters", "learn_pieces", "learn_subwords", "learn_words"]
__all__ += ["without_long_words"]

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
# Begins a piece that does not begin its word.
CONTINUED = "##"
# Rarer characters are unknown, as in BERT's vocabularies.
_MOST_CHARACTERS = 1000
_LEAST_COUNT = 2
_WORDS_AT_ONCE = 10_000
_MOST_LETTERS = 500  # of a word that is learned from
_LONG_WORD = re.compile(rf"\w{{{_MOST_LETTERS + 1},}}|[^\w\s]{{{_MOST_LETTERS + 1},}}")
# What `str.split` takes for blanks: four more than `WhitespaceSplit`.
_BLANKS = r"[\s\x1c-\x1f]+"

# ---- units with a list of tokens ---------------------------------------------------------------


def as_words(words: Sequence[str]) -> Tokens:
    """Return words, by their ids; a text is cut at blanks, case kept.

    Raises:
        DataError: A word occurs twice, is empty or has blanks in it; or `<eos>` is missing.
    """
    ids: dict[str, int] = {}
    for number, word in enumerate(words):
        if word.split() != [word]:
            raise DataError(f"line {number + 1} is {word!r}: expected one word without blanks")
        first = ids.setdefault(word, number)
        if first != number:
            raise DataError(
                f"{word!r} is in line {first + 1} and again in line {number + 1}; every word "
                f"has one id, so remove one of the lines"
            )
    if END_OF_LINE not in ids:
        raise DataError(f"{END_OF_LINE!r}, which ends every line of text, is missing; add it")
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_BLANKS), "removed")
    unknown = {"unknown": UNKNOWN} if UNKNOWN in ids else {}
    return Tokens(tokenizer, {"end_of_line": END_OF_LINE, **unknown})


def learn_words(
    texts: Iterable[str], limit: int | None = None, min_count: int = 1, unknown: bool = False
) -> Tokens:
    """Return `<eos>` and the words by falling frequency, equal ones by first occurrence.

    Source: the Transformer-XL code, which MGK's language models use; `<unk>` is a word of the
    corpus like all others there.

    Args:
        limit: Most tokens.
        min_count: Rarer words are left out.
        unknown: Whether there is an `<unk>`, id 1, whatever the text has.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    own = (END_OF_LINE, UNKNOWN) if unknown else (END_OF_LINE,)
    # The sort behind most_common is stable and the counter remembers first occurrences.
    words = [w for w, n in counts.most_common() if n >= min_count and w not in own]
    if unknown and not words:
        raise DataError(
            f"no word occurs {min_count} times in the training text; lower min_count, or use "
            f"tokens bytes"
        )
    return as_words([*own, *words][:limit])


def learn_characters(texts: Iterable[str], limit: int) -> Tokens:
    """Return `<unk>`, the newline, and characters by falling frequency."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    counts.pop("\n", None)
    own = [UNKNOWN, "\n", *(character for character, _ in counts.most_common(limit - 2))]
    ids = {character: number for number, character in enumerate(own)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(UNKNOWN, "�"), decoders.Fuse()])
    return Tokens(tokenizer, {"end_of_line": "\n", "unknown": UNKNOWN})


def as_bytes() -> Tokens:
    """Return the 256 bytes of UTF-8; the newline ends a line."""
    ids = byte_ids()
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    newline = next(character for character, byte in ids.items() if byte == ord("\n"))
    return Tokens(tokenizer, {"end_of_line": newline})


# ---- pairs of bytes ----------------------------------------------------------------------------


def learn_subwords(texts: Iterable[str], size: int) -> Tokens:
    """Learn pairs of bytes; `<eos>` is id 0, `<unk>`, which no text needs, id 1."""
    if size < 258:
        raise DataError(f"subwords must be at least 258 (the bytes and two more), received {size}")
    lines = (line for text in texts for line in without_long_words(text).split("\n"))
    tokenizer = _byte_pairs(lines, size, (END_OF_LINE, UNKNOWN), 0)
    return Tokens(tokenizer, {"end_of_line": END_OF_LINE, "unknown": UNKNOWN})


def learn_byte_pairs(texts: Iterable[str], size: int) -> Tokens:
    """Learn pairs of bytes as RoBERTa has them; a DataError if there is no room for the bytes."""
    _require_room(size, 256 + len(ROBERTA), "bytes")
    tokenizer = _byte_pairs(texts, size, list(ROBERTA.values()), _LEAST_COUNT)
    return as_roberta(tokenizer.model, ROBERTA)


def _byte_pairs(texts: Iterable[str], size: int, special: Sequence[str], least: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
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
    """Return a text to learn from, without what is cut as one word of more than 500 characters.

    Time to learn grows with the square of the longest word, and base64 or code has some of a
    million. What is cut as one is a run of letters and digits, or of other signs.
    """
    longest = max(map(len, text.split()), default=0)
    return text if longest <= _MOST_LETTERS else _LONG_WORD.sub(" ", text)


def as_roberta(
    model: Any, special: dict[str, str], blank_first: bool = False, name: str = ""
) -> Tokens:
    """Return RoBERTa's tokeniser of pairs of bytes; errors call it by `name`."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank_first)
    tokenizer.decoder = decoders.ByteLevel()
    _mark_special(tokenizer, special, takes_blank=True)
    # Takes blanks out of offsets; special tokens are put by `Tokens.join`.
    end, begin = (
        (special[role], tokenizer.token_to_id(special[role]) or 0)
        for role in ("separator", "begin")
    )
    tokenizer.post_processor = processors.RobertaProcessing(end, begin, True, blank_first)
    return Tokens(tokenizer, special, name)


# ---- WordPiece ---------------------------------------------------------------------------------


def learn_pieces(texts: Iterable[str], size: int, lower_case: bool = True) -> Tokens:
    """Learn WordPiece as BERT has it, always the same of the same texts.

    Nothing is learned of words of more than 500 characters, which BERT reads as unknown.

    The trainer numbers continued characters as it meets them, in no certain order, and breaks ties
    between pairs by these numbers; so it is given them, in order, as special tokens.

    Args:
        texts: Pieces of text that end between words.
        size: Most pieces.
        lower_case: Whether case and accents are dropped.

    Raises:
        DataError: There are no words, or more characters than pieces.
    """
    words: Counter[str] = Counter()
    tidy = normalizers.BertNormalizer(lowercase=lower_case).normalize_str
    cut = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
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
    _require_room(size, len(BERT) + len(kept) + len(continued), "characters")
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
    """Yield every word as often as it was counted."""
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
    """Return BERT's tokeniser; errors call it by `name`."""
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
    """Have special tokens read where a text has them; the mask takes a blank before it along."""
    known = tokenizer.get_vocab()
    tokens = [
        AddedToken(name, lstrip=takes_blank and role == "mask", normalized=False)
        for role, name in special.items()
        if name in known
    ]
    tokenizer.add_special_tokens(tokens)


def _require_room(size: int, least: int, what: str) -> None:
    if size < least:
        raise DataError(
            f"vocab_limit must be at least {least}, the special tokens and the {what} of the "
            f"texts, received {size}"
        )

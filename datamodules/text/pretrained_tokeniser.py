"""Tokenisers of pre-trained encoders, from their files: WordPiece (BERT), bytes (RoBERTa)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

from datamodules.core.errors import DataError, MissingDataError, nearest, require_one_of
from datamodules.core.files import expand, write_whole
from datamodules.text.learned_pieces import CONTINUED, learn_bytes, learn_words
from datamodules.text.vocabulary import tokenizers_package

__all__ = ["Kind", "Pieces", "PretrainedTokeniser"]

Kind = Literal["wordpiece", "bpe"]
_WHOLE, _WORDS, _BYTES, _MERGES = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt"
_SETTINGS = "tokenizer_config.json"
# What a special token is for: its name in the settings, and what BERT and RoBERTa call it.
_SPECIAL = {
    "begin": ("cls_token", "[CLS]", "<s>"),
    "separator": ("sep_token", "[SEP]", "</s>"),
    "mask": ("mask_token", "[MASK]", "<mask>"),
    "padding": ("pad_token", "[PAD]", "<pad>"),
    "unknown": ("unk_token", "[UNK]", "<unk>"),
}
# Ids may have gaps, but so many for each token are a mistake.
_MOST_IDS = 4
# Special tokens of a new vocabulary, by their ids.
_FIRST = {
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "bpe": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
}


class Pieces(NamedTuple):
    """A text in tokens.

    Attributes:
        ids: Of the tokens.
        offsets: First character of each in its text, and the one after its last; (0, 0) for
            special tokens.
        token_types: 0, or 1 for the second text in BERT's manner.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    token_types: list[int]


class PretrainedTokeniser:
    """A tokeniser of a pre-trained encoder, by the package `tokenizers`.

    BERT's manner of pairs is `[CLS] a [SEP] b [SEP]`, the second text of type 1; RoBERTa's, of
    tokenisers whose first token is `<s>`, is `<s> a </s></s> b </s>`, all of type 0. Special tokens
    that are written in a text are read as such.

    Source: BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019); the files of Hugging Face.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        special: Names of the special tokens by what they are for; None finds those of BERT or
            RoBERTa.
        origin: Named in errors.

    Attributes:
        vocab_size: Rows of the model's embedding table, V.
        begin: Id of the first token of a sequence; `separator`, `mask`, `padding` and `unknown`
            are ids too.
        pairs: Whose manner of pairs it has.

    Raises:
        DataError: A special token is not in the vocabulary.
    """

    begin: int
    separator: int
    mask: int
    padding: int
    unknown: int

    def __init__(
        self, tokenizer: Any, special: dict[str, str] | None = None, origin: str = "the vocabulary"
    ) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = tokenizer.get_vocab()
        _check_ids(known, origin)
        self.vocab_size: int = 1 + max(known.values(), default=-1)
        self.special = _find_special(known, special or {}, origin)
        for role, name in self.special.items():
            setattr(self, role, known[name])
        self.pairs = "roberta" if self.special["begin"] == "<s>" else "bert"

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read `tokenizer.json`, `vocab.txt`, or `vocab.json` with `merges.txt`.

        Args:
            path: One of the files, or a folder, in which the first of them that is there is read.
                `tokenizer_config.json` beside it says what is set; case is kept only if it sets
                `do_lower_case` to false.

        Raises:
            DataError: A file is missing or unreadable, or a special token is.
        """
        file = _find_file(expand(path))
        beside = file.parent / _SETTINGS
        settings = _read_json(beside) if beside.is_file() else {}
        package = tokenizers_package("pre-trained tokenisers", "use words as tokens")
        special = _named_special(settings)
        try:
            if file.suffix == ".txt":
                tokenizer = _wordpiece(package, _read_words(file), settings, special)
            elif file.name == _BYTES:
                _require_ids(file)
                tokenizer = _byte_pairs(package, file, settings, special)
            else:
                tokenizer = package.Tokenizer.from_file(str(file))
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from None
        except DataError:
            raise
        except Exception as error:  # the package raises plain Exception
            raise DataError(
                f"{file} is not a vocabulary that the package tokenizers reads: {error}; get the "
                f"tokeniser's files again"
            ) from None
        return cls(tokenizer, special, str(file))

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        folder: str | Path,
        vocab_size: int,
        kind: Kind = "wordpiece",
        *,
        lower_case: bool = True,
    ) -> Self:
        """Make a vocabulary of texts, always the same one, and write it; `read` reads it.

        Args:
            texts: Pieces of text that end between words.
            folder: Where `vocab.txt` goes, or `vocab.json` and `merges.txt`.
            vocab_size: Most tokens, special ones among them.
            kind: `wordpiece` as BERT has them, or `bpe` of bytes as RoBERTa has them.
            lower_case: Whether WordPiece drops case and accents.

        Raises:
            DataError: The vocabulary is too small for the characters, or a file exists.
        """
        require_one_of(get_args(Kind), kind=kind)
        folder = expand(folder)
        special = _FIRST[kind]
        settings: dict[str, Any]
        if kind == "wordpiece":
            settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
            words = learn_words(texts, vocab_size, special, lower_case)
            files = {_WORDS: "".join(f"{word}\n" for word in words)}
        else:
            mask = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "special": True}
            settings = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False}
            settings["mask_token"] = {**mask, "normalized": False, "rstrip": False}
            ids, merges = learn_bytes(texts, vocab_size, special)
            files = {_BYTES: json.dumps(ids, ensure_ascii=False) + "\n"}
            files[_MERGES] = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
        files[_SETTINGS] = json.dumps(settings, indent=2) + "\n"
        for name in files:
            if (folder / name).exists():
                raise DataError(f"{folder / name} exists: choose another folder or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(folder / name, text)
        return cls.read(folder)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `text` gives."""
        package = tokenizers_package("pre-trained tokenisers", "use words as tokens")
        stored = json.loads(text)
        return cls(package.Tokenizer.from_str(stored["tokenizer"]), stored["special"])

    @property
    def text(self) -> str:
        """What a cache stores, whatever file it was read from."""
        return json.dumps({"tokenizer": self._tokenizer.to_str(), "special": self.special})

    # ---- texts and tokens ---------------------------------------------------------------------

    def encode_plain(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and their offsets, without special tokens around them."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, without special tokens around them."""
        return [e.ids for e in self._tokenizer.encode_batch(lines, add_special_tokens=False)]

    def encode(self, text: str, pair: str | None = None) -> Pieces:
        """Return a text, or a pair of texts, as a model reads it."""
        ids, offsets = self.encode_plain(text)
        second, second_offsets = (None, None) if pair is None else self.encode_plain(pair)
        joined, types = self.join(ids, second)
        return Pieces(joined, self.lay_out(offsets, second_offsets, (0, 0)), types)

    def join(
        self, first: Sequence[int], second: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """Put special tokens around ids, or a pair of them; return ids and token types."""
        ids = self.lay_out(first, second, self.separator)
        ids[0] = self.begin
        num_first = len(first) + 2 if self.pairs == "bert" else len(ids)
        return ids, [int(place >= num_first) for place in range(len(ids))]

    def lay_out(self, first: Sequence[Any], second: Sequence[Any] | None, filler: Any) -> list[Any]:
        """Lay out what belongs to the tokens of a pair as `join` does, `filler` at special ones."""
        if second is None:
            return [filler, *first, filler]
        middle = [filler] * (2 if self.pairs == "roberta" else 1)
        return [filler, *first, *middle, *second, filler]

    def num_special(self, pair: bool = False) -> int:
        """Return how many special tokens `join` adds."""
        return len(self.lay_out([], [] if pair else None, 0))

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text, without special tokens."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
        return text


# ---- reading -----------------------------------------------------------------------------------


def _find_file(path: Path) -> Path:
    """Return the file that is read: `path`, or the first that is in this folder."""
    if path.is_dir():
        there = [path / name for name in (_WHOLE, _WORDS, _BYTES) if (path / name).is_file()]
        if not there:
            raise MissingDataError(
                f"{path} has no tokeniser: expected {_WHOLE}, {_WORDS}, or {_BYTES} with {_MERGES}"
            )
        path = there[0]
    if not path.is_file():
        near = nearest(path.name, (p.name for p in path.parent.glob("*") if p.is_file()))
        raise MissingDataError(f"tokeniser {path} not found{near}")
    if path.name == _BYTES and not path.with_name(_MERGES).is_file():
        raise MissingDataError(
            f"found {path}, but not {path.with_name(_MERGES)}: put both in one folder"
        )
    return path


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}; get it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}; get it again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object; get it again")
    return content


def _named_special(settings: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that settings name, by what they are for."""
    given = {role: settings.get(names[0]) for role, names in _SPECIAL.items()}
    texts = {role: t.get("content") if isinstance(t, dict) else t for role, t in given.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _check_ids(known: dict[str, int], origin: str) -> None:
    """Raise a DataError where two tokens have one id, or an id is far beyond their number."""
    tokens: dict[int, str] = {}
    for token, number in known.items():
        other = tokens.setdefault(number, token)
        if other != token:
            pair = " and ".join(map(repr, sorted((other, token))))
            raise DataError(f"{origin}: {pair} both have the id {number}; get it again")
        if number >= _MOST_IDS * len(known):
            raise DataError(
                f"{origin}: {token!r} has the id {number}, far beyond {len(known)} tokens; each id "
                f"is a row of the model's table: get it again"
            )


def _find_special(known: dict[str, int], special: dict[str, str], origin: str) -> dict[str, str]:
    """Return the names of all special tokens; a DataError for one that is not known."""
    found = {}
    for role, (key, *usual) in _SPECIAL.items():
        names = [special[role]] if role in special else usual
        there = [name for name in names if name in known]
        if not there:
            raise DataError(
                f"{origin} has no {role} token {' or '.join(map(repr, names))}: add it, or name "
                f"another as {key} in {_SETTINGS}"
            )
        found[role] = there[0]
    return found


def _read_words(path: Path) -> dict[str, int]:
    """Read a token per line; its id is the number of the line."""
    lines = _read_text(path).removesuffix("\n").split("\n")
    if lines == [""]:
        raise DataError(f"{path} is empty: expected a token per line")
    return {line: number for number, line in enumerate(lines)}


def _require_ids(path: Path) -> None:
    ids = _read_json(path)
    if not ids or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise DataError(f"{path} is not a vocabulary: expected tokens and their ids; get it again")


def _mark_special(package: Any, tokenizer: Any, special: dict[str, str], place: int) -> None:
    """Have special tokens read where a text has them; the mask takes a blank before it along."""
    known = tokenizer.get_vocab()
    names = {role: special.get(role, usual[place]) for role, usual in _SPECIAL.items()}
    there = {role: name for role, name in names.items() if name in known}
    tokens = [
        package.AddedToken(name, lstrip=role == "mask" and place == 2, normalized=False)
        for role, name in there.items()
    ]
    tokenizer.add_special_tokens(tokens)


def _wordpiece(
    package: Any, words: dict[str, int], settings: dict[str, Any], special: dict[str, str]
) -> Any:
    """Return BERT's tokeniser."""
    unknown = special.get("unknown", _SPECIAL["unknown"][1])
    tokenizer = package.Tokenizer(package.models.WordPiece(words, unk_token=unknown))
    tokenizer.normalizer = package.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = package.decoders.WordPiece(prefix=CONTINUED)
    _mark_special(package, tokenizer, special, 1)
    return tokenizer


def _byte_pairs(package: Any, file: Path, settings: dict[str, Any], special: dict[str, str]) -> Any:
    """Return RoBERTa's tokeniser."""
    merges = file.with_name(_MERGES)
    tokenizer = package.Tokenizer(package.models.BPE.from_file(str(file), str(merges)))
    blank = settings.get("add_prefix_space", False)
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=blank)
    tokenizer.decoder = package.decoders.ByteLevel()
    _mark_special(package, tokenizer, special, 2)
    known = tokenizer.get_vocab()
    ends = [special.get(role, _SPECIAL[role][2]) for role in ("separator", "begin")]
    # Takes blanks out of offsets; special tokens are put by `join`.
    tokenizer.post_processor = package.processors.RobertaProcessing(
        *((name, known.get(name, 0)) for name in ends), True, blank
    )
    return tokenizer

"""Tokens: a `tokenizers.Tokenizer` of any unit, and its special ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from lit_probattn.base.errors import DataError
from lit_probattn.base.files import digest, replace_text

# How the tokenisers of bytes, characters and words of `learn` split text, without normalisation.
SPLITTING = {
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "characters": pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
    # What `str.split` treats as whitespace: four more characters than `WhitespaceSplit`.
    "words": pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f]+"), "removed"),
}
END_OF_LINE, UNKNOWN = "<eos>", "<unk>"
# Ids can have gaps; more than this many ids per token are an error.
_MOST_IDS = 4
# Role of a special token -> its name in the tokenizer_config.json of Hugging Face.
ROLES = {
    "begin": "cls_token",
    "separator": "sep_token",
    "mask": "mask_token",
    "padding": "pad_token",
    "unknown": "unk_token",
    "end_of_line": "eos_token",
}


def byte_ids() -> dict[str, int]:
    """Return GPT-2's characters for bytes, each with its byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): b for n, b in enumerate(rest)}


def _check_ids(known: dict[str, int], origin: str) -> None:
    """Raise a DataError if two tokens share an id, or an id far exceeds the number of tokens."""
    tokens: dict[int, str] = {}
    for token, number in known.items():
        other = tokens.setdefault(number, token)
        if other != token:
            pair = " and ".join(map(repr, sorted((other, token))))
            raise DataError(f"{origin}: {pair} both have the id {number}; replace the file")
        if number >= _MOST_IDS * len(known):
            raise DataError(
                f"{origin}: {token!r} has the id {number}, far beyond {len(known)} tokens; each id "
                "is a row of the embedding table: replace the file"
            )


def _unit_of(tokenizer: Tokenizer) -> str | None:
    """Return the unit of a tokeniser of `learn` that needs no tokeniser; None for any other one."""
    cut, model = tokenizer.pre_tokenizer, tokenizer.model
    if tokenizer.normalizer is not None or cut is None:
        return None
    state = cut.__getstate__()
    unit = next((unit for unit, own in SPLITTING.items() if own.__getstate__() == state), None)
    if unit == "bytes":
        return (
            unit if isinstance(model, models.BPE) and tokenizer.get_vocab() == byte_ids() else None
        )
    return unit if isinstance(model, models.WordLevel) else None


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the package raises plain Exception
        raise DataError(
            f"the tokeniser does not support the text: {error}; add its token of unknown text"
        ) from None


class Pieces(NamedTuple):
    """A tokenised text or pair: ids, character offsets, token types (1 for a second text)."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    token_types: list[int]


class Tokens:
    """A tokeniser. A line of text ends with one token, `end_of_line`.

    BERT's format of a pair is `[CLS] a [SEP] b [SEP]`, with type 1 for the second text; RoBERTa's,
    used if the first token is `<s>`, is `<s> a </s></s> b </s>`, with type 0 for both.

    Args:
        tokenizer: Tokenises a line.
        special: Special token of each role, see `ROLES`; the separator ends a line if there is no
            `end_of_line`.

    Raises:
        DataError: A special token is missing from the vocabulary.
    """

    end_of_line: int
    unknown: int = -1  # not an id: there are no unknown tokens
    begin: int
    separator: int
    mask: int
    padding: int

    def __init__(self, tokenizer: Tokenizer, special: dict[str, str], name: str = "") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer, self.special = tokenizer, special
        _check_ids(self._ids, name or "the tokeniser")
        for role, token in special.items():
            number = tokenizer.token_to_id(token)
            if number is None:
                raise DataError(
                    f"{name or 'the tokeniser'}: missing {role} token {token!r}; add it"
                )
            setattr(self, role, number)
        if "end_of_line" not in special:
            self.end_of_line = self.separator
        self.pairs = "roberta" if special.get("begin") == "<s>" else "bert"
        self._unit = _unit_of(tokenizer)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse `text`."""
        special, _, tokenizer = text.partition("\n")
        return cls(Tokenizer.from_str(tokenizer), json.loads(special))

    @cached_property
    def text(self) -> str:
        """Serialised form: a line with the special tokens, and a tokenizer.json."""
        return f"{json.dumps(self.special)}\n{self.tokenizer.to_str()}"

    @property
    def digest(self) -> str:
        """SHA-256 of `text`, or of the list of words."""
        text = "".join(f"{word}\n" for word in self.words) if self._unit == "words" else self.text
        return digest(text)

    def save(self, folder: Path) -> None:
        """Write the files of a Hugging Face tokeniser; raises DataError if they exist."""
        settings = {ROLES[role]: token for role, token in self.special.items()}
        files = {"tokenizer.json": self.tokenizer.to_str(True)}
        files["tokenizer_config.json"] = json.dumps(settings, indent=2) + "\n"
        for name in files:
            if (folder / name).exists():
                raise DataError(f"{folder / name} exists: choose another folder or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_text(folder / name, content, durable=True)

    def __len__(self) -> int:
        return 1 + max(self._ids.values())

    @property
    def words(self) -> list[str]:
        """All tokens, in the order of their ids."""
        return sorted(self._ids, key=self._ids.__getitem__)

    # ---- lines -------------------------------------------------------------------------------

    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Convert text to ids, with `end_of_line` for newlines; also return the unknown count.

        Raises:
            DataError: A word is unknown, and there is no `<unk>` token.
        """
        if self._unit == "bytes":  # equal to the tokeniser, 600 times faster
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32), 0
        if self._unit == "words":  # 4 times faster
            return self._look_up(text.replace("\n", f" {END_OF_LINE} ").split())
        if self._unit == "characters":  # 7 times faster, a tenth of the memory
            return self._look_up(text)
        lines = text.split("\n")
        ends = [(self.end_of_line,)] * (len(lines) - 1) + [()]
        ids = chain(*chain.from_iterable(zip(self.encode_lines(lines), ends, strict=True)))
        found = np.fromiter(ids, dtype=np.int32)
        unknown = int((found == self.unknown).sum())
        if unknown:  # a literal `<unk>` in the text is known
            unknown -= text.count(self.special["unknown"])
        return found, unknown

    def _look_up(self, units: Sequence[str]) -> tuple[npt.NDArray[np.int32], int]:
        """Return the ids of words or characters, and the number of unknown ones."""
        found = map(self._ids.get, units, repeat(-1))
        ids = np.fromiter(found, dtype=np.int32, count=len(units))
        missing = ids == -1
        count = int(missing.sum())
        if count and self.unknown < 0:
            word = units[int(missing.argmax())]
            raise DataError(
                f"{word!r} is missing from the vocabulary of {len(self)} words, which has no "
                f"{UNKNOWN!r} either; add {UNKNOWN!r} to the vocabulary or its text"
            )
        ids[missing] = self.unknown
        return ids, count

    @cached_property
    def _ids(self) -> dict[str, int]:
        known: dict[str, int] = self.tokenizer.get_vocab()
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """Convert ids to text, with newlines for `end_of_line`."""
        lines: list[list[int]] = [[]]
        for token in ids:
            if token == self.end_of_line:
                lines.append([])
            else:
                lines[-1].append(int(token))
        skip = "begin" in self.special
        return "\n".join(self.tokenizer.decode(line, skip_special_tokens=skip) for line in lines)

    def decode_sequence(self, ids: Iterable[int]) -> str:
        """Convert the ids of a sequence to text without special tokens."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, without added special tokens."""
        with _named_errors():
            found = self.tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        return [encoded.ids for encoded in found]

    # ---- sequences of encoders ---------------------------------------------------------------

    def encode_plain(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and their offsets, without added special tokens."""
        with _named_errors():
            found = self.tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def sequence(self, text: str, pair: str | None = None) -> Pieces:
        """Return a text or pair with special tokens, whose offsets are (0, 0)."""
        ids, offsets = self.encode_plain(text)
        second, second_offsets = (None, None) if pair is None else self.encode_plain(pair)
        joined = self.join(ids, second)
        num_first = len(ids) + 2 if self.pairs == "bert" else len(joined)
        types = [int(place >= num_first) for place in range(len(joined))]
        return Pieces(joined, self.lay_out(offsets, second_offsets, (0, 0)), types)

    def join(self, first: Sequence[int], second: Sequence[int] | None = None) -> list[int]:
        """Add special tokens to the ids of a text or pair."""
        ids: list[int] = self.lay_out(first, second, self.separator)
        ids[0] = self.begin
        return ids

    def lay_out(self, first: Sequence[Any], second: Sequence[Any] | None, filler: Any) -> list[Any]:
        """Arrange per-token values like `join`, with `filler` at special tokens."""
        if second is None:
            return [filler, *first, filler]
        middle = [filler] * (2 if self.pairs == "roberta" else 1)
        return [filler, *first, *middle, *second, filler]

    def num_special(self, pair: bool = False) -> int:
        """Return the number of special tokens that `join` adds."""
        return len(self.lay_out([], [] if pair else None, 0))

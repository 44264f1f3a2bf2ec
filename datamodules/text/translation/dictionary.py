"""Dictionaries for translation: four special ids, then words by decreasing frequency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lit_probattn.base.errors import DataError

BOS, PAD, EOS, UNK = range(4)
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_OVERWRITE = "#fairseq:overwrite"
_MULTIPLE = 8  # sizes of embedding tables are multiples of this


class Dictionary:
    """Pieces of text and their ids; unknown pieces map to `<unk>`.

    Source: the dictionaries of fairseq, whose files `dict.<language>.txt` are supported: a piece
    and its count per line, with ids from 4 on in this order.

    Args:
        counts: Pieces with their counts, in the order of their ids.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = dict(counts)
        self.pieces = [*SPECIALS, *self.counts]
        self._ids = {piece: number for number, piece in enumerate(self.counts, len(SPECIALS))}

    @classmethod
    def count(
        cls,
        lines: Iterable[Sequence[str]],
        always: Iterable[str] = (),
        most: int | None = None,
    ) -> Dictionary:
        """Count the pieces of a text: by decreasing count, ties in alphabetical order.

        Args:
            lines: The pieces of each line.
            always: Pieces that are included even if they do not occur or are rare.
            most: Maximum number of ids, at least the special ones and `always`. None keeps every
                piece. Below it, the size is filled to a multiple of 8.
        """
        found: Counter[str] = Counter()
        for pieces in lines:
            found.update(pieces)
        for special in SPECIALS:
            found.pop(special, None)
        kept = set(always)
        found.update(dict.fromkeys(kept, 0))
        order = sorted(found.items(), key=lambda item: (-item[1], item[0]))
        free = len(order) if most is None else most - len(SPECIALS) - len(kept)
        further = [piece for piece, _ in order if piece not in kept][: max(0, free)]
        chosen = kept.union(further)
        counts = {piece: count for piece, count in order if piece in chosen}
        size = len(counts) + len(SPECIALS)
        fill = -size % _MULTIPLE
        if most is not None:
            fill = min(fill, most - size)
        return cls({**counts, **{f"madeupword{number:04d}": 0 for number in range(fill)}})

    @classmethod
    def from_text(cls, text: str, name: str) -> Dictionary:
        """Parse the content of a file; a DataError names the line that is not a piece and count."""
        counts: dict[str, int] = {}
        places: dict[str, int] = {}
        lines = text.removesuffix("\n").split("\n") if text else []
        for number, line in enumerate(lines, 1):
            entry = line.rstrip("\r").removesuffix(_OVERWRITE).rstrip(" ")
            piece, _, count = entry.rpartition(" ")
            if not piece or not count.isdecimal():
                raise DataError(
                    f"{name}: line {number} is {line[:60]!r}: expected a piece of text, a space "
                    "and its count, as in `dict.en.txt` of fairseq"
                )
            if piece in SPECIALS and not line.rstrip("\r").endswith(_OVERWRITE):
                raise DataError(
                    f"{name}: line {number} has {piece!r}, which every dictionary contains "
                    "implicitly; remove the line"
                )
            if piece in places and not line.rstrip("\r").endswith(_OVERWRITE):
                raise DataError(
                    f"{name}: duplicate piece {piece!r} in lines {places[piece]} and {number}; "
                    "remove one of them"
                )
            places.setdefault(piece, number)
            counts[piece] = int(count)
        if not counts:
            raise DataError(f"{name} is empty: expected a piece of text and its count per line")
        return cls(counts)

    @property
    def text(self) -> str:
        """Content of a file."""
        return "".join(
            f"{piece} {count}{f' {_OVERWRITE}' if piece in SPECIALS else ''}\n"
            for piece, count in self.counts.items()
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dictionary) and self.pieces == other.pieces

    __hash__ = None  # type: ignore[assignment]

    def ids(self, pieces: Sequence[str], spell: bool = False) -> npt.NDArray[np.int32]:
        """Return the ids of pieces with the end token, (num_ids + 1,).

        Args:
            spell: Whether to encode an unknown piece by its characters, which is possible for
                sub-words: their characters are bytes of the text.
        """
        found = [self._ids.get(piece, UNK) for piece in pieces]
        if spell and UNK in found:
            return self.ids(list(self._spelled(pieces)))
        return np.array([*found, EOS], dtype=np.int32)

    def _spelled(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            yield from [piece] if piece in self._ids else piece

    def words(self, ids: Iterable[int]) -> list[str]:
        """Return the pieces of ids up to the first end token, without padding and begin token."""
        found = []
        for number in ids:
            if number == EOS:
                break
            if number not in (BOS, PAD):
                found.append(self.pieces[number])
        return found

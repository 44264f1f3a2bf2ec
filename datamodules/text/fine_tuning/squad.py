"""Questions about paragraphs in the JSON of SQuAD, versions 1.1 and 2.0."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datamodules.core.tables import read_utf8
from lit_probattn.base.errors import DataError, MissingDataError

__all__ = ["Asked", "SquadFile", "Version", "WrongOffsets", "read_squad"]

Version = Literal["1.1", "2.0"]
WrongOffsets = Literal["error", "leave_out"]

_log = logging.getLogger("datamodules")
_SHOWN = 3
_SHOWN_TEXT = 40
_KINDS = {str: "text", list: "a list", dict: "an object", int: "a whole number", bool: "true/false"}


class Asked(NamedTuple):
    """A question.

    Args:
        id: Identifier, no two alike.
        question: The question itself.
        paragraph: Index of its paragraph.
        answers: Correct answers, and the character where each begins; none where there is no
            answer.
    """

    id: str
    question: str
    paragraph: int
    answers: list[tuple[str, int]]


@dataclass(frozen=True)
class SquadFile:
    """What a file holds.

    Args:
        contexts: Text of each paragraph.
        questions: In the order of the file.
        notes: What was left out, one line each.
    """

    contexts: list[str]
    questions: list[Asked]
    notes: list[str]


def read_squad(path: Path, version: Version, wrong_offsets: WrongOffsets = "error") -> SquadFile:
    """Read a file of questions.

    Args:
        version: In 2.0 a question may have no answer.
        wrong_offsets: Whether answers that do not stand where they should are an error; they are
            left out otherwise, and questions without another answer with them.

    Raises:
        DataError: The file is not of this format; the message names the place in the JSON.
    """
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file")
    try:
        content = json.loads(read_utf8(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not JSON ({error})") from None
    return _Reader(path, version, wrong_offsets).read(content)


class _Reader:
    """Reads the parts of a file, and knows where it is."""

    def __init__(self, path: Path, version: Version, wrong_offsets: WrongOffsets) -> None:
        self.path, self.version, self.wrong_offsets = path, version, wrong_offsets
        self.contexts: list[str] = []
        self.questions: list[Asked] = []
        self.places: dict[str, str] = {}  # of identifiers
        self.wrong: list[str] = []
        self.num_left_out = 0

    def read(self, content: Any) -> SquadFile:
        if not isinstance(content, dict) or "data" not in content:
            raise DataError(f"{self.path}: expected an object with the key 'data', as SQuAD has")
        for number, article in enumerate(self._field(content, "data", list, "")):
            place = f"data[{number}]"
            for index, paragraph in enumerate(self._field(article, "paragraphs", list, place)):
                self._paragraph(paragraph, f"{place}.paragraphs[{index}]")
        if not self.questions and not self.wrong:
            raise DataError(f"{self.path} has no questions")
        return SquadFile(self.contexts, self.questions, self._notes())

    def _paragraph(self, paragraph: Any, place: str) -> None:
        context = self._field(paragraph, "context", str, place)
        if not context.strip():
            raise self._error(place, "context is empty")
        self.contexts.append(context)
        for index, asked in enumerate(self._field(paragraph, "qas", list, place)):
            self._question(asked, context, f"{place}.qas[{index}]")

    def _question(self, asked: Any, context: str, place: str) -> None:
        name = self._field(asked, "id", str, place)
        question = self._field(asked, "question", str, place)
        if name in self.places:
            raise self._error(
                place, f"the id {name!r} is that of {self.places[name]} too; give each its own"
            )
        self.places[name] = place
        found = self._field(asked, "answers", list, place)
        impossible = "is_impossible" in asked and self._field(asked, "is_impossible", bool, place)
        if self.version == "1.1" and (impossible or not found):
            raise self._error(
                place, "there is no answer; set version to 2.0, which has such questions"
            )
        if impossible and found:
            raise self._error(place, "is_impossible is true, but there are answers; correct one")
        if self.version == "2.0" and not impossible and not found:
            raise self._error(place, "there is no answer, but is_impossible is not true")
        answers = [
            self._answer(answer, context, f"{place}.answers[{index}]")
            for index, answer in enumerate(found)
        ]
        right = [answer for answer in answers if answer is not None]
        if found and not right:
            self.num_left_out += 1
            return
        self.questions.append(Asked(name, question, len(self.contexts) - 1, right))

    def _answer(self, answer: Any, context: str, place: str) -> tuple[str, int] | None:
        """Return an answer, or nothing if it does not stand where it should."""
        text = self._field(answer, "text", str, place)
        start = self._field(answer, "answer_start", int, place)
        if not text:
            raise self._error(place, "text is empty")
        there = context[start : start + len(text)] if start >= 0 else ""
        if there == text:
            return text, start
        self.wrong.append(
            f"{place}: {_short(text)} should be at character {start}, where the context has "
            f"{_short(there)}"
        )
        return None

    def _notes(self) -> list[str]:
        if not self.wrong:
            return []
        first = "; ".join(self.wrong[:_SHOWN])
        more = f"; and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
        told = f"{self.path}: {len(self.wrong)} answers do not stand at their answer_start: "
        told += f"{first}{more}"
        if self.wrong_offsets == "error":
            raise DataError(f"{told}. Correct them, or set wrong_offsets to leave_out")
        if not self.questions:
            raise DataError(f"{told}. No question is left")
        _log.warning("%s; left out", told)
        return [f"{told}; left out, and with them {self.num_left_out} questions"]

    def _field(self, parent: Any, name: str, kind: type, place: str) -> Any:
        """Return a field of a JSON object; a DataError names what is missing or of another kind."""
        if not isinstance(parent, dict):
            raise self._error(place, f"expected an object, received {_short(parent)}")
        if name not in parent:
            raise self._error(place, f"{name!r} is missing")
        value = parent[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            where = f"{place}.{name}" if place else name
            raise self._error(where, f"expected {_KINDS[kind]}, received {_short(value)}")
        if isinstance(value, str) and value != value.encode("utf-8", "ignore").decode():
            raise self._error(f"{place}.{name}", "not valid Unicode")
        return value

    def _error(self, place: str, problem: str) -> DataError:
        return DataError(f"{self.path}: {place}: {problem}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]} …"

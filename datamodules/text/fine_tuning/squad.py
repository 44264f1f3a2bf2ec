"""Reader for SQuAD's JSON format, versions 1.1 and 2.0."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datamodules.core.files import read_utf8
from lit_probattn.base.errors import DataError

Version = Literal["1.1", "2.0"]
WrongOffsets = Literal["error", "leave_out"]

_log = logging.getLogger("datamodules")
_SHOWN = 3
_SHOWN_TEXT = 40
_KINDS = {str: "text", list: "a list", dict: "an object", int: "a whole number", bool: "true/false"}


class Asked(NamedTuple):
    """A question.

    Args:
        id: Unique identifier.
        question: Text of the question.
        paragraph: Index of its paragraph.
        answers: Correct answers and their start characters; empty if there is no answer.
    """

    id: str
    question: str
    paragraph: int
    answers: list[tuple[str, int]]


@dataclass(frozen=True)
class SquadFile:
    """Content of a file.

    Args:
        contexts: Text of each paragraph.
        questions: Questions in file order.
        notes: Remarks about skipped answers, one line each.
        num_unanswered: Number of questions without the key `answers`.
    """

    contexts: list[str]
    questions: list[Asked]
    notes: list[str]
    num_unanswered: int


def read_squad(
    path: Path, version: Version, wrong_offsets: WrongOffsets = "error", answered: bool = True
) -> SquadFile:
    """Read a file of questions.

    Args:
        version: In 2.0 questions can have no answer.
        wrong_offsets: Whether answers at wrong character offsets are an error; otherwise they are
            skipped, along with questions that have no other answer.
        answered: Whether every question must have the key `answers`.

    Raises:
        DataError: The file does not have this format; the message gives the location in the
            JSON.
    """
    try:
        content = json.loads(read_utf8(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not JSON ({error})") from None
    return _Reader(path, version, wrong_offsets, answered).read(content)


class _Reader:
    """Reads a file and tracks the current location."""

    def __init__(
        self, path: Path, version: Version, wrong_offsets: WrongOffsets, answered: bool
    ) -> None:
        self.path, self.version, self.wrong_offsets = path, version, wrong_offsets
        self.answered, self.num_unanswered = answered, 0
        self.contexts: list[str] = []
        self.questions: list[Asked] = []
        self.locations: dict[str, str] = {}  # location of each identifier
        self.wrong: list[str] = []
        self.num_left_out = 0

    def read(self, content: Any) -> SquadFile:
        if not isinstance(content, dict) or "data" not in content:
            raise DataError(f"{self.path}: expected an object with the key 'data', as in SQuAD")
        for number, article in enumerate(self._field(content, "data", list, "")):
            location = f"data[{number}]"
            for index, paragraph in enumerate(self._field(article, "paragraphs", list, location)):
                self._paragraph(paragraph, f"{location}.paragraphs[{index}]")
        if not self.questions and not self.wrong:
            raise DataError(f"{self.path} has no questions")
        return SquadFile(self.contexts, self.questions, self._notes(), self.num_unanswered)

    def _paragraph(self, paragraph: Any, location: str) -> None:
        context = self._field(paragraph, "context", str, location)
        if not context.strip():
            raise self._error(location, "context is empty")
        self.contexts.append(context)
        for index, asked in enumerate(self._field(paragraph, "qas", list, location)):
            self._question(asked, context, f"{location}.qas[{index}]")

    def _question(self, asked: Any, context: str, location: str) -> None:
        name = self._field(asked, "id", str, location)
        question = self._field(asked, "question", str, location)
        if name in self.locations:
            raise self._error(
                location,
                f"duplicate id {name!r}, also used by {self.locations[name]}; use unique ids",
            )
        self.locations[name] = location
        if not self.answered and "answers" not in asked:
            self.num_unanswered += 1
            self.questions.append(Asked(name, question, len(self.contexts) - 1, []))
            return
        found = self._field(asked, "answers", list, location)
        impossible = "is_impossible" in asked and self._field(
            asked, "is_impossible", bool, location
        )
        if self.version == "1.1" and (impossible or not found):
            raise self._error(location, "there is no answer; version 2.0 supports such questions")
        if impossible and found:
            raise self._error(
                location, "is_impossible is true, but there are answers; remove one of both"
            )
        if self.version == "2.0" and not impossible and not found:
            raise self._error(location, "there is no answer, but is_impossible is not true")
        answers = [
            self._answer(answer, context, f"{location}.answers[{index}]")
            for index, answer in enumerate(found)
        ]
        right = [answer for answer in answers if answer is not None]
        if found and not right:
            self.num_left_out += 1
            return
        self.questions.append(Asked(name, question, len(self.contexts) - 1, right))

    def _answer(self, answer: Any, context: str, location: str) -> tuple[str, int] | None:
        """Return an answer, or None if its character offset is wrong."""
        text = self._field(answer, "text", str, location)
        start = self._field(answer, "answer_start", int, location)
        if not text:
            raise self._error(location, "text is empty")
        there = context[start : start + len(text)] if start >= 0 else ""
        if there == text:
            return text, start
        self.wrong.append(
            f"{location}: expected {_short(text)} at character {start}, where the context has "
            f"{_short(there)}"
        )
        return None

    def _notes(self) -> list[str]:
        if not self.wrong:
            return []
        first = "; ".join(self.wrong[:_SHOWN])
        more = f"; and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
        warning = f"{self.path}: {len(self.wrong)} answers are not at their answer_start: "
        warning += f"{first}{more}"
        if self.wrong_offsets == "error":
            raise DataError(f"{warning}. Correct them, or set wrong_offsets to leave_out")
        if not self.questions:
            raise DataError(f"{warning}. No questions remain")
        _log.warning("%s; skipped", warning)
        return [f"{warning}; skipped, with {self.num_left_out} questions"]

    def _field(self, parent: Any, name: str, kind: type, location: str) -> Any:
        """Return a field of a JSON object; raises DataError if it is missing or of another type."""
        if not isinstance(parent, dict):
            raise self._error(location, f"expected an object, received {_short(parent)}")
        if name not in parent:
            raise self._error(location, f"{name!r} is missing")
        value = parent[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            where = f"{location}.{name}" if location else name
            raise self._error(where, f"expected {_KINDS[kind]}, received {_short(value)}")
        if isinstance(value, str) and value != value.encode("utf-8", "ignore").decode():
            raise self._error(f"{location}.{name}", "not valid Unicode")
        return value

    def _error(self, location: str, problem: str) -> DataError:
        return DataError(f"{self.path}: {location}: {problem}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]} …"

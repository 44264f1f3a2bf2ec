"""Extractive question answering as a data set of windows: SQuAD and files in its format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.base import SPLITS, Split
from datamodules.core.cache import Cache, CacheWriter, ensure_cache
from datamodules.core.files import expand
from datamodules.core.new_samples import NewSamples, new_spec
from datamodules.core.own import AtPath, beginning, length_line
from datamodules.core.report import compare_size
from datamodules.core.sequences import ragged_writer
from datamodules.text.fine_tuning.batches import WindowSplit
from datamodules.text.fine_tuning.encoded import EncodedTexts
from datamodules.text.fine_tuning.squad import SquadFile, Version, WrongOffsets, read_squad
from datamodules.text.fine_tuning.windows import Windows, token_span
from datamodules.text.releases import SQUAD
from datamodules.text.tokens import Tokens
from lit_probattn.base.arguments import Count, with_defaults
from lit_probattn.base.errors import MissingDataError
from lit_probattn.base.progress import progress

_SHOWN_QUESTIONS, _SHOWN = 3, 90


class Question(NamedTuple):
    """A question in its original form.

    Args:
        id: Identifier.
        question: Text of the question.
        context: The text that contains the answer.
        answers: Correct answers; empty if there is no answer.
    """

    id: str
    question: str
    context: str
    answers: list[str]


@with_defaults(max_length=384)
class QuestionAnswering(NewSamples, AtPath, EncodedTexts):
    """Questions whose answer is a span of a text, in SQuAD's JSON format.

    A sample is a window: see `datamodules.text.fine_tuning.windows`. Training uses the first of
    several answers. Without a test file, the validation split is also the test split.

    `path` is a folder with `train-v1.1.json` and `dev-v1.1.json` (or `-v2.0`), or with
    `train.json`, `dev.json` and optionally `test.json`; default: `squad` in data_dir. `new_path` is
    a file, whose questions can lack the key `answers`.

    Source: SQuAD 1.1 (Rajpurkar et al., 2016) and 2.0 (Rajpurkar et al., 2018); windows as in BERT.

    Args:
        version: 1.1, in which every question has an answer, or 2.0.
        stride: Number of tokens between the starts of consecutive pieces of a text.
        max_query_length: Longer questions are truncated.
        wrong_offsets: Whether answers at wrong character offsets are an error or are skipped.
        **kwargs: Arguments of NewSamples, AtPath, EncodedTexts (`max_length`: tokens per window)
            and DataModule.
    """

    task = "question_answering"
    labels_are = "answers"

    def __init__(
        self,
        *,
        version: Version = "1.1",
        stride: Count = 128,
        max_query_length: Count = 64,
        wrong_offsets: WrongOffsets = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        given = self.given_path
        self.folder = expand(given) if given else self.data_dir / "squad"
        self.version: Version = version
        self.wrong_offsets: WrongOffsets = wrong_offsets
        self.stride, self.max_query_length = stride, max_query_length
        self._texts: dict[str, list[Question]] = {}
        self._new_questions: Cache | None = None

    # ---- files -------------------------------------------------------------------------------

    def folder_of(self, path: str) -> Path | None:
        """Return the folder; None if the release is searched in data_dir."""
        return expand(path) if path else None

    def files(self) -> dict[str, Path]:
        """Return the file of each split; a MissingDataError lists missing files."""
        return SQUAD[self.version].find_single(self.data_dir, self.given_path)

    @property
    def select_on_test(self) -> bool:  # type: ignore[override]
        """Whether validation is the test split, because a separate test file is missing."""
        if self.new_path is not None:
            return False
        if self._opened is not None:
            return "test" not in self._opened.facts["files"]
        try:
            return "test" not in self.files()
        except MissingDataError:
            return False

    def sources(self) -> list[Path]:
        """Return the data files and the files of a given tokeniser."""
        return [*self.files().values(), *self.choice.files()]

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        sizes = [self.max_length, self.stride, self.max_query_length]
        return {
            "folder": str(self.folder.resolve()),
            "version": self.version,
            "sizes": sizes,
            "wrong_offsets": self.wrong_offsets,
            **self.choice.settings(),
        }

    # ---- the cache ---------------------------------------------------------------------------

    def build(self, writer: CacheWriter) -> None:
        """Read the files and divide the texts into windows."""
        read = {
            name: read_squad(path, self.version, self.wrong_offsets)
            for name, path in self.files().items()
        }

        def texts() -> Iterator[str]:
            yield from read["train"].contexts
            for asked in read["train"].questions:
                yield asked.question

        tokeniser = self.choice.write(writer, texts)
        windows = self._windows(tokeniser)
        windows.check()
        for name, part in read.items():
            _write_split(writer, name, part, tokeniser, windows)
        notes = [note for part in read.values() for note in part.notes]
        writer.add_facts({"notes": notes, "files": list(read)})

    def _windows(self, tokeniser: Tokens) -> Windows:
        num_special = tokeniser.num_special(pair=True)
        return Windows(self.max_length, num_special, self.max_query_length, self.stride)

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        facts = cache.facts
        self.notes = list(facts["notes"])
        return {name: WindowSplit.from_cache(*self._stored(name)) for name in SPLITS}

    def _stored(self, split: str) -> tuple[Cache, str]:
        """Return the cache of a split, and its name in that cache."""
        if split == "test" and self._new_questions is not None:
            return self._new_questions, split
        return self.cache, split if split in self.cache.facts["files"] else "val"

    # ---- new questions -----------------------------------------------------------------------

    def new_split(self, path: Path) -> tuple[Split, list[str]]:
        """Return the windows of the questions of a file, and notes."""
        spec = new_spec(self, path, self.tokeniser_digest)
        self._new_questions = ensure_cache(self.cache_dir, spec, partial(self._build_new, path))
        notes: list[str] = self._new_questions.facts["notes"]
        return WindowSplit.from_cache(*self._stored("test")), notes

    def _build_new(self, path: Path, writer: CacheWriter) -> None:
        part = read_squad(path, self.version, self.wrong_offsets, answered=False)
        _write_split(writer, "test", part, self.tokeniser, self._windows(self.tokeniser))
        writer.add_facts({"notes": part.notes, "unanswered": part.num_unanswered})

    def has_labels(self) -> bool:
        """Return whether every question of the test split has answers, or has none in 2.0."""
        return self._new_questions is None or not self._new_questions.facts["unanswered"]

    # ---- texts -------------------------------------------------------------------------------

    @property
    def num_classes(self) -> int:
        """Number of positions of a window: an answer can start at each of them."""
        return self.max_length

    def questions(self, split: str) -> Sequence[Question]:
        """Return the original questions of a split, by index; cached."""
        if split not in self._texts:
            cache, origin = self._stored(split)
            stored = json.loads(cache.text(f"{origin}_asked"))
            self._texts[split] = [
                Question(name, question, stored["contexts"][paragraph], answers)
                for name, question, paragraph, answers in stored["questions"]
            ]
        return self._texts[split]

    def question_of(self, split: str, window: int) -> int:
        """Return the index of a window's question."""
        return self._windowed(split).question_of(window)

    def characters(self, split: str, window: int, first: int, last: int) -> tuple[int, int]:
        """Return the half-open character range in the text of a span of window positions."""
        return self._windowed(split).characters_of(window, first, last)

    def _windowed(self, name: str) -> WindowSplit:
        split: WindowSplit = self.split(name)
        return split

    # ---- reports -----------------------------------------------------------------------------

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits, and three questions."""
        yield f"tokens: vocabulary {self.vocab_size}, {self.tokeniser.pairs} style"
        for name in SPLITS:
            split = self._windowed(name)
            holding = int(split.targets.sum())
            yield (
                f"{name}: {split.num_questions} questions, {len(split)} windows, {holding} of them "
                f"with the answer, {length_line(split.lengths)}"
            )
        for asked in self.questions("val")[:_SHOWN_QUESTIONS]:
            answer = asked.answers[0] if asked.answers else "no answer"
            excerpts = (beginning(text, _SHOWN) for text in (asked.question, answer))
            yield f"question {asked.id}: {' '.join(excerpts)}"

    def compare_sizes(self) -> Iterator[tuple[str, bool]]:
        """Yield a line for each published number of questions of a release."""
        files = self.files()
        for name, expected in SQUAD[self.version].counts.items():
            if files[name].name.endswith(f"-v{self.version}.json"):
                found = self._windowed(name).num_questions
                yield compare_size(f"questions of {name}", expected, found)


def _write_split(
    writer: CacheWriter,
    name: str,
    part: SquadFile,
    tokeniser: Tokens,
    windows: Windows,
) -> None:
    """Write windows, character ranges of tokens, and texts of a split to a cache."""
    encoded = [tokeniser.encode_plain(context) for context in part.contexts]
    starts = np.cumsum([0, *(len(ids) for ids, _ in encoded)])
    rows: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int]] = []
    before = tokeniser.num_special(pair=True) - 1  # special tokens before the text
    title, total = f"windows of {name}", len(part.questions)
    with (
        progress(title, total, "questions") as advance,
        ragged_writer(writer, name) as append,
    ):
        for number, asked in enumerate(part.questions):
            advance(1)
            ids, offsets = encoded[asked.paragraph]
            question = tokeniser.encode_plain(asked.question)[0][: windows.max_query_length]
            span = None
            if asked.answers:
                text, begin = asked.answers[0]
                span = token_span(offsets, begin, begin + len(text))
            second = len(question) + before
            for piece in windows.pieces(len(question), len(ids)):
                end = piece.first + piece.size
                append(tokeniser.join(question, ids[piece.first : end]))
                rows.append((number, second, piece.first, piece.size))
                shift = second - piece.first
                spans.append(
                    (span[0] + shift, span[1] + shift)
                    if span is not None and piece.holds(span)
                    else (0, 0)
                )
    writer.add(f"{name}_windows", np.array(rows, dtype=np.int32))
    writer.add(f"{name}_spans", np.array(spans, dtype=np.int32))
    places = [int(starts[asked.paragraph]) for asked in part.questions]
    writer.add(f"{name}_texts", np.array(places, dtype=np.int64))
    characters = [offset for _, offsets in encoded for offset in offsets]
    writer.add(f"{name}_characters", np.array(characters, dtype=np.int32).reshape(-1, 2))
    asked_texts = [
        [a.id, a.question, a.paragraph, [text for text, _ in a.answers]] for a in part.questions
    ]
    stored = {"contexts": part.contexts, "questions": asked_texts}
    writer.add_text(f"{name}_asked", json.dumps(stored, ensure_ascii=False))

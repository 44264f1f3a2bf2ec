"""Data sets from plain text: cloze questions with known answers, and sentence order.

A paragraph is a line; headings of WikiText (`= Title =`) and lines of fewer than three sentences
are skipped. The split of a paragraph and all random choices are determined by a hash of its text,
so the same text gives the same sets, and no paragraph is in two splits.

    python examples/sets/of_plain_text.py cloze_questions --text PATH --out FOLDER
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from datamodules.core.division import check_shares, divide
from datamodules.core.files import expand
from datamodules.core.tables import read_utf8
from datamodules.text.fine_tuning.documents import SUFFIXES, sentences_of
from datamodules.text.source import text_files
from lit_probattn.base.errors import DataError, require_at_least
from lit_probattn.base.files import replace_text

BLANK = "_____"
_HEADING = re.compile(r"\s*(=|#)")
_LEAST_SENTENCES = 3
# Possible answers: names inside a sentence, numbers, long words.
_NAMES = re.compile(r"(?<=[\w,;] )[A-Z][\w’'-]+(?: [A-Z][\w’'-]+)*")
_NUMBERS = re.compile(r"(?<!\w)\d[\d,.]*\d(?!\w)")
_LONG_WORDS = re.compile(r"(?<!\w)[a-z]{8,}(?!\w)")


class MadeSet:
    """Base of data sets from plain text.

    Args:
        text: A UTF-8 text file, or a folder of text files (.txt, .text, .tokens, .md).
        out: Folder for the train and dev files.
        dev_fraction: Share of the paragraphs in dev.
        max_paragraphs: Largest number of paragraphs, selected by hash. None means all.
        max_sentences: Number of leading sentences per paragraph. None means all.
    """

    names: tuple[str, str]

    def __init__(
        self,
        text: str,
        out: str,
        dev_fraction: float = 0.1,
        max_paragraphs: int | None = None,
        max_sentences: int | None = None,
    ) -> None:
        check_shares(dev_fraction=dev_fraction)
        require_at_least(2, max_paragraphs=max_paragraphs)
        require_at_least(_LEAST_SENTENCES, max_sentences=max_sentences)
        self.max_sentences = max_sentences
        self.text, self.out = expand(text), expand(out)
        self.dev_fraction, self.max_paragraphs = dev_fraction, max_paragraphs

    @abstractmethod
    def content(self, paragraphs: Sequence[list[str]]) -> tuple[str, int]:
        """Return the file of a split, and its number of samples; paragraphs are sentences."""

    def make(self) -> Iterator[str]:
        """Write the files; yield a one-line description of each.

        Raises:
            DataError: The text is too short, or a file exists.
        """
        paths = [self.out / name for name in self.names]
        for path in paths:
            if path.exists():
                raise DataError(f"{path} exists: choose another folder for out, or remove it")
        paragraphs = self._paragraphs()
        keys = [" ".join(sentences).encode() for sentences in paragraphs]
        shares = {"dev": self.dev_fraction}
        splits = divide(f"{self.text}: its paragraphs", keys, shares, 0)
        made = []
        for path, wanted in zip(paths, ("train", "dev"), strict=True):
            part = [p for p, split in zip(paragraphs, splits, strict=True) if split == wanted]
            content, count = self.content(part)
            if not count:
                raise DataError(
                    f"{self.text}: its {len(part)} paragraphs of {wanted} yield no sample; add "
                    "more text"
                )
            made.append((path, content, count, len(part)))
        self.out.mkdir(parents=True, exist_ok=True)
        for path, content, count, num_paragraphs in made:
            replace_text(path, content, durable=True)
            yield f"{path}: {count} samples of {num_paragraphs} paragraphs"

    def _paragraphs(self) -> list[list[str]]:
        """Return the sentences of each paragraph, each paragraph once, by their hash."""
        lines = (
            line
            for path in text_files(self.text, SUFFIXES)
            for line in read_utf8(path).splitlines()
        )
        texts = dict.fromkeys(" ".join(line.split()) for line in lines if not _HEADING.match(line))
        found = [sentences_of(text) for text in texts]
        long = [sentences for sentences in found if len(sentences) >= _LEAST_SENTENCES]
        cut = (sentences[: self.max_sentences] for sentences in long)
        kept = list({" ".join(sentences): sentences for sentences in cut}.values())
        if len(kept) < 2:
            raise DataError(
                f"{self.text}: {len(kept)} paragraphs of {_LEAST_SENTENCES} sentences or more, at "
                "least 2 are needed; a paragraph is a line"
            )
        if self.max_paragraphs is not None:
            # Not the hash that divides, which would select mostly dev paragraphs.
            kept.sort(key=lambda sentences: _hash("chosen " + " ".join(sentences)))
            kept = kept[: self.max_paragraphs]
        return sorted(kept, key=lambda sentences: _hash(" ".join(sentences)))


class ClozeQuestions(MadeSet):
    """Cloze questions in the JSON format of SQuAD 1.1.

    A question is a sentence of a paragraph without one of its names, numbers or long words, which
    is the answer and occurs exactly once in the rest of the paragraph. That rest is the context.

    Args:
        per_paragraph: Largest number of questions per paragraph.
        **kwargs: Arguments of MadeSet.
    """

    names = ("train.json", "dev.json")

    def __init__(self, text: str, out: str, per_paragraph: int = 3, **kwargs: Any) -> None:
        super().__init__(text, out, **kwargs)
        require_at_least(1, per_paragraph=per_paragraph)
        self.per_paragraph = per_paragraph

    def content(self, paragraphs: Sequence[list[str]]) -> tuple[str, int]:
        """Return the JSON of a split."""
        found = []
        for sentences in paragraphs:
            # A sentence that occurs twice in a paragraph is one question.
            named = {item["qas"][0]["id"]: item for item in _cloze(sentences)}
            asked = sorted(named.values(), key=lambda item: _hash(item["qas"][0]["question"]))
            found += asked[: self.per_paragraph]
        content = {"version": "1.1", "data": [{"title": self.text.name, "paragraphs": found}]}
        return json.dumps(content, ensure_ascii=False) + "\n", len(found)


class ShuffledSentences(MadeSet):
    """Sentence pairs: the second follows the first (`next`) or is from another paragraph (`other`).

    JSON lines with `sentence1`, `sentence2` and `label`, balanced; no sentence is first in two
    pairs. A sentence of another paragraph belongs to the same split and also follows a sentence.

    Args:
        **kwargs: Arguments of MadeSet.
    """

    names = ("train.jsonl", "dev.jsonl")

    def __init__(self, text: str, out: str, **kwargs: Any) -> None:
        super().__init__(text, out, **kwargs)

    def content(self, paragraphs: Sequence[list[str]]) -> tuple[str, int]:
        """Return the lines of a split."""
        if len(paragraphs) < 2:
            return "", 0
        pairs = [
            (number, sentences[place], sentences[place + 1])
            for number, sentences in enumerate(paragraphs)
            for place in range(0, len(sentences) - 1, 2)
        ]
        pairs.sort(key=lambda pair: _hash(f"{pair[1]} {pair[2]}"))
        followed = [(first, second, "next") for _, first, second in pairs[::2]]
        strange = [
            (first, other, "other")
            for number, first, second in pairs[1::2]
            if (other := _elsewhere(paragraphs, number, second)) is not None
        ]
        both = [row for two in zip(followed, strange, strict=False) for row in two]
        names = ("sentence1", "sentence2", "label")
        rows = [dict(zip(names, row, strict=True)) for row in both]
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), len(rows)


def _cloze(sentences: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a paragraph with one question for each suitable sentence."""
    for place, sentence in enumerate(sentences):
        rest = " ".join([*sentences[:place], *sentences[place + 1 :]])
        for phrase in _phrases(sentence):
            there = [match.start() for match in _whole(phrase).finditer(rest)]
            if len(there) != 1 or len(_whole(phrase).findall(sentence)) != 1:
                continue
            question = _whole(phrase).sub(BLANK, sentence)
            answer = {"text": phrase, "answer_start": there[0]}
            name = f"{_hash(f'{rest} {question}'):016x}"
            yield {
                "context": rest,
                "qas": [{"id": name, "question": question, "answers": [answer]}],
            }
            break


def _phrases(sentence: str) -> list[str]:
    """Return the possible answers in a sentence: names first, each kind sorted by hash."""
    kinds = (_NAMES, _NUMBERS, _LONG_WORDS)
    return [phrase for kind in kinds for phrase in sorted(set(kind.findall(sentence)), key=_hash)]


def _whole(phrase: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)")


def _elsewhere(paragraphs: Sequence[list[str]], number: int, second: str) -> str | None:
    """Return a second sentence of another paragraph that differs from `second`, or None."""
    key, count = _hash(second), len(paragraphs)
    for step in range(count - 1):
        other = (number + 1 + (key + step) % (count - 1)) % count
        seconds = [sentence for sentence in paragraphs[other][1::2] if sentence != second]
        if seconds:
            return seconds[key // count % len(seconds)]
    return None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def main(words: list[str] | None = None) -> int:
    """Write a data set; return the exit status, 1 for invalid data."""
    kinds = {"cloze_questions": ClozeQuestions, "shuffled_sentences": ShuffledSentences}
    parser = ArgumentParser(description="Generate a data set for fine-tuning from plain text.")
    commands = parser.add_subcommands()
    for name, kind in kinds.items():
        own = ArgumentParser()
        own.add_class_arguments(kind)
        commands.add_subcommand(name, own)
    given = parser.parse_args(words)
    try:
        for line in kinds[given.subcommand](**given[given.subcommand].as_dict()).make():
            print(line)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

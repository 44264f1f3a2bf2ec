"""Parallel text as a data set for encoder-decoder models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from datamodules.core.base import SPLITS, CachedDataModule, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.files import ARCHIVES, expand, extract, is_archive
from datamodules.core.own import AtPath, beginning, length_line, required_path
from datamodules.core.report import compare_size
from datamodules.text.token_batches import TokenBatches
from datamodules.text.translation.batches import PairCollate, SentencePairs
from datamodules.text.translation.coder import Cutter, Method, TextCoder
from datamodules.text.translation.dictionary import SPECIALS
from datamodules.text.translation.files import CODES, EmptyLines, ParallelText, find_plain
from datamodules.text.translation.job import LineJob
from datamodules.text.translation.moses import Moses
from datamodules.text.translation.preparation import (
    Cleaning,
    Preparation,
    is_prepared,
    read_codes,
)
from lit_probattn.base.arguments import (
    Count,
    Range,
    changed_arguments,
    check_argument,
)
from lit_probattn.base.errors import (
    DataError,
    MissingDataError,
)
from lit_probattn.base.files import digest

Tokens = Literal["auto", "subwords", "moses_bpe", "prepared", "words"]

_log = logging.getLogger("datamodules")
_READER_VERSION = 1  # part of the cache name; increment when the stored data change
_SHOWN = 100  # characters per sample
_SHOWN_PAIRS = 3


class Translation(AtPath, TokenBatches, CachedDataModule):
    """Parallel text in fairseq's layout: `train.de`, `train.en`, `valid.*` and `test.*`.

    Line n of one file is the translation of line n of the other. `dict.<language>.txt` and BPE
    codes (`code`) in the same folder are used if they exist. Ids: 0 `<s>`, 1 padding, 2 `</s>`, 3
    `<unk>`, then pieces by decreasing count. Batches are counted in tokens
    (`datamodules.core.token_order`); for their format see
    `datamodules.text.translation.batches.PairCollate`. `path` is a folder with these files, or an
    archive of it (.tar.gz, .tgz, .tar.xz, .tar.bz2).

    Args:
        source_language: Code of the source language, as in the file names.
        target_language: Code of the target language, as in the file names.
        tokens: `subwords` is byte-level pair encoding, which is lossless; `moses_bpe` are pieces
            of Moses' words, marked by `@@`; `prepared` is text that already consists of such
            pieces; `words` are separated by whitespace. `auto` selects `prepared` for text with
            `@@`, `moses_bpe` for other text with codes, and `subwords` otherwise.
        merges: Number of BPE merges, learned jointly from both languages, if there are no codes.
        codes_file: BPE codes of subword-nmt or fastBPE, used instead of `code`.
        joint_dictionary: Whether both languages share one dictionary.
        dictionary_limit: Maximum number of ids of a dictionary; rarer pieces become `<unk>`, or
            bytes with `subwords`, which require at least 260 ids.
        lower: Whether the text is lower-cased; of prepared text, only lines that are segmented
            later.
        max_ratio: Training pairs with a larger ratio of word counts are dropped. None disables.
        max_words: Training pairs with more words on either side are dropped. None disables.
        empty_lines: Whether a pair with an empty side is an error or is dropped.
        max_length: Maximum number of tokens per side, `</s>` included; the model's max_seq_len.
        too_long: Whether a longer sentence is an error or is truncated.
        **kwargs: Arguments of AtPath, of TokenBatches, which count the tokens of the longer side,
            and of DataModule.
    """

    task = "translation"
    title = "translation"
    default_tokens: Method = "subwords"  # for unsegmented text without codes
    cleaning_by_pieces = False
    max_seq_len: int

    def __init__(
        self,
        *,
        source_language: str = "de",
        target_language: str = "en",
        tokens: Tokens = "auto",
        merges: Count = 8000,
        codes_file: str | None = None,
        joint_dictionary: bool = False,
        dictionary_limit: Annotated[int, Range(5)] | None = None,
        lower: bool = False,
        max_ratio: Annotated[float, Range(1)] | None = None,
        max_words: Count | None = None,
        empty_lines: EmptyLines = "error",
        max_length: Annotated[int, Range(2)] = 1024,
        too_long: Literal["error", "cut"] = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if source_language == target_language:
            raise DataError(
                f"source_language and target_language are both {source_language!r}; expected two "
                "different languages"
            )
        self.path = self.given_path
        self.source_language, self.target_language = source_language, target_language
        self.tokens, self.merges, self.codes_file = tokens, merges, codes_file
        self.joint_dictionary, self.dictionary_limit = joint_dictionary, dictionary_limit
        self.lower, self.empty_lines, self.too_long = lower, empty_lines, too_long
        self.cleaning = Cleaning(max_ratio, max_words, self.cleaning_by_pieces)
        self.max_seq_len = max_length

    # ---- the files ---------------------------------------------------------------------------

    def folder_of(self, path: str) -> Path | None:
        """Return the folder of `path`, whether it exists or not; None if it is not set."""
        place = expand(path)
        return (place if place.is_dir() else place.parent) if path else None

    def place(self) -> Path:
        """Return the folder or archive of the text; raises MissingDataError if it is missing."""
        place = required_path(self.path)
        if place.is_file() and not is_archive(place):
            raise DataError(
                f"{place}: expected a folder, or an archive ending in {', '.join(ARCHIVES)}"
            )
        return place

    def wanted(self, name: str) -> bool:
        """Whether a file of an archive is needed."""
        names = [end for language in self.languages for end in (f".{language}", f".{language}.txt")]
        return name in CODES or name.endswith(tuple(names))

    def find(self, folder: Path) -> ParallelText:
        """Find the text in a folder; a MissingDataError lists missing files."""
        inner = sorted(p for p in folder.rglob("*") if p.is_dir()) if is_archive(folder) else []
        for place in [folder, *inner]:
            found = find_plain(self.title, place, *self.languages)
            if found is not None:
                return found
        first, second = self.languages
        files = ", ".join(f"{name}.{first}, {name}.{second}" for name in ("train", "valid", "test"))
        raise MissingDataError(
            f"{self.path}: expected the files {files}; for other languages set source_language and "
            "target_language"
        )

    @property
    def published_counts(self) -> dict[str, int]:
        """Published numbers of pairs, if any."""
        return {}

    @property
    def languages(self) -> tuple[str, str]:
        """Codes of source and target language."""
        return self.source_language, self.target_language

    # ---- the cache ---------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        codes = None
        if self.codes_file is not None:
            text = read_codes(expand(self.codes_file)).text
            codes = digest(text)
        return {
            **self.identity(),
            "languages": list(self.languages),
            "tokens": self.tokens,
            "merges": self.merges,
            "codes": codes,
            "joint_dictionary": self.joint_dictionary,
            "dictionary_limit": self.dictionary_limit,
            "lower": self.lower,
            "cleaning": vars(self.cleaning),
            "empty_lines": self.empty_lines,
            "reader_version": _READER_VERSION,
        }

    def identity(self) -> dict[str, Any]:
        """Return the identity of the text."""
        return {"path": str(expand(self.path).resolve())}

    def sources(self) -> list[Path]:
        """Return the archive or the files."""
        place = self.place()
        return [place] if is_archive(place) else self.find(place).paths

    def build(self, writer: CacheWriter) -> None:
        """Read the text; segment it and build the dictionaries."""
        spec = self.cache_spec
        states = [(str(path), path.stat()) for path in self.sources()]
        files = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
        job = LineJob(self.cache_dir / f".{spec.name}.partial", [spec.settings, files])
        if job.is_resumed:
            _log.warning("resuming an interrupted preparation in %s", job.folder)
        text = self.find(self.folder_for(job))
        cutter = self._cutter(text)
        for told in self._without_effect(text, cutter):
            _log.warning("%s: %s", self.title, told)
        Preparation(
            job,
            text,
            cutter,
            Cleaning() if text.cleaned else self.cleaning,
            self.empty_lines,
            self.merges,
            self.joint_dictionary,
            self.dictionary_limit,
            self.languages,
            self.title,
        ).run(writer)
        job.remove()

    def folder_for(self, job: LineJob) -> Path:
        """Return the folder of the text; an archive is extracted into the job's folder."""
        place = self.place()
        return extract(place, job.folder, self.wanted) if is_archive(place) else place

    def _cutter(self, text: ParallelText) -> Cutter:
        codes = expand(self.codes_file) if self.codes_file is not None else text.codes
        train = text.splits["train"].source
        method = self.tokens
        if method == "auto":
            uncut = "moses_bpe" if codes is not None else self.default_tokens
            method = "prepared" if is_prepared(train) else uncut
        elif method in ("moses_bpe", "subwords") and is_prepared(train):
            raise DataError(
                f"{train.name} already consists of pieces with @@, but tokens={method}; set tokens "
                "to prepared, or provide unsegmented text"
            )
        if method == "subwords" and self.codes_file is not None:
            raise DataError(
                "codes_file requires tokens=moses_bpe, received tokens=subwords; change tokens or "
                "remove codes_file"
            )
        source, target = (
            Moses(language, self.lower, text.aggressive) for language in self.languages
        )
        if method == "subwords":
            cutter = Cutter(method, source, target)
            least = len(SPECIALS) + len(cutter.alphabet)
            if self.dictionary_limit is not None and self.dictionary_limit < least:
                raise DataError(
                    f"dictionary_limit must be at least {least} with tokens=subwords, the number "
                    f"of special ids plus the bytes, received {self.dictionary_limit}"
                )
            return cutter
        return Cutter(method, source, target, None if codes is None else read_codes(codes).text)

    def _without_effect(self, text: ParallelText, cutter: Cutter) -> Iterator[str]:
        """Yield a line for each setting that differs from its default but is not used."""
        reasons = {}
        if cutter.method in ("prepared", "words"):
            reasons["merges"] = f"tokens={cutter.method}"
        elif cutter.codes is not None:
            reasons["merges"] = "given BPE codes"
        if text.cleaned:
            reasons["max_ratio"] = reasons["max_words"] = "text that is prepared as published"
        if text.dictionaries:
            reasons["dictionary_limit"] = "given dictionaries"
        values = {
            "merges": self.merges,
            "dictionary_limit": self.dictionary_limit,
            "max_ratio": self.cleaning.max_ratio,
            "max_words": self.cleaning.max_words,
        }
        for name, value in changed_arguments(type(self), values).items():
            if name in reasons:
                yield f"{name}={value} has no effect with {reasons[name]}"

    # ---- text --------------------------------------------------------------------------------

    @cached_property
    def coder(self) -> TextCoder:
        """Converts between text and ids; the text is prepared if necessary."""
        return TextCoder.from_text(self.cache.text("coder"))

    @property
    def vocab_size(self) -> int:
        """Number of ids of the target dictionary."""
        return len(self.coder.target)

    @property
    def source_vocab_size(self) -> int:
        """Number of ids of the source dictionary."""
        return len(self.coder.source)

    @property
    def num_classes(self) -> int:
        """Size of the target dictionary: every piece is a possible prediction."""
        return self.vocab_size

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of source lines, `</s>` included."""
        return self.coder.encode(lines)

    def detokenise(self, ids: Sequence[int]) -> str:
        """Return target ids as detokenised text."""
        return self.coder.detokenise(ids)

    def tokenised(self, ids: Sequence[int]) -> str:
        """Return target ids as words of Moses' tokeniser."""
        return self.coder.tokenised(ids)

    def references(self, split: str) -> list[str]:
        """Return the target lines of validation or test as in the files.

        Text that consists of pieces is detokenised.
        """
        lines = self._lines(split, "target")
        return self._detokenised(lines, self.coder.cutter.target)

    def source_lines(self, split: str) -> list[str]:
        """Return the source lines of validation or test as in the files, detokenised if needed."""
        return self._detokenised(self._lines(split, "source"), self.coder.cutter.source)

    def tokenised_references(self, split: str) -> list[str]:
        """Return the words of the target lines of validation or test, as `tokenised` does."""
        lines = self._lines(split, "target")
        if self.coder.cutter.method == "prepared":
            return lines
        return list(self.coder.tokenised_lines(lines))

    def _detokenised(self, lines: list[str], moses: Moses) -> list[str]:
        is_prepared = self.coder.cutter.method == "prepared"
        return [moses.line(line) for line in lines] if is_prepared else lines

    def _lines(self, split: str, side: str) -> list[str]:
        check_argument("split", split, Literal["val", "test"])
        return self.cache.text(f"{split}_{side}_lines").split("\n")

    # ---- splits ------------------------------------------------------------------------------

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the three splits; raises DataError if a sentence exceeds a batch or the model."""
        splits: dict[str, Any] = {
            name: SentencePairs.from_cache(cache, name, self.max_seq_len) for name in SPLITS
        }
        for name, split in splits.items():
            if self.too_long == "error":
                split.reject_longer(f"{self.title}: {name}")
        lengths = splits["train"].batch_lengths(self.pad_multiple)
        self.require_tokens(lengths, "pair", "lower max_length and set too_long to cut")
        self.notes = list(self._notes())
        return splits

    def _notes(self) -> Iterator[str]:
        for name, count in self.facts["left_out"].items():
            if count:
                lines = self.facts["lines"][name]
                yield f"{count} of {lines} pairs of {name} dropped: cleaning, or an empty side"
        for name, count in self.facts.get("shared", {}).items():
            if count:
                lines = self.facts["lines"][name]
                yield (
                    f"{count} of {lines} pairs of {name} are also in train, which inflates scores"
                )

    # ---- batches -----------------------------------------------------------------------------

    def target_tokens(self, steps: int) -> int:
        """Return the number of target tokens of the first steps, with `</s>`, without padding."""
        return self._training_order().target_tokens(steps)

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that collates a batch."""
        return PairCollate(self.pad_multiple, self.max_seq_len)

    # ---- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return sizes and digests of the dictionaries, for checkpoints."""
        return {"dictionaries": self._digests()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise a DataError if a checkpoint was trained with other dictionaries."""
        before, now = state_dict["dictionaries"], self._digests()
        for side, (size, sha256) in now.items():
            if list(before[side]) != [size, sha256]:
                raise DataError(
                    f"the checkpoint was trained with a {side} dictionary of {before[side][0]} "
                    f"ids, the data have a different one of {size}, so ids would denote other "
                    "words; use the text and the data settings of the training"
                )

    def _digests(self) -> dict[str, list[Any]]:
        sides = {"source": self.coder.source, "target": self.coder.target}
        return {side: [len(d), digest("\n".join(d.pieces))] for side, d in sides.items()}

    # ---- reports -----------------------------------------------------------------------------

    def size_lines(self) -> Iterator[str]:
        """Yield lines about vocabularies, lengths, padding, unknown words and samples."""
        one = ", joint" if self.coder.source == self.coder.target else ""
        yield (
            f"tokens: {self.facts['method']}, vocabulary {self.source_vocab_size} "
            f"{self.source_language}, {self.vocab_size} {self.target_language}{one}"
        )
        for name in SPLITS:
            split = self.split(name)
            yield f"{name}: {len(split)} pairs, {length_line(split.lengths, split)}"
            for side, language in zip(("source", "target"), self.languages, strict=True):
                unknown, total = self.facts["unknown"][name][side]
                share = 100 * unknown / total
                yield (
                    f"  {language}: {total} tokens with </s>, {total / len(split):.1f} per "
                    f"sentence, <unk> {unknown} ({share:.2f} %)"
                )
        shares = self.batch_lengths("train").padding_shares(self.max_tokens)
        parts = zip(shares, self.languages, strict=True)
        summary = ", ".join(f"{100 * share:.1f} % {language}" for share, language in parts)
        yield f"padding in training batches: {summary}"
        lines = zip(self.source_lines("test"), self.references("test"), strict=True)
        for number, pair in zip(range(_SHOWN_PAIRS), lines, strict=False):
            cut = (beginning(text, _SHOWN) for text in pair)
            yield f"test pair {number + 1}: {' | '.join(cut)}"

    def compare_sizes(self) -> Iterator[tuple[str, bool]]:
        """Yield a line for each published number of pairs, and whether it is equal."""
        for name, expected in self.published_counts.items():
            found = len(self.split(name))
            yield compare_size(f"pairs of {name}", expected, found)

"""Build the training text of noisy back-translation: a reverse model translates target text.

    python -m lit_probattn.reproduce.backtranslation --reverse runs/de_en/0/average-10 \\
        --monolingual news.de --parallel data/wmt14_en_de --out data/wmt14_en_de_backtranslation
    lit-probattn reproduce fish_backtranslation --set \\
        data.init_args.path=data/wmt14_en_de_backtranslation

The reverse model is a run that translates from the target into the source language. Each line of
--monolingual is translated by the beam search of the run or sampled with --temperature 1; noise is
added, and the result is the source of the line. --out is a new folder in the layout of fairseq: the
parallel text --upsample times, then the new pairs; validation, test, codes and dictionaries are
copied from --parallel. If --parallel is segmented by BPE, so are the new pairs. Rerun an
interrupted command to resume it.

Source: Edunov et al., 2018, noise of section 3; FiSH, NeurIPS 2022, section 3.7.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.text.translation.files import Lines, ParallelText, find_plain
from datamodules.text.translation.job import LineJob, lines_of
from datamodules.text.translation.preparation import is_prepared
from lit_probattn.analysis.options import add_run
from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import digest, refuse_to_replace
from lit_probattn.cli.errors import exit_status, quieten
from lit_probattn.commands.opened import add_search, set_search
from lit_probattn.commands.translate import translated
from lit_probattn.training.trained import open_translator

MODULE = "lit_probattn.reproduce.backtranslation"
_MARK = "@@"
_TAB = "\t"
_FILLER = "<unk>"
_FILLED = 0.1  # share of words replaced by it
_MOST_WORDS = 250  # of a side; longer pairs are skipped


@dataclass(frozen=True)
class Noise:
    """Noise on the words of a translated sentence.

    Args:
        deletion: probability of deleting a word.
        filler: probability of replacing a remaining word by `<unk>`.
        swap: largest number of positions by which a word moves.

    Raises:
        ConfigError: a number is out of range.
    """

    deletion: float
    filler: float
    swap: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.deletion < 1.0:
            raise ConfigError(f"--deletion must be in [0, 1), received {self.deletion}")

    def __call__(self, words: Sequence[str], seed: int, name: str) -> list[str]:
        """Return at least one noisy word; a pure function of the seed and the sentence's name.

        Words are deleted, then replaced, then moved: word i is sorted by i + u with u uniform on
        [0, swap + 1), so no word moves further than `swap` positions.
        """
        key = bytes.fromhex(digest(f"{seed}\0{name}", 16))
        generator = np.random.default_rng(int.from_bytes(key, "little"))
        draws = generator.random((3, len(words)))
        kept = [word for word, u in zip(words, draws[0], strict=True) if u >= self.deletion]
        kept = kept or list(words[:1])
        filled = [
            _FILLER if u < self.filler else word for word, u in zip(kept, draws[1], strict=False)
        ]
        places = np.arange(len(filled)) + draws[2][: len(filled)] * (self.swap + 1)
        order = np.argsort(places, kind="stable") if self.swap else np.arange(len(filled))
        return [filled[place] for place in order]


def whole_words(line: str) -> list[str]:
    """Return the words of a line with their BPE pieces; all but the last piece end in `@@`."""
    words: list[str] = []
    goes_on = False
    for piece in line.split():
        if goes_on:
            words[-1] += f" {piece}"
        else:
            words.append(piece)
        goes_on = piece.endswith(_MARK)
    return words


@dataclass(frozen=True)
class Filter:
    """Limits on the words of each side of a pair, and on their ratio."""

    most: int
    ratio: float

    def __call__(self, source: Sequence[str], target: Sequence[str]) -> bool:
        """Return whether a pair is kept."""
        lengths = sorted((len(source), len(target)))
        return lengths[0] > 0 and lengths[1] <= min(self.most, self.ratio * lengths[0])


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(f"python -m {MODULE}", __doc__)
    add = parser.add_argument
    add("--reverse", type=Path, required=True, help="run or checkpoint of the reverse model")
    add(
        "--monolingual",
        type=Path,
        required=True,
        help="text in the target language, one sentence a line",
    )
    add("--parallel", type=Path, required=True, help="folder with train.*, valid.*, test.*")
    add("--out", type=Path, required=True, help="output folder, without other text")
    add("--upsample", type=at_least(0), default=16, help="copies of the parallel text")
    add("--deletion", type=float, default=0.1, help="share of deleted words")
    add("--swap", type=at_least(0), default=3, help="largest distance by which a word moves")
    add("--max_ratio", type=float, default=1.5, help="skip larger length ratios")
    add("--seed", type=int, default=0, help="seed of noise and sampling")
    add_search(parser, n_best=False)
    add("--max_tokens", type=int, default=4096, help="tokens per batch")
    add_run(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 2 for user errors."""
    options = make_parser().parse_args(arguments)
    quieten()
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Translate, add noise, and write the folder.

    Raises:
        ConfigError: a flag is invalid, languages or segmentations do not match, or --out has text,
            such as that of --parallel.
    """
    noise = Noise(options.deletion, _FILLED, options.swap)
    if (options.out / "train.done").is_file():
        raise ConfigError(f"--out {options.out} is complete: choose another folder, or remove it")
    monolingual = Lines((options.monolingual,))
    total = _count(monolingual)
    options.checkpoint = options.reverse
    trained = open_translator(options)
    set_search(trained.task, options)
    target, source = trained.data.languages
    text = find_plain("--parallel", options.parallel, source, target)
    if text is None:
        raise ConfigError(
            f"--parallel {options.parallel}: missing train.{source} and train.{target}; the "
            f"reverse model translates from {target} into {source}"
        )
    made = options.out / ".synthetic"
    if not made.is_dir():  # otherwise an interrupted command wrote the files of --out
        refuse_to_replace(_files(options.out, (source, target)))
    make = _Pairs(trained, noise, Filter(_MOST_WORDS, options.max_ratio), options, text)
    options.out.mkdir(parents=True, exist_ok=True)
    job = LineJob(made, make.identity)
    path = job.lines("pairs", monolingual, total, make, "back-translating")
    added = _assemble(text, lines_of(path), options.out, (source, target), options.upsample)
    (options.out / "train.done").touch()
    job.remove()
    print(f"{added} of {total} lines became pairs; text: {options.out}")


class _Pairs:
    """Converts monolingual lines to `noisy source<tab>target`, or empty lines for skipped pairs.

    Lines that are too long for the model are skipped.
    """

    def __init__(
        self, trained: Any, noise: Noise, keep: Filter, options: Any, text: ParallelText
    ) -> None:
        self.trained, self.noise, self.keep = trained, noise, keep
        self.max_tokens, self.seed = options.max_tokens, options.seed
        self.in_pieces = is_prepared(text.splits["train"].source)
        coder = trained.data.coder
        if self.in_pieces and coder.cutter.method not in ("moses_bpe", "prepared"):
            raise ConfigError(
                "--parallel is segmented by BPE, but the reverse model uses "
                f"{coder.cutter.method}: train it on the same segmentation, or use plain text"
            )
        self.identity = {
            "checkpoint": str(trained.checkpoint),
            "monolingual": str(options.monolingual.resolve()),
            "noise": asdict(noise),
            "filter": asdict(keep),
            "search": [asdict(trained.task.beam), asdict(trained.task.sampling)],
            "seed": options.seed,
            "pieces": self.in_pieces,
        }

    def __call__(self, lines: Sequence[str]) -> Iterator[str]:
        """Yield a pair per line."""
        coder = self.trained.data.coder
        write: Callable[[list[int]], str] | None = None
        if self.in_pieces:
            write = lambda ids: " ".join(coder.target.words(ids))  # noqa: E731
        most = self.trained.task.model.max_seq_len
        ids = self.trained.data.encode(lines)
        fitting = ["" if len(row) > most else line for line, row in zip(lines, ids, strict=True)]
        found = translated(self.trained, fitting, self.max_tokens, write)
        for line, made in zip(lines, found, strict=True):
            target = coder.cutter.pieces([coder.cutter.words(line, "source")])[0]
            target = target if self.in_pieces else " ".join(line.split())
            words = whole_words(made.found[0][1]) if made.found else []
            if not self.keep(words, whole_words(target)):
                yield ""
                continue
            yield _TAB.join((" ".join(self.noise(words, self.seed, line)), target))


def _files(out: Path, languages: tuple[str, str]) -> Iterator[Path]:
    """Yield the files of a folder in fairseq's layout, as `_assemble` writes it."""
    yield out / "code"
    for language in languages:
        yield out / f"dict.{language}.txt"
        yield from (out / f"{stem}.{language}" for stem in ("train", "valid", "test"))


def _count(lines: Lines) -> int:
    """Return the number of lines; ConfigError if the file is empty or unreadable."""
    try:
        total = sum(1 for _ in lines)
    except OSError as error:
        raise ConfigError(f"--monolingual {lines.paths[0]}: {error.strerror}") from error
    if not total:
        raise ConfigError(f"--monolingual {lines.paths[0]} is empty")
    return total


def _assemble(
    text: ParallelText, pairs: Iterable[str], out: Path, languages: tuple[str, str], upsample: int
) -> int:
    """Write the folder and return the number of added pairs."""
    for name, stem in (("val", "valid"), ("test", "test")):
        split = text.splits[name]
        for side, language in zip((split.source, split.target), languages, strict=True):
            _write(out / f"{stem}.{language}", iter(side))
    if text.codes is not None:
        shutil.copy(text.codes, out / "code")
    for language, path in text.dictionaries.items():
        shutil.copy(path, out / f"dict.{language}.txt")
    train, added = text.splits["train"], 0
    places = [out / f"train.{language}" for language in languages]
    with (
        places[0].open("w", encoding="utf-8") as first,
        places[1].open("w", encoding="utf-8") as second,
    ):
        for _ in range(upsample):
            for source, target in zip(train.source, train.target, strict=True):
                first.write(f"{source}\n")
                second.write(f"{target}\n")
        for pair in pairs:
            source, tab, target = pair.partition(_TAB)
            if tab:
                first.write(f"{source}\n")
                second.write(f"{target}\n")
                added += 1
    return added


def _write(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())

"""Translate lines of standard input with a trained model, from a run folder or a checkpoint.

    lit-probattn translate runs/NAME/0 < text.de > text.en
    lit-probattn translate runs/NAME/0 --n_best 3 --out table.parquet < text.de
    lit-probattn translate runs/NAME/0/average-10 --beam_size 4 --length_penalty 0.6 < text.en

One translation per line, in the order of the lines; empty lines stay empty. With --n_best above 1
every translation is a separate line: source line number, rank, score and text, separated by tabs. A
run folder means its best checkpoint, or its newest if it has no validation; RUN/average-10 is the
mean of the ten newest. The default search settings, the model's configuration and its
vocabularies come from the run's config.yaml.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lit_probattn.analysis.options import add_run
from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import replacing
from lit_probattn.commands.opened import (
    add_checkpoint,
    add_draw,
    add_search,
    check_table,
    sampling_of,
    set_search,
)

if TYPE_CHECKING:
    from lit_probattn.models.search import Hypothesis
    from lit_probattn.training.trained import Trained

# Lines to read before translating: long and short ones are batched by length.
_BLOCK = 2048


@dataclass(frozen=True)
class Translated:
    """An input line and its translations."""

    number: int  # from 1
    text: str
    found: list[tuple[float, str]]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser("lit-probattn translate", __doc__)
    add = parser.add_argument
    add_checkpoint(parser)
    add_search(parser, n_best=True)
    add_draw(parser)
    text = "maximum number of source tokens per batch with padding"
    add("--max_tokens", type=at_least(1), default=4096, help=text)
    add("--out", type=Path, metavar="FILE.parquet", help="also write sources, scores and ranks")
    add_run(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the translations; return the exit status: 2 for a user error."""
    options = make_parser().parse_args(arguments)
    from lit_probattn.cli.errors import exit_status, quieten

    quieten()
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Restore the model, translate the lines, print them and write the table.

    Raises:
        ConfigError: a flag is invalid, the run is not of translation, or a line cannot be read.
    """
    from lit_probattn.training.trained import open_translator

    _check_flags(options)
    trained = open_translator(options)
    set_search(trained.task, options)
    lines = translated(trained, read_lines(sys.stdin.buffer), options.max_tokens)
    kept = []
    for line in lines:
        for text in _printed(line, trained.task.beam.n_best):
            print(text, flush=True)
        if options.out:
            kept.append(line)
    if options.out:
        _write(kept, options.out)


def _check_flags(options: argparse.Namespace) -> None:
    """Validate the flags."""
    sampling_of(options)
    searched = [n for n in ("beam_size", "n_best") if (getattr(options, n) or 1) != 1]
    if searched and options.temperature:
        raise ConfigError(f"--{searched[0]} applies to searching: remove --temperature")
    if options.out is not None:
        check_table(options.out)


def read_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of a file without line ends and byte-order mark.

    Raises:
        ConfigError: a line is not UTF-8.
    """
    for number, raw in enumerate(file, 1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"line {number} of standard input is not UTF-8 ({error.reason} at byte "
                f"{error.start + 1}): convert it, for example with iconv -t UTF-8"
            ) from error


def translated(
    trained: Trained,
    lines: Iterable[str],
    max_tokens: int,
    write: Callable[[list[int]], str] | None = None,
) -> Iterator[Translated]:
    """Yield every line with its translations, in the order of the lines.

    Args:
        max_tokens: maximum number of source tokens per batch, with padding; a longer line is a
            separate batch.
        write: converts the ids of a translation to text. None means the data's `detokenise`.

    Raises:
        ConfigError: a line exceeds the model's maximum length.
    """
    numbered = enumerate(lines, 1)
    while block := list(itertools.islice(numbered, _BLOCK)):
        full = [(number, text) for number, text in block if text.strip()]
        ids = trained.data.encode([text for _, text in full])
        _check_lengths(full, ids, trained.task.model.max_seq_len)
        named = {number: row for (number, _), row in zip(full, ids, strict=True)}
        found: dict[int, list[Hypothesis]] = {}
        for numbers in batches({n: len(row) for n, row in named.items()}, max_tokens):
            found |= _translate(trained, {n: named[n] for n in numbers})
        as_text = trained.data.detokenise if write is None else write
        for number, text in block:
            made = [(h.score, as_text(h.tokens)) for h in found.get(number, ())]
            yield Translated(number, text, made)


def _check_lengths(lines: list[tuple[int, str]], ids: list[list[int]], most: int) -> None:
    for (number, _), row in zip(lines, ids, strict=True):
        if len(row) > most:
            raise ConfigError(
                f"line {number} of standard input has {len(row)} tokens with its end, but "
                f"the model's max_seq_len is {most}: split it into sentences"
            )


def batches(lengths: dict[int, int], max_tokens: int) -> Iterator[list[int]]:
    """Yield groups of line numbers of similar length, the longest first.

    Args:
        lengths: number of tokens of every line, by its number.
        max_tokens: upper bound of rows · longest, unless a single line is longer.
    """
    group: list[int] = []
    for number in sorted(lengths, key=lambda n: (-lengths[n], n)):
        if group and (len(group) + 1) * lengths[group[0]] > max_tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _translate(trained: Trained, rows: dict[int, list[int]]) -> dict[int, list[Hypothesis]]:
    """Return the hypotheses of every line, by its number."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from lit_probattn.models.encoder_decoder import PAD

    ids = [torch.tensor(row, device=trained.device) for row in rows.values()]
    source = pad_sequence(ids, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(row) for row in ids], device=trained.device)
    mask = torch.arange(source.shape[1], device=trained.device) < lengths[:, None]
    names = torch.tensor([number - 1 for number in rows], device=trained.device)
    return dict(zip(rows, trained.task.translate(source, mask, names), strict=True))


def _printed(line: Translated, n_best: int) -> Iterator[str]:
    if n_best == 1:
        yield line.found[0][1] if line.found else ""
        return
    for rank, (score, text) in enumerate(line.found, 1):
        yield f"{line.number}\t{rank}\t{score:.6f}\t{text}"


def _write(lines: list[Translated], path: Path) -> None:
    import pandas as pd

    rows = [
        {"line": x.number, "source": x.text, "rank": rank, "score": score, "translation": text}
        for x in lines
        for rank, (score, text) in enumerate(x.found, 1)
    ]
    columns = ["line", "source", "rank", "score", "translation"]
    with replacing(path) as file:
        pd.DataFrame(rows, columns=columns).to_parquet(file, index=False)
    print(f"table: {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

"""Single sentences: the one-billion-word release, text of one's own, and figures made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lit_probattn.reproduce.__main__ import main as reproduce
from tests.bad_inputs.cases import Case, command_error, data_error, in_code, on_folder
from tests.datamodules.text import test_sentences as text

GRID = """\
kind: grid
title: A grid
task: configs/tasks/tiny/lm1b.yaml
attention: configs/attention/softmax.yaml
embed_dim: 64
mlp_dim: 128
head_dim: 16
"""


@in_code
def _release(
    folder: Path, change: Callable[[Path], object] = lambda folder: None, **options: object
) -> None:
    """Read a release that was changed; the change gets its folder."""
    text.write(folder)
    change(folder)
    text.made(folder, **options)


@on_folder
def _shard(folder: Path, content: bytes | None) -> None:
    path = folder / text.TRAINING / "news.en-00042-of-00100"
    path.unlink() if content is None else path.write_bytes(content)


def _end_in_line(folder: Path) -> None:
    for name in ("train", "valid", "test"):
        lines = [*text.sentences(20, ord(name[1])), "two <eos> in one"]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    text.made(folder, corpus="other")


@on_folder
def _grid(folder: Path, more: str) -> str:
    (folder / "grid.yaml").write_text(GRID + more)
    words = ["grid", "--tables", str(folder), "--dry-run"]
    return command_error([*words, "--runs", str(folder)], reproduce)


def cases() -> Iterator[Case]:
    """The release, settings, own text; figures and grids."""
    case = partial(Case, "LM1B (shards of sentences)")
    yield case("no release", data_error(lambda folder: text.made(folder)))
    yield case("a shard is missing", _release(_shard(None)))
    yield case("an empty shard", _release(_shard(b"")))
    yield case("a shard that is cut off", _release(_shard(b"A sentence .\nAnother")))
    yield case("a byte that is not text", _release(_shard(b"A \xff sentence .\n")))
    yield case("no sub-words", _release(subwords=None))
    yield case("too few sub-words", _release(subwords=20))
    yield case("all held-out shards as the test", _release(test_shards=50))
    yield case("a share of the release", _release(val_fraction=0.1))
    yield case("a sentence longer than a batch", _release(max_tokens=9))
    yield case("a sentence longer than an evaluation batch", _release_eval())
    yield case("fewer rows than sub-words", _release(vocab_size=99))
    yield case("a line that holds `<eos>`", data_error(_end_in_line))
    case = partial(Case, "Figures")
    for flags in (["--as_published"], ["--max_seq_len", "64"], ["--only", "fixd-h4"]):
        words = ["low_rank_figure1", *flags, "--dry-run"]
        told = " ".join(flags)
        yield case(f"`{told}`", lambda _, words=words: command_error(words, reproduce))
    yield case("a grid's width that heads do not divide", _grid("widths: [60]\nwidth_heads: [8]\n"))
    yield case(
        "a grid's width that no heads of that size fill",
        _grid("widths: [72]\nwidth_head_dim: 16\n"),
    )


@in_code
def _release_eval(folder: Path) -> None:
    text.write(folder)
    text.made(folder, eval_max_tokens=5).test_dataloader()

"""Tokenisers of pre-trained encoders that cannot be read, vocabularies that cannot be learned."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from datamodules import MaskedText
from datamodules.text.choice import TokenChoice
from datamodules.text.token_files import read_encoder
from tests.bad_inputs.cases import Case, in_code
from tests.datamodules.text import made as made_text

_WORDS = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n"
_LETTERS = '{"a": 0, "b": 1}'


@in_code
def files(folder: Path, where: str = "", /, **content: str | bytes) -> None:
    """A folder of these files, `_` in their names for the dot; `where` is the one to read."""
    for name, text in content.items():
        stem, _, ending = name.rpartition("_")
        raw = text if isinstance(text, bytes) else text.encode()
        (folder / f"{stem}.{ending}").write_bytes(raw)
    read_encoder(folder / where)


@in_code
def trained(folder: Path, size: int, *texts: str, twice: bool = False) -> None:
    """A vocabulary of these texts."""
    for _ in range(1 + twice):
        TokenChoice("wordpiece", size).make_from(texts).save(folder)


@in_code
def masked(folder: Path, **options: object) -> None:
    """Text for masked language models in the tokens of a sound vocabulary."""
    made_text.write(folder)
    (folder / "vocab.txt").write_text(_WORDS)
    given: dict[str, Any] = {"corpus": "other", "tokenizer": str(folder), **options}
    MaskedText(data_dir=str(folder), segment_len=9, **given).setup()


def cases() -> Iterator[Case]:
    """Read, then learned, then used."""
    case = partial(Case, "Tokenisers (vocab.txt, vocab.json and merges.txt, tokenizer.json)")
    yield case("an empty folder", files())
    yield case("a name with a slip", files("vocab.text", vocab_txt=_WORDS))
    yield case("no merges", files(vocab_json=_LETTERS))
    yield case("an empty vocabulary", files(vocab_txt=""))
    yield case("not UTF-8", files(vocab_txt=b"\xff\n"))
    yield case("no mask token", files(vocab_txt=_WORDS.replace("[MASK]\n", "")))
    yield case(
        "a mask token of another name",
        files(vocab_txt=_WORDS, tokenizer_config_json='{"mask_token": "<mask>"}'),
    )
    yield case("cut settings", files(vocab_txt=_WORDS, tokenizer_config_json='{"do_lower_case"'))
    yield case("settings that are a list", files(vocab_txt=_WORDS, tokenizer_config_json="[]"))
    yield case("no special tokens", files(vocab_json=_LETTERS, merges_txt="#version: 0.2\n"))
    yield case(
        "a merge of no known parts", files(vocab_json=_LETTERS, merges_txt="#version: 0.2\nx y\n")
    )
    yield case("ids that are no numbers", files(vocab_json='{"a": "b"}', merges_txt=""))
    yield case("a cut tokenizer.json", files(tokenizer_json='{"version"'))
    yield case("fewer tokens than characters", trained(10, "some words"))
    yield case("texts without words", trained(100, " ", ""))
    yield case("a tokeniser and sub-words", masked(subwords=300))
    yield case("a model with fewer tokens", masked(vocab_size=5))
    yield case("the vocabulary exists", trained(100, "some words", twice=True))

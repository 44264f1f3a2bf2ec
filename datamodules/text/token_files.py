"""Tokeniser files: a list of words, tokenizer.json, vocab.txt, vocab.json with merges.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from datamodules.core.files import read_text
from datamodules.text.learn import BERT, ROBERTA, as_bert, as_roberta, as_words
from datamodules.text.tokens import END_OF_LINE, ROLES, UNKNOWN, Tokens
from lit_probattn.base.errors import DataError, MissingDataError, nearest, prefixed

_WHOLE, _WORDS, _BYTES, _MERGES = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt"
_SETTINGS = "tokenizer_config.json"


def read_words(path: Path) -> Tokens:
    """Read one word per line, in the order of the ids, including `<eos>`."""
    text = read_text(path)
    with prefixed(f"vocabulary file {path}", DataError, to=DataError):
        return as_words(text.removesuffix("\n").split("\n"))


def read_subwords(path: Path) -> Tokens:
    """Read a tokenizer.json that contains `<eos>`."""
    tokenizer = _tokenizer(path)
    name = _unknown_of(tokenizer)
    unknown = {} if tokenizer.token_to_id(name) is None else {"unknown": name}
    return Tokens(tokenizer, {"end_of_line": END_OF_LINE, **unknown}, f"tokenizer file {path}")


def _unknown_of(tokenizer: Tokenizer) -> str:
    """Return the token of unknown text of a tokeniser's model, by default `<unk>`."""
    model = json.loads(tokenizer.to_str())["model"]
    if model.get("unk_id") is not None:  # of Unigram
        return str(model["vocab"][model["unk_id"]][0])
    return str(model.get("unk_token") or UNKNOWN)


def read_encoder(path: Path) -> Tokens:
    """Read the tokeniser of a pre-trained encoder.

    Args:
        path: `tokenizer.json`, `vocab.txt` or `vocab.json`, or a folder, of which the first of
            these that exists is read. Settings come from `tokenizer_config.json` in the same
            folder; case is kept only if it sets `do_lower_case` to false.

    Raises:
        DataError: A file is missing or unreadable, or a special token is missing.
    """
    file = _find(path)
    beside = file.parent / _SETTINGS
    settings = _json(beside) if beside.is_file() else {}
    if file.suffix == ".txt":
        lines = read_text(file).removesuffix("\n").split("\n")
        if lines == [""]:
            raise DataError(f"{file} is empty: expected a token per line")
        ids = {line: number for number, line in enumerate(lines)}
        special = _special(settings, ids, file, (BERT,))
        return as_bert(
            ids,
            special,
            settings.get("do_lower_case", True),
            settings.get("tokenize_chinese_chars", True),
            settings.get("strip_accents"),
            str(file),
        )
    if file.name == _BYTES:
        ids = _json(file)
        if not ids or not all(type(number) is int and number >= 0 for number in ids.values()):
            raise DataError(
                f"{file} is not a vocabulary: expected tokens and ids; replace the file"
            )
        special = _special(settings, ids, file, (ROBERTA,))
        try:
            model = models.BPE.from_file(str(file), str(file.with_name(_MERGES)))
        except Exception as error:  # the package raises plain Exception
            raise _unreadable(file, error) from None
        return as_roberta(model, special, settings.get("add_prefix_space", False), str(file))
    tokenizer = _tokenizer(file)
    special = _special(settings, tokenizer.get_vocab(), file, (BERT, ROBERTA))
    return Tokens(tokenizer, special, str(file))


def files_of_encoder(path: Path) -> list[Path]:
    """Return the files that `read_encoder` reads; raises MissingDataError if there are none."""
    file = _find(path)
    names = [file.name, *([_MERGES] if file.name == _BYTES else []), _SETTINGS]
    return [found for found in map(file.with_name, names) if found.is_file()]


def _find(path: Path) -> Path:
    """Return the file to read: `path`, or the first known file in this folder."""
    if path.is_dir():
        there = [path / name for name in (_WHOLE, _WORDS, _BYTES) if (path / name).is_file()]
        if not there:
            raise MissingDataError(
                f"{path} has no tokeniser: expected {_WHOLE}, {_WORDS}, or {_BYTES} with {_MERGES}"
            )
        path = there[0]
    if not path.is_file():
        near = nearest(
            path.name, (p.name for p in path.parent.glob("*") if p.is_file()), lists=False
        )
        raise MissingDataError(f"tokeniser {path} not found{near}")
    if path.name == _BYTES and not path.with_name(_MERGES).is_file():
        raise MissingDataError(
            f"found {path}, but missing {path.with_name(_MERGES)}: put both in one folder"
        )
    return path


def _special(
    settings: dict[str, Any], known: dict[str, int], file: Path, usual: tuple[dict[str, str], ...]
) -> dict[str, str]:
    """Return the special token of each role, from the settings or by usual names."""
    found = {}
    for role in BERT:
        given = settings.get(ROLES[role])
        given = given.get("content") if isinstance(given, dict) else given
        names = [given] if isinstance(given, str) else [names[role] for names in usual]
        there = [name for name in names if name in known]
        if not there:
            raise DataError(
                f"{file}: missing {role} token {' or '.join(map(repr, names))}; add it, or set "
                f"{ROLES[role]} in {_SETTINGS}"
            )
        found[role] = there[0]
    return found


def _tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(read_text(file))
    except DataError:
        raise
    except Exception as error:  # the package raises plain Exception
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(
        f"{file} is not a vocabulary of the package tokenizers: {error}; replace the tokeniser's "
        "files"
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not JSON: {error}; replace it") from None
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a JSON object; replace it")
    return content

"""Small made corpora."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datamodules import WikiText103
from datamodules.text.choice import TokenChoice
from datamodules.text.token_files import read_encoder
from datamodules.text.tokens import Tokens

NAMES = ("train", "valid", "test")


def lines(count: int, seed: int, words: int = 40) -> list[str]:
    """Lines as in the release: blanks around the words, some without a word."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        picked = [f"w{int(draw.paretovariate(0.7)) % words}" for _ in range(draw.randint(0, 12))]
        made.append(f" {' '.join(['<unk>', *picked])} \n" if picked else " \n")
    return made


def write(folder: Path, pattern: str = "wiki.{}.tokens", **texts: str) -> Path:
    """Write three splits; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(NAMES):
        text = texts.get(name, "".join(lines(60 if name == "train" else 20, number)))
        (folder / pattern.format(name)).write_bytes(text.encode())
    return folder


def data(folder: Path, **options: Any) -> WikiText103:
    """The DataModule over a folder, as any text."""
    small = {"corpus": "other", "segment_len": 7, "batch_size": 4}
    return WikiText103(data_dir=str(folder), **{**small, **options})


def expected_ids(text: str, vocabulary: list[str]) -> list[int]:
    """Ids by the rule, line by line: strip, split, append <eos>."""
    ids = {word: i for i, word in enumerate(vocabulary)}
    found = []
    for line in text.splitlines():
        found += [ids.get(word, ids.get("<unk>")) for word in [*line.strip().split(), "<eos>"]]
    return found


def encoder(
    texts: Iterable[str], folder: Path, size: int, kind: str = "wordpiece", lower: bool = True
) -> Tokens:
    """Learn the tokeniser of an encoder, and write it in the files of BERT or RoBERTa."""
    choice: Any = kind
    tokens = TokenChoice(choice, size, lower=lower).make_from(texts)
    model = json.loads(tokens.tokenizer.to_str())["model"]
    settings: dict[str, Any] = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
    files = {"vocab.txt": "".join(f"{word}\n" for word in tokens.words)}
    if kind == "bpe":
        mask = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "special": True}
        settings = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False}
        settings["mask_token"] = {**mask, "normalized": False, "rstrip": False}
        merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
        files = {"vocab.json": json.dumps(model["vocab"]), "merges.txt": "#version: 0.2\n" + merges}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**files, "tokenizer_config.json": json.dumps(settings)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return read_encoder(folder)

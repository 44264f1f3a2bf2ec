"""Every option of every data module changes what the module gives, or is refused by its name.

Each option is set away from its default, alone, over tiny data, and what the data module gives is
compared with what it gives without: batches of each loader, sizes, the name of the cache, and calls
that nothing else shows.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

import datamodules
from datamodules.core.base import CachedDataModule, DataModule
from lit_probattn.base.errors import DataError
from tests.datamodules.images.made import write_images
from tests.datamodules.images.test_folder import write as write_pictures
from tests.datamodules.lra import files as lra
from tests.datamodules.lra.test_text import write_folder as write_reviews
from tests.datamodules.series.test_own import cases, write_long
from tests.datamodules.series.test_uea import write as write_archive
from tests.datamodules.text import made as texts
from tests.support.helpers import refuses_other_values, types_of

# Every option is set beside all others, some of which void it.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no effect with ")

CLASSES = {
    name: getattr(importlib.import_module(module), cls)
    for name, (module, cls) in datamodules.REGISTRY.items()
}


def options_of(cls: type) -> dict[str, Any]:
    """Return the options that a configuration may set for a data module, with their defaults."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "data", fail_untyped=False)
    return dict(parser.get_defaults().data)


@dataclass(frozen=True)
class Option:
    """A value, away from the default.

    Args:
        value: what the option is set to; a path is taken from the folder of the data.
        others: options that are set on both sides, as this one acts with them only.
        call: a function whose arguments are looked at as well.
        told: what a refusal names where it is not the option.
    """

    value: Any
    others: dict[str, Any] = field(default_factory=dict)
    call: str | None = None
    told: str | None = None


def digest(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (tuple(x.shape), hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest())
        if isinstance(x, torch.Tensor)
        else repr(x)
        for name, x in batch.items()
    }


def observed(data: DataModule) -> dict[str, Any]:
    """What a data module gives."""
    data.prepare_data()
    data.setup()
    found: dict[str, Any] = {"headline": data.headline, "folder": str(data.cache_dir)}
    found["provenance"] = getattr(data, "provenance", None)
    found["sizes"] = list(getattr(data, "compare_sizes", list)())
    if isinstance(data, CachedDataModule):
        found["cache"] = data.cache_spec.name
    for name in ("train", "val", "test", "predict"):
        loader: Any = getattr(data, f"{name}_dataloader")()
        found[name] = loader.loader.num_workers
        if not data.num_workers:
            found[name] = [digest(batch) for batch in itertools.islice(loader, 3)]
    return found


def given_by(cls: type, options: dict[str, Any], call: str | None) -> Any:
    """What such a data module gives, or the message by which it is refused."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if call is not None:
            module, _, name = call.rpartition(".")
            original = getattr(importlib.import_module(module), name)
            patch.setattr(call, lambda *a, **k: (seen.append(repr((a, k))), original(*a, **k))[1])
        try:
            return [observed(cls(**options)), seen]
        except (DataError, TypeError) as error:
            return str(error)


# ---- the data, and what is given to every data module over it -----------------------------------


def write_stream(folder: Path) -> None:
    write_table(folder, "".join(texts.lines(120, 0)), "mine.txt")


def write_table(folder: Path, content: str, name: str = "table.csv") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content, encoding="utf-8")


def write_texts(folder: Path) -> None:
    rows = [f"Word {i % 5} word {i},{'ab'[i % 2]},{'cd'[i // 20]},B {i}" for i in range(40)]
    write_table(folder, "\n".join(["text,label,y,body", *rows]) + "\n")


def write_pairs(folder: Path) -> None:
    rows = [f"One {i} a,two {i % 3} B,{'ab'[i % 2]},{'cd'[i // 20]}" for i in range(40)]
    write_table(folder, "\n".join(["sentence1,sentence2,label,y", *rows]) + "\n")


def write_documents(folder: Path) -> None:
    lines = [f"Sentence {i} of Some words here." + "\n" * (i % 4 == 3) for i in range(80)]
    write_table(folder, "\n".join(lines) + "\n", "text.txt")


def write_series(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_long(folder / "table.csv", cases())


@dataclass(frozen=True)
class Data:
    """Tiny data of a data module, and the settings under which its options are looked at."""

    given: dict[str, Any]
    options: dict[str, Option]
    write: Callable[[Path], Any] = lambda folder: folder.mkdir(parents=True, exist_ok=True)


HERE = "@"  # the folder of the data


def options(**values: Any) -> dict[str, Option]:
    common = {
        "data_dir": Option("@/elsewhere"),
        "cache_dir": Option("@/other_cache"),
        "batch_size": Option(3),
        "eval_batch_size": Option(2),
        "num_workers": Option(1),
        "seed": Option(5),
        "pad_to": Option("max"),
        "pad_multiple": Option(48),
        "predict_split": Option("val"),
    }
    made = {n: v if isinstance(v, Option) else Option(v) for n, v in values.items()}
    return {**common, **made}


def without_padding(**values: Any) -> dict[str, Option]:
    return {n: v for n, v in options(**values).items() if n not in ("pad_to", "pad_multiple")}


RECIPE, MIXED = {"augmentation": "recipe"}, {"mixup": 0.8, "cutmix": 1.0}
OWN = {"val_fraction": 0.3, "test_fraction": 0.4, "split_seed": 7}
LISTOPS = {"num_train": 12, "num_val": 5, "num_test": 5, "min_length": 3, "max_length": 30}
STREAM = {"segment_len": 9, "batching": "segments", "vocab_size": 999, "val_stride": 3}
STREAM |= {"test_stride": 3, "prompts": ["w1 w2"], "num_prompts": 3, "prompt_len": 5}

TABLE: dict[str, Data] = {
    "synthetic": Data(
        {"num_train": 40, "num_val": 9, "num_test": 9, "max_length": 60, "pad_multiple": 1},
        options(
            num_train=41,
            num_val=10,
            num_test=11,
            min_length=20,
            max_length=70,
            vocab_size=33,
            num_classes=5,
            data_seed=3,
        ),
    ),
    "listops": Data(
        {**LISTOPS, "max_depth": 4, "batch_size": 4},
        options(
            source="released",
            num_train=13,
            num_val=6,
            num_test=6,
            min_length=4,
            max_length=29,
            max_depth=5,
            max_args=4,
            generator_seed=3,
            num_processes=Option(1, call="datamodules.lra.listops.num_useful"),
            max_length_tokens=40,
            vocab_size=33,
            parity_eval=2,
        ),
    ),
    "image": Data(
        {"batch_size": 4, "data_dir": HERE},
        without_padding(
            key_mask=Option("all", call="datamodules.lra.arena.PixelCollate"),
            vocab_size=513,
            parity_eval=2,
        ),
        lra.write_cifar,
    ),
    "imagenet": Data(
        {"batch_size": 4, "data_dir": HERE, "image_size": 16},
        without_padding(
            image_size=12,
            augmentation="none",
            auto_augment="rand-m2",
            color_jitter=Option(0.9, {"auto_augment": None}),
            erase=0.9,
            flip=1.0,
            mixup=0.1,
            cutmix=0.1,
            mix_probability=0.0,
            mix_switch=0.0,
            held_out_per_class=1,
            ground_truth=Option("@/classes.txt"),
            verify=True,
            predict_split=Option("val", {"held_out_per_class": 1}),
        ),
        write_images,
    ),
    "own_images": Data(
        {"path": "@/data", "batch_size": 4, "image_size": 16},
        without_padding(
            path="@/none",
            **OWN,
            image_size=12,
            augmentation="recipe",
            auto_augment=Option("rand-m2", RECIPE),
            color_jitter=Option(0.9, {**RECIPE, "auto_augment": None}),
            erase=Option(0.9, RECIPE),
            flip=Option(1.0, RECIPE),
            mixup=0.1,
            cutmix=0.1,
            mix_probability=Option(0.0, MIXED),
            mix_switch=Option(0.0, MIXED),
            new_path="@/data",
        ),
        lambda folder: write_pictures(folder / "data", count=20),
    ),
    "retrieval": Data(
        {"batch_size": 4, "data_dir": HERE},
        options(max_length_tokens=16, vocab_size=513, parity_eval=2),
        lra.write_pairs,
    ),
    "text": Data(
        {"batch_size": 4, "data_dir": HERE},
        options(
            split="test_as_val",
            val_fraction=0.3,
            split_seed=3,
            max_length_tokens=16,
            vocab_size=513,
            parity_eval=2,
        ),
        write_reviews,
    ),
    "own_series": Data(
        {"path": "@/table.csv", "batch_size": 4, "pad_multiple": 1},
        options(
            path="@/none.csv",
            label_column=Option("right", told="label is 'a'"),
            id_column=Option("time", told="id is 's"),
            time_column=Option("left", told="duplicate time"),
            normalization="minmax",
            max_length=9,
            val_path="@/table.csv",
            test_path="@/table.csv",
            **OWN,
            allow_overlap=Option(True, {"val_path": "@/table.csv"}),
            new_path="@/table.csv",
        ),
        write_series,
    ),
    "own_texts": Data(
        {"path": "@/table.csv", "batch_size": 4},
        options(
            path="@/none.csv",
            text_column="body",
            label_column="y",
            tokens="characters",
            vocab_limit=Option(9, {"tokens": "words"}),
            min_count=Option(4, {"tokens": "words"}),
            max_length=6,
            val_path="@/table.csv",
            test_path="@/table.csv",
            **OWN,
            allow_overlap=Option(True, {"val_path": "@/table.csv"}),
            new_path="@/table.csv",
        ),
        write_texts,
    ),
    "text_pairs": Data(
        {"path": "@/table.csv", "batch_size": 4, "vocab_limit": 80},
        options(
            path="@/none.csv",
            corpus="sst2",
            first_column="sentence2",
            second_column="sentence1",
            label_column="y",
            tokenizer="@/none",
            tokens=Option("bpe", {"vocab_limit": 300}),
            vocab_limit=70,
            lower=False,
            max_length=9,
            max_positions=8,
            vocab_size=999,
            bucket=1,
            val_path="@/table.csv",
            test_path="@/table.csv",
            **OWN,
            allow_overlap=Option(True, {"val_path": "@/table.csv"}),
            new_path="@/table.csv",
        ),
        write_pairs,
    ),
    "own_text": Data(
        {"path": "@/mine.txt", "batch_size": 4, "segment_len": 7},
        without_padding(
            seed=Option(5, {"batching": "segments"}),
            **STREAM,
            path="@/none.txt",
            tokens="words",
            vocab_limit=Option(9, {"tokens": "words"}),
            min_count=Option(4, {"tokens": "words"}),
            **OWN,
            new_path="@/mine.txt",
        ),
        write_stream,
    ),
    "wikitext103": Data(
        {"corpus": "other", "data_dir": HERE, "batch_size": 4, "segment_len": 7},
        without_padding(
            seed=Option(5, {"batching": "segments"}),
            **STREAM,
            corpus="wikitext-2",
            vocab_file="@/none",
            subwords=270,
            tokenizer_file="@/none",
        ),
        texts.write,
    ),
    "masked_text": Data(
        {"corpus": "other", "data_dir": HERE, "batch_size": 4, "segment_len": 7},
        without_padding(
            segment_len=9,
            vocab_size=999,
            corpus="wikitext-2",
            vocab_file="@/none",
            subwords=270,
            tokenizer_file="@/none",
            tokenizer="@/none",
        ),
        texts.write,
    ),
    "uea": Data(
        {"name": "Libras", "batch_size": 4, "pad_multiple": 1, "data_dir": HERE},
        options(
            name="Heartbeat",
            source="bundled",
            select_on="test",
            val_fraction=0.5,
            split_seed=3,
            normalization="minmax",
            max_length=99,
        ),
        lambda folder: write_archive(folder / "Libras"),
    ),
    "toy_trajectories": Data(
        {"num_episodes": 8, "batch_size": 4},
        without_padding(
            predict_split="train",  # the test is on episodes that are played
            num_episodes=9,
            data_seed=3,
            context_length=6,
            return_scale=3.0,
            val_fraction=0.4,
            split_seed=3,
        ),
    ),
}


# ---- the contract ------------------------------------------------------------------------------


def placed(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options with paths in the folder of the data."""
    return {
        name: value.replace(HERE, str(folder)) if isinstance(value, str) else value
        for name, value in options.items()
    }


def unread(name: str, folder: Path) -> dict[str, str]:
    """What is wrong with the options of a data module, by their names."""
    data, wrong = TABLE[name], {}
    data.write(folder)
    build = partial(given_by, CLASSES[name])
    common = {"cache_dir": "@/cache", **data.given}
    known: dict[str, Any] = {}  # by the options without the one that is looked at
    for option, entry in data.options.items():
        without = placed(folder, {**common, **entry.others})
        if option in ("data_dir", "cache_dir"):
            del without["cache_dir"]
        value = placed(folder, {option: entry.value})
        if entry.call:
            shutil.rmtree(folder / "cache", ignore_errors=True)
        if entry.call:
            before = build(without, entry.call)
        else:
            if repr(without) not in known:
                known[repr(without)] = build(without, None)
            before = known[repr(without)]
        if entry.call:  # nothing is called where the cache is there
            shutil.rmtree(folder / "cache", ignore_errors=True)
        after = build({**without, **value}, entry.call)
        same = before == after
        names = [entry.told] if entry.told else [option, str(value[option])]
        if same:
            wrong[option] = "changes nothing"
        elif isinstance(after, str) and not any(x in after for x in names):
            wrong[option] = f"is refused without its name: {after}"
        if isinstance(before, str) and entry.others == {}:
            wrong[option] = f"is compared with a refusal: {before}"
    return wrong


# Data modules whose options are not in the table yet.
OPEN = {
    "iwslt14",
    "lm1b",
    "pathfinder",
    "pretraining_text",
    "question_answering",
    "toy_translation",
    "trajectories",
    "translation",
    "wmt14",
}


def test_every_data_module_is_in_the_table_or_named_as_open():
    assert TABLE.keys() | OPEN == CLASSES.keys()
    assert not TABLE.keys() & OPEN


# What the others need before an option is looked at.
NEEDED = {
    "pathfinder": {"difficulty": "easy"},
    "trajectories": {"env": "Hopper", "quality": "medium"},
}


@pytest.mark.parametrize("name", CLASSES)
def test_an_argument_has_a_value_of_its_type(name, tmp_path):
    given = NEEDED.get(name, {})
    if name in TABLE:
        TABLE[name].write(tmp_path)
        given = TABLE[name].given
    make, options = partial(CLASSES[name], **placed(tmp_path, given)), options_of(CLASSES[name])
    kinds = types_of(CLASSES[name])
    free = refuses_other_values(make, {option: kinds[option] for option in options})
    assert "predict_split" not in free


@pytest.mark.parametrize("name", TABLE)
def test_every_option_is_in_the_table_and_away_from_its_default(name):
    defaults, entries = options_of(CLASSES[name]), TABLE[name].options
    assert entries.keys() == defaults.keys()
    given = {**defaults, **TABLE[name].given}
    assert [n for n, entry in entries.items() if entry.value in (defaults[n], given[n])] == []


@pytest.mark.parametrize("name", TABLE)
def test_every_option_changes_what_the_data_give(name, tmp_path, monkeypatch):
    monkeypatch.delenv("LIT_PROBATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert unread(name, tmp_path / "data") == {}

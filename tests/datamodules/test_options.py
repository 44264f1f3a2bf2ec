"""Every option of every data module changes what the module gives, or is refused by its name.

Each option is set away from its default, alone, over tiny data, and what the data module gives is
compared with what it gives without: batches of each loader, sizes, calls that nothing else shows,
and a line that the option has no effect. Another name of the cache counts for places only.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import logging
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
from datamodules.text.translation.data import Translation
from lit_probattn.base.errors import DataError
from tests.datamodules.images.made import write_images
from tests.datamodules.images.test_folder import write as write_pictures
from tests.datamodules.lra import files as lra
from tests.datamodules.lra.test_text import write_folder as write_reviews
from tests.datamodules.series.test_own import cases, write_long
from tests.datamodules.series.test_uea import write as write_archive
from tests.datamodules.text import made as texts
from tests.datamodules.text.fine_tuning.made import write_squad
from tests.datamodules.text.test_sentences import write as write_shards
from tests.datamodules.text.translation import made as translations
from tests.datamodules.text.translation.test_releases import write_pieces
from tests.datamodules.trajectories.made import write as write_steps
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
    found: dict[str, Any] = {"headline": data.headline}
    found["provenance"] = getattr(data, "provenance", None)
    if isinstance(data, Translation):
        found["encoded"] = data.encode(["A dog", "N1"])
    found["sizes"] = list(data.compare_sizes())
    for name in ("train", "val", "test", "predict"):
        loader: Any = getattr(data, f"{name}_dataloader")()
        found[name] = loader.loader.num_workers
        if not data.num_workers:
            found[name] = [digest(batch) for batch in itertools.islice(loader, 3)]
    return found


def given_by(cls: type, options: dict[str, Any], call: str | None, place: bool = False) -> Any:
    """What such a data module gives and, if asked, where; or the message by which it is refused."""
    seen: list[Any] = []
    told = logging.Handler()
    told.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    told.addFilter(lambda record: "has no effect" in record.getMessage())
    logger = logging.getLogger("datamodules")
    with pytest.MonkeyPatch.context() as patch:
        if call is not None:
            module, _, name = call.rpartition(".")
            original = getattr(importlib.import_module(module), name)
            patch.setattr(call, lambda *a, **k: (seen.append(repr((a, k))), original(*a, **k))[1])
        logger.addHandler(told)
        try:
            data = cls(**options)
            cached = isinstance(data, CachedDataModule)
            where = [str(data.cache_dir), cached and data.cache_spec.name] if place else []
            return [observed(data), where, seen]
        except (DataError, TypeError) as error:
            return str(error)
        finally:
            logger.removeHandler(told)


# ---- the data, and what is given to every data module over it -----------------------------------


def write_stream(folder: Path) -> None:
    write_table(folder, "".join(texts.lines(120, 0)), "mine.txt")


def write_table(folder: Path, content: str, name: str = "table.csv") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content, encoding="utf-8")


def write_texts(folder: Path) -> None:
    rows = [
        f"Word {i % 5} word {i % 7} w{i // 3},{'ab'[i % 2]},{'cd'[i // 20]},B {i}"
        for i in range(40)
    ]
    write_table(folder, "\n".join(["text,label,y,body", *rows]) + "\n")


def write_pairs(folder: Path) -> None:
    rows = [f"One {i} a,two {i % 3} B,{'ab'[i % 2]},{'cd'[i // 20]}" for i in range(40)]
    write_table(folder, "\n".join(["sentence1,sentence2,label,y", *rows]) + "\n")


def write_documents(folder: Path) -> None:
    lines = [f"Sentence {i} of Some words here." + "\n" * (i % 4 == 3) for i in range(80)]
    write_table(folder, "\n".join(lines) + "\n", "text.txt")


def write_languages(folder: Path) -> None:
    """Parallel text, and such text with an empty line."""
    translations.write(folder / "data", (60, 20, 20))
    translations.write(folder / "uneven", train_de="\n" + "ein\n" * 60, train_en="one\n" * 61)


def write_questions(folder: Path) -> None:
    """SQuAD 1.1, SQuAD 2.0, and SQuAD 1.1 with an answer at a wrong place."""
    write_squad(folder / "data")
    write_squad(folder / "unanswered", "2.0")
    train = write_squad(folder / "wrong") / "train.json"
    content = json.loads(train.read_text(encoding="utf-8"))
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    train.write_text(json.dumps(content), encoding="utf-8")


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
SAMPLES: dict[str, Any] = {  # of tables
    **{name: "@/table.csv" for name in ("val_path", "test_path", "new_path")},
    **OWN,
    "allow_overlap": Option(True, {"val_path": "@/table.csv"}),
}
LISTOPS = {"num_train": 12, "num_val": 5, "num_test": 5, "min_length": 3, "max_length": 30}
STREAM = {"segment_len": 9, "batching": "segments", "vocab_size": 999, "val_stride": 3}
STREAM |= {"test_stride": 3, "prompts": ["w1 w2"], "num_prompts": 3, "prompt_len": 5}

# Of texts that a tokeniser encodes.
ENCODED: dict[str, Any] = {
    "tokenizer": "@/none",
    "tokens": Option("bpe", {"vocab_limit": 300}),
    "vocab_limit": 60,
    "lower": False,
    "max_length": 12,
    "max_positions": 8,
    "vocab_size": 999,
    "bucket": 1,
}


def in_tokens(**values: Any) -> dict[str, Option]:
    """Options of data whose batches are counted in tokens."""
    made = options(max_tokens=100, eval_max_tokens=50, pad_multiple=8, **values)
    others = ("batch_size", "eval_batch_size", "pad_to")
    return {name: option for name, option in made.items() if name not in others}


FEW = {"num_images": 20}
GENERATED = {"source": "generated", **FEW}
LARGE_SHARES = {"val_fraction": 0.3, "test_fraction": 0.3}
PAIRS: dict[str, Any] = {
    "tokens": "words",
    "codes_file": "@/none",
    "joint_dictionary": True,
    "dictionary_limit": 20,
    "lower": True,
    "max_ratio": 1.1,
    "max_words": 5,
    "max_length": 9,
    "too_long": Option("cut", {"max_length": 9}),
}


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
            **SAMPLES,
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
            **SAMPLES,
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
            **{**ENCODED, "vocab_limit": 38, "max_length": 9},
            **SAMPLES,
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
    "pathfinder": Data(
        {"difficulty": "hard", "batch_size": 4, "data_dir": HERE},
        without_padding(
            difficulty="easy",
            resolution=128,
            source=Option("generated", FEW),
            num_images=Option(30, GENERATED),
            generator_seed=Option(3, GENERATED),
            generated_dir=Option(
                "@/made", GENERATED, call="datamodules.lra.pathfinder_release.list_metadata"
            ),
            num_processes=Option(1, GENERATED, call="datamodules.lra.pathfinder.num_useful"),
            split="in_order",
            split_seed=3,
            key_mask=Option("all", call="datamodules.lra.arena.PixelCollate"),
            parity_eval=2,
            vocab_size=513,
        ),
        lra.write_pathfinder,
    ),
    "trajectories": Data(
        {
            "env": "hopper",
            "quality": "medium",
            "val_fraction": 0.5,
            "data_dir": HERE,
            "batch_size": 4,
        },
        without_padding(
            predict_split="train",  # the test is on episodes that are played
            env="walker2d",
            quality="expert",
            path="@/none.hdf5",
            context_length=6,
            return_scale=3.0,
            val_fraction=0.2,
            split_seed=3,
        ),
        lambda folder: write_steps(folder / "hopper_medium-v2.hdf5"),
    ),
    "lm1b": Data(
        {"data_dir": HERE, "subwords": 280, "test_shards": 20, "max_length": 16, "max_tokens": 64},
        in_tokens(
            corpus=Option("other", told="corpus=other"),
            subwords=270,
            tokenizer_file="@/none",
            test_shards=2,
            val_shards=2,
            val_fraction=0.3,
            test_fraction=0.3,
            paragraphs=Option(True, call="datamodules.text.sentences.release.sentences_of"),
            max_length=9,
            pack=True,
            vocab_size=999,
            prompts=["the of"],
            num_prompts=3,
            prompt_len=5,
        ),
        write_shards,
    ),
    "pretraining_text": Data(
        {"path": "@/text.txt", "batch_size": 4, "vocab_limit": 80, **LARGE_SHARES},
        options(
            **ENCODED,
            path="@/none.txt",
            documents="line",
            next_sentence=False,
            val_fraction=0.2,
            test_fraction=0.2,
            split_seed=7,
            pack=Option(True, {"next_sentence": False}),
        ),
        write_documents,
    ),
    "question_answering": Data(
        {
            "path": "@/data",
            "batch_size": 4,
            "vocab_limit": 120,
            "max_length": 24,
            "max_query_length": 6,
            "pad_multiple": 1,
        },
        options(
            **ENCODED,
            path="@/none",
            version=Option("2.0", {"path": "@/unanswered"}),
            stride=3,
            max_query_length=3,
            wrong_offsets=Option("leave_out", {"path": "@/wrong"}),
            new_path="@/data/dev.json",
            predict_split="train",  # the validation split is also the test split
        ),
        write_questions,
    ),
    "translation": Data(
        {"path": "@/data", "max_tokens": 300, "merges": 50},
        in_tokens(
            **PAIRS,
            path="@/none",
            source_language="en",
            target_language="fr",
            merges=30,
            empty_lines=Option("drop", {"path": "@/uneven"}),
        ),
        write_languages,
    ),
    "iwslt14": Data(
        {"data_dir": HERE, "max_tokens": 300, "merges": 50},
        in_tokens(
            **{**PAIRS, "lower": False, "max_words": 9, "max_ratio": 1.3},
            source_language="en",
            target_language="de",
            merges=30,
        ),
        translations.write_iwslt,
    ),
    "wmt14": Data(
        {"data_dir": HERE, "max_tokens": 300},
        in_tokens(
            **{**PAIRS, "joint_dictionary": False},
            source_language="de",
            target_language="en",
            merges=30,
        ),
        write_pieces,
    ),
    "toy_translation": Data(
        {"num_train": 40, "num_val": 9, "num_test": 9},
        in_tokens(
            **{n: v for n, v in PAIRS.items() if n not in ("tokens", "max_ratio")},
            tokens="subwords",
            merges=Option(2, {"tokens": "subwords"}),
            num_train=41,
            num_val=10,
            num_test=11,
            num_words=9,
            max_clauses=2,
            data_seed=3,
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
    common = {"cache_dir": "@/cache", **data.given}
    known: dict[str, Any] = {}  # by the options without the one that is looked at
    for option, entry in data.options.items():
        without = placed(folder, {**common, **entry.others})
        value = placed(folder, {option: entry.value})
        place = option in ("data_dir", "cache_dir")
        if place:
            del without["cache_dir"]
        build = partial(given_by, CLASSES[name], call=entry.call, place=place)
        if entry.call or place:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            before = build(without)
            # Nothing is called where the cache is there.
            shutil.rmtree(folder / "cache", ignore_errors=True)
        else:
            if repr(without) not in known:
                known[repr(without)] = build(without)
            before = known[repr(without)]
        after = build({**without, **value})
        names = [entry.told] if entry.told else [option, str(value[option])]
        if before == after:
            wrong[option] = "changes nothing"
        elif isinstance(after, str) and not any(x in after for x in names):
            wrong[option] = f"is refused without its name: {after}"
        if isinstance(before, str) and entry.others == {}:
            wrong[option] = f"is compared with a refusal: {before}"
    return wrong


def test_every_data_module_is_in_the_table():
    assert TABLE.keys() == CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_an_argument_has_a_value_of_its_type(name, tmp_path):
    TABLE[name].write(tmp_path)
    make = partial(CLASSES[name], **placed(tmp_path, TABLE[name].given))
    options = options_of(CLASSES[name])
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

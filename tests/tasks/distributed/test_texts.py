"""Every data set of texts: two steps, resumed after the first, equal the whole run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from datamodules import REGISTRY
from tests.datamodules.lra.files import write_pairs
from tests.datamodules.lra.test_text import write_folder
from tests.datamodules.text import made
from tests.datamodules.text.fine_tuning import made as tuning
from tests.datamodules.text.fine_tuning.test_pretraining import written as write_documents
from tests.datamodules.text.translation import made as parallel
from tests.datamodules.text.translation.test_releases import write_pieces
from tests.support.runs import fingerprint, metrics, only_version
from tests.tasks.distributed.layouts import Trial

SMALL = {"embed_dim": 16, "head_dim": 8, "num_layers": 1, "mlp_dim": 16, "warmup_steps": 1}
LONG = {"merges": 50, "max_length": 64, "max_tokens": 256, "eval_max_tokens": 256}


def _table(folder: Path) -> str:
    rows = (f'"{tuning.context(n)}",{n % 2}\n' for n in range(60))
    path = folder / "texts.csv"
    path.write_text("text,label\n" + "".join(rows), encoding="utf-8")
    return str(path)


def _documents(folder: Path) -> str:
    write_documents(folder)
    return str(folder / "text.txt")


def _lines(folder: Path) -> str:
    made.write(folder, "{}.txt")
    return str(folder)


# Data set -> task, what writes its files, the setting that names them, other settings, the model's.
Row = tuple[str, Callable[[Path], object], str, dict[str, object], dict[str, object]]
ROWS: dict[str, Row] = {
    "iwslt14": ("tiny/iwslt14_de_en", parallel.write_iwslt, "data_dir", LONG, {}),
    "lm1b": ("tiny/lm1b", _lines, "data_dir", {}, {}),
    "masked_text": ("tiny/masked_lm", made.write, "data_dir", {}, {}),
    "own_text": ("own_text", _lines, "path", {"segment_len": 16, "tokens": "subwords"}, SMALL),
    "own_texts": ("own_texts", _table, "path", {"max_length": 16, "batch_size": 4}, SMALL),
    "pretraining_text": ("tiny/bert_pretraining", _documents, "path", {}, {}),
    "question_answering": ("tiny/squad", tuning.write_squad, "path", {}, {}),
    "retrieval": ("tiny/lra_retrieval", write_pairs, "data_dir", {}, {}),
    "text": (
        "lra_text",
        write_folder,
        "data_dir",
        {"max_length_tokens": 24, "batch_size": 2},
        SMALL,
    ),
    "text_pairs": ("tiny/mnli", tuning.write_mnli, "path", {}, {}),
    "toy_translation": ("tiny/translation", lambda folder: folder, "", {}, {}),
    "translation": ("tiny/translation", parallel.write, "path", LONG, {}),
    "wikitext103": ("tiny/wikitext103_small", made.write, "data_dir", {}, {}),
    "wmt14": ("tiny/wmt14_en_de", write_pieces, "data_dir", {}, {}),
}


# Data sets that are trained a second time on packed batches; other settings of data and of model.
PACKED: dict[str, dict[str, object]] = {"lm1b": {}, "pretraining_text": {"next_sentence": False}}


def test_every_data_set_of_texts_has_its_row():
    texts = [name for name, (module, _) in REGISTRY.items() if ".text" in module]
    assert sorted(ROWS) == sorted([*texts, "retrieval"])


def _trial(name: str, packed: bool, folder: Path) -> Trial:
    task, write, setting, data, model = ROWS[name]
    if packed:
        data, model = {**data, "pack": True, **PACKED[name]}, {**model, **PACKED[name]}
    place = folder / "files"
    place.mkdir()
    found = write(place)
    data = {**data, "cache_dir": str(folder / "cache")}
    if setting:
        data[setting] = found if isinstance(found, str) else str(place)
    settings = {"data": {"class_path": f"datamodules.{REGISTRY[name][1]}", "init_args": data}}
    # One validation, at the end: Lightning counts the parts of steps.
    every = {"max_steps": 2, "val_check_interval": 4, "limit_val_batches": 1}
    every["accumulate_grad_batches"] = 2
    settings |= {"model": {"init_args": model}, "trainer": every, "run": {"checkpoint_every": 1}}
    overlay = folder / "small.yaml"
    overlay.write_text(yaml.safe_dump(settings), encoding="utf-8")

    def flags(_: Path) -> Sequence[str]:
        return "--config", str(overlay)

    return Trial(task, flags)


# Every order of samples is resumed in `tests/datamodules/core/test_every_order.py`, a run on a
# stream of text in `tests/tasks/test_language_model.py`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packed"),
    [*((name, False) for name in ROWS), *((name, True) for name in PACKED)],
)
def test_two_steps_resumed_after_one_equal_the_whole(name, packed, tmp_path, tmp_path_factory):
    """With dropout, each step of two parts."""
    trial = _trial(name, packed, tmp_path)
    whole = only_version(trial.trained(tmp_path_factory))
    resumed = trial.resumed(whole, 1, tmp_path)
    assert fingerprint(resumed) == fingerprint(whole)
    rows = metrics(whole)
    assert metrics(resumed) == rows
    assert len(rows) == 2

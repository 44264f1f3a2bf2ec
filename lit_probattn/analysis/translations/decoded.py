"""Runs of translation models on a common test set, and their translations."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lit_probattn.analysis.studies.curves import check_labels, name_of, read_run, split_label
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.progress import Progress, duration
from lit_probattn.base.rows import RowStore
from lit_probattn.models.decoding import Sampling
from lit_probattn.tasks.bleu import FORMS, BLEUForm
from lit_probattn.training.checkpoints import find_file
from lit_probattn.training.run_folder import folder_of_checkpoint
from lit_probattn.training.trained import Trained, identity, open_translator


@dataclass(frozen=True)
class Lines:
    """Translations of a split, one per pair.

    Args:
        text: running text.
        words: the text separated into words as in the data, joined by spaces.
    """

    text: list[str]
    words: list[str]

    def in_form(self, form: BLEUForm) -> list[str]:
        """Return the lines that are compared by a form of BLEU."""
        return self.text if form == "detokenised" else self.words


@dataclass(frozen=True)
class Pairs:
    """The common pairs of all runs: sources and references, both in both forms.

    Args:
        forms: comparable forms of BLEU: all if the runs separate words equally, otherwise that of
            running text.
    """

    source: Lines
    reference: Lines
    forms: tuple[BLEUForm, ...]

    def __len__(self) -> int:
        return len(self.reference.text)


@dataclass(frozen=True)
class Run:
    """A run that has been opened.

    Args:
        label: its label.
        metrics: its metrics.csv, with rows of run, step, metric, value.
    """

    label: str
    trained: Trained
    metrics: pd.DataFrame

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(p.numel() for p in self.trained.task.model.parameters() if p.requires_grad)

    @property
    def target_tokens(self) -> int | None:
        """Number of target tokens up to the checkpoint; None if the data do not count them."""
        count = getattr(self.trained.data, "target_tokens", None)
        return None if count is None else int(count(self.trained.step))

    @property
    def search(self) -> dict[str, Any]:
        """Settings of the beam search, without the number of returned translations."""
        return {k: v for k, v in asdict(self.trained.task.beam).items() if k != "n_best"}


def open_runs(options: argparse.Namespace) -> list[Run]:
    """Open the runs of `options.runs`, `[LABEL=]FOLDER` each; FOLDER may be a checkpoint.

    Raises:
        ConfigError: a label is duplicate, metrics.csv is missing, the data have no text, or a run
            is not a translation run.
    """
    given = [split_label(text) for text in options.runs]
    folders = [folder_of_checkpoint(find_file(path)) for _, path in given]
    labels = [label or name_of(folder) for (label, _), folder in zip(given, folders, strict=True)]
    check_labels("--runs", labels)
    runs: list[Run] = []
    for label, folder, (_, path) in zip(labels, folders, given, strict=True):
        metrics = read_run(folder, label)
        opened = {"checkpoint": path, "config": None}
        trained = open_translator(argparse.Namespace(**{**vars(options), **opened}))
        if not hasattr(trained.data, "source_lines"):
            raise ConfigError(
                f"{path} was trained on {type(trained.data).__name__}, which does not provide the "
                "lines of its test set: expected datamodules.Translation"
            )
        runs.append(Run(label, trained, metrics))
    return runs


def common_pairs(runs: Sequence[Run], split: str) -> Pairs:
    """Return the pairs of a split, which must be equal in all runs.

    Raises:
        ConfigError: the test sets of runs differ.
    """
    data = runs[0].trained.data
    source, reference = data.source_lines(split), data.references(split)
    words = data.tokenised_references(split)
    alike = True
    for run in runs[1:]:
        other = run.trained.data
        pairs = list(zip(other.source_lines(split), other.references(split), strict=True))
        ours = list(zip(source, reference, strict=True))
        if pairs != ours:
            together = zip(pairs, ours, strict=False)
            first = next((i for i, (a, b) in enumerate(together) if a != b), None)
            where = f"{len(pairs)} pairs and {len(ours)}"
            where += f", first difference in pair {first + 1}" if first is not None else ""
            raise ConfigError(
                f"{run.label} and {runs[0].label} have different {split} splits ({where}): their "
                "scores are not comparable; use runs of the same data"
            )
        alike = alike and other.tokenised_references(split) == words
    source_words = list(data.coder.tokenised_lines(source))
    return Pairs(
        Lines(source, source_words), Lines(reference, words), FORMS if alike else FORMS[:1]
    )


def decode(run: Run, split: str, folder: Path) -> Lines:
    """Translate a split with the beam search of the run, in float32.

    Translations are stored in `folder` by run and reused by later calls for the same checkpoint,
    data and search; an interrupted call is resumed.
    """
    trained = run.trained
    task = trained.task
    task.beam = replace(task.beam, n_best=1)
    task.sampling = Sampling()
    settings = {"split": split, "search": run.search, "model": identity(trained)}
    settings["data"] = trained.config["data"]
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "-", run.label)
    store = RowStore(folder / f"{name}.jsonl", dict[str, Any], ("number",), settings=settings)
    loader = getattr(trained.data, f"{split}_dataloader")()
    total = len(trained.data.references(split))
    progress = Progress(total, f"sentences of {run.label}")
    begun = len(store)
    for rows in _missing(loader, store):
        found = _translate(trained, rows)
        for number, (text, words) in found.items():
            store.add({"number": number, "text": text, "words": words})
        passed = time.monotonic() - progress.begin
        left = passed / (len(store) - begun) * (total - len(store))
        progress.show(len(store), left, f"in {duration(passed)}" if len(store) == total else "")
    lines = sorted(store.rows, key=lambda row: row["number"])
    return Lines([row["text"] for row in lines], [row["words"] for row in lines])


def _missing(loader: Any, store: RowStore[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
    """Yield the real rows of batches that are not completely stored."""
    for batch in getattr(loader, "loader", loader):
        names = batch["sample_ids"]
        wanted = [i for i, n in enumerate(names.tolist()) if n >= 0 and not store.has(number=n)]
        if wanted:
            yield {name: batch[name][wanted] for name in ("source", "source_mask", "sample_ids")}


@torch.inference_mode()
def _translate(trained: Trained, rows: dict[str, Tensor]) -> dict[int, tuple[str, str]]:
    """Return text and words of the translations by sample id."""
    moved = [rows[name].to(trained.device) for name in ("source", "source_mask", "sample_ids")]
    found = [best[0].tokens for best in trained.task.translate(*moved)]
    made = [(trained.data.detokenise(ids), trained.data.tokenised(ids)) for ids in found]
    return dict(zip(rows["sample_ids"].tolist(), made, strict=True))

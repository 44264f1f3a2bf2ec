"""Reproducible random selection of the sequences and maps of a study."""

from __future__ import annotations

import argparse
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lit_probattn.analysis.recording import LayerCall, record
from lit_probattn.base.errors import ConfigError
from lit_probattn.training.trained import Trained


@dataclass(frozen=True)
class Sequence:
    """One sequence in one layer."""

    sample_id: int  # index of its sample in the split
    # Index within the sample: text of a pair, window of an image, application of a shared layer, or
    # 0; applications are counted before texts and windows.
    part: int
    call: LayerCall  # restricted to this sequence
    tokens: list[int] | None = None  # token ids, if the model has any

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.call.name


@torch.no_grad()
def sequences(
    trained: Trained,
    options: argparse.Namespace,
    *,
    padded: bool = False,
    min_len: int = 1,
) -> Iterator[list[Sequence]]:
    """Run the model on random samples; yield a recorded sequence per sample and layer by batch.

    Args:
        options: values of the flags `options.samples`.
        min_len: skip shorter sequences.

    Raises:
        ConfigError: the model has no attention layers of this package, or all sequences are short.
    """
    if not trained.layers:
        raise ConfigError("the model has no attention layers of lit_probattn")
    if padded and hasattr(trained.data, "pad_to"):
        trained.data.pad_to = "max"
    batches = trained.batches(
        options.split,
        options.num_samples,
        seed=options.seed,
        rows=options.batch_size,
        max_len=options.max_len or None,
    )
    found = 0
    for batch in batches:
        with record(trained.task.model) as calls:
            trained.forward(batch)
        applied: Counter[str] = Counter()
        chosen: list[Sequence] = []
        for call in calls:
            picked = _pick(call, batch, options.seed, padded, applied[call.name])
            chosen += [one for one in picked if one.call.query.shape[1] >= min_len]
            applied[call.name] += 1
        found += len(chosen)
        yield chosen
    if not found:
        raise ConfigError(
            f"no sequence of {options.split} has {min_len} positions: reduce the length"
        )


def _pick(
    call: LayerCall, batch: dict[str, Any], seed: int, padded: bool, application: int
) -> Iterator[Sequence]:
    sample_ids, inputs = batch["sample_ids"].tolist(), batch["inputs"]
    per_sample = call.num_sequences // len(sample_ids)
    rows = inputs.flatten(0, -2) if not inputs.is_floating_point() else None
    if rows is not None and rows.shape != call.query.shape[:2]:
        rows = None
    for row, sample_id in enumerate(sample_ids):
        if sample_id < 0:
            continue
        part = int(generator(seed, call.name, sample_id).permutation(per_sample)[0])
        number = row * per_sample + part
        one = call.one(number, padded=padded)
        tokens = None if rows is None else rows[number, : one.query.shape[1]].tolist()
        yield Sequence(sample_id, application * per_sample + part, one, tokens)


def longest(found: list[Sequence]) -> list[Sequence]:
    """Return the sequences, one per layer, of the longest sample; the first of equal length."""
    if not found:
        return []
    best = max(found, key=lambda one: one.call.query.shape[1]).sample_id
    return [one for one in found if one.sample_id == best]


def token_words(data: Any, tokens: list[int]) -> list[str]:
    """Return the words of tokens; empty if the DataModule cannot decode them."""
    decode = getattr(data, "decode", None)
    return [] if decode is None else [str(decode([token])).strip() for token in tokens]


def generator(seed: int, *words: Any) -> np.random.Generator:
    """Return a generator that depends only on the seed and the words."""
    text = "/".join(str(word) for word in words)
    return np.random.default_rng([seed, zlib.crc32(text.encode())])


def layer_numbers(names: list[str]) -> dict[str, int]:
    """Number the layers from 1 in the given order."""
    return {name: number for number, name in enumerate(dict.fromkeys(names), 1)}

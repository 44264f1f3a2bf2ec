"""Which sequences, and which of their maps, a study looks at: random, but the same every time."""

from __future__ import annotations

import argparse
import zlib
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
    """One sequence as one layer saw it."""

    sample_id: int  # number of its sample in the split
    part: int  # its number within the sample: text of a pair, window of a picture; else 0
    call: LayerCall  # for this sequence alone
    tokens: list[int] | None = None  # ids at its positions, if the model reads tokens

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.call.name


@torch.no_grad()
def sequences(
    trained: Trained,
    options: argparse.Namespace,
    *,
    parts: int = 1,
    padded: bool = False,
    min_len: int = 1,
) -> Iterator[list[Sequence]]:
    """Run the model on random samples; yield, batch by batch, what its layers saw.

    Args:
        options: the flags `options.samples`.
        parts: at most this many sequences of each sample and layer, drawn at random.
        min_len: shorter sequences are left out.

    Raises:
        ConfigError: the model has no attention layer of ours, or no sequence is long enough.
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
        chosen = [s for c in calls for s in _pick(c, batch, parts, options.seed, padded)]
        chosen = [s for s in chosen if s.call.query.shape[1] >= min_len]
        found += len(chosen)
        yield chosen
    if not found:
        raise ConfigError(
            f"no sequence of {options.split} has {min_len} positions: lower the length asked for"
        )


def _pick(
    call: LayerCall, batch: dict[str, Any], parts: int, seed: int, padded: bool
) -> Iterator[Sequence]:
    sample_ids, inputs = batch["sample_ids"].tolist(), batch["inputs"]
    per_sample = call.num_sequences // len(sample_ids)
    rows = inputs.flatten(0, -2) if not inputs.is_floating_point() else None
    if rows is not None and rows.shape != call.query.shape[:2]:
        rows = None
    for row, sample_id in enumerate(sample_ids):
        if sample_id < 0:
            continue
        order = generator(seed, call.name, sample_id).permutation(per_sample)[:parts]
        for part in sorted(order.tolist()):
            number = row * per_sample + part
            one = call.one(number, padded=padded)
            length = one.query.shape[1]
            tokens = None if rows is None else rows[number, :length].tolist()
            yield Sequence(sample_id, part, one, tokens)


def longest(found: list[Sequence]) -> list[Sequence]:
    """Return those, one per layer, of the sample with the most positions; ties: the first."""
    if not found:
        return []
    best = max(found, key=lambda one: one.call.query.shape[1]).sample_id
    return [one for one in found if one.sample_id == best]


def token_words(data: Any, tokens: list[int]) -> list[str]:
    """Return the words of tokens, if the DataModule can decode them; else nothing."""
    decode = getattr(data, "decode", None)
    return [] if decode is None else [str(decode([token])).strip() for token in tokens]


def generator(seed: int, *words: Any) -> np.random.Generator:
    """Return a generator that depends on the seed and the words only."""
    text = "/".join(str(word) for word in words)
    return np.random.default_rng([seed, zlib.crc32(text.encode())])


def layer_numbers(names: list[str]) -> dict[str, int]:
    """Number the layers from 1, in the order in which they come."""
    return {name: number for number, name in enumerate(dict.fromkeys(names), 1)}

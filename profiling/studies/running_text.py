"""Cost of language modelling on random words with Zipf's frequencies; nothing is downloaded.

tokenise  makes text of any size, tokenises it: seconds, peak memory of the process
loader    batches of the tokenised text: tokens per second
unigram   perplexity of val and test text under the word frequencies of the training text
model     the named small model: one training step and sliding windows: seconds, peak memory
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from datamodules import WikiText103
from lit_probattn.configs import attention_entry, attention_factory
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.randomness import RandomKey
from profiling.measure.timing import time_once
from profiling.studies.study import SEED, Report, command, flag

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_LINE_TOKENS = 58  # with <eos>; the release has 103,227,021 tokens in 1,801,350 lines
_VOCABULARY = 267735
_CHUNK_LINES = 20000


def make_text(folder: Path, num_tokens: int) -> None:
    """Write train, valid and test text; the training text has `num_tokens` with <eos>."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(_VOCABULARY - 1)], dtype=object)
    weights = 1.0 / np.arange(10, _VOCABULARY + 9)
    bounds = np.cumsum(weights / weights.sum())
    for name, size in (("valid", 217646), ("test", 245569), ("train", num_tokens)):
        with (folder / f"wiki.{name}.tokens").open("w") as file:
            if name == "train":  # every word at least once
                file.writelines(f"{' '.join(part)}\n" for part in np.array_split(words, 4618))
                size -= len(words) + 4618
            for first in range(0, size // _LINE_TOKENS, _CHUNK_LINES):
                lines = min(_CHUNK_LINES, size // _LINE_TOKENS - first)
                ids = np.searchsorted(bounds, rng.random((lines, _LINE_TOKENS - 1)))
                ids = np.minimum(ids, len(words) - 1)
                file.writelines(f"{' '.join(line)}\n" for line in words[ids])
            file.write("\n" * (size % _LINE_TOKENS))


def cost(function: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return seconds and peak memory of one call; on the CPU, of the process so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = time_once(function, device)
    peak = math.nan
    if resource is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {"seconds": seconds, "peak memory, GB": peak / 1e9}


def _data(options: argparse.Namespace, batch_size: int = 96, **more: Any) -> WikiText103:
    folder = str(options.folder)
    return WikiText103(corpus="other", data_dir=folder, batch_size=batch_size, **more)


def _report(title: str, rows: Sequence[dict[str, Any]], what: str, *notes: str) -> Report:
    table = pd.DataFrame(rows)
    return Report(title, table, {what: table}, notes)


def tokenise(options: argparse.Namespace) -> Report:
    """Make the text if needed, and tokenise it."""
    if not (options.folder / "wiki.train.tokens").is_file():
        made = cost(partial(make_text, options.folder, options.tokens), torch.device("cpu"))
        note = f"{options.tokens:,} tokens in {options.folder}; run again to measure"
        return _report("Text made", [made], "Making the text", note)
    data = _data(options)
    found = cost(data.prepare_data, torch.device("cpu"))
    return _report("Tokenising", [found], "The whole text", str(dict(data.counts.found)))


def loader(options: argparse.Namespace) -> Report:
    """Count tokens per second of the training loader."""
    rows = []
    for batching in ("columns", "segments"):
        data = _data(options, batching=batching)
        data.setup()
        stream = iter(data.train_dataloader())
        next(stream)
        counts: list[int] = []
        load = partial(
            counts.extend, (b["inputs"].numel() for b in islice(stream, options.batches))
        )
        seconds = time_once(load, torch.device("cpu"))
        rate = sum(counts) / seconds
        rows.append({"batching": batching, "million tokens per second": rate / 1e6})
    return _report("Training loader", rows, "One process")


def unigram(options: argparse.Namespace) -> Report:
    """Compute the perplexity of a model that knows word frequencies only."""
    data = _data(options, batch_size=1)
    data.setup()
    cache = data.open()
    counts = np.bincount(cache.array("train_tokens"), minlength=len(data.vocabulary))
    losses = -np.log(counts / counts.sum())
    rows = [
        {"text": n, "perplexity": float(np.exp(losses[cache.array(f"{n}_tokens")[1:]].mean()))}
        for n in ("val", "test")
    ]
    return _report("Frequencies of the training text", rows, "Unigram perplexity")


def model(options: argparse.Namespace) -> Report:
    """Take one training step over micro-batches, and slide windows over text."""
    device = torch.device(options.device)
    entry = attention_entry(f"configs/attention/{options.variant}.yaml")
    attention = attention_factory(entry["class_path"], {**entry["init_args"], "dropout": 0.0})
    sizes = {"vocab_size": _VOCABULARY, "max_seq_len": 256, "output": options.output}
    small = LanguageModel(attention, **sizes).to(device)
    weights = 1.0 / torch.arange(10, _VOCABULARY + 10)
    length = max(options.batch_size * 257, options.windows + 257)
    stream = torch.multinomial(weights, length, replacement=True).to(device)
    adam = torch.optim.AdamW(small.parameters(), lr=2.5e-4, weight_decay=0.0)

    def step() -> None:
        for tokens in stream[: options.batch_size * 257].view(options.parts, -1, 257):
            hidden = small(tokens[:, :-1], rng=RandomKey(0))
            (small.token_losses(hidden, tokens[:, 1:]).mean() / options.parts).backward()
        torch.nn.utils.clip_grad_norm_(small.parameters(), 0.25)
        adam.step()

    def slide() -> None:
        small.eval()
        for first in range(0, options.windows, options.rows):
            count = min(options.rows, options.windows - first)
            tokens = stream[first:].unfold(0, 257, 1)[:count]
            target = tokens[:, 1:].clone()
            target[:, :-1] = -100
            small.token_losses(small(tokens[:, :-1]), target)

    rows = []
    if options.parts:
        what = f"one step, {options.batch_size} x 256 tokens in {options.parts} parts"
        rows.append({"what": what, **cost(step, device)})
    with torch.inference_mode():
        what = f"{options.windows} sliding windows, {options.rows} at a time"
        rows.append({"what": what, **cost(slide, device)})
    count = sum(p.numel() for p in small.parameters())
    return _report("Small language model", rows, f"{options.variant}, {count:,} parameters")


main = command(
    __name__,
    __doc__,
    {"tokenise": tokenise, "loader": loader, "unigram": unigram, "model": model},
    {
        **SEED,
        "device": flag("cuda" if torch.cuda.is_available() else "cpu", "torch device of the model"),
        "folder": flag(Path("runs/running_text"), "folder of the text"),
        "tokens": flag(100_000_000, "tokens of the training text", least=300_000),
        "batches": flag(500, "batches of the loader", least=1),
        "variant": flag("softmax", "a file of configs/attention: attention of the model"),
        "output": flag("adaptive", "softmax of the model", choices=("adaptive", "full")),
        "batch_size": flag(96, "sequences of the step", least=1),
        "parts": flag(1, "micro-batches of the step; 0: no step", least=0),
        "windows": flag(1000, "sliding windows", least=1),
        "rows": flag(50, "windows in one forward pass", least=1),
    },
)

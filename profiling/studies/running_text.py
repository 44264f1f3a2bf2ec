"""`python -m profiling.running_text {tokenise,loader,unigram,model}`: cost of language modelling.

    tokenise  makes text of any size, tokenises it: seconds, peak memory of the process
    loader    batches of the tokenised text: tokens per second
    unigram   perplexity of val and test text under the word frequencies of the training text
    model     the named small model: one training step and sliding windows: seconds, peak memory

The text is random words with Zipf's frequencies. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import resource
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datamodules import WikiText103
from lit_probattn.attention import AttentionFactory, MGKAttention, SoftmaxAttention
from lit_probattn.models.language_model import LanguageModel, Output
from lit_probattn.randomness import RandomKey

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


def tokenise(folder: Path, num_tokens: int) -> None:
    """Make the text if needed, tokenise it, print time and memory."""
    if not (folder / "wiki.train.tokens").is_file():
        make_text(folder, num_tokens)
        print(f"made {num_tokens:,} tokens in {folder}: run again to measure")
        return
    data = WikiText103(corpus="other", data_dir=str(folder), batch_size=96)
    start = time.perf_counter()
    data.prepare_data()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    counts = dict(data.counts.found)
    print(f"{counts}, {seconds / 60:.2f} minutes, peak memory {peak / 1e9:.2f} GB", flush=True)


def loader(folder: Path, batches: int) -> None:
    """Print tokens per second of the training loader."""
    for batching in ("columns", "segments"):
        data = WikiText103(corpus="other", data_dir=str(folder), batch_size=96, batching=batching)
        data.setup()
        stream = iter(data.train_dataloader())
        next(stream)
        start, tokens = time.perf_counter(), 0
        for _ in range(batches):
            tokens += next(stream)["inputs"].numel()
        rate = tokens / (time.perf_counter() - start)
        print(f"loader, {batching}, one process: {rate / 1e6:.1f} million tokens per second")


def unigram(folder: Path) -> None:
    """Print the perplexity of a model that knows word frequencies only."""
    data = WikiText103(corpus="other", data_dir=str(folder), batch_size=1)
    data.setup()
    cache = data.open()
    counts = np.bincount(cache.array("train_tokens"), minlength=len(data.vocabulary))
    losses = -np.log(counts / counts.sum())
    for name in ("val", "test"):
        mean = losses[cache.array(f"{name}_tokens")[1:]].mean()
        print(f"{name}: unigram perplexity {np.exp(mean):.2f}")


def model(
    variant: str, output: Output, batch_size: int, parts: int, windows: int, rows: int
) -> None:
    """Print time and peak memory of a training step and of sliding windows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    variants: dict[str, AttentionFactory] = {
        "softmax": partial(SoftmaxAttention, num_heads=8),
        "mgk": partial(MGKAttention, num_heads=4),
    }
    small = LanguageModel(
        variants[variant], vocab_size=_VOCABULARY, max_seq_len=256, output=output
    ).to(device)
    print(f"{variant}, {output} softmax: {sum(p.numel() for p in small.parameters()):,} parameters")
    weights = 1.0 / torch.arange(10, _VOCABULARY + 10)
    stream = torch.multinomial(weights, max(batch_size * 257, windows + 257), replacement=True)
    stream = stream.to(device)
    if parts:
        _step(small, stream[: batch_size * 257].view(parts, batch_size // parts, 257))
    small.eval()
    start = _start(device)
    with torch.inference_mode():
        for first in range(0, windows, rows):
            tokens = stream[first:].unfold(0, 257, 1)[: min(rows, windows - first)]
            target = tokens[:, 1:].clone()
            target[:, :-1] = -100
            small.token_losses(small(tokens[:, :-1]), target)
    print(f"{windows} sliding windows, {rows} at a time: {_stop(device, start)}")


def _step(small: LanguageModel, parts: Tensor) -> None:
    """Take one optimiser step over micro-batches, (parts, rows, 257) tokens; print its cost."""
    adam = torch.optim.AdamW(small.parameters(), lr=2.5e-4, weight_decay=0.0)
    start = _start(parts.device)
    for tokens in parts:
        hidden = small(tokens[:, :-1], rng=RandomKey(0))
        (small.token_losses(hidden, tokens[:, 1:]).mean() / len(parts)).backward()
    torch.nn.utils.clip_grad_norm_(small.parameters(), 0.25)
    adam.step()
    cost = _stop(parts.device, start)
    print(f"one step, {parts[..., 0].numel()} x 256 tokens in {len(parts)} parts: {cost}")


def _start(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    return time.perf_counter()


def _stop(device: torch.device, start: float) -> str:
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak, what = torch.cuda.max_memory_allocated(), "peak allocated"
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        what = "peak resident so far"
    return f"{time.perf_counter() - start:.1f} s, {what} {peak / 1e9:.2f} GB"


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.running_text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tokenise", "loader", "unigram"):
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("--folder", type=Path, required=True, help="of the text")
        command.add_argument("--tokens", type=int, default=100_000_000)
        command.add_argument("--batches", type=int, default=500)
    command = commands.add_parser("model", allow_abbrev=False)
    command.add_argument("--variant", choices=("softmax", "mgk"), default="softmax")
    command.add_argument("--output", choices=("adaptive", "full"), default="adaptive")
    command.add_argument("--batch_size", type=int, default=96)
    command.add_argument(
        "--parts", type=int, default=1, help="micro-batches of the step; 0: no step"
    )
    command.add_argument("--windows", type=int, default=1000)
    command.add_argument("--rows", type=int, default=50, help="windows in one forward pass")
    given = parser.parse_args()
    if given.command == "tokenise":
        tokenise(given.folder, given.tokens)
    elif given.command == "loader":
        loader(given.folder, given.batches)
    elif given.command == "unigram":
        unigram(given.folder)
    else:
        model(given.variant, given.output, given.batch_size, given.parts, given.windows, given.rows)


if __name__ == "__main__":
    main()

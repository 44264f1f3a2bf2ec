"""Speed of an encoder-decoder: decoding with caches, beam search, and a training step.

    python -m examples.studies.decoding --threads 1 --out FOLDER

cache  greedy decoding of N tokens with caches, compared with a full pass per token
beam   beam search with 5 hypotheses of N tokens, compared with greedy decoding
step   forward and backward of a batch, compared with softmax with 4 heads

Sentences and weights are random; every translation has N tokens, since EOS is masked until then.
Head sizes are equal; MGK, sMGK and MLK have half the heads, FiSH 4 local heads from 2 global heads,
in all three kinds of attention. All sides of a part run in turns in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_probattn.attention import (
    Attention,
    FiSHAttention,
    LinearAttention,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)
from lit_probattn.base.arguments import at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.models.encoder_decoder import EOS, PAD, EncoderDecoder
from lit_probattn.models.search import Beam, Hypothesis, beam_search, sample
from lit_probattn.randomness import RandomKey
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import counted, span
from profiling.study import Report, add_timing, command, heading, measure_sides, shown

_FISH = partial(FiSHAttention, num_heads=4, num_global_heads=2, scale_position="before")
VARIANTS: Mapping[str, Callable[..., Attention]] = {
    "softmax 4": partial(SoftmaxAttention, num_heads=4),
    "MGK 2": partial(MGKAttention, num_heads=2, variance="paper_main"),
    "sMGK 2": partial(MGKAttention, num_heads=2, variance="paper_main", shifted_keys=True),
    "Hard FiSH 2/4": partial(_FISH, noise="none"),
    "FiSH 2/4": _FISH,
    "Hard GFiSH 2/4": partial(_FISH, noise="none", mixer="mlp"),
    "GFiSH 2/4": partial(_FISH, mixer="mlp"),
    "linear 4": partial(LinearAttention, num_heads=4),
    "MLK 2": partial(MLKAttention, num_heads=2),
}
BASELINE = "softmax 4"
CACHED, UNCACHED = "caches", "full passes"
BEAM_SIZE = 5


def build(name: str, options: argparse.Namespace) -> EncoderDecoder:
    """Build the model of a variant from a common seed."""
    torch.manual_seed(options.seed)
    model = EncoderDecoder(
        VARIANTS[name],
        source_vocab_size=options.vocab,
        vocab_size=options.vocab,
        max_seq_len=max(*options.lengths, options.source, options.tokens) + 2,
        embed_dim=options.embed_dim,
        head_dim=options.embed_dim // 4,
        num_encoder_layers=options.layers,
        num_decoder_layers=options.layers,
        mlp_dim=2 * options.embed_dim,
        dropout=0.1,
    )
    return model.to(options.device)


def sentences(options: argparse.Namespace, batch: int, length: int) -> Tensor:
    """Return random tokens with a final EOS, (batch, length)."""
    tokens = torch.randint(4, options.vocab, (batch, length), device=options.device)
    tokens[:, -1] = EOS
    return tokens


def of_length(length: int, size: int = 1) -> Beam:
    """Return a search whose translations have exactly this number of tokens."""
    return Beam(size, max_length_a=0.0, max_length_b=length, min_length=length)


@torch.inference_mode()
def without_caches(model: EncoderDecoder, source: Tensor, length: int) -> list[Hypothesis]:
    """Decode greedily with a full decoder pass per token; the encoder runs once."""
    beam, memory = of_length(length), model.encode(source)
    tokens = torch.full((len(source), 1), EOS, device=source.device)
    scores = memory.new_zeros(len(source), 0)
    for step in range(length + 1):
        found = model.logits(model.decode(tokens, memory)[:, -1]).log_softmax(-1)
        found[:, PAD] = float("-inf")
        if step < length:
            found[:, EOS] = float("-inf")
        best = found.argmax(-1) if step < length else torch.full_like(tokens[:, 0], EOS)
        tokens = torch.cat([tokens, best[:, None]], 1)
        scores = torch.cat([scores, found.gather(1, best[:, None])], 1)
    rows = zip(tokens[:, 1:-1].tolist(), scores.tolist(), strict=True)
    return [Hypothesis(ids, beam.score(row), row) for ids, row in rows]


def require_same(name: str, found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    """Raise a RuntimeError if two decoding methods produce different translations.

    Words may differ after a near tie if the scores are equal.
    """
    for a, b in zip(found, expected, strict=True):
        near = abs(a.score - b.score) < 1e-3
        if a.tokens != b.tokens and not near:
            raise RuntimeError(f"{name}: translations by {CACHED} and {UNCACHED} differ")


def measure_cache(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time greedy decoding with and without caches at each length."""
    rows = []
    for name in options.variants:
        model = build(name, options).eval()
        source = sentences(options, options.batch, options.source)
        sides: dict[tuple[int, str], Callable[[], list[Hypothesis]]] = {}
        for length in options.lengths:
            sides[length, CACHED] = partial(sample, model, source, beam=of_length(length))
            sides[length, UNCACHED] = partial(without_caches, model, source, length)
            require_same(name, sides[length, CACHED](), sides[length, UNCACHED]())
        times = measure_sides(sides, options, lambda side: {"caches": (side[0], CACHED)})
        for (length, form), found in times.items():
            speed = options.batch * (length + 1) / found["time_median_s"]
            case = {"part": "cache", "variant": name, "tokens": length, "form": form}
            rows.append({**case, "tokens_per_s": speed, **found})
    return rows


def measure_beam(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time beam search and greedy decoding."""
    rows = []
    for name in options.variants:
        model = build(name, options).eval()
        source, length = sentences(options, options.batch, options.source), options.tokens
        sides: dict[str, Callable[[], object]] = {
            "greedy": partial(sample, model, source, beam=of_length(length)),
            f"beam {BEAM_SIZE}": partial(
                beam_search, model, source, None, of_length(length, BEAM_SIZE)
            ),
        }
        times = measure_sides(sides, options, lambda _: {"greedy": "greedy"})
        for form, found in times.items():
            speed = options.batch * (length + 1) / found["time_median_s"]
            case = {"part": "beam", "variant": name, "tokens": length, "form": form}
            rows.append({**case, "tokens_per_s": speed, **found})
    return rows


def train(model: EncoderDecoder, source: Tensor, target: Tensor) -> None:
    """Run forward and backward of a batch."""
    inputs = target.roll(1, 1)  # EOS first
    hidden = model(source, inputs, rng=RandomKey(0))
    F.cross_entropy(model.logits(hidden).flatten(0, 1), target.flatten()).backward()
    model.zero_grad(set_to_none=True)


def measure_step(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a training step of all variants."""
    sides: dict[str, Callable[[], object]] = {}
    source, target = (sentences(options, options.train_batch, options.tokens) for _ in range(2))
    for name in VARIANTS:
        sides[name] = partial(train, build(name, options).train(), source, target)
    times = measure_sides(sides, options, lambda _: {"softmax": BASELINE})
    case = {"part": "step", "tokens": options.tokens, "form": "training step"}
    return [{**case, "variant": name, **found} for name, found in times.items()]


class Speeds(Report):
    """The report of all three parts, with one panel each."""

    def drawn(self) -> Any:
        """Return the figure of tokens per second over length, and of the other ratios."""
        figure, [axes] = panels(1, 3, 4.6, 3.8)
        cache, beam, step = (self.rows[self.rows["part"] == p] for p in ("cache", "beam", "step"))
        for number, (name, part) in enumerate(cache.groupby("variant", sort=False)):
            for form, dashes in ((CACHED, "-"), (UNCACHED, ":")):
                side, label = part[part["form"] == form], name if form == CACHED else None
                points = side["tokens"], side["tokens_per_s"]
                axes[0].plot(*points, dashes, marker="o", ms=3, color=f"C{number}", label=label)
        axes[0].set(xlabel="tokens of a translation", ylabel="tokens / s", yscale="log")
        axes[0].set_title(f"greedy: {CACHED} (lines), {UNCACHED} (dots)", fontsize=9)
        axes[0].legend(fontsize=7, frameon=False)
        wide = beam[beam["form"] != "greedy"]
        for axis, part, column, title in (
            (axes[1], wide, "time_over_greedy", f"beam of {BEAM_SIZE}"),
            (axes[2], step, "time_over_softmax", "training step"),
        ):
            sides = part[column] - part[f"{column}_p20"], part[f"{column}_p80"] - part[column]
            axis.barh(part["variant"], part[column], xerr=[*sides], capsize=3)
            axis.axvline(1.0, color="0.5", lw=0.8, ls=":")
            axis.invert_yaxis()
            axis.set(xlabel=f"{heading(column)}\n(error bars: 20 % to 80 % of rounds)")
            axis.set_title(title, fontsize=9)
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        return figure


def finding(rows: pd.DataFrame, longest: int) -> str:
    """Return a one-line summary."""
    cache = rows[(rows["tokens"] == longest) & (rows["form"] == UNCACHED)]
    beam = rows[rows["form"] == f"beam {BEAM_SIZE}"]
    step = rows[(rows["part"] == "step") & (rows["variant"] != BASELINE)]
    least, most = (step.loc[getattr(step["time_over_softmax"], f)()] for f in ("idxmin", "idxmax"))
    return (
        f"greedy decoding of {longest} tokens is {span(cache['time_over_caches'], '.1f')} times "
        f"as fast from caches as by full passes; a beam of {BEAM_SIZE} takes "
        f"{span(beam['time_over_greedy'], '.1f')} times as long as greedy decoding; a training "
        f"step takes {least['time_over_softmax']:.2f} ({least['variant']}) to "
        f"{most['time_over_softmax']:.2f} ({most['variant']}) times that of {BASELINE}"
    )


def run(options: argparse.Namespace) -> Report:
    """Measure all parts."""
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"unknown variant {unknown[0]!r}; expected some of {', '.join(VARIANTS)}")
    parts = [measure_cache(options), measure_beam(options), measure_step(options)]
    rows = pd.DataFrame([row for part in parts for row in part])
    cache, beam, step = (rows[rows["part"] == p].dropna(axis=1) for p in ("cache", "beam", "step"))
    for part in (cache, beam):
        part["tokens_per_s"] = part["tokens_per_s"].round(1)
    sizes = f"width {options.embed_dim}, {options.layers} + {options.layers} blocks"
    batch = counted(options.batch, "sentence")
    return Speeds(
        "Speed of the encoder-decoder: caches, beam search, a training step",
        rows,
        {
            "Greedy decoding, `time / caches` over the same from caches": shown(
                cache, "variant", "tokens", "form", "tokens_per_s"
            ),
            f"Translations of {counted(options.tokens, 'token')}": shown(
                beam, "variant", "form", "tokens_per_s"
            ),
            f"A training step of {counted(options.train_batch, 'pair')} of "
            f"{counted(options.tokens, 'token')} a side": shown(step, "variant"),
        },
        [
            f"{sizes}, vocabulary of {options.vocab:,}, float32; {batch} of "
            f"{counted(options.source, 'source token')} at a time; random weights and sentences",
            f"{options.warmup} untimed rounds, then "
            f"{' and '.join(str(n) for n in rows['time_repeats'].unique())}",
        ],
        ("variant", "speed"),
        finding=finding(rows, max(options.lengths)),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser)
    add = parser.add_argument
    text = "tokens of a translation, with and without caches"
    add("--lengths", type=int, nargs="+", default=[16, 32, 64, 128], help=text)
    text = "tokens of beam search and of a side of the training step"
    add("--tokens", type=at_least(2), default=64, help=text)
    add("--source", type=at_least(2), default=32, help="tokens of a source sentence")
    add("--batch", type=at_least(1), default=16, help="sentences per batch")
    add("--train_batch", type=at_least(1), default=16, help="pairs of a training step")
    add("--embed_dim", type=at_least(4), default=256, help="width, 4 times the head size")
    add("--layers", type=at_least(1), default=3, help="blocks of encoder and of decoder")
    add("--vocab", type=at_least(6), default=8000, help="words of each side")
    variants = ["softmax 4", "sMGK 2", "Hard GFiSH 2/4", "linear 4"]
    add("--variants", nargs="+", default=variants, help="variants")


main = command(__name__, __doc__, run, _add_options)

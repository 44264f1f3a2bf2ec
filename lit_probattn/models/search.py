"""Decoding for encoder-decoders with caches: beam search; sampling or greedy decoding.

Batch rows are sentences, or the beams of a sentence in adjacent rows. Rows of finished sentences
are removed from the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_probattn.base.arguments import Count, NotNegative, Options, WholeNumber
from lit_probattn.models.decoding import Sampling, next_tokens, uniform_numbers
from lit_probattn.models.encoder_decoder import EOS, PAD, DecoderState, EncoderDecoder
from lit_probattn.randomness import RandomKey

_NEVER = float("-inf")


@dataclass(frozen=True)
class Beam(Options):
    """Settings of a beam search.

    Source: fairseq's sequence generator and its defaults.
    Departs from the source: the maximum length depends on the sentence itself, there
    on the longest sentence of its batch; results are therefore independent of batching.

    Args:
        size: number of partial translations kept per sentence.
        length_penalty: p of the score, Σ log p(token) / (tokens, EOS included)^p.
        max_length_a: a of the maximum length without EOS, a · n + b, for n source tokens with EOS;
            at most the model's max_seq_len − 1.
        max_length_b: b of the maximum length.
        min_length: minimum number of tokens without EOS.
        n_best: number of translations returned per sentence.

    Raises:
        ValueError: a value is out of range.
    """

    size: Count = 5
    length_penalty: NotNegative = 1.0
    max_length_a: NotNegative = 1.2
    max_length_b: WholeNumber = 10
    min_length: WholeNumber = 1
    n_best: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_best > self.size:
            raise ValueError(
                f"n_best must be at most the beam's size, received n_best={self.n_best} and "
                f"size={self.size}"
            )

    def limits(self, lengths: Tensor, max_seq_len: int) -> Tensor:
        """Return the maximum number of tokens without EOS for sources of `lengths`, (B,) int64."""
        longest = (self.max_length_a * lengths.double() + self.max_length_b).long()
        return longest.clamp(min=self.min_length, max=max_seq_len - 1)

    def score(self, token_scores: list[float]) -> float:
        """Return the score of a translation from the log-probabilities of its tokens."""
        return sum(token_scores) / len(token_scores) ** self.length_penalty


@dataclass(frozen=True)
class Hypothesis:
    """A translation.

    Args:
        tokens: ids without EOS.
        score: as `Beam.score` defines it.
        token_scores: log-probability of every token and of EOS.
    """

    tokens: list[int]
    score: float
    token_scores: list[float]


@dataclass
class _Rows:
    """Partial translations of the unfinished sentences, `width` adjacent rows for each.

    Args:
        sentences: index of each sentence in the batch, (b,).
        limits: maximum number of tokens of each, (b,).
        tokens: tokens so far, EOS first, (b · width, t + 1).
        scores: their log-probabilities, (b · width, t).
        names: sample ids of the rows for random draws, (b · width,).
    """

    sentences: Tensor
    limits: Tensor
    tokens: Tensor
    scores: Tensor
    names: Tensor
    state: DecoderState
    rng: RandomKey

    @property
    def length(self) -> int:
        """Number of tokens so far, without EOS."""
        return self.scores.shape[1]

    @property
    def width(self) -> int:
        """Number of rows per sentence."""
        return len(self.tokens) // len(self.sentences)

    def next_scores(self, model: EncoderDecoder, min_length: int) -> Tensor:
        """Decode the last tokens; return the next token's log-probabilities, (b · width, V)."""
        rng = replace(self.rng, sample_ids=self.names)
        hidden = model.decode(self.tokens[:, -1:], state=self.state, rng=rng)
        logits = model.logits(hidden[:, -1])
        wide = torch.promote_types(logits.dtype, torch.float32)
        found = logits.to(wide).log_softmax(-1)
        if bool(found[:, 0].isnan().any()):  # after log_softmax, one NaN makes its whole row NaN
            raise ValueError("logits are NaN: the model's output is invalid")
        found[:, PAD] = _NEVER
        if self.length < min_length:
            found[:, EOS] = _NEVER
        full = self.limits == self.length
        if bool(full.any()):
            end = found[:, EOS].clone()
            found.masked_fill_(full.repeat_interleave(self.width)[:, None], _NEVER)
            found[:, EOS] = end
        return found

    def extend(self, rows: Tensor, tokens: Tensor, scores: Tensor, kept: Tensor) -> None:
        """Append a token to each of `rows`, keeping only the sentences `kept`, (b,) bool."""
        # If all sentences remain with the same width, rows only move within their sentences.
        same = len(rows) == len(self.tokens) and bool(kept.all())
        if not same or not torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            self.state.reorder(rows, same_sources=same)
        self.tokens = torch.cat([self.tokens[rows], tokens[:, None]], 1)
        self.scores = torch.cat([self.scores[rows], scores[:, None]], 1)
        self.names = self.names[rows]
        self.sentences, self.limits = self.sentences[kept], self.limits[kept]

    def hypothesis(self, row: int, last: float, beam: Beam) -> Hypothesis:
        """Return the translation of a row, ended by EOS with log-probability `last`."""
        scores = [*self.scores[row].tolist(), last]
        return Hypothesis(self.tokens[row, 1:].tolist(), beam.score(scores), scores)


@torch.inference_mode()
def beam_search(
    model: EncoderDecoder,
    source: Tensor,
    source_mask: Tensor | None = None,
    beam: Beam | None = None,
    *,
    rng: RandomKey | None = None,
) -> list[list[Hypothesis]]:
    """Return the best translations of every sentence, best first.

    At each step, the best 2 · size continuations of a sentence's partial translations are
    considered: those among the first `size` that end are finished, and the best others continue. A
    sentence is done when `size` translations are finished, or at its maximum length.

    Args:
        model: model in evaluation mode.
        source: token ids, each row ended by EOS, padded on the right, (B, S).
        source_mask: real tokens, (B, S) bool. None means all.
        beam: settings. None means the defaults.
        rng: key of a variant's random draws at evaluation. None: seed 0, sample ids 0 … B − 1.

    Raises:
        ValueError: the model is in training mode, the source is invalid, or logits are NaN.
    """
    beam = Beam() if beam is None else beam
    rows = _start(model, source, source_mask, beam, rng)
    finished: list[list[Hypothesis]] = [[] for _ in source]
    while len(rows.sentences):
        found = rows.next_scores(model, beam.min_length)
        _step(rows, found, beam, finished)
    for translations in finished:
        translations.sort(key=lambda one: -one.score)
    return [translations[: beam.n_best] for translations in finished]


def _step(rows: _Rows, found: Tensor, beam: Beam, finished: list[list[Hypothesis]]) -> None:
    """Finish the translations that end, and continue the best of the others."""
    count, width, words = len(rows.sentences), rows.width, found.shape[1]
    totals = (rows.scores.sum(1, keepdim=True) + found).view(count, width * words)
    best, index = totals.topk(min(2 * beam.size, width * words))
    tokens = index % words
    origin = index // words + torch.arange(count, device=index.device)[:, None] * width
    ends, possible = tokens == EOS, best > _NEVER
    kept = (rows.limits > rows.length) & (possible & ~ends).any(1)
    for place, rank in (ends & possible)[:, : beam.size].nonzero().tolist():
        done = finished[int(rows.sentences[place])]
        if len(done) < beam.size:
            row = int(origin[place, rank])
            done.append(rows.hypothesis(row, float(found[row, EOS]), beam))
        if len(done) == beam.size:
            kept[place] = False
    # Candidates that can continue, in order, before fillers.
    fills = ends | ~possible
    order = fills.long().sort(dim=1, stable=True).indices[:, : beam.size]
    origin, tokens, fills = (x.gather(1, order)[kept].flatten() for x in (origin, tokens, fills))
    rows.extend(origin, tokens, found[origin, tokens].masked_fill(fills, _NEVER), kept)


def _start(
    model: EncoderDecoder,
    source: Tensor,
    source_mask: Tensor | None,
    beam: Beam,
    rng: RandomKey | None,
) -> _Rows:
    """Encode the source; return one row per sentence, before its first token."""
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() before translating")
    if source.dim() != 2 or 0 in source.shape:
        raise ValueError(
            f"source has shape {tuple(source.shape)}, expected (batch, tokens) with at least one "
            "token"
        )
    batch, device = len(source), source.device
    real = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
    limits = beam.limits(real.sum(1), model.max_seq_len)
    rng = RandomKey(0) if rng is None else rng
    memory = model.encode(source, source_mask, rng)
    return _Rows(
        sentences=torch.arange(batch, device=device),
        limits=limits,
        tokens=torch.full((batch, 1), EOS, device=device),
        scores=memory.new_zeros(batch, 0),
        names=rng.samples(batch, device),
        state=model.new_state(memory, source_mask, int(limits.max()) + 1),
        rng=rng,
    )


@torch.inference_mode()
def sample(
    model: EncoderDecoder,
    source: Tensor,
    source_mask: Tensor | None = None,
    sampling: Sampling | None = None,
    beam: Beam | None = None,
    *,
    rng: RandomKey | None = None,
) -> list[Hypothesis]:
    """Sample one translation per sentence; scores are log-probabilities without temperature.

    Args:
        sampling: how tokens are drawn; a row's draws depend on seed, step and sample id alone. None
            means greedy.
        beam: length limits and length penalty; its size is ignored. None means the defaults.

    The other arguments and errors are those of `beam_search`.
    """
    sampling = Sampling() if sampling is None else sampling
    beam = Beam() if beam is None else beam
    rows = _start(model, source, source_mask, beam, rng)
    finished: dict[int, Hypothesis] = {}
    while len(rows.sentences):
        found = rows.next_scores(model, beam.min_length)
        tokens = next_tokens(found, sampling, uniform_numbers(sampling, rows.length, rows.names))
        scores = found.gather(1, tokens[:, None])[:, 0]
        kept = tokens != EOS
        for row in (~kept).nonzero()[:, 0].tolist():
            sentence = int(rows.sentences[row])
            finished[sentence] = rows.hypothesis(row, float(scores[row]), beam)
        rows.extend(kept.nonzero()[:, 0], tokens[kept], scores[kept], kept)
    return [finished[sentence] for sentence in range(len(source))]

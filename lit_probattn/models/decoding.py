"""Token-by-token generation with a causal model and its caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from lit_probattn.attention.cache import Cache
from lit_probattn.attention.variant import first_lack
from lit_probattn.base.arguments import Count, NotNegative, OnlyWith, Options, Range
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.randomness import STREAM_SAMPLING, RandomKey, philox4x32

_LACKS_OF_PADDING = dict.fromkeys(
    ("absolute positions", "map noise", "head noise"),
    "{} depends on cache positions, which count padding: use prompts of equal length",
)


@dataclass(frozen=True)
class Sampling(Options):
    """How the next token is drawn.

    Args:
        temperature: divides the logits; 0 selects the largest logit (greedy).
        top_k: draw among the k largest logits only.
        top_p: draw among the fewest tokens whose probabilities sum to at least p.
        seed: seed of the draws. A row's tokens depend on seed, step and `sample_ids` alone.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: NotNegative = 0.0
    top_k: Annotated[Count | None, OnlyWith(temperature=Range(above=0))] = None
    top_p: Annotated[
        Annotated[float, Range(above=0, most=1)] | None, OnlyWith(temperature=Range(above=0))
    ] = None
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """Generated tokens, with time and memory used."""

    tokens: Tensor  # (B, T); `pad_id` after a row's stop token
    lengths: Tensor  # number of new tokens per row, stop token included, (B,)
    prefill_seconds: float  # time of the prompt
    decode_seconds: float  # time of the following steps
    tokens_per_second: float | None  # of all rows during decoding; None without decoding steps
    cache_bytes: int  # size of all caches at the end


@torch.no_grad()
def next_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor | None = None) -> Tensor:
    """Choose a token per row; (B,) int64.

    Args:
        logits: (B, V).
        uniform: uniform numbers in [0, 1), (B,); unused when greedy.

    Raises:
        ValueError: a logit is NaN, or `uniform` is missing.
    """
    if bool(logits.isnan().any()):
        raise ValueError("logits are NaN: the model's output is invalid")
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    if uniform is None:
        raise ValueError("uniform is None: sampling with a temperature requires random numbers")
    scaled = logits.to(torch.float64) / sampling.temperature
    # A stable sort keeps the order of equal logits, so draws do not depend on the machine.
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered, ids = ordered[:, : sampling.top_k], ids[:, : sampling.top_k]
    probabilities = ordered.softmax(-1)
    if sampling.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = probabilities.cumsum(-1)
    target = uniform.to(cumulative)[:, None] * cumulative[:, -1:]
    index = (cumulative <= target).sum(-1, keepdim=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    return ids.gather(-1, torch.minimum(index, last))[:, 0]


def generate(
    model: LanguageModel,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    prompt_mask: Tensor | None = None,
    sampling: Sampling | None = None,
    stop_id: int | None = None,
    pad_id: int = 0,
    sample_ids: Tensor | None = None,
    caches: Sequence[Cache] | None = None,
) -> Generation:
    """Continue prompts by at most `max_new_tokens` tokens each.

    Prompts of unequal length are padded on the left, and padding counts neither as a key nor as a
    position. (Custom scores that take positions count it as a position.)

    Args:
        model: model in evaluation mode.
        prompt: token ids, (B, P).
        prompt_mask: real tokens of the prompt, (B, P) bool. None means all.
        sampling: how tokens are drawn. None means greedy.
        stop_id: token that ends a row. None always generates `max_new_tokens`.
        pad_id: id of tokens after a row's end.
        sample_ids: sample ids of the rows for the draws, also those of noise at evaluation, (B,).
            None means 0 … B-1.
        caches: empty caches, one per layer. None creates them.

    Raises:
        ValueError: the prompt is empty, not padded on the left, or too long for the model together
            with the new tokens; there is padding, and scores depend on it (not pairwise) or on
            cache positions (priors per key position, noise at evaluation, rotary_shift=after); the
            caches are not empty; or the model is in training mode.
    """
    sampling = Sampling() if sampling is None else sampling
    mask = _check_prompt(model, prompt, prompt_mask, max_new_tokens)
    batch, device = prompt.shape[0], prompt.device
    rng = RandomKey(sampling.seed, 0, sample_ids)
    rows = rng.samples(batch, device)
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    capacity = prompt.shape[1] + max_new_tokens
    caches = model.new_caches(capacity) if caches is None else caches
    if any(cache.length for cache in caches):
        raise ValueError(
            f"expected empty caches, received caches of {caches[0].length} tokens, whose positions "
            "are unknown: pass these tokens as part of the prompt"
        )
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    inputs, key_mask = prompt, None if prompt_mask is None else mask
    tokens: list[Tensor] = []
    started = time.perf_counter()
    prefilled = started
    with torch.inference_mode():
        for step in range(max_new_tokens):
            logits = model.next_logits(
                inputs, key_mask=key_mask, positions=positions, caches=caches, rng=rng
            )
            new = next_tokens(logits, sampling, uniform_numbers(sampling, step, rows))
            new = torch.where(finished, pad_id, new)
            tokens.append(new)
            if step == 0:
                _wait(device)
                prefilled = time.perf_counter()
            key_mask = ~finished[:, None] if stop_id is not None else None
            if stop_id is not None:
                finished = finished | (new == stop_id)
                if bool(finished.all()):
                    break
            inputs, positions = new[:, None], positions[:, -1:] + 1
    _wait(device)
    seconds = time.perf_counter() - prefilled
    out = torch.stack(tokens, 1)
    return Generation(
        tokens=out,
        lengths=_lengths(out, stop_id),
        prefill_seconds=prefilled - started,
        decode_seconds=seconds,
        tokens_per_second=batch * (len(tokens) - 1) / seconds if len(tokens) > 1 else None,
        cache_bytes=sum(cache.num_bytes for cache in caches),
    )


def _check_prompt(
    model: LanguageModel, prompt: Tensor, prompt_mask: Tensor | None, max_new_tokens: int
) -> Tensor:
    """Validate the prompt and return its mask."""
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() before generating")
    if prompt.dim() != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"prompt has shape {tuple(prompt.shape)}, expected (batch, tokens) with at least one "
            "token"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, received {max_new_tokens}")
    # The last new token is never fed back, so it needs no position.
    needed = prompt.shape[1] + max_new_tokens - 1
    if needed > model.max_seq_len:
        raise ValueError(
            f"{prompt.shape[1]} prompt tokens and {max_new_tokens} new ones need {needed} "
            f"positions, but max_seq_len is {model.max_seq_len}: set max_new_tokens to at most "
            f"{max(0, model.max_seq_len - prompt.shape[1] + 1)} "
            "(--model.init_args.max_new_tokens of `predict`)"
        )
    if prompt_mask is None:
        return torch.ones_like(prompt, dtype=torch.bool)
    if prompt_mask.shape != prompt.shape or prompt_mask.dtype != torch.bool:
        raise ValueError(
            f"prompt_mask has shape {tuple(prompt_mask.shape)} and dtype {prompt_mask.dtype}, "
            f"expected {tuple(prompt.shape)} and torch.bool"
        )
    if not bool(prompt_mask[:, -1].all()) or bool(
        (prompt_mask[:, :-1] & ~prompt_mask[:, 1:]).any()
    ):
        raise ValueError(
            "prompts of unequal length must be padded on the left: each row of prompt_mask must be "
            "False … False True … True, with at least one True"
        )
    if not bool(prompt_mask.all()):
        _refuse_padding(model)
    return prompt_mask


def _refuse_padding(model: LanguageModel) -> None:
    """Raise if scores depend on padding, or on cache positions, which count it."""
    for block in model.encoder.layers:
        core = block.attention.core
        reason = first_lack(block.attention.needs(), _LACKS_OF_PADDING)
        if not core.takes_padding:
            reason = f"{core.name} depends on padding: use prompts of equal length"
        if reason is not None:
            raise ValueError(reason)


def uniform_numbers(sampling: Sampling, step: int, rows: Tensor) -> Tensor | None:
    """Return a number in [0, 1) per row, from counter (step, 0, 0, row); None when greedy."""
    if sampling.temperature == 0.0:
        return None
    zero = torch.zeros_like(rows)
    key = RandomKey(sampling.seed).philox_key(STREAM_SAMPLING)
    high, low, _, _ = philox4x32((zero + step, zero, zero, rows), key)
    return high.to(torch.float64) * 2.0**-32 + (low >> 11).to(torch.float64) * 2.0**-53


def _lengths(tokens: Tensor, stop_id: int | None) -> Tensor:
    """Return the number of tokens of each row up to its stop token, (B,)."""
    full = torch.full((tokens.shape[0],), tokens.shape[1], device=tokens.device)
    if stop_id is None:
        return full
    stops = tokens == stop_id
    return torch.where(stops.any(1), stops.long().argmax(1) + 1, full)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

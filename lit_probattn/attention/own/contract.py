"""The contract of every attention layer, as checks that construct the layer.

`tests/attention/test_contract.py` applies it to every variant of the package, and `lit-probattn
check my.Class` to a user's variant. A failed check raises an `AssertionError` with the details;
`CHECKS` has a remedy for each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lit_probattn.attention.backends import GPU_BACKENDS, Backend, engines_of, reason_against
from lit_probattn.attention.cache import KVCache
from lit_probattn.attention.call import HeadCall, with_dropout
from lit_probattn.attention.engines.blocks import BLOCK_SCORES
from lit_probattn.attention.engines.native import native_refusal
from lit_probattn.attention.engines.table import LACKS_OF_CROSS_ATTENTION
from lit_probattn.attention.layer import Attention
from lit_probattn.attention.own.derived import DerivedCore
from lit_probattn.randomness import RandomKey

__all__ = ["CHECKS", "EMBED", "HEAD", "Check", "Make", "backends_for"]

# Distinct primes, so that no size is mistaken for another: batch, tokens, width, head size.
B, N, EMBED, HEAD = 2, 13, 11, 5
TOLERANCE = 1e-11
# Calls with masks: description, training mode, number of tokens, and number of tokens that are
# given or not padded. A long sequence shows effects that depend on the number of keys.
WAYS = (("", True, N, 7), (" in eval mode", False, N, 7), (" with 263 keys", True, 263, 131))

# Creates a layer of width EMBED with additional arguments.
Make = Callable[..., Attention]


class Check(NamedTuple):
    """One check of the contract.

    Args:
        run: raises an AssertionError unless the created layers pass.
        remedy: the likely cause of a failure.
    """

    run: Callable[[Make], None]
    remedy: str


def key() -> RandomKey:
    """Return the random key of the two samples."""
    return RandomKey(5, step=3, sample_ids=torch.tensor([19, 4]))


def double(*shape: int) -> Tensor:
    """Return normal float64 numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def expect(condition: bool | Tensor, message: str) -> None:
    """Raise an AssertionError with a message unless a condition holds."""
    if not condition:
        raise AssertionError(message)


def close(found: Tensor, expected: Tensor, what: str, atol: float = TOLERANCE) -> None:
    """Raise an AssertionError unless two tensors are equal up to `atol`; NaN is never equal."""
    expect(found.shape == expected.shape, f"{what}: {tuple(found.shape)}, not {expected.shape}")
    error = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    expect(error <= atol, f"{what}: off by {error:.1e}, allowed {atol:.0e}")


def cpu_backends(layer: Attention) -> list[Backend]:
    """Return the backends that run on this CPU in float64."""
    absent = {*GPU_BACKENDS, *(() if native_refusal("cpu") is None else ("native",))}
    return [cast(Backend, name) for name in layer.core.backends if name not in absent]


def backends_for(layer: Attention, x: Tensor, **call: Any) -> list[Backend]:
    """Return the CPU backends that support a call of self-attention."""
    return backends_for_call(layer, layer.call(x, **call))


def backends_for_call(layer: Attention, call: HeadCall) -> list[Backend]:
    """Return the CPU backends that support a call."""
    variant = layer.core.variant(call)

    def refusal(name: str) -> str | None:
        return reason_against(engines_of(variant)[name], call, variant)

    return [name for name in cpu_backends(layer) if refusal(name) is None]


def require_backends(layer: Attention, x: Tensor, **call: Any) -> list[Backend]:
    """Return the CPU backends that support a call; raise an AssertionError if there are none."""
    found = backends_for(layer, x, **call)
    expect(bool(found), f"no CPU backend supports {', '.join(call) or 'a plain call'}")
    return found


def rejects(call: Callable[[], object], kind: type[Exception], words: str, accepted: str) -> None:
    """Check that a call raises an error of a kind with these words, or fail with `accepted`."""
    try:
        call()
    except kind as error:
        expect(words in str(error), f"rejected with {error}")
    else:
        raise AssertionError(accepted)


def refuses_pairs(layer: Attention, x: Tensor, pairs: Tensor) -> None:
    """Check that a layer rejects attn_mask if none of its backends supports it."""
    layer.backend = "auto"
    accepted = "attn_mask is accepted, although no backend applies it"
    call = partial(layer, x, attn_mask=pairs)
    rejects(call, NotImplementedError, "cannot apply attn_mask", accepted)


# ---- masks -------------------------------------------------------------------------------------


def future_tokens_change_nothing(make: Make) -> None:
    """With a causal mask, a token attends only to earlier tokens and itself."""
    layer = make().double()
    for where, training, length, given in WAYS:
        layer, x = layer.train(training), double(B, length, EMBED)
        y = torch.cat([x[:, :given], double(B, length - given, EMBED)], 1)
        for backend in require_backends(layer, x, is_causal=True):
            layer.backend = backend
            a, b = (layer(z, is_causal=True, rng=key()) for z in (x, y))
            told = f"{backend}{where}: outputs before other future tokens"
            close(a[:, :given], b[:, :given], told)
            moved = (a[:, given:] - b[:, given:]).abs().amax(-1).min() > 0
            expect(moved, f"{backend}{where}: changed tokens do not change their outputs")


def padding_and_other_samples_change_nothing(make: Make) -> None:
    """A padded sample in a batch has the same output as alone."""
    layer = make().double()
    alone = RandomKey(5, step=3, sample_ids=torch.tensor([4]))
    for where, training, length, given in WAYS:
        layer = layer.train(training)
        x, mask = double(B, length, EMBED), torch.ones(B, length, dtype=torch.bool)
        mask[1, given:] = False
        for backend in require_backends(layer, x, key_mask=mask):
            layer.backend = backend
            short = layer(x[1:, :given], rng=alone)
            whole = layer(x, key_mask=mask, rng=key())[1:, :given]
            close(whole, short, f"{backend}{where}: a padded sample, compared with it alone")


def hidden_pairs_change_nothing(make: Make) -> None:
    """A key that attn_mask masks has no effect, or no backend supports such a mask."""
    layer, x = make().double().eval(), double(B, N, EMBED)
    pairs = torch.rand(N, N) < 0.6
    pairs[3] = False
    pairs[5, 5] = True
    y = x.clone()
    y[:, 5] = double(B, EMBED)
    supported = backends_for(layer, x, attn_mask=pairs)
    for backend in supported:
        layer.backend = backend
        a, b = (layer(x, z, attn_mask=pairs) for z in (x, y))
        unseen = ~pairs[:, 5]
        close(a[:, unseen], b[:, unseen], f"{backend}: outputs of queries that mask the key")
        moved = (a[:, ~unseen] - b[:, ~unseen]).abs().max() > 0
        expect(moved, f"{backend}: a key that is not masked has no effect")
    if not supported:
        refuses_pairs(layer, x, pairs)


def masks_of_three_dimensions_are_heads(make: Make) -> None:
    """attn_mask (H, N, L) is a separate mask per head, which is rejected if heads are mixed."""
    layer, x = make().double().eval(), double(B, N, EMBED)
    pairs = torch.rand(layer.layout.out, N, N) < 0.6
    if isinstance(layer.core, DerivedCore) and layer.core.variant(layer.call(x)).mixes_heads:
        accepted = "a mask per head is accepted, although heads are mixed after masking"
        call = partial(layer, x, attn_mask=pairs)
        rejects(call, ValueError, "mixes heads after masking", accepted)
        return
    supported = backends_for(layer, x, attn_mask=pairs)
    if not supported:
        refuses_pairs(layer, x, pairs)
    for backend in supported:
        layer.backend = backend
        found = layer.core(layer.call(x, attn_mask=pairs))
        for head, own in enumerate(pairs):
            alone = layer.core(layer.call(x, attn_mask=own))  # the same for all heads
            close(found[:, head], alone[:, head], f"{backend}: head {head} with a separate mask")


def a_bias_is_added_to_the_scores(make: Make) -> None:
    """A bias of −∞ masks a key; a layer without scores rejects a bias."""
    layer, x = make().double().eval(), double(B, N, EMBED)
    hidden = torch.zeros(N, N, dtype=torch.float64)
    hidden[:, 4] = -torch.inf
    pairs = torch.ones(N, N, dtype=torch.bool)
    pairs[:, 4] = False
    if not layer.core.makes.has_scores:
        accepted = "a bias is accepted, although there are no scores to add it to"
        rejects(partial(layer, x, bias=hidden), ValueError, "add a bias to", accepted)
        return
    for backend in require_backends(layer, x, bias=hidden):
        layer.backend = backend
        close(layer(x, bias=hidden), layer(x, attn_mask=pairs), f"{backend}: a bias of −∞")


def empty_rows_give_zeros(make: Make) -> None:
    """A fully masked sample has zero output and zero gradients, not NaN."""
    layer = make(bias=False).double()
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1] = False
    for backend in require_backends(layer, double(B, N, EMBED), key_mask=mask):
        layer.backend = backend
        layer.zero_grad()
        x = double(B, N, EMBED).requires_grad_()
        out = layer(x, key_mask=mask, rng=key())
        expect(not out[1].any(), f"{backend}: fully masked rows are not zero")
        out.square().sum().backward()
        gradient = torch.zeros(()) if x.grad is None else x.grad
        expect(gradient.isfinite().all(), f"{backend}: fully masked rows have gradients of NaN")
        expect(not gradient[1].any(), f"{backend}: fully masked rows have nonzero gradients")
        expect(gradient[0].any(), f"{backend}: other rows have zero gradients")
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        expect(finite, f"{backend}: fully masked rows give parameters gradients of NaN")


# ---- one result for all backends -----------------------------------------------------------------


def gradients_are_those_of_finite_differences(make: Make) -> None:
    """Gradients of inputs and parameters equal finite differences, in float64."""
    layer, x = make().double().eval(), double(1, 5, EMBED)
    named = dict(layer.named_parameters())
    step = 1e-6
    for backend in require_backends(layer, x, is_causal=True):
        layer.backend = backend
        cotangent = double(1, 5, EMBED)
        leaf = x.clone().requires_grad_()
        wanted = {"the input": leaf, **{n: p for n, p in named.items() if p.requires_grad}}

        def value(leaf: Tensor = leaf, cotangent: Tensor = cotangent) -> Tensor:
            return (layer(leaf, is_causal=True, rng=key()) * cotangent).sum()

        found = torch.autograd.grad(value(), list(wanted.values()), allow_unused=True)
        for (name, tensor), gradient in zip(wanted.items(), found, strict=True):
            direction = torch.randn_like(tensor)
            with torch.no_grad():
                tensor.add_(step * direction)
                high = value()
                tensor.sub_(2 * step * direction)
                low = value()
                tensor.add_(step * direction)
            expected = ((high - low) / (2 * step)).detach()
            slope = torch.zeros_like(expected) if gradient is None else (gradient * direction).sum()
            size = max(1.0, float(expected.abs()))
            close(slope / size, expected / size, f"{backend}: gradient of {name}", 1e-5)


@contextmanager
def small_blocks(scores: int = 400) -> Iterator[None]:
    """Reduce the scores per block, so that a short sequence has several blocks."""
    before = dict(BLOCK_SCORES)
    BLOCK_SCORES.update(cpu=scores)
    try:
        yield
    finally:
        BLOCK_SCORES.update(before)


@small_blocks()
def backends_agree(make: Make) -> None:
    """All backends give the output and the gradients of the reference."""
    layer, x = make().double(), double(B, N, EMBED)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, 9:] = False
    names = require_backends(layer, x, key_mask=mask, is_causal=True)
    results = {}
    for backend in names:
        layer.backend = backend
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = layer(leaf, key_mask=mask, is_causal=True, rng=key())
        out.square().sum().backward()
        expect(leaf.grad is not None, f"{backend}: the input has no gradient")
        assert leaf.grad is not None
        results[backend] = out.detach(), leaf.grad
    first = "reference" if "reference" in results else names[0]
    for backend, (out, gradient) in results.items():
        close(out, results[first][0], f"{backend} and {first}: output", 1e-9)
        close(gradient, results[first][1], f"{backend} and {first}: gradient of the input", 1e-8)


def blocks_of_queries_agree(make: Make) -> None:
    """Single queries give the same as all together, with keys of another width and number.

    The same holds for queries that read an encoder memory. If scores depend on positions, a query
    includes all earlier queries.
    """
    layer = make(key_embed_dim=17, value_head_dim=3).double().eval()
    memory, x = double(B, 19, 17), double(B, 7, EMBED)
    mask = torch.ones(B, 19, dtype=torch.bool)
    mask[0, 11:] = False
    for backend in require_backends(layer, x, key=memory, key_mask=mask):
        layer.backend = backend
        out = layer(x, memory, key_mask=mask)
        expect(out.shape == (B, 7, EMBED), f"{backend}: shape {tuple(out.shape)}")
        for i in (0, 3, 6):
            start = 0 if layer.core.knows_positions else i
            alone = layer(x[:1, start : i + 1], memory[:1, :11])[:, -1:]
            close(out[:1, i : i + 1], alone, f"{backend}: query {i} alone")
        differ = (out[:, 1:] - out[:, :-1]).abs().amax(-1).min() > 0
        expect(differ, f"{backend}: two queries have the same output")
    layer.backend = "auto"
    if not layer.needs().keys() & LACKS_OF_CROSS_ATTENTION:
        kept = layer.remember(memory, key_mask=mask)
        cuts = [x] if layer.core.knows_positions else [x[:, :3], x[:, 3:]]
        parts = torch.cat([layer(part, memory=kept) for part in cuts], 1)
        close(parts, layer(x, memory, key_mask=mask), "queries that read an encoder memory")


def decoding_equals_the_full_pass(make: Make) -> None:
    """Decoding one or three tokens at a time through the cache equals the full pass.

    The same holds if the cache is longer than a step reads at once, so that parts are merged.
    """
    layer, x = make().double().eval(), double(B, N, EMBED)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, :2] = False  # left padding, as in generation from prompts of different lengths
    full = layer(x, key_mask=mask, is_causal=True)
    for step, part_len in ((1, None), (3, None), (1, 3)):
        cache, parts = layer.new_cache(), []
        if part_len is not None and isinstance(cache, KVCache):
            cache.part_len = part_len
        with torch.no_grad():
            for start in range(0, N, step):
                new = slice(start, start + step)
                parts.append(layer(x[:, new], key_mask=mask[:, new], is_causal=True, cache=cache))
        read = "" if part_len is None else f", read in parts of {part_len} keys"
        close(torch.cat(parts, 1), full, f"{step} tokens at a time{read}")
        expect(cache.length == N, f"the cache has {cache.length} tokens, not {N}")
        expect(0 < cache.num_bytes <= cache.allocated_bytes, "the cache's byte counts are wrong")


# ---- precision, randomness, weights -----------------------------------------------------------


def precisions_agree(make: Make) -> None:
    """float32, bfloat16 and float16 agree with float64 up to their precision."""
    layer, x = make().eval(), torch.randn(B, N, EMBED)
    expected = copy.deepcopy(layer).double()(x.double(), is_causal=True, rng=key())
    limits = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
    for dtype, limit in limits.items():
        low = copy.deepcopy(layer).to(dtype)
        out = low(x.to(dtype), is_causal=True, rng=key())
        name = str(dtype).removeprefix("torch.")
        expect(out.dtype == dtype, f"{name}: the output is {out.dtype}")
        close(out, expected, name, limit * max(1.0, float(expected.detach().abs().max())))


def dropout_is_drawn_by_its_key(make: Make) -> None:
    """Attention dropout is equal for equal keys, different for others, and off in eval mode."""
    layer, x = make(dropout=0.5).double(), double(B, N, EMBED)
    with_dropout: list[Backend] = [name for name in cpu_backends(layer) if name != "sdpa"]
    seen: dict[str, Tensor] = {}
    for backend in with_dropout:
        layer.backend = backend
        try:
            first, again = (layer.train()(x, rng=key()) for _ in range(2))
        except NotImplementedError:
            continue
        expect(torch.equal(first, again), f"{backend}: one key gives two different outputs")
        other = layer(x, rng=RandomKey(6, step=3, sample_ids=torch.tensor([19, 4])))
        expect(not torch.equal(first, other), f"{backend}: two keys give the same output")
        seen[backend] = first
    expect(bool(seen), "no backend supports dropout")
    reference = next(iter(seen.values()))
    for name, out in seen.items():
        close(out, reference, f"{name}: dropped weights", 1e-9)


def recomputation_draws_the_same(make: Make) -> None:
    """Activation checkpointing gives the same gradients."""
    layer, x = make().double(), double(B, N, EMBED).requires_grad_()

    def call(z: Tensor) -> Tensor:
        out: Tensor = layer(z, is_causal=True, rng=key())
        return out

    expected = torch.autograd.grad(call(x).square().sum(), x)[0]
    again = checkpoint(call, x, use_reentrant=False)
    close(torch.autograd.grad(again.square().sum(), x)[0], expected, "gradients")


def documents_attend_to_themselves_alone(make: Make) -> None:
    """Packed documents have the same outputs and gradients as alone, with dropout and noise."""
    layer, lengths = make(dropout=0.3).double(), (3, 9, 1, 0, 7, 4, 2)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.tensor([7, 19, 4, 2, 31, 5, 11])
    x, cotangent = double(B, N, EMBED), double(B, N, EMBED)
    for causal in (False, True):
        call = with_dropout(layer.call(x, is_causal=causal, rng=key()), layer.dropout)
        supported = backends_for_call(layer, call)
        expect(bool(supported), "no CPU backend supports a packed call")
        for backend in supported:
            layer.backend = backend
            packed, alone = (x.clone().requires_grad_() for _ in range(2))
            rng = RandomKey(5, step=3, sample_ids=ids)
            found = layer(packed, cu_seqlens=bounds, is_causal=causal, rng=rng)
            parts = []
            for tokens, own in zip(alone.flatten(0, 1).split(lengths), ids, strict=True):
                rng = RandomKey(5, step=3, sample_ids=own[None])
                parts.append(
                    layer(tokens[None], is_causal=causal, rng=rng)[0] if len(tokens) else tokens
                )
            expected = torch.cat(parts).view_as(x)
            told = f"{backend}{', causal' * causal}: "
            close(found, expected, told + "packed documents, compared with each alone")
            first, second = (
                torch.autograd.grad((y * cotangent).sum(), z)[0]
                for y, z in ((found, packed), (expected, alone))
            )
            close(first, second, told + "their gradients", 1e-10)


def state_dict_restores_the_layer(make: Make) -> None:
    """A layer with loaded weights gives the same output, bit for bit."""
    layer, x = make().double(), double(B, N, EMBED)
    torch.manual_seed(7)
    other = make().double()
    expect(not torch.equal(other(x, rng=key()), layer(x, rng=key())), "two new layers are equal")
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    same = torch.equal(other(x, rng=key()), layer(x, rng=key()))
    expect(same, "outputs differ after loading weights")


def layers_are_built_and_counted_without_memory(make: Make) -> None:
    """The layer runs on the device `meta`, and `cost` has its number of parameters."""
    with torch.device("meta"):
        layer = make()
        outs = [layer(torch.empty(B, N, EMBED), rng=rng) for rng in (RandomKey(0), None)]
    for out in outs:
        expect(out.shape == (B, N, EMBED), f"shape {tuple(out.shape)}")
    count = sum(p.numel() for p in layer.parameters())
    stated = layer.cost(N).num_parameters
    expect(stated == count, f"cost has {stated} parameters, the layer {count}")


def cost_is_what_is_counted(make: Make) -> None:
    """`cost` equals the counted multiply-adds of `stated_backend`.

    Linear attention is not checked: it draws random features by products that no paper counts.
    """
    layer = make().eval()
    backend = layer.core.makes.stated_backend
    if backend not in cpu_backends(layer) or not layer.core.makes.has_scores:
        return
    layer.backend = backend
    for length in (7, N):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer(torch.randn(1, length, EMBED))
        found, stated = int(counter.get_total_flops()) // 2, layer.cost(length).macs
        told = f"{length} tokens: cost has {stated} multiply-adds, {found} were counted"
        expect(found == stated, told)


def head_size_is_given_by_name(make: Make) -> None:
    """The constructor takes (embed_dim, num_heads), and all other arguments by name."""
    cls = type(make())
    rejects(lambda: cls(8, 4, 2), TypeError, "", "a third positional argument is accepted")  # type: ignore[call-arg]
    expect(cls(8, 2).head_dim == 4, "head_dim is not embed_dim / num_heads by default")


CHECKS: dict[str, Check] = {
    "causality": Check(
        future_tokens_change_nothing, "a score may depend only on its query and key"
    ),
    "padding": Check(
        padding_and_other_samples_change_nothing,
        "sums over keys or over the batch must exclude padding and other samples",
    ),
    "masks of pairs": Check(
        hidden_pairs_change_nothing, "leave masks to the layer; do not normalise over the keys"
    ),
    "masks of heads": Check(
        masks_of_three_dimensions_are_heads, "a head must not read the scores of another head"
    ),
    "bias": Check(a_bias_is_added_to_the_scores, "return scores before the softmax"),
    "rows without keys": Check(
        empty_rows_give_zeros, "no division by a sum over keys and no logarithm of it in the scores"
    ),
    "gradients": Check(
        gradients_are_those_of_finite_differences,
        "no .data, .detach() or in-place change of parameters; no kinks at the inputs",
    ),
    "backends": Check(
        backends_agree, "scores of a pair must not depend on other pairs, or set pairwise = False"
    ),
    "cross-attention": Check(
        blocks_of_queries_agree,
        "pass **common on to Attention; read the numbers of queries and keys from the tensors",
    ),
    "cache": Check(
        decoding_equals_the_full_pass, "scores of a new query must need only keys, not queries"
    ),
    "precision": Check(
        precisions_agree, "cast parameters to query.dtype; sum exponentials in log space"
    ),
    "dropout": Check(
        dropout_is_drawn_by_its_key, "leave dropout to the layer; draw from rng, not torch's state"
    ),
    "recomputation": Check(recomputation_draws_the_same, "draw from rng; no state in forward"),
    "documents": Check(
        documents_attend_to_themselves_alone,
        "padding must have no effect, or set takes_padding = False in the core; draw from rng",
    ),
    "state_dict": Check(
        state_dict_restores_the_layer,
        "use nn.Parameter for learned tensors and register_buffer for others",
    ),
    "parameters": Check(
        layers_are_built_and_counted_without_memory,
        "create tensors with torch's functions, without .item(); cost must count all parameters",
    ),
    "cost": Check(cost_is_what_is_counted, "correct cost, or remove it: it is then counted"),
    "arguments": Check(
        head_size_is_given_by_name,
        "__init__(self, embed_dim, num_heads, *, …, **common) with defaults for your arguments",
    ),
}

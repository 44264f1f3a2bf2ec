"""Functions that kernels of linear attention share: features, states, gradients.

`call` is a `LinearArguments` and `form` a `LinearForm` of operators.py. Queries and keys share one
axis of positions, on which the last query and the last key coincide if the mask is causal.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.tiles import number, zero_tile, zero_vector


@triton.jit
def load_positions(
    base, start, stride, limit, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    first=0,
):  # fmt: skip
    """Load rows start … and columns first … of a matrix, and the mask of entries inside it.

    `start` may be negative.
    """
    rows, cols = start + tl.arange(0, BLOCK), first + tl.arange(0, PADDED)
    inside = ((rows >= 0) & (rows < limit))[:, None] & (cols < WIDTH)[None, :]
    at = base + rows[:, None].to(tl.int64) * stride + cols[None, :]
    return tl.load(at, mask=inside, other=0.0), inside


@triton.jit
def store_positions(
    base, tile, start, stride, limit, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, first=0,
):  # fmt: skip
    """Store the elements that `load_positions` would load."""
    rows, cols = start + tl.arange(0, BLOCK), first + tl.arange(0, PADDED)
    inside = ((rows >= 0) & (rows < limit))[:, None] & (cols < WIDTH)[None, :]
    at = base + rows[:, None].to(tl.int64) * stride + cols[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_numbers(base, start, limit, other, BLOCK: tl.constexpr):
    """Load one number per position; `other` outside."""
    rows = start + tl.arange(0, BLOCK)
    return tl.load(base + rows, mask=(rows >= 0) & (rows < limit), other=other)


@triton.jit
def store_numbers(base, values, start, limit, BLOCK: tl.constexpr):
    """Store one number per position."""
    rows = start + tl.arange(0, BLOCK)
    tl.store(base + rows, values, mask=(rows >= 0) & (rows < limit))


@triton.jit
def weight_of(WEIGHT, head, source, num_sources):
    """Return the weight of a source in a head; 1 without weights."""
    if WEIGHT is not None:
        return tl.load(WEIGHT + head * num_sources + source)
    else:
        return 1.0


@triton.jit
def segment_program(call, count):
    """Return the segment, sample and head (or source) of a program; `count` heads per sample."""
    place, head = tl.program_id(0) // count, tl.program_id(0) % count
    segments = number(call.num_segments)
    return place % segments, (place // segments).to(tl.int64), head


@triton.jit
def chunks_of(call, segment, form: tl.constexpr):
    """Return the number of chunks of a segment."""
    if form.segment == form.chunk:
        return 1
    else:
        first = segment * (form.segment // form.chunk)
        return tl.minimum(form.segment // form.chunk, number(call.num_chunks) - first)


@triton.jit
def _plain_features(x, inside, form: tl.constexpr):
    """Return φ(x) before normalisation; zero outside."""
    if form.features == 1:
        x = tl.exp(tl.minimum(x, 0.0)) + tl.maximum(x, 0.0)
    elif form.features == 2:
        x = tl.maximum(x, 0.0)
    return tl.where(inside, x, 0.0)


@triton.jit
def _totals_of(x):
    """Return the sums of rows as a column, replaced by 1 if they are 0."""
    total = tl.sum(x, 1)
    return tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def features_of(x, inside, form: tl.constexpr):
    """Return the features of vectors, float32."""
    x = _plain_features(x, inside, form)
    if form.normed:
        x = x / _totals_of(x)
    return x


@triton.jit
def feature_gradient(x, grad, inside, form: tl.constexpr):
    """Return the gradient of vectors from the gradient of their features."""
    plain = _plain_features(x, inside, form)
    if form.normed:
        total = _totals_of(plain)
        grad = (grad - tl.sum(grad * plain, 1)[:, None] / total) / total
    if form.features == 1:  # the slope is 1 if the result is above 1, else the result
        grad = grad * tl.minimum(plain, 1.0)
    elif form.features == 2:
        grad = tl.where(plain > 0.0, grad, 0.0)
    return tl.where(inside, grad, 0.0)


@triton.jit
def load_query(call, b, head, chunk, form: tl.constexpr):
    """Load a chunk of queries, float32, and the mask of entries inside."""
    x = call.query
    start = chunk * form.chunk - number(call.query_start)
    base = x.base + b * x.batch + tl.cast(head, tl.int64) * x.head
    tile, inside = load_positions(
        base, start, x.row, number(call.num_queries), form.key_dim, form.key_pad, form.chunk
    )
    return tile.to(tl.float32), inside


@triton.jit
def query_features(call, b, head, chunk, form: tl.constexpr):
    """Return the features of a chunk of queries in their dtype."""
    x, inside = load_query(call, b, head, chunk, form)
    return features_of(x, inside, form).to(call.query.base.dtype.element_ty)


@triton.jit
def load_key(call, b, source, start, r: tl.constexpr, form: tl.constexpr):
    """Load component r of a chunk of keys, shifted, float32; and the mask of entries inside."""
    x = call.key
    base = x.base + b * x.batch + tl.cast(source, tl.int64) * x.head + r * x.part
    tile, inside = load_positions(
        base, start, x.row, number(call.num_keys), form.key_dim, form.key_pad, form.chunk
    )
    tile = tile.to(tl.float32)
    if call.shift is not None:
        cols = tl.arange(0, form.key_pad)
        at = call.shift + (source * form.components + r) * form.key_dim + cols
        tile += tl.load(at, mask=cols < form.key_dim, other=0.0)[None, :]
    return tile, inside


@triton.jit
def key_share(call, source, start, r: tl.constexpr, form: tl.constexpr):
    """Return π of component r as a column, (chunk, 1)."""
    place = source * form.components + r
    if form.prior_rows:
        base = call.prior + tl.cast(place, tl.int64) * number(call.num_keys)
        share = load_numbers(base, start, number(call.num_keys), 0.0, form.chunk)
    else:
        share = zero_vector(form.chunk) + tl.load(call.prior + place)
    return share[:, None]


@triton.jit
def real_keys(call, b, start, form: tl.constexpr):
    """Return the mask of real keys as a column; requires a key mask."""
    base, limit = call.key_mask + b * number(call.num_keys), number(call.num_keys)
    return (load_numbers(base, start, limit, 0, form.chunk) != 0)[:, None]


@triton.jit
def mixed_key(call, b, source, start, form: tl.constexpr):
    """Return Σ_r π_r k_r of a chunk, or its only component; and the mask of entries inside."""
    COMPONENTS: tl.constexpr = form.components
    total, inside = load_key(call, b, source, start, 0, form)
    if call.prior is not None:
        total *= key_share(call, source, start, 0, form)
        for r in tl.static_range(1, COMPONENTS):
            x, inside = load_key(call, b, source, start, r, form)
            total += x * key_share(call, source, start, r, form)
    return total, inside


@triton.jit
def key_features(call, b, source, chunk, form: tl.constexpr):
    """Return the (mixed) features of a chunk of keys in the queries' dtype; 0 for masked keys."""
    COMPONENTS: tl.constexpr = form.components
    start = chunk * form.chunk - number(call.key_start)
    if call.prior is None or form.mix_before:
        x, inside = mixed_key(call, b, source, start, form)
        found = features_of(x, inside, form)
    else:
        found = zero_tile(form.chunk, form.key_pad)
        for r in tl.static_range(COMPONENTS):
            x, inside = load_key(call, b, source, start, r, form)
            found += features_of(x, inside, form) * key_share(call, source, start, r, form)
    if call.key_mask is not None:
        found = tl.where(real_keys(call, b, start, form), found, 0.0)
    return found.to(call.query.base.dtype.element_ty)


@triton.jit
def kept_values(call, b, source, start, form: tl.constexpr):
    """Return the dropout factors of values as a column."""
    place = b * number(call.num_sources) + source
    base, limit = call.keep + place * number(call.num_keys), number(call.num_keys)
    return load_numbers(base, start, limit, 0.0, form.chunk)[:, None]


@triton.jit
def load_values(call, b, source, chunk, first, COLUMNS: tl.constexpr, form: tl.constexpr):
    """Load columns of a chunk of values in the dtype of queries; 0 for dropped values."""
    x = call.value
    start = chunk * form.chunk - number(call.key_start)
    base = x.base + b * x.batch + tl.cast(source, tl.int64) * x.head
    tile, _inside = load_positions(
        base, start, x.row, number(call.num_keys), form.value_dim, COLUMNS, form.chunk, first
    )
    if call.keep is not None:
        tile = tile.to(tl.float32) * kept_values(call, b, source, start, form)
    return tile.to(call.query.base.dtype.element_ty)


@triton.jit
def state_place(STATES, place, segment, call, form: tl.constexpr):
    """Return the address of the state of a segment, in (places, segments, F (E + 1)).

    A call that is not causal has one state for all segments. The last F numbers are totals.
    """
    SIZE: tl.constexpr = form.key_dim * (form.value_dim + form.totals)
    if form.causal:
        return STATES + (place * number(call.num_segments) + segment) * SIZE
    else:
        return STATES + place * SIZE


@triton.jit
def load_state(
    STATES, place, segment, first, call, COLUMNS: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """Load columns of a segment's state (F, E)."""
    base = state_place(STATES, place, segment, call, form)
    state, _inside = load_positions(
        base, 0, form.value_dim, form.key_dim, form.value_dim, COLUMNS, form.key_pad, first
    )
    return state


@triton.jit
def load_total(STATES, place, segment, call, form: tl.constexpr):
    """Load a segment's totals (F); 0 if there are none."""
    total = zero_vector(form.key_pad)
    if form.totals:
        base = state_place(STATES, place, segment, call, form)
        at = base + form.key_dim * form.value_dim
        total = load_numbers(at, 0, form.key_dim, 0.0, form.key_pad)
    return total


@triton.jit
def sums_place(SUMS, place, segment, call, form: tl.constexpr):
    """Return the address of the sums over one segment, in (places, segments, F (E + 1))."""
    SIZE: tl.constexpr = form.key_dim * (form.value_dim + form.totals)
    return SUMS + (place * number(call.num_segments) + segment) * SIZE


@triton.jit
def store_state(base, state, first, COLUMNS: tl.constexpr, form: tl.constexpr):
    """Store columns of the sums over one segment at `base`."""
    store_positions(
        base, state, 0, form.value_dim, form.key_dim, form.value_dim, COLUMNS, form.key_pad, first
    )


@triton.jit
def store_total(base, total, form: tl.constexpr):
    """Store the totals over one segment after its state."""
    if form.totals:
        at = base + form.key_dim * form.value_dim
        store_numbers(at, total, 0, form.key_dim, form.key_pad)


@triton.jit
def mixed_state(STATES, call, b, head, segment, SOURCES: tl.constexpr, form: tl.constexpr):
    """Return Σ_s p[h, s] S_s and Σ_s r[h, s] z_s before a segment."""
    state, total = zero_tile(form.key_pad, form.value_pad), zero_vector(form.key_pad)
    for g in tl.range(0, SOURCES):
        source = g if call.weight is not None else head // form.readers
        place = b * number(call.num_sources) + source
        one = load_state(STATES, place, segment, 0, call, form.value_pad, form)
        ones = load_total(STATES, place, segment, call, form)
        state += one * weight_of(call.weight, head, source, number(call.num_sources))
        total += ones * weight_of(call.norm_weight, head, source, number(call.num_sources))
    return state, total


@triton.jit
def load_inverse(call, DEN, place, chunk, form: tl.constexpr):
    """Return 1 / (den + eps) of a chunk's queries; 0 if den is 0."""
    start = chunk * form.chunk - number(call.query_start)
    den = load_numbers(
        DEN + place * number(call.num_queries), start, number(call.num_queries), 0.0, form.chunk
    )
    return tl.where(den == 0.0, 0.0, 1.0 / tl.where(den == 0.0, 1.0, den + call.eps))


@triton.jit
def load_gradient(
    call, grad_out, b, head, chunk, first, COLUMNS: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """Load columns of the gradient of a chunk of the output times its factor, float32."""
    start = chunk * form.chunk - number(call.query_start)
    base = grad_out.base + b * grad_out.batch + tl.cast(head, tl.int64) * grad_out.head
    tile, _inside = load_positions(
        base, start, grad_out.row, number(call.num_queries), form.value_dim, COLUMNS, form.chunk,
        first,
    )  # fmt: skip
    return tile.to(tl.float32) * call.factor

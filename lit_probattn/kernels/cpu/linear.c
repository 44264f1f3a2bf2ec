/* Linear attention by chunks of TALL positions, whose pairs and states stay in the cache.

       y_i = inverse_i sum_j (F_i . f_j) v_j,   F = map(query),   f_j = sum_r prior_jr map(key_jr),   v_j = keep_j value_j

   over the real keys, all or those with j <= i; inverse_i = factor / (sum_j F_i . f_j + eps), or factor without a division.
   Pairs are formed within a chunk of a causal call only; between chunks only the sums S = sum f_j' v_j and z = sum f_j are
   passed on.  With n_i = inverse_i dy_i and d_i = -(dy_i . y_i) inverse_i / factor, and T = sum F_i' n_i, t = sum d_i F_i of
   the queries in later chunks, or of all,

       dF_i = sum_j (n_i . v_j + d_i) f_j + n_i S' + d_i z
       df_j = sum_i (n_i . v_j + d_i) F_i + v_j T' + t,     dv_j = sum_i (F_i . f_j) n_i + f_j T

   where the sums are over the pairs of a chunk.  Column `wide` of the rows v and n is 1 and d, and row `wide` of S' and T' is z
   and t, so that products add the second terms. */
#include "vectors.h"
#include <stdlib.h>

/* The smallest normal number and its root. */
#define TINY ((real)(sizeof(real) == 8 ? 2.2250738585072014e-308 : 1.1754943508222875e-38))
#define FAINT ((real)(sizeof(real) == 8 ? 1.4916681462400413e-154 : 1.0842021724855044e-19))

#define STEP 12 /* a multiple of DOWN, and of 4 */
enum { NONE, ELU, RELU };

/* `_Call` in linear.py mirrors it.  Strides count elements; the last dimension is dense. */
typedef struct {
    int64_t batch, heads, groups, rows, cols, size, value_size, components, causal, divides, row_map, col_map;
    int64_t prior_cols; /* entries of a prior: one per key, or 1 */
    double eps, factor;
    const real *query, *key, *value, *prior, *keep;
    int64_t query_strides[3], key_strides[4], value_strides[3], keep_strides[3];
    const uint8_t *key_mask;
    int64_t key_mask_strides[1];
    real *out, *inverse, *states; /* `inverse` and `states` are null if there is no backward pass */
    int64_t out_strides[3];
    const real *grad_out;
    int64_t grad_strides[3];
    real *grad_query, *grad_key, *grad_value; /* null if not needed */
    int64_t grad_query_strides[3], grad_key_strides[4], grad_value_strides[3];
    double *grad_prior; /* (batch, heads, components, prior_cols) */
} Call;

/* Buffers of one job; `full` and `wide` are the sizes of features and values, multiples of 16. */
typedef struct {
    long full, wide, stride; /* `stride` of rows with a column after the last */
    real *rows, *f, *transposed, *phi[MOST], *v, *transposed_v, *n, *p, *dp; /* of a chunk; transposed: one row per feature or value */
    real *out, *grad_f, *grad_v;
    real *states, *state, *z, *transposed_state, *transposed_later; /* sums of one head of `states`: S and z, or T and t */
    real totals[TALL];
    void *block;
} Room;

static int room_make(Room *m, const Call *f, int backward, long heads) {
    const long full = m->full = upto(f->size, 16), wide = m->wide = upto(f->value_size, 16), stride = m->stride = wide + 16;
    for (int turn = 0; turn < 2; turn++) {
        char *at = turn ? m->block : 0;
#define ROOM(name, count) name = (real *)at, at += (sizeof(real) * (size_t)(count) + 63) / 64 * 64
        ROOM(m->rows, TALL * full);
        for (long r = 0; r < f->components; r++) ROOM(m->phi[r], TALL * full);
        if (f->prior) ROOM(m->f, TALL * full);
        else m->f = m->phi[0];
        ROOM(m->transposed, full * TALL);
        ROOM(m->v, TALL * stride);
        ROOM(m->p, TALL * TALL);
        ROOM(m->out, TALL * (full > wide ? full : wide));
        ROOM(m->states, heads * (full * wide + full));
        if (backward) {
            ROOM(m->transposed_v, (wide + 1) * TALL);
            ROOM(m->n, TALL * stride);
            ROOM(m->dp, TALL * TALL);
            ROOM(m->grad_f, TALL * full);
            ROOM(m->grad_v, TALL * wide);
            ROOM(m->transposed_state, (wide + 1) * full);
            ROOM(m->transposed_later, (wide + 1) * full);
        }
#undef ROOM
        if (!turn && !(m->block = aligned_alloc(64, (size_t)(at - (char *)0) + 64))) return 0;
    }
    memset(m->states, 0, sizeof(real) * (size_t)(heads * (full * wide + full)));
    return 1;
}

/* Selects the sums of a head, by its number in the job. */
static void use_head(Room *m, long n) {
    m->state = m->states + n * (m->full * m->wide + m->full);
    m->z = m->state + m->full * m->wide;
}

/* ---- products ------------------------------------------------------------------------------------------------------------ */

/* DOWN rows: to (DOWN, cols) = or += x (DOWN, depth) y (depth, cols). */
INLINE void some_rows(int height, const real *x, long xr, long xk, const real *y, long yk, real *to, long tr, long cols, long depth, int add) {
    long c = 0;
    for (; c + ACROSS * VL <= cols; c += ACROSS * VL) {
        if (add) block(0, height, ACROSS, depth, x, xr, xk, y + c, yk, to + c, tr, 1);
        else block(0, height, ACROSS, depth, x, xr, xk, y + c, yk, to + c, tr, 0);
    }
    for (; c < cols; c += VL) {
        if (add) block(0, height, 1, depth, x, xr, xk, y + c, yk, to + c, tr, 1);
        else block(0, height, 1, depth, x, xr, xk, y + c, yk, to + c, tr, 0);
    }
}

/* to (count, cols) = or += x (count, depth) y (depth, cols). */
static void multiply(const real *x, long xr, const real *y, long yk, real *to, long tr, long count, long cols, long depth, int add) {
    for (long i = 0; i < count; i += DOWN) some_rows(DOWN, x + i * xr, xr, 1, y, yk, to + i * tr, tr, cols, depth, add);
}

/* The same for a lower triangle x, without its zeros. */
static void multiply_lower(const real *x, const real *y, long yk, real *to, long tr, long count, long cols) {
    for (long i = 0; i < count; i += DOWN) some_rows(DOWN, x + i * TALL, TALL, 1, y, yk, to + i * tr, tr, cols, i + DOWN, 1);
}

/* to (rows, cols) += x' y, x (depth, rows) and y (depth, cols); `lower`: x is a lower triangle. */
static void multiply_transposed(const real *x, long xk, const real *y, long yk, real *to, long tr, long rows, long cols, long depth, int lower) {
    long blocks = rows / SIDE;
    while ((rows - blocks * SIDE) % 4) blocks--;
    long j = 0;
    for (; j < blocks * SIDE; j += SIDE) {
        const long from = lower ? j : 0;
        some_rows(SIDE, x + from * xk + j, 1, xk, y + from * yk, yk, to + j * tr, tr, cols, depth - from, 1);
    }
    for (; j < rows; j += 4) {
        const long from = lower ? j : 0;
        some_rows(4, x + from * xk + j, 1, xk, y + from * yk, yk, to + j * tr, tr, cols, depth - from, 1);
    }
}

/* The lower triangle of x (count, depth) y (depth, count). */
static void pairs(const real *x, long xr, const real *y, real *to, long count, long depth) {
    for (long i = 0; i < count; i += DOWN) {
        some_rows(DOWN, x + i * xr, xr, 1, y, TALL, to + i * TALL, TALL, upto(i + DOWN, VL), depth, 0);
        for (long n = i; n < i + DOWN; n++) memset(to + n * TALL + n + 1, 0, sizeof(real) * (size_t)(TALL - n - 1));
    }
}

/* to (size, count) = from' (count, size). */
static void transpose(const real *from, long stride, real *to, long to_stride, long count, long size) {
    for (long e = 0; e < size; e++)
        for (long n = 0; n < count; n++) to[e * to_stride + n] = from[n * stride + e];
}

/* ---- chunks -------------------------------------------------------------------------------------------------------------- */

/* Features of n vectors, n at most 4. */
INLINE void mapped(int map, int n, vec *x) {
    vec low[4];
    UNROLL for (int i = 0; i < n && map == RELU; i++) x[i] = larger(all(0), x[i]);
    if (map != ELU) return;
    UNROLL for (int i = 0; i < n; i++) low[i] = -larger(all(0), -x[i]);
    exponentials(n, low);
    UNROLL for (int i = 0; i < n; i++) x[i] = chosen((vint)(x[i] > all(0)), x[i] + 1, low[i]);
}

/* The gradient of the input of a map from that of its result `y`. */
INLINE vec sloped(int map, vec grad, vec y) {
    if (map == RELU) return (vec)((vint)grad & (vint)(y > all(0)));
    if (map == ELU) return grad * -larger(all(-1), -y);
    return grad;
}

/* Prefetches a row soon to come: rows are too far apart for the processor to do so. */
INLINE void fetch(const real *row, long stride, long size, int writes) {
    for (long e = 0; e < size; e += 64 / (long)sizeof(real))
        if (writes) __builtin_prefetch(row + AHEAD * stride + e, 1);
        else __builtin_prefetch(row + AHEAD * stride + e);
}

/* factor * a row. */
INLINE void scale_row(real *restrict to, const real *restrict from, real factor, long size) {
    long e = 0;
    for (; e + VL <= size; e += VL) store(to + e, all(factor) * load(from + e));
    for (; e < size; e++) to[e] = factor * from[e];
}

/* A row of features, and zeros after its last element. */
INLINE void map_row(int map, real *to, const real *from, long size, long full) {
    long e = 0;
    vec x[4];
    for (; e + 4 * VL <= size; e += 4 * VL) {
        UNROLL for (int i = 0; i < 4; i++) x[i] = load(from + e + i * VL);
        mapped(map, 4, x);
        UNROLL for (int i = 0; i < 4; i++) store(to + e + i * VL, x[i]);
    }
    for (; e + VL <= size; e += VL) {
        x[0] = load(from + e);
        mapped(map, 1, x);
        store(to + e, x[0]);
    }
    if (e < size) {
        real last[VL] = {0};
        memcpy(last, from + e, sizeof(real) * (size_t)(size - e));
        x[0] = load(last);
        mapped(map, 1, x);
        store(last, x[0]);
        memcpy(to + e, last, sizeof(real) * (size_t)(size - e));
    }
    memset(to + size, 0, sizeof(real) * (size_t)(full - size));
}

static void map_rows(const Room *m, int map, real *to, const real *from, long stride, int count, long size) {
    const long full = m->full;
    for (int n = 0; n < count; n++) {
        const real *row = from + n * stride;
        fetch(row, stride, size, 0);
        if (map == ELU) map_row(ELU, to + n * full, row, size, full);
        else if (map == RELU) map_row(RELU, to + n * full, row, size, full);
        else map_row(NONE, to + n * full, row, size, full);
    }
    memset(to + count * full, 0, sizeof(real) * (size_t)((TALL - count) * full));
}

/* Gradients of the rows' inputs. */
static void put_slopes(const Room *m, int map, real *to, long stride, const real *grad, const real *y, int count, long size) {
    const long full = m->full;
    for (int n = 0; n < count; n++, to += stride, grad += full, y += full) {
        long e = 0;
        fetch(to, stride, size, 1);
        for (; e + VL <= size; e += VL) store(to + e, sloped(map, load(grad + e), load(y + e)));
        if (e < size) {
            real last[VL];
            store(last, sloped(map, load(grad + e), load(y + e)));
            memcpy(to + e, last, sizeof(real) * (size_t)(size - e));
        }
    }
}

INLINE int is_real(const Call *f, int64_t b, int64_t j) { return !f->key_mask || f->key_mask[b * f->key_mask_strides[0] + j]; }

INLINE real share(const Call *f, int64_t h, int64_t r, int64_t j) {
    return f->prior[(h * f->components + r) * f->prior_cols + (f->prior_cols > 1 ? j : 0)];
}

/* Features and values of the keys from j on; zeros for masked ones. */
static void fill_keys(Room *m, const Call *f, int64_t b, int64_t h, int64_t j, int count) {
    const int64_t *ks = f->key_strides, *vs = f->value_strides, *ps = f->keep_strides;
    const long full = m->full;
    for (int64_t r = 0; r < f->components; r++) {
        map_rows(m, (int)f->col_map, m->phi[r], f->key + b * ks[0] + h * ks[1] + r * ks[2] + j * ks[3], ks[3], count, f->size);
        for (int n = 0; n < count; n++)
            if (!is_real(f, b, j + n)) memset(m->phi[r] + n * full, 0, sizeof(real) * (size_t)full);
    }
    for (int n = 0; n < TALL && f->prior; n++)
        for (long e = 0; e < full; e += VL) {
            vec sum = all(0);
            for (int64_t r = 0; r < f->components && n < count; r++) sum += all(share(f, h, r, j + n)) * load(m->phi[r] + n * full + e);
            store(m->f + n * full + e, sum);
        }
    memset(m->v, 0, sizeof(real) * (size_t)(TALL * m->stride));
    for (int n = 0; n < count; n++) {
        const real *row = f->value + b * vs[0] + h * vs[1] + (j + n) * vs[2];
        const real keep = f->keep ? f->keep[b * ps[0] + h * ps[1] + (j + n) * ps[2]] : 1;
        real *restrict to = m->v + n * m->stride;
        fetch(row, vs[2], f->value_size, 0);
        if (is_real(f, b, j + n)) scale_row(to, row, keep, f->value_size);
        to[m->wide] = 1;
    }
}

/* S += f' v, z += sum f. */
static void add_keys(Room *m, const Call *f, int count) {
    multiply_transposed(m->f, m->full, m->v, m->stride, m->state, m->wide, m->full, m->wide, count, 0);
    for (int n = 0; n < count && f->divides; n++)
        for (long e = 0; e < m->full; e += VL) store(m->z + e, load(m->z + e) + load(m->f + n * m->full + e));
}

/* T += F' n, t += F' d. */
static void add_rows(Room *m, const Call *f, int count) {
    multiply_transposed(m->rows, m->full, m->n, m->stride, m->state, m->wide, m->full, m->wide, count, 0);
    for (int n = 0; n < count && f->divides; n++) {
        const vec d = all(m->n[n * m->stride + m->wide]);
        for (long e = 0; e < m->full; e += VL) store(m->z + e, load(m->z + e) + d * load(m->rows + n * m->full + e));
    }
}

static void fill_rows(Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int count) {
    const int64_t *qs = f->query_strides;
    map_rows(m, (int)f->row_map, m->rows, f->query + b * qs[0] + h * qs[1] + i * qs[2], qs[2], count, f->size);
}

/* Sums of the features of rows with those of the keys. */
static void total_rows(Room *m, const Call *f, int count) {
    for (int n = 0; n < count && f->divides; n++) {
        vec sum = all(0);
        for (long e = 0; e < m->full; e += VL) sum += load(m->rows + n * m->full + e) * load(m->z + e);
        for (long j = 0; j <= n && f->causal; j += VL) sum += load(m->p + n * TALL + j);
        m->totals[n] = added(sum);
    }
}

/* Rows of the output, and the factors of the backward pass. */
static void put_rows(const Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int count) {
    const int64_t *os = f->out_strides;
    for (int n = 0; n < count; n++) {
        const real total = f->divides ? m->totals[n] + (real)f->eps : 1, size = total < 0 ? -total : total;
        const real inverse = size < TINY ? 0 : (real)f->factor / total;
        real *restrict to = f->out + b * os[0] + h * os[1] + (i + n) * os[2];
        fetch(to, os[2], f->value_size, 1);
        scale_row(to, m->out + n * m->wide, inverse, f->value_size);
        if (f->inverse) f->inverse[(b * f->heads * f->groups + h) * f->rows + i + n] = size < FAINT ? 0 : inverse;
    }
}

/* n and d of the rows from i on. */
static void fill_gradients(Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int count) {
    const int64_t *gs = f->grad_strides, *os = f->out_strides;
    memset(m->n, 0, sizeof(real) * (size_t)(TALL * m->stride));
    for (int n = 0; n < count; n++) {
        const real *grad = f->grad_out + b * gs[0] + h * gs[1] + (i + n) * gs[2];
        const real *out = f->out + b * os[0] + h * os[1] + (i + n) * os[2];
        const real inverse = f->inverse[(b * f->heads * f->groups + h) * f->rows + i + n];
        real *restrict to = m->n + n * m->stride;
        vec sums = all(0);
        long e = 0;
        fetch(grad, gs[2], f->value_size, 0);
        fetch(out, os[2], f->value_size, 0);
        for (; e + VL <= f->value_size; e += VL) {
            const vec g = load(grad + e);
            sums += g * load(out + e);
            store(to + e, all(inverse) * g);
        }
        real sum = added(sums);
        for (; e < f->value_size; e++) sum += grad[e] * out[e], to[e] = inverse * grad[e];
        if (f->divides) to[m->wide] = inverse == 0 ? 0 : -sum * (inverse / (real)f->factor);
    }
}

/* State of a chunk, saved by the forward pass. */
INLINE real *saved(const Room *m, const Call *f, int64_t b, int64_t h, int64_t chunk) {
    const int64_t chunks = f->causal ? (f->cols + TALL - 1) / TALL : 1;
    return f->states + ((b * f->heads + h) * chunks + chunk) * (m->full * m->wide + m->full);
}

INLINE size_t state_bytes(const Room *m) { return sizeof(real) * (size_t)(m->full * m->wide + m->full); }

/* A state and its sums as the rows of its columns. */
static void transpose_state(const Room *m, const real *state, real *to) {
    transpose(state, m->wide, to, m->full, m->full, m->wide);
    memcpy(to + m->wide * m->full, state + m->full * m->wide, sizeof(real) * (size_t)m->full);
}

/* Key heads [from, to) of a sample with their groups of query heads, one chunk of all heads after another, because their rows
   are adjacent in memory. */
int NAMED(linear_forward)(const Call *f, int64_t b, int64_t from, int64_t to) {
    Room room = {0}, *m = &room;
    if (!room_make(m, f, 0, to - from)) return 1;
    for (int64_t j = 0; j < f->cols && !f->causal; j += TALL)
        for (int64_t h = from; h < to; h++) {
            use_head(m, h - from);
            fill_keys(m, f, b, h, j, least(f->cols - j, TALL));
            add_keys(m, f, least(f->cols - j, TALL));
        }
    for (int64_t i = 0; i < f->rows; i += TALL) {
        const int count = least(f->rows - i, TALL);
        const long tall = upto(count, STEP);
        for (int64_t h = from; h < to; h++) {
            use_head(m, h - from);
            if (f->states && (f->causal || i == 0)) memcpy(saved(m, f, b, h, i / TALL), m->state, state_bytes(m));
            if (f->causal) {
                fill_keys(m, f, b, h, i, count);
                transpose(m->f, m->full, m->transposed, TALL, TALL, f->size);
            }
            for (int64_t g = 0; g < f->groups; g++) {
                fill_rows(m, f, b, h * f->groups + g, i, count);
                multiply(m->rows, m->full, m->state, m->wide, m->out, m->wide, tall, m->wide, f->size, 0);
                if (f->causal) {
                    pairs(m->rows, m->full, m->transposed, m->p, tall, f->size);
                    multiply_lower(m->p, m->v, m->stride, m->out, m->wide, tall, m->wide);
                }
                total_rows(m, f, count);
                put_rows(m, f, b, h * f->groups + g, i, count);
            }
            if (f->causal) add_keys(m, f, count);
        }
    }
    free(m->block);
    return 0;
}

/* Gradients of the keys, priors and values from j on. */
static void put_keys(const Room *m, const Call *f, int64_t b, int64_t h, int64_t j, int count) {
    const int64_t *ks = f->grad_key_strides, *vs = f->grad_value_strides, *ps = f->keep_strides;
    const long full = m->full;
    for (int n = 0; n < count && !f->prior; n++)
        if (!is_real(f, b, j + n)) memset(m->grad_f + n * full, 0, sizeof(real) * (size_t)full);
    for (int64_t r = 0; r < f->components && f->prior; r++) {
        double *to = f->grad_prior ? f->grad_prior + ((b * f->heads + h) * f->components + r) * f->prior_cols : 0;
        for (int n = 0; n < count; n++) {
            const vec prior = all(is_real(f, b, j + n) ? share(f, h, r, j + n) : 0);
            vec sum = all(0);
            for (long e = 0; e < full; e += VL) {
                const vec grad = load(m->grad_f + n * full + e);
                sum += grad * load(m->phi[r] + n * full + e);
                store(m->out + n * full + e, prior * grad);
            }
            if (to) to[f->prior_cols > 1 ? j + n : 0] += (double)added(sum);
        }
        if (f->grad_key)
            put_slopes(m, (int)f->col_map, f->grad_key + b * ks[0] + h * ks[1] + r * ks[2] + j * ks[3], ks[3], m->out, m->phi[r], count, f->size);
    }
    if (f->grad_key && !f->prior)
        put_slopes(m, (int)f->col_map, f->grad_key + b * ks[0] + h * ks[1] + j * ks[3], ks[3], m->grad_f, m->f, count, f->size);
    for (int n = 0; n < count && f->grad_value; n++) {
        real *restrict to = f->grad_value + b * vs[0] + h * vs[1] + (j + n) * vs[2];
        const real keep = f->keep ? f->keep[b * ps[0] + h * ps[1] + (j + n) * ps[2]] : 1;
        fetch(to, vs[2], f->value_size, 1);
        scale_row(to, m->grad_v + n * m->wide, keep, f->value_size);
    }
}

/* Gradients of keys and values by the queries outside a chunk. */
static void of_later(Room *m, const Call *f, long tall) {
    transpose_state(m, m->state, m->transposed_later);
    multiply(m->v, m->stride, m->transposed_later, m->full, m->grad_f, m->full, tall, m->full, m->wide + 1, 0);
    if (f->grad_value) multiply(m->f, m->full, m->state, m->wide, m->grad_v, m->wide, tall, m->wide, f->size, 0);
}

/* Gradients of the queries from i on, in m->out. */
static void put_queries(Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int count, long tall) {
    const int64_t *qs = f->grad_query_strides;
    multiply(m->n, m->stride, m->transposed_state, m->full, m->out, m->full, tall, m->full, m->wide + 1, 0);
    if (f->causal) multiply_lower(m->dp, m->f, m->full, m->out, m->full, tall, m->full);
    put_slopes(m, (int)f->row_map, f->grad_query + b * qs[0] + h * qs[1] + i * qs[2], qs[2], m->out, m->rows, count, f->size);
}

int NAMED(linear_backward)(const Call *f, int64_t b, int64_t from, int64_t to) {
    const int64_t last = f->rows ? (f->rows - 1) / TALL * TALL : -1;
    const int keys = f->grad_key || f->grad_prior;
    Room room = {0}, *m = &room;
    if (!room_make(m, f, 1, to - from)) return 1;
    for (int64_t i = last; i >= 0; i -= TALL) {
        const int count = least(f->rows - i, TALL);
        const long tall = upto(count, STEP);
        for (int64_t h = from; h < to; h++) {
            use_head(m, h - from);
            transpose_state(m, saved(m, f, b, h, f->causal ? i / TALL : 0), m->transposed_state);
            if (f->causal) {
                fill_keys(m, f, b, h, i, count);
                transpose(m->f, m->full, m->transposed, TALL, TALL, f->size);
                transpose(m->v, m->stride, m->transposed_v, TALL, TALL, m->wide + 1);
                of_later(m, f, tall);
            }
            for (int64_t g = 0; g < f->groups; g++) {
                fill_rows(m, f, b, h * f->groups + g, i, count);
                fill_gradients(m, f, b, h * f->groups + g, i, count);
                if (f->causal) pairs(m->n, m->stride, m->transposed_v, m->dp, tall, m->wide + 1);
                if (f->grad_query) put_queries(m, f, b, h * f->groups + g, i, count, tall);
                if (f->causal && keys) multiply_transposed(m->dp, TALL, m->rows, m->full, m->grad_f, m->full, tall, m->full, tall, 1);
                if (f->causal && f->grad_value) {
                    pairs(m->rows, m->full, m->transposed, m->p, tall, f->size);
                    multiply_transposed(m->p, TALL, m->n, m->stride, m->grad_v, m->wide, tall, m->wide, tall, 1);
                }
                add_rows(m, f, count);
            }
            if (f->causal) put_keys(m, f, b, h, i, count);
        }
    }
    for (int64_t j = 0; j < f->cols && !f->causal; j += TALL)
        for (int64_t h = from; h < to; h++) {
            const int count = least(f->cols - j, TALL);
            use_head(m, h - from);
            fill_keys(m, f, b, h, j, count);
            of_later(m, f, upto(count, STEP));
            put_keys(m, f, b, h, j, count);
        }
    free(m->block);
    return 0;
}

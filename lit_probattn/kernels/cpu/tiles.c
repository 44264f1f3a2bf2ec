/* Attention by tiles of TALL queries and WIDE keys that stay in the second-level cache, including the products.

   With maps S_r = scale query . key_r, coefficients c, row terms a_ir, column terms b_jr and pair terms (bias, -inf for
   masked pairs), the scores of a head are

       SOFT    l = log sum_r exp t_r     t_r = c_r S_r + a_ir + b_jr + pair term
       HARD    l = max_r t_r, the first maximum if there are several
       SUM     l = sum_r c_r S_r + pair term, of maps that all heads of a sample share
       LAYERS  l = W_2 ReLU(W_1 S + b_1) + pair term, or W_1 S without W_2
       POWER   l = log (S^2 + FLOOR)^(degree / 2) + b_j + pair term

   and SUM and LAYERS add s noise to the maps S, or LAYERS to the units W_1 S (`unit_noise`),

   and the output is dropout(softmax_j l) value.  Forward: online softmax, whose maximum changes only if a score exceeds it
   by SLACK.  Backward: from each row's maximum and inverse sum, which are stored separately because the logarithm of the sum
   is too coarse for scores of 1e8; one tile of keys at a time, so that gradients of keys and values are written once.
   Skipped without changing results: keys after the last real one, causally masked tiles, and in backward queries without a
   gradient.  Queries outside `query_mask` have output 0 and no gradient; tiles of them are skipped.

   An owner of maps is a head of a sample, or a sample if its heads share maps.

   If the processor multiplies bfloat16, heads may have this dtype (`low`).  Products of heads then take pairs of bfloat16
   instead of numbers: queries and keys unchanged, so that their scale is applied after the product, the weights and the
   gradients of maps rounded once.  Scores, exponentials, sums, terms, mixing and all their gradients are float. */
#include "keep.h"
#include "matrices.h"
#include <stdlib.h>

#define WIDE 128
#define STRIDE (WIDE + 16) /* rows of maps; and of LONG elements of queries */
#define LONG 128
#define PANEL (ACROSS * VL)
#define TURNED (upto(TALL, 32) / 2) /* pairs of queries */
#define SLACK ((real)8)
#define FAR ((real)40) /* largest difference of components for one exponential */
#define MANY 4 /* vectors at once, of scores that take one exponential */
#define FLOOR ((real)1e-12) /* added to squares before their logarithm */
enum { SOFT, HARD, SUM, LAYERS, POWER };

/* `_Call` in tiles.py mirrors it.  Strides count elements; the last dimension is dense. */
typedef struct {
    int64_t batch, heads, rows, cols, size, value_size, maps, components, kind, common;
    int64_t low; /* 1: query, key, value, out, grad_out and the gradients of key and value point to bfloat16; 2: and matrix
                    registers multiply them */
    int64_t key_heads, value_heads, col_heads;
    double scale;
    const real *query, *key, *value, *coef, *row, *col;
    int64_t query_strides[3], key_strides[4], value_strides[3]; /* sample, head (or map), [component,] position */
    const real *bias;
    int64_t bias_strides[4];
    const uint8_t *key_mask;
    int64_t key_mask_strides[1];
    const uint8_t *query_mask;
    int64_t query_mask_strides[1];
    const uint8_t *pair_mask;
    int64_t pair_strides[4], causal;
    const int64_t *draw; /* two words of the key, then one per sample */
    int64_t threshold;
    const int64_t *noise;
    int64_t first_row, hidden, unit_noise, degree;
    const real *noise_scale, *first, *first_bias, *second;
    real *out, *top, *inverse;
    int64_t out_strides[3];
    const real *grad_out;
    int64_t grad_strides[3];
    /* null if not needed; query, key and value are strided, the others are dense */
    real *grad_query, *grad_key, *grad_value, *grad_row, *grad_col, *grad_bias;
    int64_t grad_query_strides[3], grad_key_strides[4], grad_value_strides[3], grad_bias_strides[4];
    double *grad_coef, *grad_scale, *grad_first, *grad_first_bias, *grad_second; /* one of each per owner */
} Call;

void noise_tile(float *out, int64_t plane, int64_t stride, int64_t maps, int64_t row, int64_t rows, int64_t col, int64_t cols, uint32_t sample,
                uint32_t k0, uint32_t k1);

/* Buffers of one job. */
typedef struct {
    real *maps[MOST], *sums[MOST], *units[MOST], *w, *pairs, *dl, *noise; /* tiles, TALL x STRIDE */
    real *query[MOST], *here;               /* queries of a tile and rows of the output's gradient, LONG elements at a time */
    real *queries[MOST], *there, *low;      /* the same for transposed products, and a tile for them; `low`: rows in pairs */
    real *panels[MOST], *key_rows[MOST];    /* keys for products, all of an owner or those of a tile; backward: as rows */
    real *values;                           /* forward: rows; backward: panels of a tile, for every head */
    real *col[MOST], *factor[MOST], *summit; /* column terms; factors of components that share a map, and the largest term */
    real *a[MOST], *shift, spread;          /* row terms of the tile, or factors and the largest term; spread of columns */
    real *top, *total, *out;                /* per row: largest score, sums of exponentials in VL parts, values */
    real *grad_keys[MOST], *grad_values, *grad_cols[MOST], *grad_queries, *delta;
    int16_t *keep;
    uint8_t *wanted;                        /* whether a tile of queries has a gradient, for every head */
    int divides, factored; /* whether components may share an exponential, and do in this tile of queries */
    int64_t length;        /* one past the last real key */
    void *block;
} Room;

/* ---- products ----------------------------------------------------------------------------------------------------------- */

INLINE int low(const Call *f) { return PAIRS && f->low; }
INLINE int matrices(const Call *f) { return MATRICES && f->low == 2; }

/* Size in products of a row of `size` elements, or of a column. */
INLINE long entries(const Call *f, long size) {
    const long pairs = (size + 1) / 2;
    return matrices(f) ? upto(pairs, 16) : low(f) ? pairs : size;
}

/* Address of element `at` of a tensor that may be bfloat16. */
INLINE const real *place(const Call *f, const real *from, int64_t at) { return low(f) ? (const real *)((const uint16_t *)from + at) : from + at; }

/* Rows of the tensors are too far apart for the processor's prefetches. */
INLINE void expect_row(const Call *f, const real *row, int64_t stride, long size) {
    for (long e = 0; e < size; e += 64 / (long)sizeof(real)) __builtin_prefetch(place(f, row, AHEAD * stride + e));
}

INLINE real number(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return (real)found;
}

INLINE uint16_t nearest(real from) {
    const float x = (float)from;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Rows from memory to a tile, LONG elements at a time, with zeros after the last row and element.  For matrix registers rows
   are adjacent. */
static void fill(const Call *f, real *to, const real *from, long stride, int count, long size, real scale) {
    const long dense = entries(f, size);
    for (int n = 0; matrices(f) && n < TALL; n++, to += dense) {
        const size_t bytes = n < count ? sizeof(uint16_t) * (size_t)size : 0;
        if (n + AHEAD < count) expect_row(f, place(f, from, n * stride), stride, size);
        if (bytes) memcpy(to, place(f, from, n * stride), bytes);
        memset((char *)to + bytes, 0, sizeof(real) * (size_t)dense - bytes);
    }
    if (matrices(f)) return;
    const long long_row = low(f) ? 2 * LONG : LONG;
    for (long e = 0; e < size; e += long_row, to += TALL * STRIDE) {
        const int some = least(size - e, long_row), full = (int)upto(some, 16);
        for (int n = 0; n < TALL; n++) {
            real *restrict at = to + n * STRIDE;
            if (n + AHEAD < count) expect_row(f, place(f, from, n * stride + e), stride, some);
            if (low(f)) {
                const real *row = place(f, from, n * stride + e);
                int x = 0;
                for (; n < count && x + 2 * VL <= some; x += 2 * VL) store(at + x / 2, load(row + x / 2));
                if (n < count && x < some) memcpy(at + x / 2, row + x / 2, sizeof(uint16_t) * (size_t)(some - x));
                x = n < count ? some : 0;
                if (x < full) memset((uint16_t *)at + x, 0, sizeof(uint16_t) * (size_t)(full - x));
                continue;
            }
            const real *restrict row = from + n * stride + e;
            int x = n < count ? 0 : some;
            for (; x + VL <= some; x += VL) store(at + x, all(scale) * load(row + x));
            for (; x < some; x++) at[x] = scale * row[x];
            for (x = n < count ? some : 0; x < full; x++) at[x] = 0;
        }
    }
}

/* Keys of a tile to panels of PANEL keys each, with zeros after the last. */
static void pack(const Call *f, real *panels, const real *keys, long stride, int cols, long size) {
    const long count = entries(f, size);
    for (int j = 0; j < WIDE; j += PANEL, panels += count * PANEL)
        for (int n = 0; n < PANEL; n++) {
            const real *row = place(f, keys, (j + n) * stride);
            real *restrict to = panels + n;
            if (j + n + AHEAD < cols) expect_row(f, row, stride, size);
            if (j + n >= cols)
                for (long e = 0; e < count; e++) to[e * PANEL] = 0;
            else if (low(f)) {
                for (long e = 0; e < size / 2; e++) memcpy(to + e * PANEL, place(f, row, 2 * e), sizeof(real));
                if (size % 2) {
                    const uint16_t last[2] = {((const uint16_t *)row)[size - 1], 0};
                    memcpy(to + size / 2 * PANEL, last, sizeof last);
                }
                for (long e = (size + 1) / 2; e < count; e++) to[e * PANEL] = 0;
            } else
                for (long e = 0; e < size; e++) to[e * PANEL] = row[e];
        }
}

/* Two rows of bfloat16, or one and zeros, as one row of pairs; zeros from `size` to `full`. */
static void zip(real *to, const uint16_t *first, const uint16_t *second, long size, long full) {
    typedef uint16_t shorts __attribute__((vector_size(2 * VL)));
    typedef uint32_t longs __attribute__((vector_size(4 * VL)));
    long e = 0;
    for (; e + VL <= size; e += VL) {
        shorts a, b = {0};
        memcpy(&a, first + e, sizeof a);
        if (second) memcpy(&b, second + e, sizeof b);
        const longs pairs = __builtin_convertvector(a, longs) | __builtin_convertvector(b, longs) << 16;
        memcpy(to + e, &pairs, sizeof pairs);
    }
    for (; e < full; e++) {
        const uint16_t pair[2] = {e < size ? first[e] : 0, second && e < size ? second[e] : 0};
        memcpy(to + e, pair, sizeof pair);
    }
}

/* Adjacent rows of `full` elements; `low`: two rows in pairs, and zeros after the last for matrix registers. */
static void copy_rows(const Call *f, real *to, long full, const real *from, long stride, int count, long size) {
    if (matrices(f)) memset(to + (count + 1) / 2 * full, 0, sizeof(real) * (size_t)((upto(count, 32) / 2 - (count + 1) / 2) * full));
    for (int n = 0; n < count; n += low(f) ? 2 : 1, to += full) {
        const real *row = place(f, from, n * stride);
        if (n + AHEAD < count) expect_row(f, row, stride, size);
        if (low(f)) zip(to, (const uint16_t *)row, n + 1 < count ? (const uint16_t *)row + stride : 0, size, full);
        else {
            memcpy(to, row, sizeof(real) * (size_t)size);
            memset(to + size, 0, sizeof(real) * (size_t)(full - size));
        }
    }
}

/* Like `fill`, for transposed products; numbers are copied unchanged.  For matrix registers elements are rows, of TURNED pairs. */
static void fill_pairs(const Call *f, real *to, const real *from, long stride, int count, long size) {
    const uint16_t *rows = (const uint16_t *)from;
    for (long e = 0; matrices(f) && e < size; e += 16, to += 16 * TURNED) {
        real pairs[TURNED * 16] __attribute__((aligned(64)));
        for (int n = 0; n < TURNED; n++)
            if (2 * n < count) zip(pairs + n * 16, rows + 2 * n * stride + e, 2 * n + 1 < count ? rows + (2 * n + 1) * stride + e : 0, least(size - e, 16), 16);
            else store(pairs + n * 16, all(0));
        for (int n = 0; n < TURNED; n += 16) transpose(pairs + n * 16, 16, to + n, TURNED);
    }
    for (long e = 0; low(f) && !matrices(f) && e < size; e += LONG, to += TALL * STRIDE)
        for (int n = 0; n < count; n += 2) {
            const uint16_t *row = rows + n * stride + e;
            zip(to + n / 2 * STRIDE, row, n + 1 < count ? row + stride : 0, least(size - e, LONG), upto(least(size - e, LONG), 16));
        }
}

/* A tile of numbers for `scatter`, and in place for `gather`, in which keys after `seen` are 0. */
static const real *down(const Room *m, const Call *f, const real *x, int count) {
    if (!low(f)) return x;
    for (int n = 0; n < count; n += 2)
        for (int c = 0; c < WIDE; c += VL) {
            const vec first = load(x + n * STRIDE + c), second = n + 1 < count ? load(x + (n + 1) * STRIDE + c) : all(0);
            store(m->low + n / 2 * STRIDE + c, paired(first, second));
        }
    for (int n = (count + 1) / 2; matrices(f) && n < (int)entries(f, count); n++) memset(m->low + n * STRIDE, 0, sizeof(real) * WIDE);
    return m->low;
}

static const real *across(const Call *f, real *x, int count, int seen) {
    for (int n = 0; low(f) && n < count; n++) {
        for (int c = 0; c < WIDE; c += 2 * VL) store(x + n * STRIDE + c / 2, rounded(load(x + n * STRIDE + c), load(x + n * STRIDE + c + VL)));
        memset((uint16_t *)(x + n * STRIDE) + seen, 0, sizeof(uint16_t) * (size_t)(upto(seen, 32) - seen));
    }
    return x;
}

/* s (height, WIDE) = x (height, size) panels. */
INLINE void scores_of(int low, const real *x, const real *panels, long size, real *s, int height) {
    for (long e = 0; e < size; e += LONG, x += TALL * STRIDE)
        for (int j = 0; j < WIDE; j += PANEL)
            for (int i = 0; i < height; i += DOWN) {
                const real *y = panels + j * size + e * PANEL;
                real *to = s + i * STRIDE + j;
                if (e) block(low, DOWN, ACROSS, size - e < LONG ? size - e : LONG, x + i * STRIDE, STRIDE, 1, y, PANEL, to, STRIDE, 1);
                else block(low, DOWN, ACROSS, size < LONG ? size : LONG, x + i * STRIDE, STRIDE, 1, y, PANEL, to, STRIDE, 0);
            }
}

/* to (height, width) += p (height, depth) y (depth, width). */
INLINE void gather_of(int low, const real *p, const real *y, long width, real *to, int height, int depth) {
    long c = 0;
#if BYTES == 64
    for (; c + 4 * VL <= width; c += 4 * VL)
        for (int i = 0; i < height; i += 6) block(low, 6, 4, depth, p + i * STRIDE, STRIDE, 1, y + c, width, to + i * width + c, width, 1);
#endif
    for (; c + PANEL <= width; c += PANEL)
        for (int i = 0; i < height; i += DOWN) block(low, DOWN, ACROSS, depth, p + i * STRIDE, STRIDE, 1, y + c, width, to + i * width + c, width, 1);
    for (; c < width; c += VL)
        for (int i = 0; i < height; i += DOWN) block(low, DOWN, 1, depth, p + i * STRIDE, STRIDE, 1, y + c, width, to + i * width + c, width, 1);
}

/* to (WIDE, width) += p' (WIDE, count) x (count, width). */
INLINE void scatter_of(int low, const real *p, const real *x, long width, real *to, int count) {
    enum { WHOLE = WIDE % SIDE % 4 == 0 ? WIDE / SIDE * SIDE : (WIDE / SIDE - 1) * SIDE };
    for (long e = 0; e < width; e += LONG, x += TALL * STRIDE) {
        const long some = width - e < LONG ? width - e : LONG;
        long c = 0;
        for (; c + PANEL <= some; c += PANEL) {
            real *at = to + e + c;
            for (int j = 0; j < WHOLE; j += SIDE) {
                UNROLL for (int r = SIDE; low && r < 2 * SIDE; r++) /* such a short product waits for its sums */
                    __builtin_prefetch(at + (j + r) * width, 1), __builtin_prefetch(at + (j + r) * width + VL, 1);
                block(low, SIDE, ACROSS, count, p + j, 1, STRIDE, x + c, STRIDE, at + j * width, width, 1);
            }
            for (int j = WHOLE; j < WIDE; j += 4) block(low, 4, ACROSS, count, p + j, 1, STRIDE, x + c, STRIDE, at + j * width, width, 1);
        }
        for (; c < some; c += VL)
            for (int j = 0; j < WIDE; j += 4) block(low, 4, 1, count, p + j, 1, STRIDE, x + c, STRIDE, to + e + c + j * width, width, 1);
    }
}

static void scores(const Call *f, const real *x, const real *panels, long size, real *s, int height) {
    const long full = entries(f, size);
    if (matrices(f))
        for (int j = 0; j < WIDE; j += PANEL) multiply(x, full, panels + j * full, PANEL, full, s + j, STRIDE, height, PANEL, 0);
    else if (low(f)) scores_of(1, x, panels, full, s, height);
    else scores_of(0, x, panels, full, s, height);
}

static void gather(const Call *f, const real *p, const real *y, long width, real *to, int height, int depth) {
    if (matrices(f)) multiply(p, STRIDE, y, width, (depth + 1) / 2, to, width, height, width, 1);
    else if (low(f)) gather_of(1, p, y, width, to, height, (depth + 1) / 2);
    else gather_of(0, p, y, width, to, height, depth);
}

/* With matrix registers, to (width, WIDE) += x' p instead. */
static void scatter(const Call *f, const real *p, const real *x, long width, real *to, int count) {
    if (matrices(f)) multiply(x, TURNED, p, STRIDE, (count + 1) / 2, to, WIDE, (int)width, WIDE, 1);
    else if (low(f)) scatter_of(1, p, x, width, to, (count + 1) / 2);
    else scatter_of(0, p, x, width, to, count);
}

/* Sums of `scatter` as rows of `full` elements. */
static const real *rows_of(const Call *f, const real *sums, long full, real *to) {
    if (!matrices(f)) return sums;
    for (long e = 0; e < full; e += 16)
        for (int n = 0; n < WIDE; n += 16) transpose(sums + e * WIDE + n, WIDE, to + n * full + e, full);
    return to;
}

/* Rows of a tile that products compute. */
INLINE int height_of(const Call *f, int count) { return (int)upto(count, matrices(f) ? 16 : DOWN); }

/* ---- buffers of a job --------------------------------------------------------------------------------------------------- */

/* Size of rows of queries, or of gradients, as factors of products, or `turned` for transposed products. */
static size_t tile_size(const Call *f, long size, int turned) {
    const size_t full = (size_t)upto(size, 16);
    if (matrices(f)) return turned ? full * TURNED : TALL * (size_t)entries(f, size);
    return (full + LONG - 1) / LONG * TALL * STRIDE;
}

/* Tiles of queries, and of gradients, that a job keeps for all its tiles of keys. */
static size_t kept_tiles(const Call *f, int backward, size_t heads) {
    return matrices(f) && backward && !f->common ? heads * (size_t)upto(f->rows, TALL) / TALL : 1;
}

static int room_make(Room *m, const Call *f, int backward, size_t heads) {
    const size_t tile = TALL * STRIDE, R = (size_t)f->maps, K = (size_t)f->components, U = (size_t)f->hidden;
    const size_t all = (size_t)upto(f->cols, WIDE), E = (size_t)upto(f->size, 16), V = (size_t)upto(f->value_size, 16);
    const size_t held = f->common ? (size_t)f->value_heads : 1;
    const size_t copies = kept_tiles(f, backward, heads);
    const size_t long_query = copies * tile_size(f, f->size, 0), long_value = copies * tile_size(f, f->value_size, 0);
    const size_t turned_query = copies * tile_size(f, f->size, 1), turned_value = copies * tile_size(f, f->value_size, 1);
    const size_t queries = f->common ? R : 1, keys = backward ? WIDE : all, rows = (size_t)upto(f->rows, TALL);
    m->divides = f->kind == SOFT && K > 1 && R == 1 && !f->coef && f->col && f->row;
    for (int turn = 0; turn < 2; turn++) {
        char *at = turn ? m->block : 0;
#define ROOM(name, type, count) name = (type *)at, at += (sizeof(type) * (count) + 63) / 64 * 64
        for (size_t r = 0; r < R; r++) ROOM(m->maps[r], real, tile);
        for (size_t r = 0; r < R && f->common && backward; r++) ROOM(m->sums[r], real, tile);
        for (size_t h = 0; h < (f->kind == LAYERS ? (size_t)f->heads : f->kind == POWER); h++) ROOM(m->units[h], real, tile);
        ROOM(m->w, real, tile);
        ROOM(m->pairs, real, tile);
        ROOM(m->dl, real, backward && f->grad_bias ? tile : 0);
        ROOM(m->noise, real, f->noise ? tile * (f->unit_noise ? U : R) : 0);
        for (size_t r = 0; r < queries; r++) ROOM(m->query[r], real, long_query);
        ROOM(m->here, real, backward ? long_value : 0);
        for (size_t r = 0; r < queries; r++)
            if (low(f) && backward) ROOM(m->queries[r], real, turned_query);
            else m->queries[r] = m->query[r];
        if (low(f)) ROOM(m->there, real, backward ? turned_value : 0);
        else m->there = m->here;
        ROOM(m->low, real, low(f) ? tile : 0);
        for (size_t r = 0; r < R; r++) ROOM(m->panels[r], real, keys * (size_t)entries(f, f->size));
        for (size_t r = 0; r < R && backward; r++) ROOM(m->key_rows[r], real, WIDE * E);
        ROOM(m->values, real, held * keys * V);
        for (size_t r = 0; r < K; r++) ROOM(m->col[r], real, all);
        for (size_t r = 0; r < K && m->divides; r++) ROOM(m->factor[r], real, all);
        ROOM(m->summit, real, m->divides ? all : 0);
        for (size_t r = 0; r < K; r++) ROOM(m->a[r], real, TALL);
        ROOM(m->shift, real, TALL);
        ROOM(m->top, real, heads * TALL);
        ROOM(m->total, real, heads * TALL * (size_t)VL);
        ROOM(m->out, real, backward ? 0 : heads * TALL * V);
        for (size_t r = 0; r < R && backward; r++) ROOM(m->grad_keys[r], real, WIDE * E);
        ROOM(m->grad_values, real, backward ? held * WIDE * V : 0);
        for (size_t r = 0; r < K; r++) ROOM(m->grad_cols[r], real, WIDE);
        ROOM(m->grad_queries, real, backward ? TALL * E : 0);
        ROOM(m->delta, real, backward ? heads * rows : 0);
        ROOM(m->keep, int16_t, TALL * WIDE);
        ROOM(m->wanted, uint8_t, backward ? heads * rows / TALL : 0);
#undef ROOM
        if (!turn && !(m->block = aligned_alloc(64, (size_t)(at - (char *)0) + 64))) return 0;
    }
    return 1;
}

/* Column terms of a head for the keys [from, to), -inf for masked keys and after the last; the last real key. */
static void columns(Room *m, const Call *f, int64_t b, int64_t h, int64_t from, int64_t until) {
    const int64_t L = f->cols, K = f->common ? 1 : f->components, stop = until < L ? until : L;
    const uint8_t *real_keys = f->key_mask ? f->key_mask + b * f->key_mask_strides[0] : 0;
    m->length = L;
    while (real_keys && m->length > 0 && !real_keys[m->length - 1]) m->length--;
    for (int64_t r = 0; r < K; r++) {
        const real *beta = f->col ? f->col + ((b * f->col_heads + h * f->col_heads / f->heads) * K + r) * L : 0;
        real *restrict to = m->col[r];
        for (int64_t j = from; j < stop; j++) to[j] = beta ? beta[j] : 0;
        for (int64_t j = from; real_keys && j < stop; j++) to[j] = real_keys[j] ? to[j] : (real)-INFINITY;
        for (int64_t j = stop; j < until; j++) to[j] = (real)-INFINITY;
    }
}

/* Factors of the keys [from, to), and the largest difference between their components. */
static void divide_columns(Room *m, const Call *f, int64_t from, int64_t to) {
    m->spread = 0;
    for (int64_t j = from; j < to && m->divides; j++) {
        real high = m->col[0][j];
        for (int64_t r = 1; r < f->components; r++) high = m->col[r][j] > high ? m->col[r][j] : high;
        m->summit[j] = high;
        for (int64_t r = 0; r < f->components && high > (real)-INFINITY; r++)
            if (!(high - m->col[r][j] <= m->spread)) m->spread = high - m->col[r][j]; /* NaN stays */
    }
    for (int64_t r = 0; r < f->components && m->divides; r++)
        for (int64_t j = from; j < to; j += VL) {
            const vec high = load(m->summit + j), x = exponential(load(m->col[r] + j) - high);
            store(m->factor[r] + j, (vec)((vint)x & ((vint)(high > all((real)-INFINITY)) | (vint)(high != high))));
        }
}

/* Row terms of a tile, and whether components share one exponential: exp(S + max a + max b) sum_r A_r B_r. */
static void row_terms(Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int count) {
    const int64_t K = f->components;
    m->factored = 0;
    if (!f->row) return;
    const real *a = f->row + ((b * f->heads + h) * f->rows + i) * K;
    real spread = 0;
    for (int n = 0; n < count; n++) {
        real high = a[n * K], low = high;
        for (int64_t r = 0; r < K; r++) {
            const real x = a[n * K + r];
            m->a[r][n] = x;
            high = x > high ? x : high;
            low = x < low ? x : low;
        }
        m->shift[n] = high;
        if (!(high - low <= spread)) spread = high - low;
    }
    m->factored = m->divides && (m->spread < FAR || spread < FAR);
    for (int64_t r = 0; r < K && m->factored; r++)
        for (int n = 0; n < TALL; n += VL) store(m->a[r] + n, exponential(load(m->a[r] + n) - load(m->shift + n)));
}

/* Pair terms of a tile of a head: bias, and -inf for masked pairs; returns whether there are any. */
static int pair_terms(Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int64_t j, int count, int cols) {
    const int64_t offset = f->cols - f->rows;
    const int edge = f->causal && j + WIDE - 1 > i + offset;
    if (!edge && !f->bias && !f->pair_mask) return 0;
    for (int n = 0; n < count; n++) {
        real *restrict x = m->pairs + n * STRIDE;
        if (f->bias) {
            const int64_t *s = f->bias_strides;
            const real *at = f->bias + b * s[0] + h * s[1] + (i + n) * s[2] + j * s[3];
            for (int c = 0; c < cols; c++) x[c] = at[c * s[3]];
        } else
            memset(x, 0, sizeof(real) * WIDE);
        for (int c = cols; c < WIDE; c++) x[c] = 0;
        if (f->pair_mask) {
            const int64_t *s = f->pair_strides;
            const uint8_t *at = f->pair_mask + b * s[0] + h * s[1] + (i + n) * s[2] + j * s[3];
            for (int c = 0; c < cols; c++) x[c] = at[c * s[3]] ? x[c] : (real)-INFINITY;
        }
        if (edge) {
            const int64_t seen = i + n + offset + 1 - j;
            for (int c = seen < 0 ? 0 : (int)seen; c < WIDE; c++) x[c] = (real)-INFINITY;
        }
    }
    return 1;
}

static void keep_pairs(Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int64_t j, int count) {
    keep_tile(m->keep, i, count, j, WIDE, (uint32_t)h, (uint32_t)f->draw[2 + b], (uint32_t)f->draw[0], (uint32_t)f->draw[1], (int16_t)f->threshold);
}

INLINE real dropout_scale(const Call *f) { return f->draw ? (real)(65536.0 / (32768.0 - (double)f->threshold)) : 1; }

/* ---- the pass over a tile ------------------------------------------------------------------------------------------------- */

/* Scores of a head from maps: ONE map; OWN maps of components, or a SHARED one; their largest; one exponential for
   components that share a map; a sum of maps. */
enum { ONE, OWN, SHARED, LARGEST, FACTORED, SUMMED };

typedef struct {
    int kind, K, shared, terms, pairs, dropped, low; /* whether there are row terms, pair terms, dropout; bfloat16 */
    int plain;                                  /* no coefficients, row terms or pair terms, other than the kind implies */
    const real *coef;
    real *maps[MOST]; /* the map of ONE may be computed from the maps */
    real scale;       /* of products without the scale */
} Form;

static Form form_of(const Room *m, const Call *f, int64_t h, int pairs) {
    Form form = {.K = (int)f->components, .shared = f->maps == 1, .terms = f->row != 0, .pairs = pairs, .dropped = f->draw != 0, .low = low(f)};
    form.scale = low(f) && !f->common && f->kind != POWER ? (real)f->scale : 1;
    form.coef = f->coef ? f->coef + h * f->components : 0;
    for (int r = 0; r < form.K; r++) form.maps[r] = m->maps[form.shared ? 0 : r];
    if (f->kind == LAYERS) form.maps[0] = m->units[h];
    if (f->kind == POWER) form.maps[0] = m->units[0];
    if (f->kind == SUM) form.kind = SUMMED;
    else if (f->kind == LAYERS) form.kind = ONE, form.K = 1;
    else if (form.K == 1) form.kind = ONE;
    else if (f->kind == HARD) form.kind = LARGEST;
    else form.kind = m->factored ? FACTORED : form.shared ? SHARED : OWN;
    form.plain = !pairs && !f->grad_bias && (form.kind == SUMMED || (!form.coef && (form.kind == FACTORED || !form.terms)));
    return form;
}

INLINE vec scaled_map(const Form *g, int r, int at) { return PAIRS ? load(g->maps[r] + at) * all(g->scale) : load(g->maps[r] + at); }

/* t_r, or l of a sum. */
INLINE vec term(const Room *m, const Form *g, int kind, int K, int plain, int r, int n, int c, int64_t j) {
    const int at = n * STRIDE + c;
    vec t;
    if (kind == SUMMED) {
        t = load(m->col[0] + j + c);
        UNROLL_FEW for (int k = 0; k < K; k++) t += all(g->coef[k]) * load(g->maps[k] + at);
    } else if (kind == FACTORED)
        t = scaled_map(g, 0, at) + load(m->summit + j + c) + all(m->shift[n]);
    else {
        t = scaled_map(g, r, at);
        if (!plain && g->coef) t *= all(g->coef[r]);
        t += load(m->col[r] + j + c);
        if (!plain && g->terms) t += all(m->a[r][n]);
    }
    return !plain && g->pairs ? t + load(m->pairs + at) : t;
}

INLINE vec factors(const Room *m, int K, const vec *a, int64_t j) {
    vec sum = a[0] * load(m->factor[0] + j);
    UNROLL_FEW for (int r = 1; r < K; r++) sum += a[r] * load(m->factor[r] + j);
    return sum;
}

/* Two vectors of t_r, or of the score of a reduction other than a sum of exponentials. */
INLINE void two_terms(const Room *m, const Form *g, int kind, int K, int plain, int r, int n, int c, int64_t j, vec *t) {
    const int others = kind == LARGEST ? K : 0;
    UNROLL for (int x = 0; x < 2; x++) t[x] = term(m, g, kind, K, plain, r, n, c + x * VL, j);
    UNROLL_FEW for (int k = 1; k < others; k++)
        UNROLL for (int x = 0; x < 2; x++) t[x] = maximum(t[x], term(m, g, kind, K, plain, k, n, c + x * VL, j));
}

/* The largest scores of a row, by lanes. */
INLINE vec highest(const Room *m, const Form *g, int kind, int K, int plain, int n, int64_t j) {
    const int sums = kind == OWN || kind == SHARED ? K : 1;
    vec high = all((real)-INFINITY), t[2];
    for (int c = 0; c < WIDE; c += 2 * VL)
        UNROLL_FEW for (int r = 0; r < sums; r++) {
            two_terms(m, g, kind, K, plain, r, n, c, j, t);
            high = larger(larger(high, t[0]), t[1]);
        }
    return high;
}

/* Weights of a row relative to exp `base`, added to *sum; returns the largest scores by lanes. */
INLINE vec weigh_row(const Room *m, const Form *g, int kind, int K, int plain, int n, int64_t j, real base, vec *sum) {
    const int sums = kind == OWN || kind == SHARED ? K : 1, pairs = sums / 2 * 2;
    const int X = kind == OWN || kind == SHARED ? 2 : MANY;
    real *restrict w = m->w + n * STRIDE;
    vec high = all((real)-INFINITY), a[MOST];
    UNROLL_FEW for (int r = 0; r < K && kind == FACTORED; r++) a[r] = all(m->a[r][n]);
    for (int c = 0; c < WIDE; c += X * VL) {
        vec p[MANY] = {{0}}, q[4];
        UNROLL_FEW for (int r = 0; r < pairs; r += 2) {
            UNROLL for (int x = 0; x < 2; x++) two_terms(m, g, kind, K, plain, r + x, n, c, j, q + 2 * x);
            UNROLL for (int x = 0; x < 4; x++) high = larger(high, q[x]), q[x] -= base;
            exponentials(4, q);
            UNROLL for (int x = 0; x < 2; x++) p[x] = r ? p[x] + q[x] + q[2 + x] : q[x] + q[2 + x];
        }
        if (pairs < sums) {
            UNROLL for (int x = 0; x < X; x += 2) two_terms(m, g, kind, K, plain, pairs, n, c + x * VL, j, q + x);
            UNROLL for (int x = 0; x < X; x++) high = larger(high, q[x]), q[x] -= base;
            exponentials(X, q);
            UNROLL for (int x = 0; x < X; x++) p[x] = pairs ? p[x] + q[x] : q[x];
        }
        UNROLL for (int x = 0; x < X; x++) {
            if (kind == FACTORED) p[x] *= factors(m, K, a, j + c + x * VL);
            *sum += p[x];
            if (g->dropped) p[x] = kept(p[x], m->keep + n * WIDE + c + x * VL);
        }
        UNROLL for (int x = 0; x < X; x += 2)
            if (PAIRS && g->low) store(w + (c + x * VL) / 2, rounded(p[x], p[x + 1]));
            else store(w + c + x * VL, p[x]), store(w + c + (x + 1) * VL, p[x + 1]);
    }
    return high;
}

/* Weights of a tile as inputs of `gather`, not yet divided by their sum; o is the previous result of `gather`.  A row whose
   maximum changes is computed again. */
INLINE void weigh_rows(const Room *room, const Form *form, int kind, int K, int plain, real *tops, real *totals, int64_t j, int count, real *o, long width) {
    const Room own_room = *room, *m = &own_room; /* copies, which no store can change */
    const Form own_form = *form, *g = &own_form;
    for (int n = 0; n < count; n++) {
        vec sum = load(totals + n * VL), before = sum, high;
        int again = tops[n] == (real)-INFINITY;
        if (again) high = highest(m, g, kind, K, plain, n, j);
        else high = weigh_row(m, g, kind, K, plain, n, j, tops[n], &sum);
        if (any(high > all(tops[n] + SLACK))) {
            const real next = largest(high), less = (real)exp(tops[n] - next);
            before *= all(less);
            for (long e = 0; e < width; e += VL) store(o + n * width + e, load(o + n * width + e) * all(less));
            tops[n] = next;
            again = 1;
        }
        if (again) {
            sum = before;
            weigh_row(m, g, kind, K, plain, n, j, tops[n] == (real)-INFINITY ? 0 : tops[n], &sum);
        }
        store(totals + n * VL, sum);
    }
}

/* Sums over rows in a backward pass. */
typedef struct {
    const real *top, *inverse, *delta;
    real *rows;                      /* (count, K) of row terms, added to, or null */
    double *coef;                    /* (K), or null */
    real scale;                      /* of dropout */
    int cols, pairs;                 /* whether gradients of column terms and of pairs are needed */
} Sums;

/* w contains gradients of the dropped weights, and is replaced by the weights; maps by their gradients; sums are added to. */
INLINE void spread_rows(const Room *room, const Form *form, int kind, int K, int plain, const Sums *given, int64_t j, int count) {
    const Room own_room = *room, *m = &own_room; /* copies, which no store can change */
    const Form own_form = *form, *g = &own_form;
    const Sums own_sums = *given, *s = &own_sums;
    const int several = kind == OWN || kind == SHARED, own = several || kind == LARGEST ? K : 1, terms = !plain || kind == FACTORED;
    const int pairs = several ? K / 2 * 2 : 0, factored = kind == FACTORED && s->cols ? K : 0;
    const int X = several || kind == LARGEST ? 2 : MANY;
    doubles coefs[MOST];
    vec shares[MOST][WIDE / VL]; /* of column terms, not yet multiplied by the factors of a component */
    UNROLL_FEW for (int r = 0; r < K; r++) coefs[r] = (doubles){0};
    UNROLL_FEW for (int r = 0; r < factored; r++) memset(shares[r], 0, sizeof shares[r]);
    for (int n = 0; n < count; n++) {
        const vec top = all(s->top[n]), inverse = all(s->inverse[n]), delta = all(s->delta[n]), scale = all(s->scale);
        vec sums[MOST], products[MOST], a[MOST];
        UNROLL_FEW for (int r = 0; r < K; r++) sums[r] = products[r] = all(0), a[r] = kind == FACTORED ? all(m->a[r][n] * s->inverse[n]) : all(0);
        for (int c = 0; c < WIDE; c += X * VL) {
            vec t[MOST * MANY], best[MANY], p[MANY];
            UNROLL_FEW for (int r = 0; r < own; r++)
                UNROLL for (int x = 0; x < X; x++) t[r * X + x] = term(m, g, kind, K, plain, r, n, c + x * VL, j) - top;
            if (kind == LARGEST) {
                UNROLL for (int x = 0; x < X; x++) best[x] = t[x];
                UNROLL_FEW for (int r = 1; r < K; r++)
                    UNROLL for (int x = 0; x < X; x++) best[x] = larger(best[x], t[r * X + x]);
                UNROLL for (int x = 0; x < X; x++) p[x] = best[x];
                exponentials(2, p);
            } else {
                UNROLL_FEW for (int r = 0; r < pairs; r += 2) exponentials(4, t + r * X);
                if (pairs < own) exponentials(X, t + pairs * X);
            }
            UNROLL for (int x = 0; x < X; x++) {
                const int here = c + x * VL, at = n * STRIDE + here;
                vec dp = load(m->w + at);
                if (kind == LARGEST) p[x] *= inverse;
                else {
                    UNROLL_FEW for (int r = 0; r < own && kind != FACTORED; r++) t[r * X + x] *= inverse;
                    p[x] = t[x];
                    UNROLL_FEW for (int r = 1; r < own; r++) p[x] += t[r * X + x];
                    if (kind == FACTORED) p[x] *= factors(m, K, a, j + here);
                }
                vec dropped = p[x];
                if (g->dropped) {
                    dropped = kept(dropped * scale, m->keep + n * WIDE + here);
                    dp = kept(dp * scale, m->keep + n * WIDE + here);
                }
                store(m->w + at, dropped);
                const vec rest = dp - delta, dl = p[x] * rest;
                if (!plain && s->pairs) store(m->dl + at, dl);
                if (kind == SUMMED) {
                    UNROLL_FEW for (int r = 0; r < K; r++) {
                        products[r] += dl * load(g->maps[r] + at);
                        store(m->sums[r] + at, load(m->sums[r] + at) + dl * all(g->coef[r]));
                    }
                } else if (kind == FACTORED) {
                    const vec mine = t[x] * rest;
                    UNROLL_FEW for (int r = 0; r < K; r++) {
                        if (s->cols) shares[r][here / VL] += mine * a[r];
                        sums[r] += mine * load(m->factor[r] + j + here);
                    }
                    store(g->maps[0] + at, dl);
                } else {
                    vint left = (vint)(all(1) == all(1));
                    vec shared = all(0);
                    UNROLL_FEW for (int r = 0; r < K; r++) {
                        vec mine = several ? t[r * X + x] * rest : dl;
                        if (kind == LARGEST) { /* the first maximum gets the gradient */
                            const vint first = r < K - 1 ? (vint)(t[r * X + x] == best[x]) & left : left;
                            mine = (vec)((vint)dl & first);
                            left &= ~first;
                        }
                        if (s->cols) store(m->grad_cols[r] + here, load(m->grad_cols[r] + here) + mine);
                        if (terms) sums[r] += mine;
                        if (!plain && g->coef) {
                            products[r] += mine * load(g->maps[g->shared ? 0 : r] + at);
                            mine *= all(g->coef[r]);
                        }
                        if (g->shared) shared += mine;
                        else store(g->maps[r] + at, mine);
                    }
                    if (g->shared) store(g->maps[0] + at, shared);
                }
            }
        }
        UNROLL_FEW for (int r = 0; r < K; r++)
            if (s->coef) coefs[r] += __builtin_convertvector(products[r], doubles);
        for (int r = 0; terms && s->rows && r < K; r++) s->rows[n * K + r] += added(sums[r]) * (kind == FACTORED ? m->a[r][n] * s->inverse[n] : 1);
    }
    for (int r = 0; s->coef && r < K; r++) s->coef[r] += (double)g->scale * sum_of(coefs[r]);
    for (int r = 0; r < factored; r++)
        for (int c = 0; c < WIDE; c += VL) store(m->grad_cols[r] + c, load(m->grad_cols[r] + c) + shares[r][c / VL] * load(m->factor[r] + j + c));
}

/* Two components or maps are compiled separately; the papers' forms also without additional terms. */
#ifdef DOUBLE
#define FORMS_OF_TWO(pass)
#else
#define FORMS_OF_TWO(pass)                                       \
    if (g->K == 2 || g->kind == ONE) switch (2 * g->kind + g->plain) { \
        case 2 * ONE + 1: pass(ONE, 1, 1); return;               \
        case 2 * OWN + 1: pass(OWN, 2, 1); return;               \
        case 2 * OWN: pass(OWN, 2, 0); return;                   \
        case 2 * SHARED:                                         \
        case 2 * SHARED + 1: pass(SHARED, 2, 0); return;         \
        case 2 * LARGEST + 1: pass(LARGEST, 2, 1); return;       \
        case 2 * FACTORED + 1: pass(FACTORED, 2, 1); return;     \
        case 2 * SUMMED + 1: pass(SUMMED, 2, 1); return;         \
        default: break;                                          \
        }
#endif
#define EVERY_FORM(pass)                               \
    FORMS_OF_TWO(pass)                                 \
    switch (g->kind) {                                 \
    case ONE: pass(ONE, 1, 0); break;                  \
    case OWN: pass(OWN, g->K, 0); break;               \
    case SHARED: pass(SHARED, g->K, 0); break;         \
    case LARGEST: pass(LARGEST, g->K, 0); break;       \
    case FACTORED: pass(FACTORED, g->K, 0); break;     \
    default: pass(SUMMED, g->K, 0);                    \
    }

static void weigh(Room *m, const Form *g, real *tops, real *totals, int64_t j, int count, real *o, long width) {
#define PASS(kind, K, plain) weigh_rows(m, g, kind, K, plain, tops, totals, j, count, o, width)
    EVERY_FORM(PASS)
#undef PASS
}

static void spread(Room *m, const Form *g, const Sums *s, int64_t j, int count) {
#define PASS(kind, K, plain) spread_rows(m, g, kind, K, plain, s, j, count)
    EVERY_FORM(PASS)
#undef PASS
}

#include "mixing.h"

/* ---- forward and backward --------------------------------------------------------------------------------------------------- */

static void make_maps(Room *m, const Call *f, int64_t b, int64_t i, int64_t j, int count, int cols, int height, int64_t tile) {
    for (int r = 0; r < f->maps; r++) {
        scores(f, m->query[f->common ? r : 0], m->panels[r] + tile * WIDE * entries(f, f->size), f->size, m->maps[r], height);
        for (int at = 0; low(f) && (f->common || f->kind == POWER) && at < count * STRIDE; at += VL) store(m->maps[r] + at, load(m->maps[r] + at) * all((real)f->scale));
    }
    if (f->noise) add_noise(m, f, b, i, j, count, cols);
    if (f->kind == LAYERS) mix(m, f, count);
    if (f->kind == POWER) power_of_map(m, f, count);
}

static void fill_queries(Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int count) {
    const int64_t *s = f->query_strides;
    for (int r = 0; r < (f->common ? f->maps : 1); r++) {
        const real *rows = place(f, f->query, b * s[0] + (f->common ? r : h) * s[1] + i * s[2]);
        fill(f, m->query[r], rows, s[2], count, f->size, (real)f->scale);
        if (m->queries[r] != m->query[r]) fill_pairs(f, m->queries[r], rows, s[2], count, f->size);
    }
}

/* Write rows to a tensor that may be bfloat16. */
static void put(const Call *f, real *to, int64_t at, long stride, const real *from, long full, int count, long size, real scale) {
    for (int n = 0; n < count; n++) {
        const real *restrict row = from + n * full;
        uint16_t *restrict rounded_row = (uint16_t *)to + at + n * stride;
        real *restrict there = to + at + n * stride;
        for (long e = 0; low(f) && e < size; e++) rounded_row[e] = nearest(scale * row[e]);
        for (long e = 0; !low(f) && e < size; e++) there[e] = scale * row[e];
    }
}

INLINE int needed(const Call *f, int64_t b, int64_t i) { return !f->query_mask || f->query_mask[b * f->query_mask_strides[0] + i]; }

/* One past the last key that a query before `row` sees. */
INLINE int64_t last_key(const Room *m, const Call *f, int64_t row) {
    const int64_t seen = row + f->cols - f->rows;
    return f->causal && seen < m->length ? seen : m->length;
}

/* Items are (owner, tile of queries). */
int NAMED(tiles_forward)(const Call *f, int64_t from, int64_t to) {
    const int64_t H = f->heads, N = f->rows, L = f->cols, E = f->size, V = upto(f->value_size, 16), tiles = (N + TALL - 1) / TALL;
    const int64_t *ks = f->key_strides, *vs = f->value_strides, *os = f->out_strides;
    const int heads = f->common ? (int)H : 1;
    Room room = {0}, *m = &room;
    if (!room_make(m, f, 0, (size_t)heads)) return 1;
    Shapes shapes;
    if (matrices(f)) matrices_start(&shapes);
    int64_t owner = -1, packed = -1, copied = -1;
    for (int64_t item = from; item < to; item++) {
        const int64_t z = item / tiles, b = f->common ? z : z / H, h = f->common ? 0 : z % H, i = item % tiles * TALL;
        const int64_t key_head = b * f->key_heads + h * f->key_heads / H, value_head = b * f->value_heads + h * f->value_heads / H;
        const int count = least(N - i, TALL), height = height_of(f, count);
        if (z != owner) columns(m, f, b, h, 0, upto(L, WIDE)), divide_columns(m, f, 0, upto(L, WIDE));
        owner = z;
        row_terms(m, f, b, h, i, count);
        for (int64_t j = 0; j < m->length && key_head != packed; j += WIDE)
            for (int r = 0; r < f->maps; r++)
                pack(f, m->panels[r] + j * entries(f, E), place(f, f->key, b * ks[0] + (key_head - b * f->key_heads) * ks[1] + r * ks[2] + j * ks[3]), ks[3],
                     least(L - j, WIDE), E);
        packed = key_head;
        for (int64_t v = 0; v < (f->common ? f->value_heads : 1) && value_head != copied; v++)
            copy_rows(f, m->values + v * upto(L, WIDE) * V, V, place(f, f->value, b * vs[0] + (value_head - b * f->value_heads + v) * vs[1]), vs[2],
                      (int)m->length, f->value_size);
        copied = value_head;
        fill_queries(m, f, b, h, i, count);
        for (int n = 0; n < heads * TALL; n++) m->top[n] = (real)-INFINITY;
        memset(m->total, 0, sizeof(real) * (size_t)(heads * TALL * VL));
        memset(m->out, 0, sizeof(real) * (size_t)(heads * TALL * V));
        int some = 0;
        for (int n = 0; n < count; n++) some |= needed(f, b, i + n);
        const int64_t stop = last_key(m, f, i + count);
        for (int64_t j = 0; some && j < stop; j += WIDE) {
            const int cols = least(L - j, WIDE);
            make_maps(m, f, b, i, j, count, cols, height, j / WIDE);
            for (int x = 0; x < heads; x++) {
                const int pairs = pair_terms(m, f, b, h + x, i, j, count, cols);
                const Form form = form_of(m, f, h + x, pairs);
                real *o = m->out + x * TALL * V;
                if (f->draw) keep_pairs(m, f, b, h + x, i, j, count);
                weigh(m, &form, m->top + x * TALL, m->total + x * TALL * VL, j, count, o, V);
                const real *values = m->values + (x * (f->common ? f->value_heads : 0) / H * upto(L, WIDE) + (low(f) ? j / 2 : j)) * V;
                gather(f, m->w, values, V, o, height, least(stop - j, WIDE));
            }
        }
        for (int x = 0; x < heads; x++)
            for (int n = 0; n < count; n++) {
                const int64_t at = (b * H + h + x) * N + i + n;
                const real total = needed(f, b, i + n) ? added(load(m->total + (x * TALL + n) * VL)) : 0, top = m->top[x * TALL + n];
                const real inverse = total == 0 ? 0 : 1 / total, factor = inverse * dropout_scale(f);
                if (total == 0) memset(m->out + (x * TALL + n) * V, 0, sizeof(real) * (size_t)V);
                f->top[at] = top == (real)-INFINITY ? 0 : top;
                f->inverse[at] = inverse;
                put(f, f->out, b * os[0] + (h + x) * os[1] + (i + n) * os[2], 0, m->out + (x * TALL + n) * V, V, 1, f->value_size, factor);
            }
    }
    if (matrices(f)) matrices_end(&shapes);
    free(m->block);
    return 0;
}

/* Elements e, e + 1, ... of a row. */
INLINE vec elements(const Call *f, const real *row, int64_t e) {
    if (!low(f)) return load(row + e);
    vshort some;
    memcpy(&some, place(f, row, e), sizeof some);
    return (vec)(__builtin_convertvector(some, vint) << 16);
}

/* x . y, and whether an element of x is not 0. */
static double dot(const Call *f, const real *x, const real *y, int64_t size, int *some) {
    doubles sums = {0};
    vint found = {0};
    int64_t e = 0;
    for (; e + VL <= size; e += VL) {
        const vec a = elements(f, x, e);
        sums += __builtin_convertvector(a, doubles) * __builtin_convertvector(elements(f, y, e), doubles);
        found |= (vint)(a != all(0));
    }
    double sum = sum_of(sums);
    *some = any(found);
    for (; e < size; e++) {
        const real a = low(f) ? number(((const uint16_t *)x)[e]) : x[e], b = low(f) ? number(((const uint16_t *)y)[e]) : y[e];
        *some |= a != 0;
        sum += (double)a * (double)b;
    }
    return sum;
}

/* delta = grad_out . out of a head's rows, and which tiles of queries have a gradient: not those whose weights are all 0. */
static void deltas(const Call *f, int64_t b, int64_t h, real *restrict delta, uint8_t *restrict wanted) {
    const int64_t gs = f->grad_strides[2], os = f->out_strides[2], rows = f->rows, size = f->value_size;
    const real *grads = place(f, f->grad_out, b * f->grad_strides[0] + h * f->grad_strides[1]);
    const real *outs = place(f, f->out, b * f->out_strides[0] + h * f->out_strides[1]);
    const real *inverse = f->inverse + (b * f->heads + h) * rows;
    for (int64_t i = 0; i < rows; i += TALL) {
        int wants = 0;
        for (int64_t n = i; n < rows && n < i + TALL; n++) {
            const real *g = place(f, grads, n * gs), *o = place(f, outs, n * os);
            int some;
            expect_row(f, g, gs, size);
            expect_row(f, o, os, size);
            delta[n] = (real)dot(f, g, o, size, &some);
            wants |= some && inverse[n] != 0;
        }
        wanted[i / TALL] = (uint8_t)wants;
    }
}

static void add_bias(const Room *m, const Call *f, int64_t b, int64_t h, int64_t i, int64_t j, int count, int cols) {
    const int64_t *s = f->grad_bias_strides;
    for (int n = 0; n < count; n++) {
        real *to = f->grad_bias + b * s[0] + h * s[1] + (i + n) * s[2] + j * s[3];
        for (int c = 0; c < cols; c++) to[c * s[3]] += m->dl[n * STRIDE + c];
    }
}

/* Tiles of keys `first`, `first` + `step`, ... of the heads [from, to) of a sample, or of all heads that share maps.  Keys,
   values and column terms belong only to these heads; gradients of queries and of row terms are this job's. */
int NAMED(tiles_backward)(const Call *f, int64_t b, int64_t from, int64_t to, int64_t first, int64_t step, int64_t slot) {
    const int64_t H = f->heads, N = f->rows, L = f->cols, E = f->size, K = f->components, R = f->maps;
    const int64_t full = upto(E, 16), V = upto(f->value_size, 16), rows = upto(N, TALL), offset = L - N;
    const int64_t *ks = f->key_strides, *vs = f->value_strides, *gs = f->grad_strides, *qs = f->grad_query_strides;
    const int64_t *gk = f->grad_key_strides, *gv = f->grad_value_strides;
    const int heads = f->common ? (int)H : 1, held = f->common ? (int)f->value_heads : 1;
    const int64_t slots = slot * f->batch; /* gradients that jobs share are summed later */
    const real scale = low(f) ? (real)f->scale : 1; /* of queries, whose scale is applied already or not */
    Room room = {0}, *m = &room;
    if (!room_make(m, f, 1, (size_t)(to - from))) return 1;
    Shapes shapes;
    if (matrices(f)) matrices_start(&shapes);
    for (int64_t h = from; h < to; h++) deltas(f, b, h, m->delta + (h - from) * rows, m->wanted + (h - from) * rows / TALL);
    const int keeps = kept_tiles(f, 1, (size_t)(to - from)) > 1;
    real *const query = m->query[0], *const turned = m->queries[0], *const here = m->here, *const there = m->there;
    for (int64_t t = first; t * WIDE < L; t += step) {
        const int64_t j = t * WIDE;
        const int cols = least(L - j, WIDE);
        int64_t packed = -1, copied = -1, termed = -1;
        for (int64_t h = from; h < to; h += heads) {
            const int64_t key_head = h * f->key_heads / H, value_head = h * f->value_heads / H, col_head = h * f->col_heads / H;
            const int last = h + heads >= to; /* sums over heads are then written */
            columns(m, f, b, h, j, j + WIDE);
            if (j >= m->length) break; /* gradients are initially zero */
            divide_columns(m, f, j, j + WIDE);
            for (int r = 0; r < R && key_head != packed; r++) {
                const real *keys = place(f, f->key, b * ks[0] + key_head * ks[1] + r * ks[2] + j * ks[3]);
                pack(f, m->panels[r], keys, ks[3], cols, E);
                copy_rows(f, m->key_rows[r], full, keys, ks[3], cols, E);
                memset(m->grad_keys[r], 0, sizeof(real) * (size_t)(WIDE * full));
            }
            packed = key_head;
            for (int v = 0; v < held && value_head != copied; v++)
                pack(f, m->values + v * WIDE * V, place(f, f->value, b * vs[0] + (value_head + v) * vs[1] + j * vs[2]), vs[2], cols, f->value_size);
            if (value_head != copied) memset(m->grad_values, 0, sizeof(real) * (size_t)(held * WIDE * V));
            copied = value_head;
            for (int64_t r = 0; r < K && col_head != termed; r++) memset(m->grad_cols[r], 0, sizeof(real) * WIDE);
            termed = col_head;
            const int64_t start = f->causal && j - offset > 0 ? (j - offset) / TALL * TALL : 0;
            for (int64_t i = start; i < N; i += TALL) {
                const int count = least(N - i, TALL), height = height_of(f, count), seen = least(last_key(m, f, i + count) - j, WIDE);
                int some = 0;
                for (int x = 0; x < heads; x++) some |= m->wanted[((h - from + x) * rows + i) / TALL];
                if (!some) continue;
                if (keeps) {
                    const size_t kept = (size_t)(((h - from) * rows + i) / TALL);
                    m->query[0] = query + kept * tile_size(f, E, 0), m->queries[0] = turned + kept * tile_size(f, E, 1);
                    m->here = here + kept * tile_size(f, f->value_size, 0), m->there = there + kept * tile_size(f, f->value_size, 1);
                }
                row_terms(m, f, b, h, i, count);
                if (!keeps || t == first) fill_queries(m, f, b, h, i, count);
                make_maps(m, f, b, i, j, count, cols, height, 0);
                for (int64_t r = 0; r < R && f->common; r++) memset(m->sums[r], 0, sizeof(real) * TALL * STRIDE);
                for (int x = 0; x < heads; x++) {
                    const int64_t at = (b * H + h + x) * N + i, v = f->common ? x * f->value_heads / H : 0;
                    const int pairs = pair_terms(m, f, b, h + x, i, j, count, cols);
                    const Form form = form_of(m, f, h + x, pairs);
                    const real *grads = place(f, f->grad_out, b * gs[0] + (h + x) * gs[1] + i * gs[2]);
                    if (!keeps || t == first) {
                        fill(f, m->here, grads, gs[2], count, f->value_size, 1);
                        if (f->grad_value) fill_pairs(f, m->there, grads, gs[2], count, f->value_size);
                    }
                    scores(f, m->here, m->values + v * WIDE * V, f->value_size, m->w, height);
                    if (f->draw) keep_pairs(m, f, b, h + x, i, j, count);
                    const Sums sums = {
                        .top = f->top + at, .inverse = f->inverse + at, .delta = m->delta + (h - from + x) * rows + i, .scale = dropout_scale(f),
                        .rows = f->grad_row ? f->grad_row + (slots * H * N + at) * K : 0,
                        .coef = f->grad_coef ? f->grad_coef + ((slots + b) * H + h + x) * K : 0,
                        .cols = f->grad_col != 0, .pairs = f->grad_bias != 0,
                    };
                    spread(m, &form, &sums, j, count);
                    if (f->grad_bias) add_bias(m, f, b, h + x, i, j, count, cols);
                    if (f->grad_value) scatter(f, down(m, f, m->w, count), m->there, V, m->grad_values + v * WIDE * V, count);
                }
                if (f->kind == LAYERS) unmix(m, f, count, slots + b);
                if (f->kind == POWER) power_gradient(m, f, count);
                if (f->grad_scale && !f->unit_noise) noise_gradient(m, f, count, cols, f->grad_scale + (slots + b) * R);
                real *const *maps = f->common ? m->sums : m->maps;
                for (int64_t r = 0; r < R && f->grad_key; r++)
                    scatter(f, down(m, f, maps[r], count), m->queries[f->common ? r : 0], full, m->grad_keys[r], count);
                for (int64_t r = 0; r < (f->common ? R : 1) && f->grad_query; r++) {
                    real *restrict to = f->grad_query + slot * f->batch * (f->common ? R : H) * N * E + b * qs[0] + (f->common ? r : h) * qs[1] + i * qs[2];
                    memset(m->grad_queries, 0, sizeof(real) * (size_t)(TALL * full));
                    for (int64_t k = r; k < (f->common ? r + 1 : R); k++) gather(f, across(f, maps[k], count, seen), m->key_rows[k], full, m->grad_queries, height, seen);
                    for (int n = 0; n < count; n++) {
                        const real *row = m->grad_queries + n * full;
                        int64_t e = 0;
                        for (; e + VL <= E; e += VL) store(to + n * qs[2] + e, load(to + n * qs[2] + e) + all((real)f->scale) * load(row + e));
                        for (; e < E; e++) to[n * qs[2] + e] += (real)f->scale * row[e];
                    }
                }
            }
            if (f->grad_key && (last || (h + heads) * f->key_heads / H != key_head))
                for (int64_t r = 0; r < R; r++)
                    put(f, f->grad_key, b * gk[0] + key_head * gk[1] + r * gk[2] + j * gk[3], gk[3], rows_of(f, m->grad_keys[r], full, m->key_rows[r]), full, cols, E, scale);
            if (f->grad_value && (last || (h + heads) * f->value_heads / H != value_head))
                for (int v = 0; v < held; v++)
                    put(f, f->grad_value, b * gv[0] + (value_head + v) * gv[1] + j * gv[2], gv[2], rows_of(f, m->grad_values + v * WIDE * V, V, m->values + v * WIDE * V), V, cols, f->value_size, 1);
            if (f->grad_col && (last || (h + heads) * f->col_heads / H != col_head))
                for (int64_t r = 0; r < K; r++) {
                    real *restrict at = f->grad_col + ((b * f->col_heads + col_head) * K + r) * L + j;
                    memcpy(at, m->grad_cols[r], sizeof(real) * (size_t)cols);
                }
        }
    }
    if (matrices(f)) matrices_end(&shapes);
    free(m->block);
    return 0;
}

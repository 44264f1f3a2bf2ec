/* What lies between the matrix products of a block of attention: one pass over rows that stay in the cache.

   Included once per type.  With score maps S_r, coefficients c_r, row terms a_ir and column terms b_rj:

       t_r = c_r S_r + a_r + b_r + bias,  -inf where masked
       SOFT  weights = softmax_j(log sum_r exp t_r)
       HARD  weights = softmax_j(max_r t_r), the first largest wins
       SUM   weights = softmax_j(sum_r c_r S_r + bias)

   and the dropped weights carry the factor of dropout.  A row that may see nothing gets zeros. */

#define NAME(x) JOIN(x, REAL)
#define JOIN(x, type) JOIN_(x, type)
#define JOIN_(x, type) x##_##type

/* x[j] *= keep ? scale : 0 for the pairs of one row; the factors go to `mult` unless it is null. */
INLINE void NAME(drop_row)(REAL *restrict x, int64_t cols, const Block *b, uint32_t row, uint32_t head, uint32_t sample,
                           REAL *restrict mult) {
    uint32_t words[4 * CHUNK];
    int16_t lanes[8 * CHUNK];
    const REAL scale = (REAL)b->scale;
    const int32_t threshold = b->threshold;
    for (int64_t g = 0; 8 * g < cols; g += CHUNK) {
        int64_t left = (cols + 7) / 8 - g, to;
        int count = (int)(left < CHUNK ? left : CHUNK);
        philox_words(row, (uint32_t)g, head, sample, b->k0, b->k1, count, words);
        memcpy(lanes, words, 16 * (size_t)count);
        to = cols - 8 * g < 8 * count ? cols - 8 * g : 8 * count;
        REAL *restrict at = x + 8 * g;
        if (mult) {
            REAL *restrict factor = mult + 8 * g;
            for (int64_t n = 0; n < to; n++) {
                factor[n] = lanes[n] >= threshold ? scale : (REAL)0;
                at[n] *= factor[n];
            }
        } else
            for (int64_t n = 0; n < to; n++) at[n] *= lanes[n] >= threshold ? scale : (REAL)0;
    }
}

/* Additive terms of one row: the bias, and -inf where the row may not look. */
static void NAME(mask_row)(REAL *restrict x, const Block *b, int64_t sample, int64_t head, int64_t i) {
    const int64_t cols = b->cols;
    if (b->bias) {
        const REAL *at = (const REAL *)b->bias + sample * b->bias_strides[0] + head * b->bias_strides[1] + i * b->bias_strides[2];
        const int64_t step = b->bias_strides[3];
        for (int64_t j = 0; j < cols; j++) x[j] = at[j * step];
    } else
        for (int64_t j = 0; j < cols; j++) x[j] = 0;
    if (b->key_mask) {
        const uint8_t *at = b->key_mask + sample * b->key_stride;
        for (int64_t j = 0; j < cols; j++) x[j] = at[j] ? x[j] : (REAL)-INFINITY;
    }
    if (b->pair_mask) {
        const uint8_t *at = b->pair_mask + sample * b->pair_strides[0] + head * b->pair_strides[1] + i * b->pair_strides[2];
        const int64_t step = b->pair_strides[3];
        for (int64_t j = 0; j < cols; j++) x[j] = at[j * step] ? x[j] : (REAL)-INFINITY;
    }
    if (b->causal) {
        int64_t last = i + b->causal_offset + 1;
        for (int64_t j = last < 0 ? 0 : last; j < cols; j++) x[j] = (REAL)-INFINITY;
    }
}

/* The rows of one query: scores t_r, or their exponentials, their reduction, and what they sum to.

   Where components share their map without coefficients, exp t_r = exp(S + a + b) A_r B_r with a = max_r a_r, b_j = max_r b_rj:
   one exponential for all of them, unless the components of a row and those of a column differ by more than FAR. */
typedef struct {
    REAL *t[MOST_MAPS], *factors[MOST_MAPS]; /* B_r of the head of which `head` is the number */
    REAL *mask, *w, *most, *mult, *rest, *unused, *summit, inverse, spread, own[MOST_MAPS]; /* b; A_r */
    int64_t head;
    int factored;
} NAME(Row);

static const REAL NAME(FAR) = 40;

/* Fill b_j and B_rj of a head. */
static void NAME(factor_columns)(NAME(Row) *row, const Block *b, int64_t z) {
    const int64_t cols = b->cols, K = b->components;
    const REAL *beta = (const REAL *)b->col_terms + z * K * b->all_cols;
    REAL *restrict summit = row->summit, spread = 0;
    for (int64_t j = 0; j < cols; j++) summit[j] = beta[j];
    for (int64_t r = 1; r < K; r++)
        for (int64_t j = 0; j < cols; j++) summit[j] = beta[r * b->all_cols + j] > summit[j] ? beta[r * b->all_cols + j] : summit[j];
    for (int64_t r = 0; r < K; r++) {
        REAL *restrict factor = row->factors[r];
        for (int64_t j = 0; j < cols; j++) {
            REAL below = summit[j] == (REAL)-INFINITY ? 0 : summit[j] - beta[r * b->all_cols + j];
            spread = below > spread ? below : spread;
            factor[j] = NAME(exponential)(-below);
        }
    }
    row->spread = spread;
    row->head = z;
}

/* A_r of a row, and whether one exponential serves all its components. */
INLINE REAL NAME(factor_row)(NAME(Row) *row, const Block *b, const REAL *a, int64_t z) {
    const int64_t K = b->components;
    REAL top = a[0], least = a[0];
    row->factored = 0;
    if (b->kind != SOFT || !b->shared || b->coef || !b->col_terms || K == 1) return 0;
    for (int64_t r = 1; r < K; r++) {
        top = a[r] > top ? a[r] : top;
        least = a[r] < least ? a[r] : least;
    }
    if (row->head != z) NAME(factor_columns)(row, b, z);
    row->factored = top - least < NAME(FAR) || row->spread < NAME(FAR); /* NaN: no */
    for (int64_t r = 0; r < K; r++) row->own[r] = NAME(exponential)(a[r] - top);
    return top;
}

/* Fill t_0 = exp(S + a + b) and the unnormalised weights w = t_0 sum_r A_r B_r. */
INLINE void NAME(weigh_factored)(NAME(Row) *restrict row, const Block *b, const REAL *restrict s, REAL shift) {
    const int64_t cols = b->cols, K = b->components;
    const REAL *restrict mask = row->mask, *restrict summit = row->summit;
    const REAL *restrict first = row->factors[0], *restrict second = row->factors[1], one = row->own[0], two = row->own[1];
    REAL top = (REAL)-INFINITY, total = 0, *restrict t = row->t[0], *restrict w = row->w;
    if (b->masked) {
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < cols; j++) {
            t[j] = s[j] + summit[j] + shift + mask[j];
            top = t[j] > top ? t[j] : top;
        }
    } else {
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < cols; j++) {
            t[j] = s[j] + summit[j] + shift;
            top = t[j] > top ? t[j] : top;
        }
    }
    if (top == (REAL)-INFINITY) top = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < cols; j++) {
        t[j] = NAME(exponential)(t[j] - top);
        w[j] = t[j] * (one * first[j] + two * second[j]);
        total += w[j];
    }
    for (int64_t r = 2; r < K; r++) {
        const REAL *restrict factor = row->factors[r], own = row->own[r];
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < cols; j++) {
            REAL more = t[j] * own * factor[j];
            w[j] += more;
            total += more;
        }
    }
    row->inverse = total == 0 ? 0 : 1 / total;
}

/* Fill t_r (exponentials where SOFT) and the unnormalised weights w, which are t_0 for one component. */
INLINE void NAME(weigh)(NAME(Row) *restrict row, const Block *b, REAL *const *maps, int64_t place, int64_t z, int64_t i) {
    const int64_t cols = b->cols, K = b->kind == SUM ? 1 : b->components, sample = z / b->heads, head = z % b->heads;
    const REAL *coef = b->coef ? (const REAL *)b->coef + head * b->components : 0;
    const REAL *a = b->row_terms ? (const REAL *)b->row_terms + (z * b->all_rows + i) * b->components : 0;
    REAL top = (REAL)-INFINITY, total = 0, *restrict w = row->w;
    if (b->masked) NAME(mask_row)(row->mask, b, sample, head, i);
    row->factored = 0;
    if (a) {
        const REAL shift = NAME(factor_row)(row, b, a, z);
        if (row->factored) {
            NAME(weigh_factored)(row, b, maps[0] + place * cols, shift);
            return;
        }
    }
    for (int64_t r = 0; r < K; r++) {
        const REAL *restrict s = maps[b->shared ? 0 : r] + place * cols;
        const REAL *restrict beta = b->col_terms ? (const REAL *)b->col_terms + (z * b->components + r) * b->all_cols : 0;
        const REAL *restrict mask = row->mask;
        REAL *restrict t = row->t[r], c = coef ? coef[r] : (REAL)1, shift = a ? a[r] : (REAL)0, most = top;
        if (b->kind == SUM) {
            for (int64_t j = 0; j < cols; j++) t[j] = c * s[j];
            for (int64_t g = 1; g < b->components; g++) {
                const REAL *restrict other = maps[g] + place * cols;
                c = coef[g];
                for (int64_t j = 0; j < cols; j++) t[j] += c * other[j];
            }
            c = 1;
            s = t;
        }
        if (beta && b->masked) {
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < cols; j++) {
                t[j] = c * s[j] + beta[j] + shift + mask[j];
                most = t[j] > most ? t[j] : most;
            }
        } else if (beta) {
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < cols; j++) {
                t[j] = c * s[j] + beta[j] + shift;
                most = t[j] > most ? t[j] : most;
            }
        } else if (b->masked) {
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < cols; j++) {
                t[j] = c * s[j] + shift + mask[j];
                most = t[j] > most ? t[j] : most;
            }
        } else {
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < cols; j++) {
                t[j] = c * s[j] + shift;
                most = t[j] > most ? t[j] : most;
            }
        }
        top = most;
    }
    if (top == (REAL)-INFINITY) top = 0;
    if (K == 1) {
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < cols; j++) {
            w[j] = NAME(exponential)(w[j] - top);
            total += w[j];
        }
    } else if (b->kind == HARD) {
        REAL *restrict most = row->most;
        for (int64_t r = 0; r < K; r++) {
            const REAL *restrict t = row->t[r];
            if (r == 0)
                for (int64_t j = 0; j < cols; j++) most[j] = t[j];
            else
                for (int64_t j = 0; j < cols; j++) most[j] = t[j] > most[j] ? t[j] : most[j];
        }
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < cols; j++) {
            w[j] = NAME(exponential)(most[j] - top);
            total += w[j];
        }
    } else {
        REAL *restrict t = row->t[0], *restrict u = row->t[1];
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < cols; j++) {
            t[j] = NAME(exponential)(t[j] - top);
            u[j] = NAME(exponential)(u[j] - top);
            w[j] = t[j] + u[j];
            total += w[j];
        }
        for (int64_t r = 2; r < K; r++) {
            REAL *restrict v = row->t[r];
#pragma omp simd reduction(+ : total)
            for (int64_t j = 0; j < cols; j++) {
                v[j] = NAME(exponential)(v[j] - top);
                w[j] += v[j];
                total += v[j];
            }
        }
    }
    row->inverse = total == 0 ? 0 : 1 / total; /* NaN stays NaN */
}

/* Rows for which the maps have no room of their own. */
static REAL *NAME(room)(NAME(Row) *row, const Block *b) {
    const int64_t cols = b->cols, K = b->kind == SUM ? 1 : b->components;
    const int64_t room = (cols + 15) / 16 * 16; /* every row begins with a cache line */
    REAL *scratch = aligned_alloc(64, ((size_t)(2 * K + 7) * (size_t)room * sizeof(REAL) + 63) / 64 * 64);
    for (int64_t r = 0; r < K; r++) row->t[r] = scratch + (r + 7) * room;
    row->mask = scratch;
    row->w = K == 1 ? row->t[0] : scratch + room;
    row->most = scratch + 2 * room;
    row->mult = scratch + 3 * room;
    row->rest = scratch + 4 * room;
    row->unused = scratch + 5 * room;
    row->summit = scratch + 6 * room;
    for (int64_t r = 0; r < K; r++) row->factors[r] = scratch + (r + 7 + K) * room;
    row->head = -1;
    if (scratch) memset(row->unused, 0, (size_t)cols * sizeof(REAL));
    return scratch;
}

/* Rows [from, to) of the block's (heads, rows), or of its queries where heads have their maps in common: weights into
   `out`, (heads of the block, rows, cols). */
int NAME(rows_forward)(const Block *b, REAL *const *maps, REAL *out, int64_t from, int64_t to) {
    NAME(Row) row;
    const int64_t cols = b->cols;
    REAL *scratch = NAME(room)(&row, b);
    if (!scratch) return 1;
    const int64_t turns = b->common ? b->count : 1;
    for (int64_t unit = from * turns; unit < to * turns; unit++) {
        const int64_t place = b->common ? unit % turns * b->rows + unit / turns : unit;
        const int64_t z = b->first + place / b->rows, i = b->row + place % b->rows;
        NAME(weigh)(&row, b, maps, b->common ? unit / turns : place, z, i);
        REAL *restrict w = out + place * cols, inverse = row.inverse;
        const REAL *restrict found = row.w;
        for (int64_t j = 0; j < cols; j++) w[j] = found[j] * inverse;
        if (b->dropped) NAME(drop_row)(w, cols, b, (uint32_t)i, (uint32_t)(z % b->heads), (uint32_t)b->samples[z / b->heads], 0);
    }
    free(scratch);
    return 0;
}

/* Gradients of rows [from, to).  weights: gets the dropped weights; grad: dP, becomes the gradient of the reduced
   score.  grads: of the maps; SUM and shared maps are added to, the others set (they may be the maps themselves).
   row_grads and coef_grads: (heads of the block, rows, components), set; col_grads: (heads of the block, components, cols),
   added to. */
int NAME(rows_backward)(const Block *b, REAL *const *maps, REAL *weights, REAL *grad, REAL *const *grads, REAL *row_grads,
                        REAL *col_grads, REAL *coef_grads, int64_t from, int64_t to) {
    NAME(Row) row;
    const int64_t cols = b->cols, K = b->kind == SUM ? 1 : b->components;
    REAL *scratch = NAME(room)(&row, b);
    if (!scratch) return 1;
    REAL *restrict mult = row.mult, *restrict rest = row.rest;
    const int64_t turns = b->common ? b->count : 1;
    for (int64_t unit = from * turns; unit < to * turns; unit++) {
        const int64_t place = b->common ? unit % turns * b->rows + unit / turns : unit;
        const int64_t z = b->first + place / b->rows, i = b->row + place % b->rows, at = b->common ? unit / turns : place;
        const REAL *coef = b->coef ? (const REAL *)b->coef + (z % b->heads) * b->components : 0;
        NAME(weigh)(&row, b, maps, at, z, i);
        REAL *restrict p = weights + place * cols, *restrict g = grad + place * cols, inverse = row.inverse, delta;
        const REAL *restrict w = row.w;
        double mass = 0, dot = 0;
        if (b->dropped) {
            NAME(drop_row)(g, cols, b, (uint32_t)i, (uint32_t)(z % b->heads), (uint32_t)b->samples[z / b->heads], mult);
#pragma omp simd reduction(+ : dot, mass)
            for (int64_t j = 0; j < cols; j++) {
                REAL x = w[j] * inverse;
                p[j] = x * mult[j];
                dot += (double)x * (double)g[j];
                mass += x;
            }
        } else {
#pragma omp simd reduction(+ : dot, mass)
            for (int64_t j = 0; j < cols; j++) {
                REAL x = w[j] * inverse;
                p[j] = x;
                dot += (double)x * (double)g[j];
                mass += x;
            }
        }
        delta = mass == 0 ? 0 : (REAL)(dot / mass);
        if (K == 1 || b->kind == HARD)
            for (int64_t j = 0; j < cols; j++) {
                g[j] = w[j] * inverse * (g[j] - delta);
                rest[j] = g[j];
            }
        else /* d l / d t_r = t_r / w, and t_r holds exp(t_r - top) */
            for (int64_t j = 0; j < cols; j++) {
                rest[j] = inverse * (g[j] - delta);
                g[j] = w[j] * rest[j];
            }
        if (b->kind == SUM) {
            for (int64_t r = 0; r < b->components; r++) {
                const REAL *s = maps[r] + at * cols, c = coef[r];
                REAL *to_map = grads[r] + at * cols, sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < cols; j++) {
                    sum += g[j] * s[j];
                    to_map[j] += c * g[j];
                }
                coef_grads[place * b->components + r] = sum;
            }
        } else if (row.factored) { /* one map, which has the gradient of the sum */
            REAL *restrict u = row.t[0];
            for (int64_t j = 0; j < cols; j++) u[j] *= rest[j];
            for (int64_t r = 0; r < K && (row_grads || col_grads); r++) {
                const REAL *restrict factor = row.factors[r], own = row.own[r];
                REAL *restrict to_col = col_grads ? col_grads + ((z - b->first) * K + r) * cols : row.unused, sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < cols; j++) {
                    REAL share = u[j] * own * factor[j];
                    sum += share;
                    to_col[j] += share;
                }
                if (row_grads) row_grads[place * K + r] = sum;
            }
            if (grads[0] != grad) memcpy(grads[0] + at * cols, g, (size_t)cols * sizeof(REAL));
        } else if (K > 1 || b->col_terms || b->row_terms || coef) {
            for (int64_t r = 0; r < K; r++) {
                REAL *restrict t = row.t[r]; double sum = 0, product = 0;
                if (K == 1)
                    for (int64_t j = 0; j < cols; j++) t[j] = rest[j];
                else if (b->kind == HARD) /* the first largest takes the gradient */
                    for (int64_t j = 0; j < cols; j++) {
                        int here = t[j] == row.most[j];
                        t[j] = here ? rest[j] : (REAL)0;
                        rest[j] = here ? (REAL)0 : rest[j];
                    }
                else
                    for (int64_t j = 0; j < cols; j++) t[j] *= rest[j];
                if (row_grads) {
#pragma omp simd reduction(+ : sum)
                    for (int64_t j = 0; j < cols; j++) sum += t[j];
                    row_grads[place * K + r] = (REAL)sum;
                }
                if (col_grads) {
                    REAL *restrict to_col = col_grads + ((z - b->first) * K + r) * cols;
                    for (int64_t j = 0; j < cols; j++) to_col[j] += t[j];
                }
                if (coef) {
                    const REAL *s = maps[b->shared ? 0 : r] + at * cols;
#pragma omp simd reduction(+ : product)
                    for (int64_t j = 0; j < cols; j++) product += t[j] * s[j];
                    coef_grads[place * K + r] = (REAL)product;
                }
            }
            for (int64_t r = 0; r < K && grads[0] != grad; r++) {
                const REAL *restrict t = row.t[r];
                REAL *restrict to_map = grads[b->shared ? 0 : r] + at * cols, c = coef ? coef[r] : (REAL)1;
                if (b->shared && r > 0)
                    for (int64_t j = 0; j < cols; j++) to_map[j] += c * t[j];
                else
                    for (int64_t j = 0; j < cols; j++) to_map[j] = c * t[j];
            }
        } else if (grads[0] != grad)
            memcpy(grads[0] + at * cols, g, (size_t)cols * sizeof(REAL));
    }
    free(scratch);
    return 0;
}

#undef NAME
#undef JOIN
#undef JOIN_

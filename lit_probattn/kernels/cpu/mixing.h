/* Functions of maps and their gradients: noise, one or two layers, powers.  Part of tiles.c. */

static void add_noise(Room *m, const Call *f, int64_t b, int64_t i, int64_t j, int count, int cols) {
    (void)m, (void)f, (void)b, (void)i, (void)j, (void)count, (void)cols;
#ifndef DOUBLE
    const int many = (int)(f->unit_noise ? f->hidden : f->maps);
    noise_tile(m->noise, TALL * STRIDE, STRIDE, many, f->first_row + i, count, j, cols, (uint32_t)f->noise[2 + b], (uint32_t)f->noise[0],
               (uint32_t)f->noise[1]);
    for (int g = 0; g < many; g++)
        for (int n = 0; n < count; n++) {
            real *restrict x = m->noise + (g * TALL + n) * STRIDE, *restrict to = f->unit_noise ? 0 : m->maps[g] + n * STRIDE;
            for (int c = cols; c < WIDE; c++) x[c] = 0;
            for (int c = 0; !f->unit_noise && c < WIDE; c++) to[c] += f->noise_scale[g] * x[c];
        }
#endif
}

static void noise_gradient(const Room *m, const Call *f, int count, int cols, double *to) {
    for (int g = 0; g < f->maps; g++)
        for (int n = 0; n < count; n++) {
            const real *restrict x = m->noise + (g * TALL + n) * STRIDE, *restrict y = m->sums[g] + n * STRIDE;
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int c = 0; c < cols; c++) sum += (double)x[c] * (double)y[c];
            to[g] += sum;
        }
}

/* to[a, b] += x_a . y_b over `rows` rows; a block of sums stays in registers. */
static void outer(const real *const *x, int A, const real *const *y, int B, int rows, double *to) {
    enum { R = 4, C = DOWN == 6 ? 2 : 4 };
    for (int a = 0; a < A; a += R)
        for (int b = 0; b < B; b += C) {
            const real *left[R], *right[C];
            vec sum[R][C];
            UNROLL for (int k = 0; k < R; k++) left[k] = x[a + k < A ? a + k : a];
            UNROLL for (int l = 0; l < C; l++) right[l] = y[b + l < B ? b + l : b];
            UNROLL for (int k = 0; k < R; k++)
                UNROLL for (int l = 0; l < C; l++) sum[k][l] = all(0);
            for (int n = 0; n < rows; n++)
                for (int c = n * STRIDE; c < n * STRIDE + WIDE; c += VL)
                    UNROLL for (int l = 0; l < C; l++) {
                        const vec one = load(right[l] + c);
                        UNROLL for (int k = 0; k < R; k++) sum[k][l] += load(left[k] + c) * one;
                    }
            for (int k = 0; k < R && a + k < A; k++)
                for (int l = 0; l < C && b + l < B; l++) to[(a + k) * B + b + l] += (double)added(sum[k][l]);
        }
}

/* For any widths; and for two global maps and eight units and heads, as in the papers, with unrolled loops. */
#define WIDTHS(name) name##_any
#define DECLARE_WIDTHS(f) const int G = (int)(f)->maps, U = (int)(f)->hidden, H = (int)(f)->heads; (void)H
#define EACH
#include "layers.h"
#undef WIDTHS
#undef DECLARE_WIDTHS
#undef EACH
#ifndef DOUBLE
#define WIDTHS(name) name##_papers
#define DECLARE_WIDTHS(f) enum { G = 2, U = 8, H = 8 }
#define EACH UNROLL
#include "layers.h"
#undef WIDTHS
#undef DECLARE_WIDTHS
#undef EACH
#endif

static void mix(Room *m, const Call *f, int count) {
#ifndef DOUBLE
    if (f->maps == 2 && f->hidden == 8 && f->heads == 8) {
        mix_papers(m, f, count);
        return;
    }
#endif
    mix_any(m, f, count);
}

static void unmix(Room *m, const Call *f, int count, int64_t owner) {
#ifndef DOUBLE
    if (f->maps == 2 && f->hidden == 8 && f->heads == 8) {
        unmix_papers(m, f, count, owner);
        return;
    }
#endif
    unmix_any(m, f, count, owner);
}

/* The logarithm of a power of the map of a head, in m->units[0]. */
static void power_of_map(Room *m, const Call *f, int count) {
    const vec half = all((real)f->degree / 2);
    for (int at = 0; at < count * STRIDE; at += VL) {
        const vec s = load(m->maps[0] + at);
        store(m->units[0] + at, half * natural_log(s * s + all(FLOOR)));
    }
}

/* The gradient of a map from the gradient of its logarithm. */
static void power_gradient(Room *m, const Call *f, int count) {
    const vec degree = all((real)f->degree);
    for (int at = 0; at < count * STRIDE; at += VL) {
        const vec s = load(m->maps[0] + at);
        store(m->maps[0] + at, load(m->units[0] + at) * degree * s / (s * s + all(FLOOR)));
    }
}

/* Maps of heads from those of a sample: noise, one or two layers, their gradients.  Part of tiles.c. */

static void add_noise(Room *m, const Call *f, int64_t b, int64_t i, int64_t j, int count, int cols) {
    (void)m, (void)f, (void)b, (void)i, (void)j, (void)count, (void)cols;
#ifndef DOUBLE
    const int many = (int)(f->kind == LAYERS ? f->hidden : f->maps);
    noise_tile(m->noise, TALL * STRIDE, STRIDE, many, f->first_row + i, count, j, cols, (uint32_t)f->noise[2 + b], (uint32_t)f->noise[0],
               (uint32_t)f->noise[1]);
    for (int g = 0; g < many; g++)
        for (int n = 0; n < count; n++) {
            real *restrict x = m->noise + (g * TALL + n) * STRIDE, *restrict to = m->maps[g] + n * STRIDE;
            for (int c = cols; c < WIDE; c++) x[c] = 0;
            for (int c = 0; f->kind != LAYERS && c < WIDE; c++) to[c] += f->noise_scale[g] * x[c];
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

/* Units of the first layer at one place, before the ReLU. */
INLINE void first_layer(const Room *m, const Call *f, int G, int U, int at, const vec *s, vec *z) {
    for (int u = 0; u < U; u++) {
        z[u] = all(f->first_bias ? f->first_bias[u] : 0);
        if (f->noise) z[u] += all(f->noise_scale[u]) * load(m->noise + u * TALL * STRIDE + at);
        for (int g = 0; g < G; g++) z[u] += all(f->first[u * G + g]) * s[g];
    }
}

INLINE void mix_rows(Room *m, const Call *f, int G, int U, int H, int count) {
    for (int n = 0; n < count; n++)
        for (int c = 0; c < WIDE; c += VL) {
            const int at = n * STRIDE + c;
            vec s[MOST], z[MOST];
            UNROLL for (int g = 0; g < G; g++) s[g] = load(m->maps[g] + at);
            first_layer(m, f, G, U, at, s, z);
            for (int u = 0; f->second && u < U; u++) z[u] = larger(z[u], all(0));
            for (int h = 0; h < H; h++) {
                vec t = f->second ? all(0) : z[h];
                for (int u = 0; f->second && u < U; u++) t += all(f->second[h * U + u]) * z[u];
                store(m->units[h] + at, t);
            }
        }
}

/* to[a, b] += x_a . y_b over `rows` rows. */
static void outer(const real *const *x, int A, const real *const *y, int B, int rows, double *to) {
    for (int a = 0; a < A; a += 4)
        for (int b = 0; b < B; b += 4) {
            vec sum[4][4];
            UNROLL for (int k = 0; k < 4; k++)
                UNROLL for (int l = 0; l < 4; l++) sum[k][l] = all(0);
            for (int n = 0; n < rows; n++)
                for (int c = 0; c < WIDE; c += VL) {
                    vec left[4], right[4];
                    UNROLL for (int k = 0; k < 4; k++) left[k] = load(x[a + k < A ? a + k : a] + n * STRIDE + c);
                    UNROLL for (int k = 0; k < 4; k++) right[k] = load(y[b + k < B ? b + k : b] + n * STRIDE + c);
                    UNROLL for (int k = 0; k < 4; k++)
                        UNROLL for (int l = 0; l < 4; l++) sum[k][l] += left[k] * right[l];
                }
            for (int k = 0; k < 4 && a + k < A; k++)
                for (int l = 0; l < 4 && b + l < B; l++) to[(a + k) * B + b + l] += (double)added(sum[k][l]);
        }
}

/* Gradients of the maps, in m->sums, and of the layers, from those of the heads' scores, in m->units. */
INLINE void unmix_rows(Room *m, const Call *f, int G, int U, int H, int count, int64_t owner) {
    enum { ROWS = 4 };
    static _Thread_local real room[2 * MOST][ROWS * STRIDE] __attribute__((aligned(64)));
    const real *places[2 * MOST], *heads[MOST], *maps[MOST], *noise[MOST];
    for (int u = 0; u < 2 * MOST; u++) places[u] = room[u];
    for (int n = 0; n < count; n += ROWS) {
        const int rows = least(count - n, ROWS);
        for (int x = 0; x < rows; x++)
            for (int c = 0; c < WIDE; c += VL) {
                const int at = (n + x) * STRIDE + c, here = x * STRIDE + c;
                vec s[MOST], z[MOST], d[MOST];
                UNROLL for (int g = 0; g < G; g++) s[g] = load(m->maps[g] + at);
                first_layer(m, f, G, U, at, s, z);
                if (f->second) {
                    for (int u = 0; u < U; u++) d[u] = all(0);
                    for (int h = 0; h < H; h++) {
                        const vec g = load(m->units[h] + at);
                        for (int u = 0; u < U; u++) d[u] += all(f->second[h * U + u]) * g;
                    }
                    for (int u = 0; u < U; u++) {
                        d[u] = (vec)((vint)d[u] & (vint)(z[u] > all(0)));
                        store(room[MOST + u] + here, larger(z[u], all(0)));
                    }
                } else
                    for (int u = 0; u < U; u++) d[u] = load(m->units[u] + at);
                for (int u = 0; u < U; u++) store(room[u] + here, d[u]);
                UNROLL for (int g = 0; g < G; g++) {
                    vec t = all(0);
                    for (int u = 0; u < U; u++) t += all(f->first[u * G + g]) * d[u];
                    store(m->sums[g] + at, t);
                }
            }
        for (int h = 0; h < H; h++) heads[h] = m->units[h] + n * STRIDE;
        for (int g = 0; g < G; g++) maps[g] = m->maps[g] + n * STRIDE;
        for (int u = 0; u < U && f->noise; u++) noise[u] = m->noise + (u * TALL + n) * STRIDE;
        if (f->grad_first) outer(places, U, maps, G, rows, f->grad_first + owner * U * G);
        if (f->grad_second) outer(heads, H, places + MOST, U, rows, f->grad_second + owner * H * U);
        for (int u = 0; u < U; u++) {
            vec plain = all(0);
            for (int x = 0; x < rows && f->grad_first_bias; x++)
                for (int c = 0; c < WIDE; c += VL) plain += load(room[u] + x * STRIDE + c);
            if (f->grad_first_bias) f->grad_first_bias[owner * U + u] += (double)added(plain);
            if (f->grad_scale) outer(places + u, 1, noise + u, 1, rows, f->grad_scale + owner * U + u);
        }
    }
}

/* Two global maps and eight units and heads, as the papers have them, are compiled by themselves. */
#define EVERY_WIDTH(pass)                                                                      \
    const int G = (int)f->maps, U = (int)f->hidden, H = (int)f->heads;                         \
    if (G == 2 && U == 8 && H == 8) pass(2, 8, 8);                                             \
    else pass(G, U, H)

static void mix(Room *m, const Call *f, int count) {
#define PASS(G, U, H) mix_rows(m, f, G, U, H, count)
    EVERY_WIDTH(PASS);
#undef PASS
}

static void unmix(Room *m, const Call *f, int count, int64_t owner) {
#define PASS(G, U, H) unmix_rows(m, f, G, U, H, count, owner)
    EVERY_WIDTH(PASS);
#undef PASS
}

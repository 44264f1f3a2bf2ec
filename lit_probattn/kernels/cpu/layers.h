/* One layer or two between the maps of a sample and the scores of its heads.  mixing.h includes it for any widths, and once
   with constant widths. */

/* Units of the first layer at one element, before the ReLU. */
INLINE void WIDTHS(first_layer)(const Room *m, const Call *f, int at, const vec *s, vec *z) {
    DECLARE_WIDTHS(f);
    EACH for (int u = 0; u < U; u++) {
        z[u] = all(f->first_bias ? f->first_bias[u] : 0);
        if (f->unit_noise) z[u] += all(f->noise_scale[u]) * load(m->noise + u * TALL * STRIDE + at);
        EACH for (int g = 0; g < G; g++) z[u] += all(f->first[u * G + g]) * s[g];
    }
}

static void WIDTHS(mix)(Room *m, const Call *f, int count) {
    DECLARE_WIDTHS(f);
    for (int n = 0; n < count; n++)
        for (int c = 0; c < WIDE; c += VL) {
            const int at = n * STRIDE + c;
            vec s[MOST], z[MOST];
            EACH for (int g = 0; g < G; g++) s[g] = load(m->maps[g] + at);
            WIDTHS(first_layer)(m, f, at, s, z);
            if (f->second) {
                EACH for (int u = 0; u < U; u++) z[u] = larger(all(0), z[u]);
                EACH for (int h = 0; h < H; h++) {
                    vec t = all(0);
                    EACH for (int u = 0; u < U; u++) t += all(f->second[h * U + u]) * z[u];
                    store(m->units[h] + at, t);
                }
            } else
                EACH for (int h = 0; h < H; h++) store(m->units[h] + at, z[h]);
        }
}

/* Gradients of the maps, in m->sums, and of the layers, from the gradients of the heads' scores, in m->units. */
static void WIDTHS(unmix)(Room *m, const Call *f, int count, int64_t owner) {
    DECLARE_WIDTHS(f);
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
                EACH for (int g = 0; g < G; g++) s[g] = load(m->maps[g] + at);
                WIDTHS(first_layer)(m, f, at, s, z);
                if (f->second) {
                    EACH for (int u = 0; u < U; u++) d[u] = all(0);
                    EACH for (int h = 0; h < H; h++) {
                        const vec g = load(m->units[h] + at);
                        EACH for (int u = 0; u < U; u++) d[u] += all(f->second[h * U + u]) * g;
                    }
                    EACH for (int u = 0; u < U; u++) {
                        d[u] = (vec)((vint)d[u] & (vint)(z[u] > all(0)));
                        store(room[MOST + u] + here, larger(all(0), z[u]));
                    }
                } else
                    EACH for (int u = 0; u < U; u++) d[u] = load(m->units[u] + at);
                EACH for (int u = 0; u < U; u++) store(room[u] + here, d[u]);
                EACH for (int g = 0; g < G; g++) {
                    vec t = all(0);
                    EACH for (int u = 0; u < U; u++) t += all(f->first[u * G + g]) * d[u];
                    store(m->sums[g] + at, t);
                }
            }
        for (int h = 0; h < H; h++) heads[h] = m->units[h] + n * STRIDE;
        for (int g = 0; g < G; g++) maps[g] = m->maps[g] + n * STRIDE;
        for (int u = 0; u < U && f->unit_noise; u++) noise[u] = m->noise + (u * TALL + n) * STRIDE;
        if (f->grad_first) outer(places, U, maps, G, rows, f->grad_first + owner * U * G);
        if (f->grad_second) outer(heads, H, places + MOST, U, rows, f->grad_second + owner * H * U);
        for (int u = 0; u < U; u++) {
            vec plain = all(0);
            for (int x = 0; x < rows && f->grad_first_bias; x++)
                for (int c = 0; c < WIDE; c += VL) plain += load(room[u] + x * STRIDE + c);
            if (f->grad_first_bias) f->grad_first_bias[owner * U + u] += (double)added(plain);
            if (f->grad_scale && f->unit_noise) outer(places + u, 1, noise + u, 1, rows, f->grad_scale + owner * U + u);
        }
    }
}

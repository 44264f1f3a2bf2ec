/* Random draws: keep decisions of a block, and standard normal noise by Box-Muller, evaluated in double.

   Compiled with -DDOUBLE, so that `vec` contains doubles. */
#include "keep.h"

/* kept[b, h, i, j] of heads starting at `head`, rows [row, row + rows) and columns [col, col + cols), dense. */
void keep_block(uint8_t *kept, const int64_t *samples, int64_t batch, int64_t head, int64_t heads, int64_t row, int64_t rows, int64_t col,
                int64_t cols, uint32_t k0, uint32_t k1, int32_t threshold) {
    enum { PART = 256 };
    int16_t keep[PART];
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = head; h < head + heads; h++)
            for (int64_t i = row; i < row + rows; i++, kept += cols)
                for (int64_t j = col / 64 * 64; j < col + cols; j += PART) {
                    const int64_t from = j < col ? col - j : 0, to = col + cols - j < PART ? col + cols - j : PART;
                    keep_tile(keep, i, 1, j, PART, (uint32_t)h, (uint32_t)samples[b], k0, k1, (int16_t)threshold);
                    for (int64_t n = from; n < to; n++) kept[j - col + n] = keep[n] != 0;
                }
}

/* Low halves as numbers, to which `more` is added: exact, by the last bits of 2^52. */
INLINE vec number(words x, double more) { return (vec)((x & 0xFFFFFFFF) | 0x4330000000000000) - all(0x1p52 - more); }

INLINE vec root(vec x) {
    UNROLL for (int i = 0; i < VL; i++) x[i] = sqrt(x[i]);
    return x;
}

/* -2 log(x / 2^32) of n vectors of whole numbers x in [1, 2^32], as in fdlibm: error below one unit in the last place. */
INLINE void squares(int n, vec *x) {
    static const double c[] = {1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
                               2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01};
    const uint64_t half = 0x3FE6A09E00000000; /* x = m 2^k with m in [0.707, 1.414) */
    vec k[AT_ONCE], f[AT_ONCE], s[AT_ONCE], z[AT_ONCE], r[AT_ONCE], h[AT_ONCE];
    UNROLL for (int i = 0; i < n; i++) {
        const words bits = (words)x[i] + all_words(0x3FF0000000000000 - half);
        k[i] = (vec)((bits >> 52) | 0x4330000000000000) - all(0x1p52 + 1023 + 32);
        f[i] = (vec)((bits & 0x000FFFFFFFFFFFFF) + all_words(half)) - all(1);
    }
    UNROLL for (int i = 0; i < n; i++) s[i] = f[i] / (f[i] + all(2));
    UNROLL for (int i = 0; i < n; i++) z[i] = s[i] * s[i], h[i] = f[i] * f[i] * all(0.5), r[i] = all(c[0]);
    UNROLL for (int m = 1; m < 7; m++)
        UNROLL for (int i = 0; i < n; i++) r[i] = r[i] * z[i] + all(c[m]);
    UNROLL for (int i = 0; i < n; i++) {
        const vec t = s[i] * (h[i] + r[i] * z[i]) + k[i] * all(1.90821492927058770002e-10), w = (h[i] - t) - f[i];
        x[i] = (w + w) - k[i] * all(2 * 6.93147180369123816490e-01);
    }
}

/* cos and sin of n angles in [0, 2 pi], which are replaced by the cosines. */
INLINE void turns(int n, vec *angle, vec *sine) {
    static const double odd[] = {1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
                                 -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01};
    static const double even[] = {-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
                                  2.48015872894767294178e-05,  -1.38888888888741095749e-03, 4.16666666666666019037e-02};
    const vec magic = all(0x1.8p52);
    vec t[AT_ONCE], r[AT_ONCE], z[AT_ONCE], s[AT_ONCE], c[AT_ONCE];
    UNROLL for (int i = 0; i < n; i++) {
        t[i] = angle[i] * all(0.63661977236758134308) + magic; /* quarter turns, in the low bits */
        const vec q = t[i] - magic;
        r[i] = angle[i] - q * all(1.57079632679489655800);
        r[i] = r[i] - q * all(6.12323399573676603587e-17);
        z[i] = r[i] * r[i], s[i] = all(odd[0]), c[i] = all(even[0]);
    }
    UNROLL for (int m = 1; m < 6; m++)
        UNROLL for (int i = 0; i < n; i++) s[i] = s[i] * z[i] + all(odd[m]), c[i] = c[i] * z[i] + all(even[m]);
    UNROLL for (int i = 0; i < n; i++) {
        s[i] = s[i] * z[i] * r[i] + r[i];
        c[i] = c[i] * z[i] * z[i] + (all(1) - z[i] * all(0.5));
        const words turn = (words)t[i];
        const vint swap = -(vint)(turn & 1);
        sine[i] = (vec)((words)chosen(swap, c[i], s[i]) ^ ((turn >> 1) << 63));
        angle[i] = (vec)((words)chosen(swap, s[i], c[i]) ^ (((turn + 1) >> 1) << 63));
    }
}

typedef float singles __attribute__((vector_size(BYTES / 2)));

INLINE void put(float *to, vec x, int64_t some) {
    const singles y = __builtin_convertvector(x, singles);
    if (some >= LANES) memcpy(to, &y, sizeof y);
    else memcpy(to, &y, sizeof(float) * (size_t)some);
}

/* Two normals of each element of n pairs of words: the first `some` numbers to x, and to y unless it is null. */
INLINE void normal_pairs(int n, const words *one, const words *two, float *x, float *y, int64_t some) {
    const vec step = all(0x1p-32 * 2.0 * 3.14159265358979323846);
    vec radius[AT_ONCE], cosine[AT_ONCE], sine[AT_ONCE];
    UNROLL for (int i = 0; i < n; i++) radius[i] = number(one[i], 1), cosine[i] = number(two[i], 0) * step;
    squares(n, radius);
    turns(n, cosine, sine);
    UNROLL for (int i = 0; i < n; i++) {
        if (some - i * LANES <= 0) break;
        const vec length = root(radius[i]);
        put(x + i * LANES, length * cosine[i], some - i * LANES);
        if (y) put(y + i * LANES, length * sine[i], some - i * LANES);
    }
}

/* out: maps x rows x cols of one sample; stride `plane` between maps, `stride` between rows. */
void noise_tile(float *out, int64_t plane, int64_t stride, int64_t maps, int64_t row, int64_t rows, int64_t col, int64_t cols,
                uint32_t sample, uint32_t k0, uint32_t k1) {
    for (int64_t g = 0; 4 * g < maps; g++)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j += AT_ONCE * LANES) {
                words a[AT_ONCE], b[AT_ONCE], c[AT_ONCE], d[AT_ONCE];
                UNROLL for (int w = 0; w < AT_ONCE; w++) b[w] = lane_numbers() + all_words((uint64_t)(col + j + w * LANES));
                philox(AT_ONCE, (uint32_t)(row + i), (uint32_t)g, sample, k0, k1, a, b, c, d);
                float *at = out + 4 * g * plane + i * stride + j;
                normal_pairs(AT_ONCE, a, b, at, 4 * g + 1 < maps ? at + plane : 0, cols - j);
                if (4 * g + 2 < maps) normal_pairs(AT_ONCE, c, d, at + 2 * plane, 4 * g + 3 < maps ? at + 3 * plane : 0, cols - j);
            }
}

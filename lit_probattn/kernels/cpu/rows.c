/* Rows of attention in C: keep decisions of dropout, and the pass of rows.h for float and double. */
#include "philox.h"
#include <math.h>
#include <stdlib.h>

#define MOST_MAPS 16
enum { SOFT, HARD, SUM };

/* A block of queries of some heads; `Block` in rows.py mirrors it. */
typedef struct {
    int64_t heads, first, count; /* heads of a sample; the block's first of all (sample, head), and how many */
    int64_t row, rows, cols;   /* first query, queries, keys that the block may see */
    int64_t all_rows, all_cols; /* of row and column terms */
    int64_t components, kind, shared, common; /* shared: one map for all components; common: for all heads */
    const void *coef, *row_terms, *col_terms; /* (heads, K), (B heads, N, K), (B heads, K, L) or null */
    int64_t masked, causal, causal_offset;
    const void *bias;
    int64_t bias_strides[4];
    const uint8_t *key_mask;
    int64_t key_stride;
    const uint8_t *pair_mask;
    int64_t pair_strides[4];
    int64_t dropped;
    const int64_t *samples;
    uint32_t k0, k1;
    int32_t threshold;
    double scale;
} Block;

/* exp of moderate x to about one unit in the last place; 0 below -87, NaN for NaN. */
INLINE float exponential_float(float x) {
    float y = x < -87.0f ? -87.0f : x, t = y * 1.44269504f + 12582912.0f; /* the nearest integer, in the low bits */
    int32_t low, bits;
    memcpy(&low, &t, 4);
    float n = t - 12582912.0f, r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    memcpy(&bits, &p, 4);
    bits += (int32_t)((uint32_t)low << 23);
    memcpy(&p, &bits, 4);
    p = x < -87.0f ? 0.0f : p;
    return x != x ? x : p;
}

INLINE double exponential_double(double x) { return exp(x); }

#define REAL float
#include "rows.h"
#undef REAL
#define REAL double
#include "rows.h"
#undef REAL

/* kept[b, h, i, j] of heads from `head` on, rows [row, row + rows) and columns [col, col + cols), dense. */
void keep_block(uint8_t *kept, const int64_t *samples, int64_t batch, int64_t head, int64_t heads, int64_t row, int64_t rows,
                int64_t col, int64_t cols, uint32_t k0, uint32_t k1, int32_t threshold) {
    uint32_t words[4 * CHUNK];
    int16_t lanes[8 * CHUNK];
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < rows; i++, kept += cols) {
                int64_t last = (col + cols + 7) / 8;
                for (int64_t g = col / 8; g < last; g += CHUNK) {
                    int count = (int)(last - g < CHUNK ? last - g : CHUNK);
                    philox_words((uint32_t)(row + i), (uint32_t)g, (uint32_t)(head + h), (uint32_t)samples[b], k0, k1, count, words);
                    memcpy(lanes, words, 16 * (size_t)count);
                    int64_t start = 8 * g - col, from = start < 0 ? -start : 0;
                    int64_t to = start + 8 * count > cols ? cols - start : 8 * count;
                    for (int64_t n = from; n < to; n++) kept[start + n] = lanes[n] >= threshold;
                }
            }
}

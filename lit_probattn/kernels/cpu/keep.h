/* Keep decisions of dropout for a tile; see lit_probattn/randomness.py. */
#ifndef LIT_PROBATTN_KEEP
#define LIT_PROBATTN_KEEP
#include "philox.h"

typedef int16_t shorts __attribute__((vector_size(BYTES)));

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif
#if BYTES == 64
#define FRONT(a, b) PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define BACK(a, b) PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#elif BYTES == 32
#define FRONT(a, b) PICK(a, b, 0, 4, 1, 5)
#define BACK(a, b) PICK(a, b, 2, 6, 3, 7)
#else
#define FRONT(a, b) PICK(a, b, 0, 2)
#define BACK(a, b) PICK(a, b, 1, 3)
#endif

/* keep[n, c]: -1 if the pair of query row + n and key col + c is kept, else 0; cols and col are multiples of 64. */
static inline void keep_tile(int16_t *keep, int64_t row, int count, int64_t col, int cols, uint32_t head, uint32_t sample, uint32_t k0,
                             uint32_t k1, int16_t threshold) {
    const words low = all_words(0xFFFFFFFF);
    for (int n = 0; n < count; n++)
        for (int c = 0; c < cols; c += 8 * LANES * AT_ONCE) {
            words a[AT_ONCE], b[AT_ONCE], g[AT_ONCE], d[AT_ONCE];
            UNROLL for (int w = 0; w < AT_ONCE; w++) b[w] = lane_numbers() + all_words((uint64_t)((col + c) / 8 + w * LANES));
            philox(AT_ONCE, (uint32_t)(row + n), head, sample, k0, k1, a, b, g, d);
            UNROLL for (int w = 0; w < AT_ONCE; w++) {
                const words ab = (a[w] & low) | (b[w] << 32), cd = (g[w] & low) | (d[w] << 32);
                const shorts front = (shorts)FRONT(ab, cd) >= threshold, back = (shorts)BACK(ab, cd) >= threshold;
                const int at = c + 8 * LANES * w;
                if (at >= cols) break;
                memcpy(keep + n * cols + at, &front, BYTES);
                memcpy(keep + n * cols + at + BYTES / 2, &back, BYTES);
            }
        }
}
#endif

/* Keep decisions of dropout for a tile, from vectors of Philox4x32-10; see lit_probattn/randomness.py. */
#ifndef LIT_PROBATTN_KEEP
#define LIT_PROBATTN_KEEP
#include "vectors.h"

#define LANES (BYTES / 8) /* counters in a vector: each word in the low half of 64 bits, the high half holds anything */
typedef uint64_t words __attribute__((vector_size(BYTES)));
typedef int16_t shorts __attribute__((vector_size(BYTES)));

INLINE words all_words(uint64_t x) { return x - (words){0}; }

/* Products of low halves. */
INLINE words product(words a, words b) {
#if BYTES == 64
    return (words)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif BYTES == 32
    return (words)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (words)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF);
#endif
}

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

/* keep[n, c]: -1 where the pair of query row + n and key col + c is kept, else 0; cols and col are multiples of 64.
   The first three rounds have factors that a row has in common. */
static void keep_tile(int16_t *keep, int64_t row, int count, int64_t col, int cols, uint32_t head, uint32_t sample, uint32_t k0, uint32_t k1,
                      int16_t threshold) {
    enum { AT_ONCE = 4 };
    const uint64_t M0 = 0xD2511F53u, M1 = 0xCD9E8D57u, low = 0xFFFFFFFFu;
    const words first = all_words(M0), second = all_words(M1);
    const uint32_t x1 = k0 + 0x9E3779B9u, y1 = k1 + 0xBB67AE85u, x2 = x1 + 0x9E3779B9u, y2 = y1 + 0xBB67AE85u;
    const uint64_t q0 = (uint64_t)head * M1;
    words lane;
    for (int i = 0; i < LANES; i++) lane[i] = (uint64_t)i;
    for (int n = 0; n < count; n++) {
        const uint64_t p0 = (uint64_t)(uint32_t)(row + n) * M0, c1 = (uint32_t)(p0 >> 32) ^ sample ^ k1;
        const uint64_t q1 = c1 * M1, a2 = (uint32_t)(q1 >> 32) ^ (uint32_t)q0 ^ x1, p2 = a2 * M0;
        for (int c = 0; c < cols; c += 8 * LANES * AT_ONCE) {
            words a[AT_ONCE], b[AT_ONCE], g[AT_ONCE], d[AT_ONCE];
            UNROLL for (int w = 0; w < AT_ONCE; w++) {
                const words group = lane + all_words((uint64_t)((col + c) / 8 + w * LANES));
                const words p1 = product(group ^ all_words((q0 >> 32) ^ k0), first);
                const words q2 = product((p1 >> 32) ^ all_words((p0 & low) ^ y1), second);
                a[w] = (q2 >> 32) ^ all_words((q1 & low) ^ x2);
                b[w] = q2;
                g[w] = p1 ^ all_words((p2 >> 32) ^ y2);
                d[w] = all_words(p2);
            }
            uint32_t x = x2, y = y2;
            UNROLL for (int round = 3; round < 10; round++) {
                x += 0x9E3779B9u, y += 0xBB67AE85u;
                UNROLL for (int w = 0; w < AT_ONCE; w++) {
                    const words p = product(a[w], first), q = product(g[w], second);
                    a[w] = (q >> 32) ^ b[w] ^ all_words(x);
                    g[w] = (p >> 32) ^ d[w] ^ all_words(y);
                    b[w] = q;
                    d[w] = p;
                }
            }
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
}
#endif

/* Vectors of Philox4x32-10; see lit_probattn/randomness.py. */
#ifndef LIT_PROBATTN_PHILOX
#define LIT_PROBATTN_PHILOX
#include "vectors.h"

#define LANES (BYTES / 8) /* counters in a vector: each word in the low half of 64 bits, the high half holds anything */
typedef uint64_t words __attribute__((vector_size(BYTES)));

enum { PHILOX_X = 0x9E3779B9u, PHILOX_Y = 0xBB67AE85u };
static const uint64_t PHILOX_FIRST = 0xD2511F53u, PHILOX_SECOND = 0xCD9E8D57u;

INLINE words all_words(uint64_t x) { return x - (words){0}; }

INLINE words lane_numbers(void) {
    words lane;
    for (int i = 0; i < LANES; i++) lane[i] = (uint64_t)i;
    return lane;
}

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

/* Rounds `from` to 10 of n vectors, interleaved; x and y are the key's words in round `from`. */
INLINE void philox_rounds(int n, int from, words *a, words *b, words *c, words *d, uint32_t x, uint32_t y) {
    UNROLL for (int round = from; round < 10; round++) {
        UNROLL for (int w = 0; w < n; w++) {
            const words p = product(a[w], all_words(PHILOX_FIRST)), q = product(c[w], all_words(PHILOX_SECOND));
            a[w] = (q >> 32) ^ b[w] ^ all_words(x);
            c[w] = (p >> 32) ^ d[w] ^ all_words(y);
            b[w] = q;
            d[w] = p;
        }
        x += PHILOX_X, y += PHILOX_Y;
    }
}
#endif

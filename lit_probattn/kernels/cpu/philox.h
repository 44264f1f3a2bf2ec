/* Vectors of Philox4x32-10; see lit_probattn/randomness.py. */
#ifndef LIT_PROBATTN_PHILOX
#define LIT_PROBATTN_PHILOX
#include "vectors.h"

#define LANES (BYTES / 8) /* counters in a vector: each word in the low half of 64 bits, the high half holds anything */
typedef uint64_t words __attribute__((vector_size(BYTES)));

enum { AT_ONCE = 4 }; /* vectors that are computed together */
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

/* The four words of n vectors of columns, interleaved, with counter (row, column, third, fourth); at first b contains the
   columns.  In the first three rounds half of the factors are equal for all columns of a row. */
INLINE void philox(int n, uint32_t row, uint32_t third, uint32_t fourth, uint32_t k0, uint32_t k1, words *a, words *b, words *c, words *d) {
    const uint64_t low = 0xFFFFFFFFu, p0 = (uint64_t)row * PHILOX_FIRST, q0 = (uint64_t)third * PHILOX_SECOND;
    const uint32_t x1 = k0 + PHILOX_X, y1 = k1 + PHILOX_Y; /* the key's words in the second round */
    uint32_t x = x1 + PHILOX_X, y = y1 + PHILOX_Y;
    const uint64_t q1 = ((uint32_t)(p0 >> 32) ^ fourth ^ k1) * PHILOX_SECOND;
    const uint64_t p2 = ((uint32_t)(q1 >> 32) ^ (uint32_t)q0 ^ x1) * PHILOX_FIRST;
    UNROLL for (int w = 0; w < n; w++) {
        const words p1 = product(b[w] ^ all_words((q0 >> 32) ^ k0), all_words(PHILOX_FIRST));
        const words q2 = product((p1 >> 32) ^ all_words((p0 & low) ^ y1), all_words(PHILOX_SECOND));
        a[w] = (q2 >> 32) ^ all_words((q1 & low) ^ x);
        b[w] = q2;
        c[w] = p1 ^ all_words((p2 >> 32) ^ y);
        d[w] = all_words(p2);
    }
    UNROLL for (int round = 3; round < 10; round++) {
        x += PHILOX_X, y += PHILOX_Y;
        UNROLL for (int w = 0; w < n; w++) {
            const words p = product(a[w], all_words(PHILOX_FIRST)), q = product(c[w], all_words(PHILOX_SECOND));
            a[w] = (q >> 32) ^ b[w] ^ all_words(x);
            c[w] = (p >> 32) ^ d[w] ^ all_words(y);
            b[w] = q;
            d[w] = p;
        }
    }
}
#endif

/* Philox4x32-10 over a row of counters (c0, first + n, c2, c3); see lit_probattn/randomness.py. */
#ifndef LIT_PROBATTN_PHILOX
#define LIT_PROBATTN_PHILOX
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define CHUNK 64 /* counters in flight: their words stay in the first-level cache */

/* out[4 n + w] is word w of counter n. */
INLINE void philox_words(uint32_t c0, uint32_t first, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1,
                         int count, uint32_t *restrict out) {
    for (int n = 0; n < count; n++) {
        uint32_t a = c0, b = first + (uint32_t)n, c = c2, d = c3, x = k0, y = k1;
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint64_t p = (uint64_t)a * 0xD2511F53u, q = (uint64_t)c * 0xCD9E8D57u;
            a = (uint32_t)(q >> 32) ^ b ^ x;
            c = (uint32_t)(p >> 32) ^ d ^ y;
            b = (uint32_t)q;
            d = (uint32_t)p;
            x += 0x9E3779B9u;
            y += 0xBB67AE85u;
        }
        out[4 * n] = a;
        out[4 * n + 1] = b;
        out[4 * n + 2] = c;
        out[4 * n + 3] = d;
    }
}
#endif

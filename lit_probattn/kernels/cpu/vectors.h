/* Vectors as wide as the target's registers, their exponentials, and the product on which everything is based.

   One source for AVX-512, AVX2, NEON and SSE, by vector extensions of GCC and Clang.  `real` is float, or double with
   -DDOUBLE.  Not for -ffast-math: exponentials require their additions in this order. */
#ifndef LIT_PROBATTN_VECTORS
#define LIT_PROBATTN_VECTORS
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_FEW UNROLL
#define UNROLL_BY_4 _Pragma("clang loop unroll_count(4)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_FEW _Pragma("GCC unroll 2") /* for a number that is not always a constant */
#define UNROLL_BY_4 _Pragma("GCC unroll 4")
#endif

/* Rows and vectors of a block whose sums are in registers: DOWN x ACROSS for scores and values, SIDE for transposed
   products, of 32, 16 or 32 registers. */
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#define BYTES 64
#define DOWN 12
#define SIDE 8
#define ACROSS 2
#elif defined(__AVX2__) && defined(__FMA__)
#define BYTES 32
#define DOWN 6
#define SIDE 6
#define ACROSS 2
#elif defined(__aarch64__)
#define BYTES 16
#define DOWN 4
#define SIDE 4
#define ACROSS 4
#else
#define BYTES 16
#define DOWN 6
#define SIDE 6
#define ACROSS 2
#endif

#define MOST 16 /* components, maps, hidden units */
#define TALL 48 /* rows of a tile, positions of a chunk */
#define AHEAD 8 /* rows that are prefetched */

/* NAMED(f): the exported function f of this precision. */
#ifdef DOUBLE
typedef double real;
typedef int64_t whole;
#define NAMED(function) function##_double
#else
typedef float real;
typedef int32_t whole;
#define NAMED(function) function##_float
#endif
#define VL ((int)(BYTES / sizeof(real)))
typedef real vec __attribute__((vector_size(BYTES)));
typedef whole vint __attribute__((vector_size(BYTES)));
typedef real vec_anywhere __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
typedef double doubles __attribute__((vector_size(BYTES / sizeof(real) * sizeof(double))));
typedef int16_t vshort __attribute__((vector_size(2 * BYTES / sizeof(real))));

INLINE long upto(long n, long step) { return (n + step - 1) / step * step; }
INLINE int least(long a, long b) { return (int)(a < b ? a : b); }

INLINE vec load(const real *p) { return *(const vec_anywhere *)p; }
INLINE void store(real *p, vec x) { *(vec_anywhere *)p = x; }
INLINE vec all(real x) { return x - (vec){0}; } /* x + 0 would be an addition, because of -0 */

/* a where `first` is -1, b where it is 0. */
INLINE vec chosen(vint first, vec a, vec b) { return (vec)(((vint)a & first) | ((vint)b & ~first)); }

/* b if a is NaN, except on NEON. */
INLINE vec larger(vec a, vec b) {
#if BYTES == 64 && defined(DOUBLE)
    return (vec)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif BYTES == 64
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif BYTES == 32 && defined(DOUBLE)
    return (vec)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif BYTES == 32
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__aarch64__) && !defined(DOUBLE)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return chosen((vint)(a > b), a, b);
#endif
}

/* The larger number; NaN if one of them is NaN. */
INLINE vec maximum(vec a, vec b) { return (vec)((vint)larger(a, b) | (vint)(a != a)); }

INLINE int any(vint x) {
#if BYTES == 64 && !defined(DOUBLE)
    return _mm512_movepi32_mask((__m512i)x) != 0;
#elif BYTES == 32 && !defined(DOUBLE)
    return _mm256_movemask_ps((__m256)x) != 0;
#else
    union {
        vint v;
        uint64_t part[BYTES / 8];
    } u = {x};
    uint64_t some = 0;
    for (int i = 0; i < BYTES / 8; i++) some |= u.part[i];
    return some != 0;
#endif
}

INLINE real largest(vec x) {
    union {
        vec v;
        real lane[VL];
    } u = {x};
    UNROLL for (int half = VL / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) u.lane[i] = u.lane[i] > u.lane[i + half] ? u.lane[i] : u.lane[i + half];
    return u.lane[0];
}

INLINE real added(vec x) {
    enum { PARTS = BYTES / 16, LANES = VL / PARTS };
    typedef real part __attribute__((vector_size(16)));
    union {
        vec v;
        part p[PARTS];
    } u = {x};
    UNROLL for (int half = PARTS / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) u.p[i] += u.p[i + half];
    const part p = u.p[0];
    return LANES == 2 ? p[0] + p[1] : (p[0] + p[LANES / 2]) + (p[1] + p[LANES - 1]);
}

INLINE double sum_of(doubles x) {
    double sum = 0;
    UNROLL for (int i = 0; i < VL; i++) sum += x[i];
    return sum;
}

/* x if `keep` is -1, 0 if it is 0. */
INLINE vec kept(vec x, const int16_t *keep) {
#if BYTES == 32 && !defined(DOUBLE)
    return (vec)((__m256i)x & _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)keep)));
#else
    vshort some;
    memcpy(&some, keep, sizeof some);
    return (vec)((vint)x & __builtin_convertvector(some, vint));
#endif
}

/* exp x of n vectors, interleaved, for x below 80: 0 for denormal results, NaN for NaN. */
INLINE void exponentials(int n, vec *x) {
#ifdef DOUBLE
    enum { BITS = 52, BIAS = 1023, TERMS = 14 };
    const double magic = 6755399441055744.0 + BIAS, lowest = -709.08956571282410, rest = 2.03552737409310331e-17;
    static const double c[] = {1.3691488853904128e-12, 2.5678435993488206e-11, 4.4455382718708116e-10, 7.0549116208011233e-09,
                               1.0178086009239699e-07, 1.3215486790144309e-06, 1.5252733804059841e-05, 1.5403530393381609e-04,
                               1.3333558146428443e-03, 9.6181291076284772e-03, 5.5504108664821580e-02, 2.4022650695910071e-01,
                               6.9314718055994531e-01, 1.0};
#else
    enum { BITS = 23, BIAS = 127, TERMS = 6 };
    const float magic = 12582912.0f + BIAS, lowest = -88.0296936f, rest = 1.92596303e-8f;
    static const float c[] = {1.327647129e-3f, 9.675541893e-3f, 5.550713092e-2f, 2.402212024e-1f, 6.931469440e-1f, 1.0000001192f};
#endif
    const vec per = all((real)1.4426950408889634074), shift = all(magic);
    vec t[4], p[4];
    UNROLL for (int i = 0; i < n; i++) x[i] = larger(all(lowest), x[i]);
    UNROLL for (int i = 0; i < n; i++) t[i] = x[i] * per + shift; /* its low bits are the exponent of the answer */
    UNROLL for (int i = 0; i < n; i++) p[i] = x[i] * per - (t[i] - shift);
    UNROLL for (int i = 0; i < n; i++) x[i] = x[i] * all(rest) + p[i];
    UNROLL for (int i = 0; i < n; i++) p[i] = x[i] * all(c[0]) + all(c[1]);
    UNROLL for (int k = 2; k < TERMS; k++)
        UNROLL for (int i = 0; i < n; i++) p[i] = p[i] * x[i] + all(c[k]);
    UNROLL for (int i = 0; i < n; i++) x[i] = p[i] * (vec)((vint)t[i] << BITS);
}

INLINE vec exponential(vec x) {
    exponentials(1, &x);
    return x;
}

/* log x for x > 0, but for denormal numbers; NaN for infinity and NaN. */
INLINE vec natural_log(vec x) {
#ifdef DOUBLE
    enum { BITS = 52, TERMS = 11 };
    const double high = 6.93147180369123816490e-01, rest = 1.90821492927058770002e-10;
    const whole root = 0x3FE6A09E667F3BCD; /* bits of the root of 1/2 */
#else
    enum { BITS = 23, TERMS = 5 };
    const float high = 0.693359375f, rest = -2.12194440e-4f;
    const whole root = 0x3F3504F3;
#endif
    const vint power = ((vint)x - root) >> BITS; /* x = 2^power y, y between the roots of 1/2 and 2 */
    const vec y = (vec)((vint)x - (power << BITS)), times = __builtin_convertvector(power, vec);
    const vec ratio = (y - 1) / (y + 1), square = ratio * ratio; /* log y = 2 artanh ratio */
    vec sum = all((real)1 / (2 * TERMS + 1));
    UNROLL for (int k = TERMS - 1; k > 0; k--) sum = sum * square + all((real)1 / (real)(2 * k + 1));
    return (x - x) + (times * all(rest) + (ratio + ratio) * (square * sum)) + (ratio + ratio) + times * all(high);
}

/* Products of bfloat16: a vector contains two numbers per element, whose products are added in float. */
#if BYTES == 64 && defined(__AVX512BF16__) && !defined(DOUBLE)
#define PAIRS 1
INLINE vec plus_pairs(vec sum, vec a, vec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

/* Numbers rounded to bfloat16: first `first`, then `second`. */
INLINE vec rounded(vec first, vec second) { return (vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }

/* Number i of `first` next to number i of `second`. */
INLINE vec paired(vec first, vec second) {
    typedef int16_t lanes __attribute__((vector_size(BYTES)));
    static const lanes order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (vec)_mm512_permutexvar_epi16((__m512i)order, (__m512i)rounded(first, second));
}
#else
#define PAIRS 0
INLINE vec plus_pairs(vec sum, vec a, vec b) { return sum + a * b; }
INLINE vec rounded(vec first, vec second) { return first + second; }
INLINE vec paired(vec first, vec second) { return first + second; }
#endif

/* The pair of bfloat16 at p, in all elements. */
INLINE vec everywhere(const real *p) {
    whole bits;
    memcpy(&bits, p, sizeof bits);
    return (vec)(bits - (vint){0});
}

/* to (R, C vectors) = or += x (R, depth) y (depth, C vectors), where x has element (r, k) at r xr + k xk; `low`: elements are
   pairs of bfloat16.  R, C, xr, xk and low are constants after inlining. */
INLINE void block(int low, int R, int C, long depth, const real *restrict x, long xr, long xk, const real *restrict y, long yk,
                  real *restrict to, long tr, int add) {
    vec sum[12][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) sum[r][c] = add ? load(to + r * tr + c * VL) : all(0);
    UNROLL_BY_4 for (long k = 0; k < depth; k++) {
        vec b[4];
        UNROLL for (int c = 0; c < C; c++) b[c] = load(y + k * yk + c * VL);
        UNROLL for (int r = 0; r < R; r++) {
            const vec w = low ? everywhere(x + r * xr + k * xk) : all(x[r * xr + k * xk]);
            UNROLL for (int c = 0; c < C; c++) sum[r][c] = low ? plus_pairs(sum[r][c], w, b[c]) : sum[r][c] + w * b[c];
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) store(to + r * tr + c * VL, sum[r][c]);
}
#endif

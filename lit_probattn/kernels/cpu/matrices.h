/* Products of bfloat16 in the matrix registers of AMX.  A register has 16 rows of 16 numbers or pairs; one instruction
   multiplies 16 rows of 16 pairs by 16 pairs of 16 columns.  Part of tiles.c. */
#ifndef LIT_PROBATTN_MATRICES
#define LIT_PROBATTN_MATRICES
#include "vectors.h"

#if PAIRS && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define MATRICES 1
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the system permits this process to use them. */
static inline int matrices_permitted(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

/* Sizes of the registers of a thread. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Shapes;

/* Set eight registers to full size; `before` are the sizes to restore, which other libraries may expect. */
static inline void matrices_start(Shapes *before) {
    Shapes shapes = {.palette = 1};
    for (int n = 0; n < 8; n++) shapes.row_bytes[n] = 64, shapes.rows[n] = 16;
    __asm__ volatile("" : : "r"(before), "r"(&shapes) : "memory"); /* the intrinsics do not declare what they read */
    _tile_storeconfig(before);
    _tile_loadconfig(&shapes);
}

static inline void matrices_end(const Shapes *before) {
    __asm__ volatile("" : : "r"(before) : "memory");
    _tile_loadconfig(before);
}

/* to (16 R, 16 C) = or += x (16 R, depth) y (depth, 16 C), for R and C of 1 or 2, and a depth in pairs. */
INLINE void matrix_block(int R, int C, long depth, const real *x, long xr, const real *y, long yk, real *to, long tr, int add) {
    const long x_bytes = xr * 4, y_bytes = yk * 4, to_bytes = tr * 4;
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, to, to_bytes);
        if (C > 1) _tile_loadd(1, to + 16, to_bytes);
        if (R > 1) _tile_loadd(2, to + 16 * tr, to_bytes);
        if (R > 1 && C > 1) _tile_loadd(3, to + 16 * tr + 16, to_bytes);
    }
    for (long k = 0; k < depth; k += 16) {
        _tile_loadd(4, x + k, x_bytes);
        _tile_loadd(6, y + k * yk, y_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (C > 1) {
            _tile_loadd(7, y + k * yk + 16, y_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (R > 1) {
            _tile_loadd(5, x + 16 * xr + k, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (C > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to, to_bytes);
    if (C > 1) _tile_stored(1, to + 16, to_bytes);
    if (R > 1) _tile_stored(2, to + 16 * tr, to_bytes);
    if (R > 1 && C > 1) _tile_stored(3, to + 16 * tr + 16, to_bytes);
    __asm__ volatile("" ::: "memory");
}

/* to (height, width) = or += x (height, depth) y (depth, width); height, width and depth are rounded up to 16. */
static inline void multiply(const real *x, long xr, const real *y, long yk, long depth, real *to, long tr, int height, long width, int add) {
    for (long c = 0; c < width; c += 32)
        for (int i = 0; i < height; i += 32) {
            const real *rows = x + i * xr, *columns = y + c;
            real *sums = to + i * tr + c;
            if (height - i > 16 && width - c > 16) matrix_block(2, 2, depth, rows, xr, columns, yk, sums, tr, add);
            else if (height - i > 16) matrix_block(2, 1, depth, rows, xr, columns, yk, sums, tr, add);
            else if (width - c > 16) matrix_block(1, 2, depth, rows, xr, columns, yk, sums, tr, add);
            else matrix_block(1, 1, depth, rows, xr, columns, yk, sums, tr, add);
        }
}

/* to (16, 16) = from (16, 16) transposed. */
INLINE void transpose(const real *from, long stride, real *to, long to_stride) {
    __m512d a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = (__m512d)load(from + i * stride);
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = (__m512d)_mm512_unpacklo_ps((__m512)a[i], (__m512)a[i + 1]);
        b[i + 1] = (__m512d)_mm512_unpackhi_ps((__m512)a[i], (__m512)a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
        UNROLL for (int k = 0; k < 2; k++) {
            a[i + 2 * k] = _mm512_unpacklo_pd(b[i + k], b[i + k + 2]);
            a[i + 2 * k + 1] = _mm512_unpackhi_pd(b[i + k], b[i + k + 2]);
        }
    UNROLL for (int i = 0; i < 16; i += 8)
        UNROLL for (int k = i; k < i + 4; k++) {
            b[k] = _mm512_shuffle_f64x2(a[k], a[k + 4], 0x88);
            b[k + 4] = _mm512_shuffle_f64x2(a[k], a[k + 4], 0xdd);
        }
    UNROLL for (int k = 0; k < 8; k++) {
        store(to + k * to_stride, (vec)_mm512_shuffle_f64x2(b[k], b[k + 8], 0x88));
        store(to + (k + 8) * to_stride, (vec)_mm512_shuffle_f64x2(b[k], b[k + 8], 0xdd));
    }
}
#else
#define MATRICES 0
static inline int matrices_permitted(void) { return 0; }
typedef struct {
    int none;
} Shapes;
static inline void matrices_start(Shapes *before) { (void)before; }
static inline void matrices_end(const Shapes *before) { (void)before; }
static inline void multiply(const real *x, long xr, const real *y, long yk, long depth, real *to, long tr, int height, long width, int add) {
    (void)x, (void)xr, (void)y, (void)yk, (void)depth, (void)to, (void)tr, (void)height, (void)width, (void)add;
}
static inline void transpose(const real *from, long stride, real *to, long to_stride) { (void)from, (void)stride, (void)to, (void)to_stride; }
#endif
#endif

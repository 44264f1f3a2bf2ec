/* The peak rates of this processor, by which `python -m profiling kernels` divides. */
#include "matrices.h"

#define DEPTH 128
#define PANEL (ACROSS * VL)

/* Multiply-adds of a block whose operands stay in the first-level cache; returns FLOP. */
int64_t peak_products(real *operands, int64_t rounds) {
    real *x = operands, *y = x + DOWN * DEPTH, *to = y + DEPTH * PANEL;
    for (int64_t n = 0; n < rounds; n++) block(0, DOWN, ACROSS, DEPTH, x, DEPTH, 1, y, PANEL, to, PANEL, 1);
    return 2 * rounds * DOWN * DEPTH * PANEL;
}

/* How tiles multiply bfloat16: 0 not, 1 in pairs, 2 in matrix registers.  Intel's processors multiply pairs more slowly than
   float. */
int64_t bfloat16_products(void) {
#if PAIRS
    __builtin_cpu_init();
    return matrices_permitted() ? 2 : !__builtin_cpu_is("intel");
#else
    return 0;
#endif
}

/* Exponentials of numbers in the first-level cache; returns their count. */
int64_t peak_exponentials(real *operands, int64_t rounds) {
    enum { MANY = 16 };
    real *to = operands + MANY * 4 * VL;
    for (int64_t n = 0; n < rounds; n++)
        for (int i = 0; i < MANY * 4 * VL; i += 4 * VL) {
            vec x[4];
            UNROLL for (int k = 0; k < 4; k++) x[k] = load(operands + i + k * VL);
            exponentials(4, x);
            UNROLL for (int k = 0; k < 4; k++) store(to + i + k * VL, x[k]);
        }
    return rounds * MANY * 4 * VL;
}

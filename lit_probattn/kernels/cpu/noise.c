/* Standard normal score noise: Philox and Box-Muller of four maps in one pass, evaluated in double.

   Compiled with -ffast-math, so that log, sin and cos come from the vector library; linked without it (linking with
   it would set flush-to-zero for the whole process). */
#include "philox.h"
#include <math.h>

/* out: maps x rows x cols of one sample; `plane` numbers from map to map, `stride` from row to row. */
void noise_tile(float *out, int64_t plane, int64_t stride, int64_t maps, int64_t row, int64_t rows, int64_t col, int64_t cols,
                uint32_t sample, uint32_t k0, uint32_t k1) {
    uint32_t words[4 * CHUNK];
    double radius[CHUNK], angle[CHUNK];
    for (int64_t g = 0; 4 * g < maps; g++)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j += CHUNK) {
                int here = (int)(cols - j < CHUNK ? cols - j : CHUNK);
                philox_words((uint32_t)(row + i), (uint32_t)(col + j), (uint32_t)g, sample, k0, k1, here, words);
                for (int pair = 0; pair < 2 && 4 * g + 2 * pair < maps; pair++) {
                    float *x = out + (4 * g + 2 * pair) * plane + i * stride + j, *y = x + plane;
                    for (int n = 0; n < here; n++) {
                        radius[n] = sqrt(-2.0 * log(((double)words[4 * n + 2 * pair] + 1.0) * 0x1p-32));
                        angle[n] = (double)words[4 * n + 2 * pair + 1] * (0x1p-32 * 2.0 * 3.14159265358979323846);
                    }
                    for (int n = 0; n < here; n++) x[n] = (float)(radius[n] * cos(angle[n]));
                    if (4 * g + 2 * pair + 1 < maps)
                        for (int n = 0; n < here; n++) y[n] = (float)(radius[n] * sin(angle[n]));
                }
            }
}

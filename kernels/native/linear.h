/* y = x w^T + bias for few rows of x: weights are read as they lie, where a BLAS puts them in its own order first. */
#ifndef FOREBAY_LINEAR_H
#define FOREBAY_LINEAR_H

#include "layer.h"

enum {
    COLUMNS = 48,           /* of y in a piece of work: whole vectors, lines and tiles */
    TALLEST = 8,            /* rows of weights in a tile, at most */
    PART = 512,             /* elements at a time: of 32 rows of x an eighth of a second-level cache of 512 KiB */
    STRETCH = 64,           /* elements at a time when x is transposed: LANES rows of them stay in the first level */
};

/* All contiguous. M rows, K elements in each, N rows of weights. */
struct Linear {
    void *y_MN;
    const void *x_MK, *weight_NK;
    const void *bias_N;                 /* or NULL */
    const Elements *weights, *rows;     /* rows: of x, y and bias */
    long m, n, k;
};

/* What one thread needs. A last tile may reach beyond the columns. */
struct LinearSpace {
    float *totals;                      /* (COLUMNS + TALLEST) x M in whole vectors */
    float *weights;                     /* COLUMNS x (PART + a vector), where weights are not float */
    const float *rows[COLUMNS + TALLEST];
    const char *ahead[COLUMNS + TALLEST];
};

/* M in whole vectors of any instruction set. */
static inline size_t linear_rows(const Linear *linear) { return ((size_t)linear->m + ROUND - 1) / ROUND * ROUND; }
/* Bytes. */
static inline size_t linear_totals(const Linear *linear)
{
    return sizeof(float) * linear_rows(linear) * (COLUMNS + TALLEST);
}

/* y, which does not depend on the number of threads. Returns 0, or -1 for no memory. */
int linear_forward(const Linear *linear, const Kernels *kernels, int threads);

#endif

/* Operations on every row by itself, each too small for the calls that a library would need for it. */
#ifndef FOREBAY_ROWS_H
#define FOREBAY_ROWS_H

#include "layer.h"

/* y, (N, D), of x, (N, D) or (N, 2 D). Contiguous. */
struct Rows {
    void *y;
    const void *x;
    const void *weight_D;       /* or NULL */
    const Elements *elements;
    long n, d;
    float epsilon;
};

/* Returns 0, or -1 for no memory. */
int rows_forward(const Rows *rows, RowKernel *kernel, int threads);

#endif

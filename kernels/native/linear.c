/* Memory and the two parallel loops of a linear layer: over elements of x, then over columns of y. */
#include "linear.h"

#include "pieces.h"

static float *cut(const Linear *linear, LinearSpace *spaces, int threads, char **next)
{
    size_t weights = linear->weights->size == sizeof(float) ? 0 : sizeof(float) * COLUMNS * (PART + ROUND);
    for (int i = 0; i < threads; i++) {
        float *totals = take(next, linear_totals(linear)), *unpacked = take(next, weights);
        if (spaces)
            spaces[i].totals = totals, spaces[i].weights = unpacked;
    }
    return take(next, sizeof(float) * linear_rows(linear) * (size_t)linear->k);
}

static void run(const Linear *linear, const Kernels *kernels, float *x_KM, LinearSpace *spaces, int threads)
{
#pragma omp parallel num_threads(threads)
    {
        LinearSpace *space = spaces + thread_number();
#pragma omp for
        for (long k = 0; k < linear->k; k += STRETCH)
            kernels->transpose(linear, x_KM, k, min_long(k + STRETCH, linear->k));
#pragma omp for schedule(dynamic, 1) nowait
        for (long n = 0; n < linear->n; n += COLUMNS)
            kernels->columns(linear, x_KM, space, n, min_long(n + COLUMNS, linear->n));
    }
}

int linear_forward(const Linear *linear, const Kernels *kernels, int threads)
{
    threads = useful_threads(linear->m * linear->n * linear->k, threads);
    size_t table = sizeof(LinearSpace) * (size_t)threads;
    char *size = NULL;
    take(&size, table);
    cut(linear, NULL, threads, &size);
    char *memory = memory_take(LINEAR_MEMORY, (size_t)(size - (char *)NULL)), *next = memory;
    if (!memory)
        return -1;
    LinearSpace *spaces = take(&next, table);
    float *x_KM = cut(linear, spaces, threads, &next);
    run(linear, kernels, x_KM, spaces, threads);
    memory_give(LINEAR_MEMORY, memory);
    return 0;
}

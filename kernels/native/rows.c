/* Memory and the parallel loop over rows. */
#include "rows.h"

#include "pieces.h"

enum {
    SPACES = 3,             /* of a row: gate and up, or x and weights */
    WORK = 16,              /* products that an element is worth */
};

int rows_forward(const Rows *rows, RowKernel *kernel, int threads)
{
    threads = useful_threads(WORK * rows->n * rows->d, threads);
    size_t each = sizeof(float) * SPACES * row_stride(rows->d);
    char *memory = memory_take(ROWS_MEMORY, each * (size_t)threads);
    if (!memory)
        return -1;
#pragma omp parallel num_threads(threads)
    {
        float *space = (float *)(memory + each * (size_t)thread_number());
#pragma omp for
        for (long n = 0; n < rows->n; n++)
            kernel(rows, space, n);
    }
    memory_give(ROWS_MEMORY, memory);
    return 0;
}

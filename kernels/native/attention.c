/* Memory and the parallel loop of attention: over heads, and the panels of rows of all askers within each. */
#include "attention.h"

#include "pieces.h"

static void cut(const Attention *attention, AttentionSpace *space, long panel, char **next)
{
    size_t rows = sizeof(float) * (size_t)panel, size = (size_t)attention->size;
    space->stride = (long)row_stride(attention->size);
    size_t span = sizeof(float) * ((size_t)SPAN * (size_t)space->stride + TALLEST);
    space->queries = take(next, rows * size), space->results = take(next, rows * (size + TALLEST));
    space->scores = take(next, rows * (SPAN + TALLEST));
    space->most = take(next, rows), space->sum = take(next, rows), space->factor = take(next, rows);
    space->keys = take(next, span), space->values = take(next, span);
    space->row = take(next, sizeof(float) * row_stride(attention->size));
}

static long panels_of(const Attention *attention, const Asker *asker, long panel)
{
    return (attention_rows(attention, asker) + panel - 1) / panel;
}

/* Panel `number` of one head, counted over all askers. */
static void attend_panel(const Attention *attention, const Kernels *kernels, AttentionSpace *space, long head,
                         long number)
{
    const Asker *asker = attention->askers;
    for (; number >= panels_of(attention, asker, kernels->panel); asker++)
        number -= panels_of(attention, asker, kernels->panel);
    long from = number * kernels->panel;
    kernels->attend(attention, asker, space, head, from,
                    min_long(from + kernels->panel, attention_rows(attention, asker)));
}

static long products(const Attention *attention)
{
    long total = 0;
    for (const Asker *asker = attention->askers; asker < attention->askers + attention->count; asker++)
        for (long i = 0; i < asker->segment_count; i++)
            total += 2 * attention_rows(attention, asker) * asker->segments[i].count;
    return total * attention->kv_heads * attention->size;
}

int attention_forward(const Attention *attention, const Kernels *kernels, int threads)
{
    long panels = 0;
    for (const Asker *asker = attention->askers; asker < attention->askers + attention->count; asker++)
        panels += panels_of(attention, asker, kernels->panel);
    threads = useful_threads(products(attention), threads);
    AttentionSpace sizes;
    char *bytes = NULL;
    cut(attention, &sizes, kernels->panel, &bytes);
    size_t each = (size_t)(bytes - (char *)NULL);
    char *memory = memory_take(ATTENTION_MEMORY, each * (size_t)threads);
    if (!memory)
        return -1;
#pragma omp parallel num_threads(threads)
    {
        AttentionSpace space;
        char *next = memory + each * (size_t)thread_number();
        cut(attention, &space, kernels->panel, &next);
#pragma omp for schedule(dynamic, 1) nowait
        for (long i = 0; i < panels * attention->kv_heads; i++)
            attend_panel(attention, kernels, &space, i / panels, i % panels);
    }
    memory_give(ATTENTION_MEMORY, memory);
    return 0;
}

/* Tokens sorted by expert, scratch memory, and the two parallel loops of a forward pass. */
#include "layer.h"

#include <stdlib.h>
#include <string.h>

#include "pieces.h"

enum {
    TILE = 2048,            /* tokens at a time: bounds the memory, and is far beyond where speed saturates */
    DECODE = 16,            /* tokens up to which reading the weights takes longer than computing */
    MOST = 256,             /* columns per piece of work with many tokens */
};

const char *layer_problem(const Layer *layer)
{
    const int32_t *offsets = layer->offsets_E1, *indices = layer->indices_R;
    if (offsets[0] != 0 || offsets[layer->experts] != layer->kept)
        return "offsets must go from 0 to the number of kept units";
    for (long e = 0; e < layer->experts; e++) {
        if (offsets[e] > offsets[e + 1] || offsets[e + 1] > layer->kept)
            return "offsets must not descend";
        int bad = 0;
        for (long r = offsets[e] + 1; r < offsets[e + 1]; r++)
            bad |= indices[r] <= indices[r - 1];
        if (bad)
            return "indices must ascend within an expert";
        if (offsets[e] < offsets[e + 1] && (indices[offsets[e]] < 0 || indices[offsets[e + 1] - 1] >= layer->hidden))
            return "indices must be hidden units of the backbone";
    }
    return NULL;
}

/* ---- plan ---- */

static int32_t expert_of(const Layer *layer, long pair)
{
    int32_t expert = layer->topk_ids_TK[pair];
    return expert >= 0 && expert < layer->experts ? expert : -1;
}

static long kept_of(const Layer *layer, long expert)
{
    return layer->offsets_E1[expert + 1] - layer->offsets_E1[expert];
}

/* start[e] .. start[e + 1]: the places of expert e's pairs in sorted order. Returns hidden values of all pairs. */
static size_t count_pairs(const Layer *layer, int32_t *start)
{
    size_t hidden = 0;
    memset(start, 0, sizeof(*start) * (size_t)(layer->experts + 1));
    for (long pair = 0; pair < layer->tokens * layer->top_k; pair++) {
        int32_t expert = expert_of(layer, pair);
        if (expert < 0)
            continue;
        start[expert + 1]++;
        hidden += (size_t)kept_of(layer, expert);
    }
    for (long e = 0; e < layer->experts; e++)
        start[e + 1] += start[e];
    return hidden;
}

typedef struct {
    int32_t *token;
    float *weight;
    float **x;
    float **y;
    float *hidden;
    float *x_TD, *y_TD, *hidden_TH;
} Arrays;

static void cut_plan(const Layer *layer, Plan *plan, Arrays *arrays, size_t hidden, char **next)
{
    size_t tokens = (size_t)layer->tokens, count = tokens * (size_t)layer->top_k;
    plan->groups = take(next, sizeof(Group) * (size_t)layer->experts);
    plan->x = take(next, sizeof(float *) * tokens);
    plan->y = take(next, sizeof(float *) * tokens);
    plan->y_stride = (long)row_stride(layer->model);
    plan->hidden = take(next, sizeof(float *) * tokens);
    plan->weight_T = take(next, sizeof(float) * tokens);
    arrays->x_TD = take(next, sizeof(float) * tokens * row_stride(layer->model));
    arrays->y_TD = take(next, sizeof(float) * tokens * row_stride(layer->model));
    arrays->hidden_TH = take(next, sizeof(float) * tokens * row_stride(layer->hidden));
    arrays->token = take(next, sizeof(int32_t) * count);
    arrays->weight = take(next, sizeof(float) * count);
    arrays->x = take(next, sizeof(float *) * count);
    arrays->y = take(next, sizeof(float *) * count);
    arrays->hidden = take(next, sizeof(float) * hidden);
}

static void place_tokens(const Layer *layer, Plan *plan, const Arrays *arrays)
{
    for (long t = 0; t < layer->tokens; t++) {
        plan->x[t] = arrays->x_TD + (size_t)t * row_stride(layer->model);
        plan->y[t] = arrays->y_TD + t * plan->y_stride;
        plan->hidden[t] = arrays->hidden_TH + (size_t)t * row_stride(layer->hidden);
        plan->weight_T[t] = 0;
    }
}

static void fill_token(const Layer *layer, const Plan *plan, long t)
{
    long hidden = layer->hidden;
    layer->rows->unpack(plan->x[t], (const char *)layer->x_TD + t * layer->model * layer->rows->size, layer->model);
    memset(plan->hidden[t] + hidden, 0, sizeof(float) * (row_stride(hidden) - (size_t)hidden));
}

/* Moves start[e] to the end of expert e's pairs, which is where expert e + 1 began. */
static void fill_pairs(const Layer *layer, Plan *plan, Arrays *arrays, int32_t *start)
{
    for (long pair = 0; pair < layer->tokens * layer->top_k; pair++) {
        int32_t expert = expert_of(layer, pair);
        if (expert < 0)
            continue;
        long token = pair / layer->top_k, place = start[expert]++;
        arrays->token[place] = (int32_t)token;
        arrays->weight[place] = layer->topk_weights_TK[pair];
        arrays->x[place] = plan->x[token];
        arrays->y[place] = plan->y[token];
        plan->weight_T[token] += layer->topk_weights_TK[pair];
    }
}

static void fill_groups(const Layer *layer, Plan *plan, Arrays *arrays, const int32_t *end)
{
    float *hidden = arrays->hidden;
    plan->count = plan->most = 0;
    for (long e = 0; e < layer->experts; e++) {
        long first = e ? end[e - 1] : 0, kept = kept_of(layer, e), count = end[e] - first;
        if (!count || !kept)
            continue;
        plan->groups[plan->count++] = (Group){
            .first = layer->offsets_E1[e], .kept = kept, .pairs = count, .token = arrays->token + first,
            .weight = arrays->weight + first, .x = arrays->x + first, .y = arrays->y + first, .hidden = hidden};
        plan->most = max_long(plan->most, count);
        hidden += count * kept;
    }
}

static int make_plan(const Layer *layer, Plan *plan)
{
    char *size = NULL;
    Arrays arrays;
    int32_t *start = malloc(sizeof(*start) * (size_t)(layer->experts + 1));
    if (!start)
        return -1;
    size_t hidden = count_pairs(layer, start);
    cut_plan(layer, plan, &arrays, hidden, &size);
    plan->memory = memory_take(PLAN_MEMORY, (size_t)(size - (char *)NULL));
    if (plan->memory) {
        char *next = plan->memory;
        cut_plan(layer, plan, &arrays, hidden, &next);
        place_tokens(layer, plan, &arrays);
        fill_pairs(layer, plan, &arrays, start);
        fill_groups(layer, plan, &arrays, start);
    }
    free(start);
    return plan->memory ? 0 : -1;
}

/* ---- scratch ---- */

static void cut_scratch(Scratch *scratch, size_t tokens, size_t pairs, size_t width, char **next)
{
    scratch->rows = take(next, sizeof(void *) * 2 * width);
    scratch->gate_up = take(next, sizeof(float) * tokens * 2 * width);
    scratch->base = take(next, sizeof(float) * tokens * width);
    scratch->residual = take(next, sizeof(float) * pairs * 2 * width);
    scratch->block = take(next, sizeof(float) * BLOCK * (DEPTH + ROUND));
    scratch->gate = take(next, sizeof(float) * (width + ROUND));
    scratch->up = take(next, sizeof(float) * (width + ROUND));
}

/* One for each thread, in one piece of memory: that of the first. */
static Scratch *make_scratches(int threads, size_t tokens, size_t pairs, size_t width)
{
    char *end = NULL;
    Scratch one;
    cut_scratch(&one, tokens, pairs, width, &end);
    size_t size = (size_t)(end - (char *)NULL), table = (size_t)round_up((long)sizeof(Scratch) * threads, LINE);
    char *memory = memory_take(SCRATCH_MEMORY, table + size * (size_t)threads);
    for (int i = 0; memory && i < threads; i++) {
        char *next = memory + table + size * (size_t)i;
        cut_scratch((Scratch *)memory + i, tokens, pairs, width, &next);
    }
    return (Scratch *)memory;
}

/* ---- forward ---- */

/* Whole pairs of the longest vectors: what is left of a piece is computed one by one, ten times slower. */
static long piece(long columns, int pieces) { return round_up((columns + pieces - 1) / pieces, 2 * ROUND); }

/* Hidden units per piece of work, then columns of y. With few tokens memory decides, which is fastest in long runs: the
 * rows of down that experts keep are cut into pieces of `columns`. With many, pieces must fit into the cache. */
static void pieces(const Layer *layer, int threads, long *units, long *columns)
{
    if (layer->tokens <= DECODE) {
        *units = piece(layer->hidden, 2 * threads);
        *columns = piece(layer->model, threads);
    } else {
        *units = min_long(MOST, piece(layer->hidden, TURNS * threads));
        *columns = min_long(MOST, piece(layer->model, TURNS * threads));
    }
}

static void run(const Layer *layer, const Plan *plan, const Kernels *kernels, Scratch *scratches, int threads,
                long units, long columns)
{
#pragma omp parallel num_threads(threads)
    {
        Scratch *scratch = scratches + thread_number();
#pragma omp for
        for (long t = 0; t < layer->tokens; t++)
            fill_token(layer, plan, t);
#pragma omp for schedule(dynamic, 1)
        for (long from = 0; from < layer->hidden; from += units)
            kernels->hidden(layer, plan, scratch, from, min_long(from + units, layer->hidden));
#pragma omp for schedule(dynamic, 1) nowait
        for (long from = 0; from < layer->model; from += columns)
            kernels->output(layer, plan, scratch, from, min_long(from + columns, layer->model));
    }
}

static int forward_tile(const Layer *layer, const Kernels *kernels, int threads)
{
    long units, columns;
    Plan plan;
    pieces(layer, threads, &units, &columns);
    if (make_plan(layer, &plan))
        return -1;
    Scratch *scratches =
        make_scratches(threads, (size_t)layer->tokens, (size_t)plan.most, (size_t)max_long(units, columns));
    if (scratches)
        run(layer, &plan, kernels, scratches, threads, units, columns);
    memory_give(SCRATCH_MEMORY, scratches);
    memory_give(PLAN_MEMORY, plan.memory);
    return scratches ? 0 : -1;
}

int layer_forward(const Layer *layer, const Kernels *kernels, int threads)
{
    for (long first = 0; first < layer->tokens; first += TILE) {
        Layer tile = *layer;
        tile.tokens = min_long(TILE, layer->tokens - first);
        tile.x_TD = (const char *)layer->x_TD + first * layer->model * layer->rows->size;
        tile.y_TD = (char *)layer->y_TD + first * layer->model * layer->rows->size;
        tile.topk_weights_TK += first * layer->top_k;
        tile.topk_ids_TK += first * layer->top_k;
        if (forward_tile(&tile, kernels, useful_threads(3 * tile.tokens * tile.hidden * tile.model, threads)))
            return -1;
    }
    return 0;
}

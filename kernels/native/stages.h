/* The two stages of a layer; included once per instruction set. */

/* ---- hidden units ---- */

static long list(const void **rows, const void *matrix, long from, long to, long bytes)
{
    for (long i = from; i < to; i++)
        *rows++ = (const char *)matrix + i * bytes;
    return to - from;
}

/* Products with rows of an int8 backbone, which their scales make what they are; other backbones have none. */
static void scale_rows(float *products, const float *scale, long count)
{
    for (long i = 0; scale && i < count; i++)
        products[i] *= scale[i];
}

static const float *at(const float *scale, long from) { return scale ? scale + from : NULL; }

/* The backbone's hidden values, in scratch->base, and weighted by all experts of the token in plan->hidden_TH. */
static void backbone_hidden(const Layer *layer, const Plan *plan, Scratch *scratch, long from, long to)
{
    const Elements *elements = layer->backbone;
    long count = to - from, row = layer->model * elements->size;
    list(scratch->rows, layer->gate_HD, from, to, row);
    list(scratch->rows + count, layer->up_HD, from, to, row);
    elements->multiply((const float *const *)plan->x, layer->tokens, 2 * count, layer->model, scratch->gate_up,
                       2 * count, scratch);
    for (long t = 0; t < layer->tokens; t++) {
        float *gate = scratch->gate_up + 2 * count * t;
        scale_rows(gate, at(layer->gate_scale_H, from), count);
        scale_rows(gate + count, at(layer->up_scale_H, from), count);
        float *base = scratch->base + count * t, *hidden = plan->hidden[t] + from;
        __builtin_memcpy(scratch->gate, gate, sizeof(float) * count);
        __builtin_memcpy(scratch->up, gate + count, sizeof(float) * count);
        activate(scratch->gate, scratch->up, count, layer->activation);
        __builtin_memcpy(base, scratch->gate, sizeof(float) * count);
        for (long i = 0; i < count; i++)
            hidden[i] = plan->weight_T[t] * base[i];
    }
}

/* Kept units [first, last) of R, all within the hidden units [from, to), for one token of the group. */
static void correct(const Layer *layer, const Plan *plan, Scratch *scratch, const Group *group, long pair,
                          long first, long last, long from, long to)
{
    long count = last - first, width = to - from, token = group->token[pair];
    const int32_t *unit = layer->indices_R + first;
    const float *gate = scratch->gate_up + 2 * width * token - from, *up = gate + width;
    const float *base = scratch->base + width * token - from, *residual = scratch->residual + 2 * count * pair;
    float *total = plan->hidden[token], weight = group->weight[pair];
    float *weighted = group->hidden + group->kept * pair + first - group->first;
    for (long i = 0; i < count; i++) {
        scratch->gate[i] = gate[unit[i]] + residual[i];
        scratch->up[i] = up[unit[i]] + residual[count + i];
    }
    activate(scratch->gate, scratch->up, count, layer->activation);
    for (long i = 0; i < count; i++) {
        weighted[i] = weight * scratch->gate[i];
        total[unit[i]] += weighted[i] - weight * base[unit[i]];
    }
}

static void hidden(const Layer *layer, const Plan *plan, Scratch *scratch, long from, long to)
{
    const Elements *elements = layer->residual;
    long row = layer->model * elements->size;
    backbone_hidden(layer, plan, scratch, from, to);
    for (const Group *group = plan->groups; group < plan->groups + plan->count; group++) {
        long end = group->first + group->kept;
        long first = lower_bound(layer->indices_R, group->first, end, from);
        long last = lower_bound(layer->indices_R, first, end, to), count = last - first;
        if (!count)
            continue;
        list(scratch->rows, layer->residual_gate_RD, first, last, row);
        list(scratch->rows + count, layer->residual_up_RD, first, last, row);
        elements->multiply((const float *const *)group->x, group->pairs, 2 * count, layer->model, scratch->residual,
                           2 * count, scratch);
        for (long pair = 0; pair < group->pairs; pair++)
            correct(layer, plan, scratch, group, pair, first, last, from, to);
    }
}

/* ---- output ---- */

static void output(const Layer *layer, const Plan *plan, Scratch *scratch, long from, long to)
{
    const Elements *elements = layer->backbone;
    long count = list(scratch->rows, layer->down_DH, from, to, layer->hidden * elements->size);
    elements->multiply((const float *const *)plan->hidden, layer->tokens, count, layer->hidden, plan->y[0] + from,
                       plan->y_stride, scratch);
    for (long t = 0; t < layer->tokens; t++)
        scale_rows(plan->y[t] + from, at(layer->down_scale_D, from), count);
    for (const Group *group = plan->groups; group < plan->groups + plan->count; group++)
        layer->residual->add(layer, group, from, to);
    for (long t = 0; t < layer->tokens; t++)
        layer->rows->pack((char *)layer->y_TD + (t * layer->model + from) * layer->rows->size, plan->y[t] + from, count);
}

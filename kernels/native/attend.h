/* Attention of a panel of rows; included once per instruction set.
 *
 * A vector holds one number of LANES rows, so that the softmax needs no sums across a vector. Keys come in spans; what
 * was summed of earlier ones is scaled when a higher product appears (online softmax, arXiv 1805.02867).
 */

#define PANEL_BLEND(V, N) case V: panel_sums(x, weight, step, NULL, 0, count, factor, total, V, N); break;

/* total[n][v] = factor[v] total[n][v] + sum over `count` keys k of x[k][v] value[k][n] */
static void any_panel_blend(const float *x, const float *const *weight, long step, long count, const float *factor,
                            float *total, long vectors)
{
    switch (vectors) {
        PANEL_BLEND(1, TALLEST) PANEL_BLEND(2, SUMS / 2) PANEL_BLEND(3, SUMS / 3) PANEL_BLEND(4, SUMS / 4)
    }
}

#undef PANEL_BLEND

/* Where a row's numbers begin among queries or results that lie `stride` and `head` elements apart. */
INLINE long row_at(const Attention *attention, long head, long row, long stride, long per_head)
{
    return row / attention->group * stride + (head * attention->group + row % attention->group) * per_head;
}

/* Queries side by side, zeros beyond the last, and no keys seen. */
static void begin_rows(const Attention *attention, const Asker *asker, AttentionSpace *space, long head, long from,
                       long to, long vectors)
{
    long rows = vectors * LANES, size = attention->size;
    float scale = 1.0f / sqrtf((float)size);
    __builtin_memset(space->queries, 0, sizeof(float) * (size_t)(rows * size));
    __builtin_memset(space->results, 0, sizeof(float) * (size_t)(rows * (size + TALLEST)));
    for (long i = 0; i < to - from; i++) {
        long at = row_at(attention, head, from + i, asker->stride, asker->head);
        attention->elements->unpack(space->row, (const char *)asker->queries + at * attention->elements->size, size);
        for (long s = 0; s < size; s++)
            space->queries[s * rows + i] = scale * space->row[s];
    }
    for (long i = 0; i < rows; i++)
        space->most[i] = -FLT_MAX, space->sum[i] = 0;
}

/* Products of all rows with `count` keys. Meanwhile their values are fetched. */
static void score(const Attention *attention, AttentionSpace *space, const char *keys, long stride, const char *values,
                  long value_stride, long count, long vectors)
{
    const Elements *elements = attention->elements;
    long rows = vectors * LANES, wide = panel_rows(vectors), size = attention->size;
    for (long i = 0; elements->size != sizeof(float) && i < count; i++)
        elements->unpack(space->keys + i * space->stride, keys + i * stride * elements->size, size);
    __builtin_memset(space->scores, 0, sizeof(float) * (size_t)(rows * (SPAN + TALLEST)));
    for (long k = 0; k < count; k += wide) {
        const float *key[TALLEST];
        const char *ahead[TALLEST];
        for (long i = 0; i < wide; i++) {
            long at = at_most(k + i, count - 1);
            key[i] = elements->size == sizeof(float) ? (const float *)keys + at * stride : space->keys + at * space->stride;
            ahead[i] = values + at * value_stride * elements->size;
        }
        any_panel_sums(space->queries, key, ahead, elements->size, size, space->scores + k * rows, vectors);
    }
}

/* exp(product - the row's highest so far) of `count` keys, and what earlier ones are worth now. */
static void soften(AttentionSpace *space, long count, long vectors)
{
    for (long i = 0; i < vectors * LANES; i += LANES) {
        Vector before = load_f32(space->most + i), most = before, sum = splat(0);
        float *scores = space->scores + i;
        for (long k = 0; k < count; k++) {
            Vector one = load_f32(scores + k * vectors * LANES);
            most = pick(one > most, one, most);
        }
        for (long k = 0; k < count; k++) {
            Vector share = exponential(load_f32(scores + k * vectors * LANES) - most);
            store(scores + k * vectors * LANES, share);
            sum += share;
        }
        Vector factor = exponential(before - most);
        store(space->most + i, most);
        store(space->factor + i, factor);
        store(space->sum + i, load_f32(space->sum + i) * factor + sum);
    }
}

/* Bytes [0, size) of the rows [from, to) into the cache. */
INLINE void fetch_rows(const char *rows, long from, long to, long stride, long size)
{
    for (long i = from; i < to; i++)
        for (long byte = 0; byte < size; byte += LINE)
            __builtin_prefetch(rows + i * stride + byte, 0, 2);
}

/* Adds `count` values, each as often as its key is attended to. Meanwhile `next_count` keys are fetched. */
static void blend(const Attention *attention, AttentionSpace *space, const char *values, long stride, long count,
                  const char *next, long next_stride, long next_count, long vectors)
{
    const Elements *elements = attention->elements;
    long wide = panel_rows(vectors), size = attention->size;
    for (long i = 0; i < count; i++)
        elements->unpack(space->values + i * space->stride, values + i * stride * elements->size, size);
    for (long s = 0; s < size; s += wide) {
        const float *value[TALLEST];
        for (long i = 0; i < wide; i++)
            value[i] = space->values + s + i;
        fetch_rows(next, next_count * s / size, next_count * at_most(s + wide, size) / size, next_stride * elements->size,
                   size * elements->size);
        any_panel_blend(space->scores, value, space->stride, count, space->factor,
                        space->results + s * vectors * LANES, vectors);
    }
}

static void attend_segment(const Attention *attention, const Segment *segment, AttentionSpace *space, long head,
                           long vectors)
{
    long bytes = attention->elements->size;
    const char *keys = (const char *)segment->keys + head * segment->key_head * bytes;
    const char *values = (const char *)segment->values + head * segment->value_head * bytes;
    for (long k = 0; k < segment->count; k += SPAN) {
        long count = at_most(SPAN, segment->count - k);
        const char *value = values + k * segment->value_stride * bytes;
        score(attention, space, keys + k * segment->key_stride * bytes, segment->key_stride, value,
              segment->value_stride, count, vectors);
        soften(space, count, vectors);
        blend(attention, space, value, segment->value_stride, count, keys + (k + count) * segment->key_stride * bytes,
              segment->key_stride, at_most(SPAN, segment->count - k - count), vectors);
    }
}

static void attend(const Attention *attention, const Asker *asker, AttentionSpace *space, long head, long from, long to)
{
    long vectors = (to - from + LANES - 1) / LANES, rows = vectors * LANES, size = attention->size;
    begin_rows(attention, asker, space, head, from, to, vectors);
    for (const Segment *segment = asker->segments; segment < asker->segments + asker->segment_count; segment++)
        attend_segment(attention, segment, space, head, vectors);
    long heads = attention->kv_heads * attention->group;
    for (long i = 0; i < to - from; i++) {
        long at = row_at(attention, head, from + i, heads * size, size);
        float share = 1.0f / space->sum[i];
        for (long s = 0; s < size; s++)
            space->row[s] = space->results[s * rows + i] * share;
        attention->elements->pack((char *)asker->results + at * attention->elements->size, space->row, size);
    }
}

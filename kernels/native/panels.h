/* A linear layer for few rows of x; included once per instruction set.
 *
 * x, the smaller matrix, is transposed, so that a vector holds one element of LANES rows of x; it is multiplied by
 * single weights, which are read as they lie. A panel is PANEL vectors of rows or what is left of them.
 */

enum {
    PANEL = 4,              /* vectors */
    SUMS = 12,              /* of products; with one vector and the fewer of vectors and weights these are 16 registers */
};

/* ---- sums of one panel ---- */

/* sum[n][v] += x[v] w[n][k], where k counts floats. */
INLINE void panel_step(Vector *sum, const float *x, const float *const *w, long k, const int vectors, const int rows)
{
    Vector held[PANEL];
    if (rows < vectors) {
        for (int n = 0; n < rows; n++)
            held[n] = splat(w[n][k]);
        for (int v = 0; v < vectors; v++) {
            Vector one = load_f32(x + v * LANES);
            for (int n = 0; n < rows; n++)
                sum[n * vectors + v] += one * held[n];
        }
    } else {
        for (int v = 0; v < vectors; v++)
            held[v] = load_f32(x + v * LANES);
        for (int n = 0; n < rows; n++) {
            Vector one = splat(w[n][k]);
            for (int v = 0; v < vectors; v++)
                sum[n * vectors + v] += one * held[v];
        }
    }
}

/* total[n][v] += x[k][v] weight[n][k] over `count` elements k, `step` floats from each other; `vectors` and `rows` are
 * constants where this is inlined. Totals of before are multiplied by factor[v], if there are factors, and added to last:
 * short sums round less. Meanwhile as many elements `ahead` of `size` bytes, if any, are fetched into the cache. */
INLINE void panel_sums(const float *x, const float *const *weight, long step, const char *const *ahead, long size,
                       long count, const float *factor, float *total, const int vectors, const int rows)
{
    enum { FLOATS = LINE / 4 };
    Vector sum[SUMS];
    const float *w[TALLEST];
    for (int n = 0; n < rows; n++)
        w[n] = weight[n];
    for (int i = 0; i < rows * vectors; i++)
        sum[i] = splat(0);
    for (long line = 0; line < count; line += FLOATS) {
        for (int n = 0; ahead && n < rows; n++)
            __builtin_prefetch(ahead[n] + line * size, 0, 2);
        for (long k = line; k < at_most(line + FLOATS, count); k++)
            panel_step(sum, x + k * vectors * LANES, w, k * step, vectors, rows);
    }
    for (int i = 0; i < rows * vectors; i++) {
        Vector before = load_f32(total + i * LANES);
        if (factor)
            before *= load_f32(factor + i % vectors * LANES);
        store(total + i * LANES, sum[i] + before);
    }
}

/* Rows of weights at a time. */
INLINE long panel_rows(long vectors) { return vectors == 1 ? TALLEST : SUMS / vectors; }

#define PANEL_SUMS(V, N) case V: panel_sums(x, weight, 1, ahead, size, count, NULL, total, V, N); break;

static void any_panel_sums(const float *x, const float *const *weight, const char *const *ahead, long size, long count,
                           float *total, long vectors)
{
    switch (vectors) {
        PANEL_SUMS(1, TALLEST) PANEL_SUMS(2, SUMS / 2) PANEL_SUMS(3, SUMS / 3) PANEL_SUMS(4, SUMS / 4)
    }
}

#undef PANEL_SUMS

/* ---- x and y ---- */

/* Of the panel that begins with row m. */
INLINE long vectors_at(const Linear *linear, long m) { return at_most(PANEL, (linear->m - m + LANES - 1) / LANES); }

/* The panel that row m belongs to. */
INLINE long panel_of(long m) { return m / (PANEL * LANES) * (PANEL * LANES); }

/* LANES rows from row m on; zeros beyond the last. */
static void unpack_rows(const Linear *linear, float rows[LANES][STRETCH], long m, long from, long count)
{
    for (long i = 0; i < LANES; i++)
        if (m + i < linear->m)
            linear->rows->unpack(rows[i], (const char *)linear->x_MK + ((m + i) * linear->k + from) * linear->rows->size,
                                 count);
        else
            __builtin_memset(rows[i], 0, sizeof(rows[i]));
}

static void transpose(const Linear *linear, float *x_KM, long from, long to)
{
    float rows[LANES][STRETCH];
    for (long m = 0; m < linear->m; m += LANES) {
        long panel = panel_of(m), stride = vectors_at(linear, panel) * LANES;
        float *x = x_KM + panel * linear->k + from * stride + m - panel;
        unpack_rows(linear, rows, m, from, to - from);
        for (long k = 0; k < to - from; k++)
            for (long i = 0; i < LANES; i++)
                x[k * stride + i] = rows[i][k];
    }
}

/* Columns [from, to) of y: their sums, transposed back, and the bias. */
static void finish(const Linear *linear, LinearSpace *space, long from, long to)
{
    long size = linear->rows->size;
    float out[COLUMNS], bias[COLUMNS] = {0};
    if (linear->bias_N)
        linear->rows->unpack(bias, (const char *)linear->bias_N + from * size, to - from);
    for (long m = 0; m < linear->m; m++) {
        long panel = panel_of(m), stride = vectors_at(linear, panel) * LANES;
        const float *total = space->totals + panel * (COLUMNS + TALLEST) + m - panel;
        for (long n = 0; n < to - from; n++)
            out[n] = total[n * stride] + bias[n];
        linear->rows->pack((char *)linear->y_MN + (m * linear->n + from) * size, out, to - from);
    }
}

/* ---- columns of y ---- */

/* Elements of the rows [from, to) of weights from k on, as floats, and what will be read after them. The last row fills
 * the last tile up. */
static void list_weights(const Linear *linear, LinearSpace *space, long from, long to, long k, long count)
{
    long size = linear->weights->size;
    const char *weight = (const char *)linear->weight_NK + k * size;
    for (long n = 0; n < to - from + TALLEST; n++) {
        const char *at = weight + at_most(from + n, to - 1) * linear->k * size;
        const char *below = weight - k * size + at_most(from + n + COLUMNS, linear->n - 1) * linear->k * size;
        float *unpacked = space->weights + at_most(n, to - from - 1) * (PART + ROUND);
        space->ahead[n] = k + PART < linear->k ? at + PART * size : below;
        space->rows[n] = size == sizeof(float) ? (const float *)at : unpacked;
        if (size != sizeof(float) && n < to - from)
            linear->weights->unpack(unpacked, at, count);
    }
}

static void columns(const Linear *linear, const float *x_KM, LinearSpace *space, long from, long to)
{
    __builtin_memset(space->totals, 0, linear_totals(linear));
    for (long k = 0; k < linear->k; k += PART) {
        long count = at_most(PART, linear->k - k);
        list_weights(linear, space, from, to, k, count);
        for (long m = 0; m < linear->m; m += PANEL * LANES) {
            long vectors = vectors_at(linear, m);
            const float *x = x_KM + m * linear->k + k * vectors * LANES;
            float *total = space->totals + m * (COLUMNS + TALLEST);
            for (long n = 0; n < to - from; n += panel_rows(vectors))
                any_panel_sums(x, space->rows + n, m ? NULL : space->ahead + n, linear->weights->size, count,
                               total + n * vectors * LANES, vectors);
        }
    }
    finish(linear, space, from, to);
}

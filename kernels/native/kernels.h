/* The kernels for one ELEMENT type; included once per type and instruction set. Without a STORE it is a type of the
 * backbone alone. */

/* ---- rows of activations times rows of weights ---- */

INLINE Vector NAME(load_some)(const ELEMENT *from, long count)
{
    ELEMENT some[LANES] = {0};
    __builtin_memcpy(some, from, sizeof(ELEMENT) * (size_t)count);
    return LOAD(some);
}

INLINE Vector NAME(take)(const ELEMENT *from, long count)
{
    return count == LANES ? LOAD(from) : NAME(load_some)(from, count);
}

/* total[m nb + n] += a[m][k:] * b[n][k:], `count` elements. Of the two, those that are fewer are held in registers. */
INLINE void NAME(step)(Vector total[TOTALS], const float *const *a, const ELEMENT *const *b, long k, long count,
                       const int ma, const int nb)
{
    Vector held[TALL];
    if (ma > nb) {
        for (int n = 0; n < nb; n++)
            held[n] = NAME(take)(b[n] + k, count);
        for (int m = 0; m < ma; m++) {
            Vector left = load_f32(a[m] + k);
            for (int n = 0; n < nb; n++)
                total[m * nb + n] += left * held[n];
        }
    } else {
        for (int m = 0; m < ma; m++)
            held[m] = load_f32(a[m] + k);
        for (int n = 0; n < nb; n++) {
            Vector right = NAME(take)(b[n] + k, count);
            for (int m = 0; m < ma; m++)
                total[m * nb + n] += held[m] * right;
        }
    }
}

/* out[m][n] (+)= a[m] . b[n] over [from, to) for m < `ma`, n < `nb`, which are constants where this is inlined.
 * Meanwhile the same part of the rows `ahead`, if any, is fetched into the cache. */
INLINE void NAME(dots)(const float *const *a, const ELEMENT *const *b, const ELEMENT *const *ahead, long from, long to,
                       float *out, long stride, const int ma, const int nb)
{
    enum { PER_LINE = LINE / sizeof(ELEMENT) };
    Vector total[TOTALS];
    for (int i = 0; i < (ma * nb + 3) / 4 * 4; i++) /* `= {0}` would be a slow instruction for all of them */
        total[i] = splat(0);
    long k = from;
    for (; k + PER_LINE <= to; k += PER_LINE) {
        if (ahead)
            for (int n = 0; n < nb; n++)
                __builtin_prefetch(ahead[n] + k, 0, 2);
        for (int i = 0; i < PER_LINE; i += LANES)
            NAME(step)(total, a, b, k + i, LANES, ma, nb);
    }
    for (; k + LANES <= to; k += LANES)
        NAME(step)(total, a, b, k, LANES, ma, nb);
    if (k < to)
        NAME(step)(total, a, b, k, to - k, ma, nb);
    for (int i = 0; i < ma * nb; i += 4) {
        Quad four = sums(total + i);
        for (int j = 0; j < 4 && i + j < ma * nb; j++) {
            float *to_add = out + (i + j) / nb * stride + (i + j) % nb;
            *to_add = from ? *to_add + four[j] : four[j];
        }
    }
}

#define DOTS(M, N) case M * 8 + N: NAME(dots)(a, b, ahead, from, to, out, stride, M, N); break;

static void NAME(tile)(const float *const *a, const ELEMENT *const *b, const ELEMENT *const *ahead, long from, long to,
                       float *out, long stride, long ma, long nb)
{
    switch (ma * 8 + nb) {
        DOTS(1, 1) DOTS(1, 2) DOTS(1, 3) DOTS(1, 4) DOTS(1, 5) DOTS(1, 6)
        DOTS(2, 1) DOTS(2, 2) DOTS(2, 3) DOTS(2, 4) DOTS(2, 5) DOTS(2, 6)
        DOTS(3, 1) DOTS(3, 2) DOTS(3, 3)
        DOTS(4, 1) DOTS(4, 2) DOTS(4, 3)
    }
}

#undef DOTS

/* The first rows of a fetch those `ahead`, of which there are `na`. */
static void NAME(tiles)(const float *const *a, long ma, const ELEMENT *const *b, long nb, const ELEMENT *const *ahead,
                        long na, long from, long to, float *out, long stride)
{
    for (long m = 0; m < ma; m += TALL) {
        long tall = at_most(TALL, ma - m), wide = width(tall);
        for (long n = 0; n < nb; n += wide)
            NAME(tile)(a + m, b + n, !m && n + wide <= na ? ahead + n : NULL, from, to, out + m * stride + n, stride,
                       tall, at_most(wide, nb - n));
    }
}

/* Few rows of a: weights are converted in registers. A block of them stays in the second-level cache while the rows
 * of a pass, TALL at a time, through the first. */
static void NAME(multiply_few)(const float *const *a, long ma, const ELEMENT *const *b, long nb, long length,
                               float *out, long stride)
{
    long block = ma <= TALL ? width(ma) : SMALL_BLOCK;
    for (long n = 0; n < nb; n += block)
        for (long from = 0; from < length; from += DEPTH)
            NAME(tiles)(a, ma, b + n, at_most(block, nb - n), b + n + block, nb - n - block, from,
                        at_most(from + DEPTH, length), out + n, stride);
}

static void NAME(unpack)(float *to, const void *elements, long count)
{
    const ELEMENT *from = elements;
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        store(to + i, LOAD(from + i));
    if (i < count)
        store(to + i, NAME(load_some)(from + i, count - i));
}

/* The rows of the next pass are fetched while the first tiles of this one are computed. */
static void NAME(passes)(const float *const *a, long ma, const float *const *b, long nb, long from, long to, float *out,
                         long stride)
{
    for (long m = 0; m < ma; m += TALL) {
        long tall = at_most(TALL, ma - m), wide = width(tall);
        for (long n = 0; n < nb; n += wide)
            tile_f32(a + m, b + n, n < 2 * wide && m + TALL + n + wide <= ma ? a + m + TALL + n : NULL, from, to,
                     out + m * stride + n, stride, tall, at_most(wide, nb - n));
    }
}

/* Many rows of a: blocks of weights are first converted, and laid close together so that they do not evict each other. */
static void NAME(multiply_many)(const float *const *a, long ma, const ELEMENT *const *b, long nb, long length,
                                float *out, long stride, float *block)
{
    long even = (nb + BLOCK - 1) / BLOCK, size = ((nb + even - 1) / even + SMALL_BLOCK - 1) / SMALL_BLOCK * SMALL_BLOCK;
    for (long n = 0; n < nb; n += size)
        for (long from = 0; from < length; from += DEPTH) {
            long rows = at_most(size, nb - n), count = at_most(DEPTH, length - from);
            const float *packed[BLOCK];
            for (long i = 0; i < rows; i++) {
                NAME(unpack)(block + i * (DEPTH + LANES), b[n + i] + from, count);
                packed[i] = block + i * (DEPTH + LANES) - from;
            }
            NAME(passes)(a, ma, packed, rows, from, from + (count + LANES - 1) / LANES * LANES, out + n, stride);
        }
}

/* out[m][n] = a[m] . b[n]. The order of summation depends on `length` alone. */
static void NAME(multiply)(const float *const *a, long ma, long nb, long length, float *out, long stride,
                           Scratch *scratch)
{
    const ELEMENT *const *b = (const ELEMENT *const *)scratch->rows;
    if (ma <= FEW)
        NAME(multiply_few)(a, ma, b, nb, length, out, stride);
    else
        NAME(multiply_many)(a, ma, b, nb, length, out, stride, scratch->block);
}

#ifdef STORE

static void NAME(pack)(void *elements, const float *from, long count)
{
    ELEMENT *to = elements, some[LANES];
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        STORE(to + i, load_f32(from + i));
    if (i < count) {
        STORE(some, load_some_f32(from + i, count - i));
        __builtin_memcpy(to + i, some, sizeof(ELEMENT) * (size_t)(count - i));
    }
}

/* ---- what the kept units add to y ---- */

INLINE float NAME(scalar)(ELEMENT x) { return NAME(load_some)(&x, 1)[0]; }

/* y[m][from:to] += sum over i < `count`, a constant where this is inlined, of a[m][i] b[i][from:to]. */
INLINE void NAME(axpy)(float *const *y, const float *a, long stride, long ma, const ELEMENT *b, long model, long from,
                       long to, const int count)
{
    long d = from;
    for (; d + 2 * LANES <= to; d += 2 * LANES) {
        Vector left[STEP], right[STEP];
        for (int i = 0; i < count; i++) {
            __builtin_prefetch(b + (i + count) * model + d);
            left[i] = LOAD(b + i * model + d);
            right[i] = LOAD(b + i * model + d + LANES);
        }
        for (long m = 0; m < ma; m++) {
            Vector first = load_f32(y[m] + d), second = load_f32(y[m] + d + LANES);
            for (int i = 0; i < count; i++) {
                Vector factor = splat(a[m * stride + i]);
                first += factor * left[i];
                second += factor * right[i];
            }
            store(y[m] + d, first);
            store(y[m] + d + LANES, second);
        }
    }
    for (; d < to; d++)
        for (long m = 0; m < ma; m++)
            for (int i = 0; i < count; i++)
                y[m][d] += a[m * stride + i] * NAME(scalar)(b[i * model + d]);
}

#define AXPY(N) case N: NAME(axpy)(group->y, a, group->kept, group->pairs, b, layer->model, from, to, N); break;

static void NAME(add)(const Layer *layer, const Group *group, long from, long to)
{
    for (long r = 0; r < group->kept; r += STEP) {
        const float *a = group->hidden + r;
        const ELEMENT *b = (const ELEMENT *)layer->residual_down_RD + (group->first + r) * layer->model;
        switch (at_most(STEP, group->kept - r)) {
            AXPY(1) AXPY(2) AXPY(3) AXPY(4) AXPY(5) AXPY(6)
        }
    }
}

#undef AXPY
#endif

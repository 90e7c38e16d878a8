/* Operations on one row; included once per instruction set. */

static void put_row(const Rows *rows, const float *row, long n)
{
    rows->elements->pack((char *)rows->y + n * rows->d * rows->elements->size, row, rows->d);
}

static float mean_square(const float *row, long count)
{
    Vector sum[4] = {splat(0), splat(0), splat(0), splat(0)};
    long i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int v = 0; v < 4; v++)
            sum[v] += load_f32(row + i + v * LANES) * load_f32(row + i + v * LANES);
    Quad four = sums(sum);
    float total = four[0] + four[1] + (four[2] + four[3]);
    for (; i < count; i++)
        total += row[i] * row[i];
    return total / (float)count;
}

/* RMSNorm (arXiv 1910.07467), in float. */
static void norm_row(const Rows *rows, float *space, long n)
{
    long size = rows->elements->size, d = rows->d;
    float *row = space, *weight = space + (d + ROUND - 1) / ROUND * ROUND;
    rows->elements->unpack(row, (const char *)rows->x + n * d * size, d);
    rows->elements->unpack(weight, rows->weight_D, d);
    float scale = 1.0f / sqrtf(mean_square(row, d) + rows->epsilon);
    for (long i = 0; i < d; i++)
        row[i] *= scale * weight[i];
    put_row(rows, row, n);
}

/* SiLU of the first half of x times the second (SwiGLU's middle, arXiv 2002.05202). */
static void gate_row(const Rows *rows, float *space, long n)
{
    long size = rows->elements->size, d = rows->d;
    float *gate = space, *up = space + (d + ROUND - 1) / ROUND * ROUND;
    const char *x = (const char *)rows->x + 2 * n * d * size;
    rows->elements->unpack(gate, x, d);
    rows->elements->unpack(up, x + d * size, d);
    activate(gate, up, d, SILU);
    put_row(rows, gate, n);
}

/* Attention without a mask, of few queries to keys and values that lie in several places. */
#ifndef FOREBAY_ATTENTION_H
#define FOREBAY_ATTENTION_H

#include "linear.h"

enum {
    SPAN = 48,              /* keys at a time: their values and the products of 32 rows stay in the first-level cache */
};

/* Keys and values of some positions. Distances are in elements; those of one head are contiguous. */
typedef struct {
    const void *keys, *values;
    long count;
    long key_stride, key_head, value_stride, value_head;
} Segment;

/* Queries that attend to the same keys. Results are contiguous. */
struct Asker {
    void *results;
    const void *queries;
    long count, stride, head;
    const Segment *segments;
    long segment_count;
};

/* A row is a query of one position and head; `group` query heads, side by side, share a head of keys and values. */
struct Attention {
    const Asker *askers;
    long count;
    long kv_heads, group, size;         /* size: of a head */
    const Elements *elements;
};

/* What one thread needs for a panel of rows, which lie side by side in whole vectors. */
struct AttentionSpace {
    float *queries;                     /* size x rows, scaled */
    float *results;                     /* (size + TALLEST) x rows */
    float *scores;                      /* (SPAN + TALLEST) x rows: products with keys, then their exponentials */
    float *most, *sum, *factor;         /* of rows: highest product, sum of exponentials, what the last ones are worth */
    float *keys, *values;               /* SPAN x stride, and TALLEST floats */
    float *row;                         /* size */
    long stride;
};

static inline long attention_rows(const Attention *attention, const Asker *asker)
{
    return asker->count * attention->group;
}

/* All results, which depend neither on the number of threads nor on other queries. 0, or -1 for no memory. */
int attention_forward(const Attention *attention, const Kernels *kernels, int threads);

#endif

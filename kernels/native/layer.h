/* One forward pass of a compressed MoE layer on the CPU, and the kernels that it is made of.
 *
 * Shape letters as in weights.py: T tokens, K experts per token, E experts, H hidden units, D model dimension, R kept
 * units of all experts. What is computed on the way is float; weights, x and y are float, bfloat16 or half, and the
 * backbone may be int8 with a scale for each row.
 */
#ifndef FOREBAY_LAYER_H
#define FOREBAY_LAYER_H

#include <stddef.h>
#include <stdint.h>

enum {
    DEPTH = 768,            /* floats: seven rows, of activations and weights, fit into a first-level cache of 32 KiB */
    BLOCK = 48,             /* rows of weights: DEPTH floats of each are half of a second-level cache, 512 KiB */
    FEW = 48,               /* rows of activations up to which converting weights ahead does not pay */
    LINE = 64,              /* bytes in a line of the cache */
    ROUND = 16,             /* floats in the longest vector of any instruction set */
};

typedef struct Elements Elements;

typedef struct {
    const void *x_TD;
    const float *topk_weights_TK;
    const int32_t *topk_ids_TK;
    const void *gate_HD, *up_HD, *down_DH;
    const void *residual_gate_RD, *residual_up_RD, *residual_down_RD;
    const int32_t *indices_R, *offsets_E1;
    const float *gate_scale_H, *up_scale_H, *down_scale_D; /* of an int8 backbone's rows; else NULL */
    void *y_TD;
    const Elements *backbone, *residual, *rows; /* rows: of x and y */
    long tokens, top_k, experts, hidden, model, kept;
    int activation;
} Layer;

/* The pairs (token, slot) that chose one expert, where that expert keeps at least one unit. */
typedef struct {
    long first, kept;       /* its kept units are [first, first + kept) of R */
    long pairs;             /* how many tokens */
    const int32_t *token;   /* per pair */
    const float *weight;    /* per pair: the router's weight */
    float **x;              /* per pair: the token's row of x */
    float **y;              /* per pair: the token's row of plan->y */
    float *hidden;          /* pairs x kept: weighted hidden values of the kept units */
} Group;

typedef struct {
    Group *groups;
    long count;
    long most;              /* pairs of the largest group; more than T if a token names an expert twice */
    float **x;              /* per token: its row of x, with room for a whole vector beyond its end */
    float *weight_T;        /* sum of the token's router weights */
    float **y;              /* per token: where its row of y is summed, as far apart as the rows of x */
    long y_stride;
    float **hidden;         /* per token, H: sum over experts of weighted hidden values, for the backbone's down */
    void *memory;
} Plan;

/* What one thread needs while it works on `width` hidden units or columns of y. */
typedef struct {
    const void **rows;      /* 2 width pointers to rows of weights */
    float *gate_up;         /* T x 2 width */
    float *base;            /* T x width */
    float *residual;        /* plan->most x 2 width */
    float *block;           /* BLOCK x (DEPTH + a vector) */
    float *gate, *up;       /* width, and room to round up to whole vectors */
} Scratch;

/* Hidden units [from, to): fills those columns of plan->hidden and of every group's `hidden`. */
typedef void HiddenKernel(const Layer *layer, const Plan *plan, Scratch *scratch, long from, long to);
/* Columns [from, to) of y. Needs all of plan->hidden. */
typedef void OutputKernel(const Layer *layer, const Plan *plan, Scratch *scratch, long from, long to);

/* out[m][n] = a[m] . scratch->rows[n]. The order of summation depends on `length` alone. */
typedef void Multiply(const float *const *a, long ma, long nb, long length, float *out, long stride, Scratch *scratch);
/* `count` floats from elements, with zeros up to a whole vector, and back, rounded to nearest even. */
typedef void Unpack(float *to, const void *from, long count);
typedef void Pack(void *to, const float *from, long count);
/* Columns [from, to) of y += the down rows that an expert keeps, times its hidden values. */
typedef void Add(const Layer *layer, const Group *group, long from, long to);

enum { SILU, GELU, GELU_TANH, ACTIVATIONS };
enum { F32, BF16, F16, I8, ELEMENTS };

/* For one type of elements. int8 is for backbones and has no pack and no add. */
struct Elements {
    Multiply *multiply;
    Unpack *unpack;
    Pack *pack;
    Add *add;
    long size;              /* bytes of an element */
};

/* See linear.h. */
typedef struct Linear Linear;
typedef struct LinearSpace LinearSpace;
/* Elements [from, to) of all rows of x, at most STRETCH; all rows of an element side by side, panel after panel. */
typedef void TransposeKernel(const Linear *linear, float *x_KM, long from, long to);
/* Columns [from, to) of y, at most COLUMNS. The order of summation is that of the elements. */
typedef void ColumnsKernel(const Linear *linear, const float *x_KM, LinearSpace *space, long from, long to);

/* See attention.h. */
typedef struct Attention Attention;
typedef struct Asker Asker;
typedef struct AttentionSpace AttentionSpace;
/* The results of rows [from, to), at most `panel`, of one head of keys and values. */
typedef void AttendKernel(const Attention *attention, const Asker *asker, AttentionSpace *space, long head, long from,
                          long to);

/* See rows.h. Row n; `space` has room for three rows of floats. */
typedef struct Rows Rows;
typedef void RowKernel(const Rows *rows, float *space, long n);

/* For one instruction set. */
typedef struct {
    HiddenKernel *hidden;
    OutputKernel *output;
    TransposeKernel *transpose;
    ColumnsKernel *columns;
    AttendKernel *attend;
    RowKernel *norm, *gate;
    long panel;             /* rows that a pass over weights or keys serves */
    Elements elements[ELEMENTS];
} Kernels;

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

/* NULL, or what is wrong with offsets and indices. */
const char *layer_problem(const Layer *layer);
/* y. Returns 0, or -1 for no memory. */
int layer_forward(const Layer *layer, const Kernels *kernels, int threads);

/* Memory for one call, aligned to lines of the cache. What was given back last is kept for the next call of its kind: the
 * kernel would clear its pages again. NULL when there is none. */
enum { PLAN_MEMORY, SCRATCH_MEMORY, LINEAR_MEMORY, ATTENTION_MEMORY, ROWS_MEMORY, MEMORIES };
void *memory_take(int kind, size_t bytes);
void memory_give(int kind, void *memory);

#endif

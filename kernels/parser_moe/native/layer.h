/* One forward pass of a compressed MoE layer on the CPU, and the kernels that it is made of.
 *
 * Shape letters as in weights.py: T tokens, K experts per token, E experts, H hidden units, D model dimension, R kept
 * units of all experts. What is computed on the way is float; weights, x and y are float, bfloat16 or half.
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

typedef struct Kernels Kernels;

typedef struct {
    const void *x_TD;
    const float *topk_weights_TK;
    const int32_t *topk_ids_TK;
    const void *gate_HD, *up_HD, *down_DH;
    const void *residual_gate_RD, *residual_up_RD, *residual_down_RD;
    const int32_t *indices_R, *offsets_E1;
    void *y_TD;
    const Kernels *rows;    /* those for the type of x and y */
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

/* `count` floats from elements, with zeros up to a whole vector, and back, rounded to nearest even. */
typedef void Unpack(float *to, const void *from, long count);
typedef void Pack(void *to, const float *from, long count);

/* For one type of elements. */
struct Kernels {
    HiddenKernel *hidden;
    OutputKernel *output;
    Unpack *unpack;
    Pack *pack;
    long size;              /* bytes of an element */
};

enum { SILU, GELU, GELU_TANH, ACTIVATIONS };
enum { F32, BF16, F16, ELEMENTS };

extern const Kernels portable_kernels[ELEMENTS], avx2_kernels[ELEMENTS], avx512_kernels[ELEMENTS];

/* NULL, or what is wrong with offsets and indices. */
const char *layer_problem(const Layer *layer);
/* y. Returns 0, or -1 for no memory. */
int layer_forward(const Layer *layer, const Kernels *kernels, int threads);

/* Memory for one call, aligned to lines of the cache. What was given back last is kept for the next call of its kind: the
 * kernel would clear its pages again. NULL when there is none. */
enum { PLAN_MEMORY, SCRATCH_MEMORY, MEMORIES };
void *memory_take(int kind, size_t bytes);
void memory_give(int kind, void *memory);

#endif

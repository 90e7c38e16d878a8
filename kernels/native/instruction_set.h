/* All kernels for one instruction set: define LANES and TABLE, switch the target on, include this. */
#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "rows.h"

#include <float.h>
#include <math.h>

#include "vector.h"

enum {
    TALL = 4,               /* rows of activations at a time */
    TOTALS = 12,            /* and so many sums; with `TALL` and one row of weights that is 16 vector registers */
    STEP = 6,               /* 12 vectors of weights, 2 totals, one factor */
    SMALL_BLOCK = 12,       /* rows of weights that few rows of activations pass; any width fits */
};

INLINE long at_most(long a, long b) { return a < b ? a : b; }

/* Rows of weights at a time: few rows of activations need more of them, as one sum waits for its last addition. */
INLINE long width(long tall) { return tall <= 2 ? 6 : 3; }

/* The first place in [low, high) of an ascending list that holds at least `value`. */
static long lower_bound(const int32_t *list, long low, long high, long value)
{
    while (low < high) {
        long middle = (low + high) / 2;
        if (list[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

#define ELEMENT float
#define LOAD load_f32
#define STORE store_f32
#define NAME(name) name##_f32
#include "kernels.h"
#undef ELEMENT
#undef LOAD
#undef STORE
#undef NAME

#define ELEMENT uint16_t
#define LOAD load_bf16
#define STORE store_bf16
#define NAME(name) name##_bf16
#include "kernels.h"
#undef LOAD
#undef STORE
#undef NAME

#define LOAD load_f16
#define STORE store_f16
#define NAME(name) name##_f16
#include "kernels.h"
#undef ELEMENT
#undef LOAD
#undef STORE
#undef NAME

#define ELEMENT int8_t
#define LOAD load_i8
#define NAME(name) name##_i8
#include "kernels.h"

#include "stages.h"
#include "panels.h"
#include "attend.h"
#include "each_row.h"

#define ELEMENTS_OF(type, element) {multiply_##type, unpack_##type, pack_##type, add_##type, sizeof(element)}

const Kernels TABLE = {hidden, output, transpose, columns, attend, norm_row, gate_row, PANEL * LANES, {
    [F32] = ELEMENTS_OF(f32, float), [BF16] = ELEMENTS_OF(bf16, uint16_t), [F16] = ELEMENTS_OF(f16, uint16_t),
    [I8] = {.multiply = multiply_i8, .unpack = unpack_i8, .size = 1}}};

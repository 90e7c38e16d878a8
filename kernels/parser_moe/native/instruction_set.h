/* All kernels for one instruction set: define LANES and TABLE, switch the target on, include this. */
#include "layer.h"

#include <math.h>

#include "vector.h"

enum {
    LINE = 64,              /* bytes */
    TALL = 4, WIDE = 3,     /* 12 totals, 3 rows of weights and one of activations: 16 vector registers */
    STEP = 6,               /* 12 vectors of weights, 2 totals, one factor */
    FEW = 16,               /* rows of activations up to which converting weights ahead does not pay */
    SMALL_BLOCK = 12,
};

INLINE long at_most(long a, long b) { return a < b ? a : b; }
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
#define NAME(name) name##_f32
#include "kernels.h"
#undef ELEMENT
#undef LOAD
#undef NAME

#define ELEMENT uint16_t
#define LOAD load_bf16
#define NAME(name) name##_bf16
#include "kernels.h"
#undef LOAD
#undef NAME

#define LOAD load_f16
#define NAME(name) name##_f16
#include "kernels.h"

const Kernels TABLE[ELEMENTS] = {
    [F32] = {hidden_f32, output_f32}, [BF16] = {hidden_bf16, output_bf16}, [F16] = {hidden_f16, output_f16}};

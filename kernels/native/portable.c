/* What every processor can do; the compiler turns the vectors into its own (NEON, SSE2). */
#define LANES 4
#define TABLE portable_kernels
#include "instruction_set.h"

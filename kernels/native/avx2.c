/* x86-64 with AVX2 and FMA. */
#ifdef __x86_64__
#pragma GCC target("avx2,fma")
#define LANES 8
#define TABLE avx2_kernels
#include "instruction_set.h"
#else
typedef int nothing_here; /* ISO C forbids an empty file */
#endif

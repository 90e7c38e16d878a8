/* x86-64 with AVX-512. */
#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define LANES 16
#define TABLE avx512_kernels
#include "instruction_set.h"
#else
typedef int nothing_here; /* ISO C forbids an empty file */
#endif

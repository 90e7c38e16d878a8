/* How memory and work are cut into pieces; for the files that run loops in parallel.
 *
 * Threads are OpenMP's, because torch's are: both share one libgomp, so the thread pool that torch warmed up is used
 * and `torch.set_num_threads` and the engine's core binding hold here too.
 */
#ifndef FOREBAY_PIECES_H
#define FOREBAY_PIECES_H

#include "layer.h"

#ifdef _OPENMP
#include <omp.h>
static inline int thread_number(void) { return omp_get_thread_num(); }
#else
static inline int thread_number(void) { return 0; }
#endif

enum {
    TURNS = 8,              /* pieces for each thread, so that all end together though other work holds one up */
};

static inline long min_long(long a, long b) { return a < b ? a : b; }
static inline long max_long(long a, long b) { return a > b ? a : b; }
static inline long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }

/* One block of memory cut into pieces: called once to learn the size, once to cut. */
static inline void *take(char **next, size_t bytes)
{
    char *piece = *next;
    *next += round_up((long)bytes, LINE);
    return piece;
}

/* Whole vectors may be read at the end, and rows a power of two apart would fall into the same sets of a cache. */
static inline size_t row_stride(long length) { return (size_t)round_up(length, ROUND) + ROUND; }

/* A thread that wakes up for less than some 10 microseconds of work costs more than it brings. */
static inline int useful_threads(long products, int threads) { return (int)min_long(threads, 1 + products / (1 << 17)); }

#endif

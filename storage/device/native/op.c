/* An operation before it is queued: its memory, and whether the device can reach that directly. */
#include "queue.h"

#include <stdlib.h>

Op *op_new(uint32_t pieces)
{
    Op *op = calloc(1, sizeof *op + pieces * sizeof op->pieces[0]);
    if (op)
        op->count = pieces;
    return op;
}

/* Whether the device shares that memory, if it matters to it. */
static bool is_shared(const Geometry *geometry, const struct iovec *piece)
{
    const char *address = piece->iov_base, *shared = geometry->shared;
    return !shared || (address >= shared && piece->iov_len <= geometry->shared_size
                       && (uint64_t)(address - shared) <= geometry->shared_size - piece->iov_len);
}

static bool fits_direct(const Geometry *geometry, const Op *op)
{
    if (op->count > MAX_IOVECS || op->length % geometry->length_alignment)
        return false;
    for (uint32_t i = 0; i < op->count; i++) {
        uint64_t address = (uint64_t)(uintptr_t)op->pieces[i].iov_base;
        if (!address || address % geometry->memory_alignment || op->pieces[i].iov_len % geometry->length_alignment
            || !is_shared(geometry, &op->pieces[i]))
            return false;
    }
    return true;
}

void queue_classify(const Queue *queue, Op *op)
{
    const Geometry *geometry = &queue->geometry;
    uint64_t mask = geometry->length_alignment - 1;
    op->padded = (op->length + mask) & ~mask;
    op->offset += geometry->start;
    op->staged = !geometry->memory && !fits_direct(geometry, op);
    op->region = -1;
}

/* Copies between an operation's scattered memory and a flat buffer, with the CRC computed while data is in cache. */
#define _GNU_SOURCE
#include "crc32c.h"
#include "queue.h"

#include <string.h>
#include <sys/mman.h>

#define BLOCK (16 << 10) /* small enough that what was just copied is still in L1/L2 when it is hashed */
#define HUGE_PAGE (2ul << 20)

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

#if defined(__SSE2__)
#include <emmintrin.h>

/* Past the cache: what goes to KV pages and staging buffers is not read again soon by this core, and a third of the
 * memory traffic is saved. Faster than memcpy by half, and immune to how `rep movsb` slows down when misaligned. */
static void copy(char *to, const char *from, size_t size)
{
    size_t head = least(size, -(uintptr_t)to & 15);
    memcpy(to, from, head);
    for (to += head, from += head, size -= head; size >= 64; to += 64, from += 64, size -= 64) {
        _mm_prefetch(from + 2048, _MM_HINT_T0);
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, size);
}

static void copied(void)
{
    _mm_sfence(); /* before anyone is told */
}
#else
static void copy(char *to, const char *from, size_t size)
{
    memcpy(to, from, size);
}

static void copied(void)
{
}
#endif

static uint32_t gather_piece(char *flat, const char *piece, size_t left, bool checksum, uint32_t crc)
{
    for (size_t at = 0, size; left; at += size, left -= size) {
        size = least(left, BLOCK);
        if (piece)
            copy(flat + at, piece + at, size);
        else
            memset(flat + at, 0, size);
        if (checksum)
            crc = crc32c(crc, piece ? piece + at : flat + at, size);
    }
    return crc;
}

static uint32_t scatter_piece(const char *flat, char *piece, size_t left, bool checksum, uint32_t crc)
{
    for (size_t at = 0, size; left; at += size, left -= size) {
        size = least(left, BLOCK);
        if (piece)
            copy(piece + at, flat + at, size);
        if (checksum)
            crc = crc32c(crc, flat + at, size);
    }
    return crc;
}

/* What of the bytes [from, to) of an operation lies in a piece that begins at byte `at`. */
static struct iovec part_of(const struct iovec *piece, uint64_t at, uint64_t from, uint64_t to)
{
    from = from > at ? from - at : 0;
    to = to > at ? least(to - at, piece->iov_len) : 0;
    if (from >= to)
        return (struct iovec){NULL, 0};
    return (struct iovec){piece->iov_base ? (char *)piece->iov_base + from : NULL, to - from};
}

void op_gather(Op *op, char *flat, uint64_t from, uint64_t size)
{
    uint64_t at = 0;
    op->crc = from ? op->crc : 0;
    for (uint32_t i = 0; i < op->count && at < from + size; at += op->pieces[i++].iov_len) {
        struct iovec part = part_of(&op->pieces[i], at, from, from + size);
        op->crc = gather_piece(flat, part.iov_base, part.iov_len, op->checksum, op->crc);
        flat += part.iov_len;
    }
    copied();
}

void op_scatter(Op *op, const char *flat, uint64_t from, uint64_t size)
{
    uint64_t at = 0;
    op->crc = from ? op->crc : 0;
    for (uint32_t i = 0; i < op->count && at < from + size; at += op->pieces[i++].iov_len) {
        struct iovec part = part_of(&op->pieces[i], at, from, from + size);
        op->crc = scatter_piece(flat, part.iov_base, part.iov_len, op->checksum, op->crc);
        flat += part.iov_len;
    }
    copied();
}

void op_fill(Op *op, char *stage, uint64_t from, uint64_t size)
{
    uint64_t left = op->length > from ? op->length - from : 0;
    op_gather(op, stage, from, size);
    if (left < size)
        memset(stage + left, 0, size - left);
}

void op_hash(Op *op)
{
    uint32_t crc = 0;
    for (uint32_t i = 0; i < op->count; i++)
        crc = crc32c(crc, op->pieces[i].iov_base, op->pieces[i].iov_len);
    op->crc = crc;
}

struct iovec op_rest(const Op *op, const struct iovec *pieces)
{
    uint64_t skip = op->done;
    while (skip >= pieces->iov_len)
        skip -= pieces++->iov_len;
    return (struct iovec){(char *)pieces->iov_base + skip, pieces->iov_len - skip};
}

/* Powers of two, so that operations of many lengths make a buffer grow but a few times. */
size_t stage_size(uint64_t least)
{
    size_t size = 64 << 10;
    while (size < least)
        size *= 2;
    return size;
}

static size_t whole_pages(size_t size)
{
    return size >= HUGE_PAGE ? (size + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1) : (size + 4095) & ~4095ul;
}

/* Page aligned, on huge pages where they can be had: fewer segments per I/O. NULL without memory. */
char *stage_new(size_t size)
{
    size = whole_pages(size);
    size_t extra = size >= HUGE_PAGE ? HUGE_PAGE : 0;
    char *base = mmap(NULL, size + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    if (!extra)
        return base;
    char *aligned = (char *)(((uintptr_t)base + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
    if (aligned > base)
        munmap(base, (size_t)(aligned - base));
    if (base + extra > aligned)
        munmap(aligned + size, (size_t)(base + extra - aligned));
    madvise(aligned, size, MADV_HUGEPAGE);
    return aligned;
}

void stage_free(char *stage, size_t size)
{
    if (stage)
        munmap(stage, whole_pages(size));
}

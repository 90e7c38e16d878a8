/* io_uring over raw system calls; only <linux/io_uring.h> is needed to build it. */
#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Newer than the oldest headers that build this; a kernel without them says EINVAL. */
#define COOP_TASKRUN (1u << 8)
#define SUBMIT_ALL (1u << 7)
#define SINGLE_ISSUER (1u << 12)
#define DEFER_TASKRUN (1u << 13)

#define NEEDED (IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_SUBMIT_STABLE | IORING_FEAT_FAST_POLL)

static int ring_setup(unsigned entries, struct io_uring_params *params)
{
    static const unsigned flags[] = {SUBMIT_ALL | SINGLE_ISSUER | DEFER_TASKRUN, SUBMIT_ALL | COOP_TASKRUN, 0};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        *params = (struct io_uring_params){.flags = flags[i]};
        int fd = (int)syscall(SYS_io_uring_setup, entries, params);
        if (fd >= 0 || errno != EINVAL)
            return fd;
    }
    return -1;
}

static int ring_map(Ring *ring, const struct io_uring_params *params)
{
    size_t submit_size = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    size_t complete_size = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    ring->rings_size = submit_size > complete_size ? submit_size : complete_size;
    ring->sqes_size = params->sq_entries * sizeof(struct io_uring_sqe);
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    ring->rings = mmap(NULL, ring->rings_size, protection, flags, ring->fd, IORING_OFF_SQ_RING);
    if (ring->rings == MAP_FAILED)
        return errno;
    ring->sqes = mmap(NULL, ring->sqes_size, protection, flags, ring->fd, IORING_OFF_SQES);
    if (ring->sqes == MAP_FAILED)
        return errno;
    char *base = ring->rings;
    ring->submit_tail = (unsigned *)(base + params->sq_off.tail);
    ring->submit_mask = *(unsigned *)(base + params->sq_off.ring_mask);
    ring->complete_head = (unsigned *)(base + params->cq_off.head);
    ring->complete_tail = (unsigned *)(base + params->cq_off.tail);
    ring->complete_mask = *(unsigned *)(base + params->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(base + params->cq_off.cqes);
    unsigned *order = (unsigned *)(base + params->sq_off.array);
    for (unsigned i = 0; i < params->sq_entries; i++)
        order[i] = i;
    return 0;
}

int ring_open(Ring *ring, unsigned entries)
{
    struct io_uring_params params;
    *ring = (Ring){.fd = ring_setup(entries, &params), .rings = MAP_FAILED, .sqes = MAP_FAILED};
    if (ring->fd < 0)
        return errno;
    int error = (params.features & NEEDED) == NEEDED ? ring_map(ring, &params) : ENOSYS;
    if (error)
        ring_close(ring);
    return error;
}

void ring_close(Ring *ring)
{
    if (ring->fd < 0)
        return;
    if (ring->rings != MAP_FAILED)
        munmap(ring->rings, ring->rings_size);
    if (ring->sqes != MAP_FAILED)
        munmap(ring->sqes, ring->sqes_size);
    close(ring->fd);
    ring->fd = -1;
}

struct io_uring_sqe *ring_prepare(Ring *ring)
{
    unsigned tail = *ring->submit_tail;
    struct io_uring_sqe *entry = &ring->sqes[tail & ring->submit_mask];
    memset(entry, 0, sizeof *entry);
    /* The kernel looks at the entry in ring_enter only, which this same thread calls. */
    __atomic_store_n(ring->submit_tail, tail + 1, __ATOMIC_RELEASE);
    ring->pending++;
    return entry;
}

void ring_enter(Ring *ring, bool wait)
{
    unsigned flags = wait ? IORING_ENTER_GETEVENTS : 0;
    while (ring->pending || wait) {
        long taken = syscall(SYS_io_uring_enter, ring->fd, ring->pending, wait ? 1 : 0, flags, NULL, 0);
        if (taken >= 0) {
            ring->pending -= (unsigned)taken;
            wait = false; /* an entry that was not taken is retried once, without waiting */
            flags = 0;
            if (!taken)
                return;
        } else if (errno != EINTR) { /* EAGAIN, EBUSY: short of memory, or completions to reap first */
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
            return;
        }
    }
}

unsigned ring_reap(Ring *ring, struct io_uring_cqe *into, unsigned most)
{
    unsigned head = *ring->complete_head, count = 0;
    unsigned tail = __atomic_load_n(ring->complete_tail, __ATOMIC_ACQUIRE);
    for (; head != tail && count < most; head++)
        into[count++] = ring->cqes[head & ring->complete_mask];
    __atomic_store_n(ring->complete_head, head, __ATOMIC_RELEASE);
    return count;
}

static bool ring_register(Ring *ring, unsigned what, void *argument, unsigned count)
{
    long result;
    do
        result = syscall(SYS_io_uring_register, ring->fd, what, argument, count);
    while (result < 0 && errno == EINTR);
    return result >= 0;
}

bool ring_register_file(Ring *ring, int fd)
{
    return ring_register(ring, IORING_REGISTER_FILES, &fd, 1);
}

void ring_unregister(Ring *ring)
{
    ring_register(ring, IORING_UNREGISTER_BUFFERS, NULL, 0);
    ring_register(ring, IORING_UNREGISTER_FILES, NULL, 0);
}

bool ring_buffer_table(Ring *ring, unsigned entries)
{
    struct iovec *none = calloc(entries, sizeof *none); /* empty buffers: works from Linux 5.13 on */
    uint64_t *tags = calloc(entries, sizeof *tags);
    struct io_uring_rsrc_register table = {.nr = entries, .data = (uintptr_t)none, .tags = (uintptr_t)tags};
    bool done = none && tags && ring_register(ring, IORING_REGISTER_BUFFERS2, &table, sizeof table);
    free(none);
    free(tags);
    return done;
}

bool ring_set_buffer(Ring *ring, unsigned index, void *base, size_t size)
{
    struct iovec buffer = {base, size};
    uint64_t tag = 0;
    struct io_uring_rsrc_update2 update = {
        .offset = index, .data = (uintptr_t)&buffer, .tags = (uintptr_t)&tag, .nr = 1};
    return ring_register(ring, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update);
}

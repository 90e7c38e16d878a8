/* The io_uring backend: one thread, one ring.
 *
 * The thread waits in io_uring_enter and nowhere else. A read of `wake_fd` is always outstanding on the ring, so
 * new work ends the wait just as a finished I/O does.
 */
#define _GNU_SOURCE
#include "queue.h"
#include "ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define TABLE 1024              /* registered buffers: the staging arena and slices of the caller's memory */
#define SLICE (1ull << 30)      /* the kernel's limit for one buffer */
#define LARGEST (1ull << 30)    /* bytes of one request; the rest follows */
#define BATCH 64
#define RETRIES 100

typedef struct {
    uint64_t address, length;
    int index;
} Slice;

enum pin_state { NONE, ASKED, ANSWERED };
enum outlook { BUSY, SLEEP, END };

typedef struct {
    Queue *queue;
    Ring ring;
    int wake_fd;
    uint64_t woken; /* where the read of wake_fd puts its 8 bytes */
    bool sleeping;
    bool started; /* set-up is over, `error` tells how */
    int error;
    bool fixed_file, table;

    char *arena; /* staging: one slot per place */
    size_t slot;
    bool arena_pinned;
    int staged; /* slots in use */

    Slice slices[TABLE]; /* by address */
    int slice_count;
    enum pin_state pin_state;
    uint64_t pin_address, pin_length;
    bool pinned;
} Uring;

/* ---- staging ---- */

/* Only while no slot is in use. */
static bool arena_grow(Uring *uring, uint64_t need)
{
    if (uring->slot >= need)
        return true;
    if (uring->arena_pinned)
        ring_set_buffer(&uring->ring, 0, NULL, 0);
    stage_free(uring->arena, uring->slot * (size_t)uring->queue->places);
    size_t slot = stage_size(need), size = slot * (size_t)uring->queue->places;
    uring->arena = stage_new(size);
    uring->slot = uring->arena ? slot : 0;
    uring->arena_pinned =
        uring->arena && uring->table && size <= SLICE && ring_set_buffer(&uring->ring, 0, uring->arena, size);
    return uring->arena != NULL;
}

static char *slot_of(const Uring *uring, const Op *op)
{
    return uring->arena + (size_t)op->place * uring->slot;
}

/* ---- the caller's registered memory ---- */

static int slice_after(const Uring *uring, uint64_t address)
{
    int low = 0, high = uring->slice_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (uring->slices[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int buffer_of(const Uring *uring, const struct iovec *piece)
{
    uint64_t address = (uintptr_t)piece->iov_base;
    int after = slice_after(uring, address);
    if (!after)
        return -1;
    const Slice *slice = &uring->slices[after - 1];
    return address + piece->iov_len <= slice->address + slice->length ? slice->index : -1;
}

static bool pin_slice(Uring *uring, uint64_t address, uint64_t length)
{
    struct iovec whole = {(void *)(uintptr_t)address, length};
    if (buffer_of(uring, &whole) >= 0)
        return true;
    int index = uring->slice_count + 1; /* 0 is the arena */
    if (index >= TABLE || !ring_set_buffer(&uring->ring, (unsigned)index, whole.iov_base, length))
        return false;
    int at = slice_after(uring, address);
    memmove(&uring->slices[at + 1], &uring->slices[at], (size_t)(uring->slice_count - at) * sizeof(Slice));
    uring->slices[at] = (Slice){address, length, index};
    uring->slice_count++;
    return true;
}

static bool pin_all(Uring *uring, uint64_t address, uint64_t length)
{
    bool all = uring->table;
    for (uint64_t at = 0; all && at < length; at += SLICE)
        all = pin_slice(uring, address + at, length - at < SLICE ? length - at : SLICE);
    return all;
}

static void serve_pin(Uring *uring)
{
    Queue *queue = uring->queue;
    pthread_mutex_lock(&queue->lock);
    bool asked = uring->pin_state == ASKED;
    pthread_mutex_unlock(&queue->lock);
    if (!asked)
        return;
    bool pinned = pin_all(uring, uring->pin_address, uring->pin_length);
    pthread_mutex_lock(&queue->lock);
    uring->pinned = pinned;
    uring->pin_state = ANSWERED;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

/* The kernel lets only the ring's thread register buffers, so the caller asks it and waits. */
static bool uring_pin(Queue *queue, uint64_t address, uint64_t length)
{
    Uring *uring = queue->backend;
    bool pinned = false;
    pthread_mutex_lock(&queue->lock);
    while (uring->pin_state != NONE && queue->alive)
        pthread_cond_wait(&queue->changed, &queue->lock);
    if (queue->alive && !queue->stopping) {
        uring->pin_address = address;
        uring->pin_length = length;
        uring->pin_state = ASKED;
        queue->wake(queue);
        while (uring->pin_state != ANSWERED && queue->alive)
            pthread_cond_wait(&queue->changed, &queue->lock);
        pinned = uring->pin_state == ANSWERED && uring->pinned;
        uring->pin_state = NONE;
        pthread_cond_broadcast(&queue->changed);
    }
    pthread_mutex_unlock(&queue->lock);
    return pinned;
}

/* ---- requests ---- */

static void prepare(Uring *uring, Op *op)
{
    static const uint8_t codes[2][3] = {
        {IORING_OP_READ, IORING_OP_READV, IORING_OP_READ_FIXED},
        {IORING_OP_WRITE, IORING_OP_WRITEV, IORING_OP_WRITE_FIXED},
    };
    struct io_uring_sqe *entry = ring_prepare(&uring->ring);
    entry->fd = uring->fixed_file ? 0 : uring->queue->geometry.fd;
    entry->flags = (uint8_t)((uring->fixed_file ? IOSQE_FIXED_FILE : 0) | (op->retries ? IOSQE_ASYNC : 0));
    entry->off = op->offset + op->done;
    entry->user_data = (uintptr_t)op;
    if (!op->staged && op->count > 1 && !op->done) {
        entry->opcode = codes[op->direction][1];
        entry->addr = (uintptr_t)op->pieces;
        entry->len = op->count;
        return;
    }
    struct iovec slot = {slot_of(uring, op), op->padded};
    struct iovec rest = op_rest(op, op->staged ? &slot : op->pieces);
    entry->opcode = codes[op->direction][op->region < 0 ? 0 : 2];
    entry->buf_index = (uint16_t)(op->region < 0 ? 0 : op->region);
    entry->addr = (uintptr_t)rest.iov_base;
    entry->len = (uint32_t)(rest.iov_len < LARGEST ? rest.iov_len : LARGEST);
}

static void finish(Uring *uring, Op *op, int64_t result)
{
    uring->staged -= op->staged;
    queue_finish(uring->queue, op, result);
}

static void start(Uring *uring, Op *op)
{
    if (op->staged && !arena_grow(uring, op->padded)) {
        finish(uring, op, -ENOMEM);
        return;
    }
    if (op->staged && op->direction == WRITE_OP) {
        ring_enter(&uring->ring, false); /* the device need not wait for this copy */
        op_fill(op, slot_of(uring, op), 0, op->padded);
    }
    if (op->staged)
        op->region = uring->arena_pinned ? 0 : -1;
    else
        op->region = op->count == 1 ? buffer_of(uring, op->pieces) : -1;
    bool staged = op->staged;
    if (queue_launch(uring->queue, op))
        prepare(uring, op);
    else
        uring->staged -= staged;
}

/* An arena that must grow has to be empty first: then the operation waits, and those behind it. */
static bool may_start(const Uring *uring, const Op *op)
{
    return !op->staged || op->padded <= uring->slot || uring->staged == 0;
}

static void start_ready(Uring *uring)
{
    Queue *queue = uring->queue;
    for (;;) {
        pthread_mutex_lock(&queue->lock);
        Op *op = queue_next(queue);
        if (op && may_start(uring, op)) {
            queue_begin(queue, op);
            uring->staged += op->staged;
        } else {
            op = NULL;
        }
        pthread_mutex_unlock(&queue->lock);
        if (!op)
            return;
        start(uring, op);
    }
}

static void restage(Uring *uring, Op *op)
{
    queue_restage(uring->queue, op);
    uring->staged++;
    start(uring, op);
}

/* Whether the request is over; otherwise the rest of it has been prepared. */
static bool settled(Uring *uring, Op *op, int64_t *result)
{
    bool again = (*result == -EAGAIN || *result == -EINTR) && op->retries++ < RETRIES;
    if (*result > 0) {
        op->done += (uint64_t)*result;
        again = op->done < op->padded;
    }
    if (again)
        prepare(uring, op);
    else if (*result >= 0)
        *result = op->done < op->padded ? -EIO : (int64_t)op->length;
    return !again;
}

/* What is left to do with bytes that have come or gone; the device works on meanwhile. */
static void take(Uring *uring, Op *op)
{
    bool scatter = op->staged && op->direction == READ_OP, hash = !op->staged && op->checksum;
    if (scatter || hash)
        ring_enter(&uring->ring, false);
    if (scatter)
        op_scatter(op, slot_of(uring, op), 0, op->padded);
    if (hash)
        op_hash(op);
}

static void land(Uring *uring, Op *op, int64_t result)
{
    if (result == -EINVAL && !op->staged && may_start(uring, &(Op){.staged = 1, .padded = op->padded})) {
        restage(uring, op); /* a memory layout that this file cannot take after all */
        return;
    }
    if (!settled(uring, op, &result))
        return;
    bool staged = op->staged;
    if (!queue_land(uring->queue, op)) {
        uring->staged -= staged;
        return;
    }
    if (result >= 0)
        take(uring, op);
    finish(uring, op, result);
}

/* ---- the thread ---- */

static void arm_wake(Uring *uring)
{
    struct io_uring_sqe *entry = ring_prepare(&uring->ring);
    entry->opcode = IORING_OP_READ;
    entry->fd = uring->wake_fd;
    entry->addr = (uintptr_t)&uring->woken;
    entry->len = sizeof uring->woken;
    entry->user_data = 0;
}

static void uring_wake(Queue *queue)
{
    Uring *uring = queue->backend;
    if (uring->sleeping)
        eventfd_write(uring->wake_fd, 1);
    uring->sleeping = false;
}

static enum outlook look_ahead(Uring *uring)
{
    Queue *queue = uring->queue;
    pthread_mutex_lock(&queue->lock);
    Op *op = queue_next(queue);
    bool idle = !queue->flying[READ_OP] && !queue->flying[WRITE_OP];
    enum outlook outlook = SLEEP;
    if (queue->stopping && idle)
        outlook = END;
    else if (uring->pin_state == ASKED || (op && may_start(uring, op)))
        outlook = BUSY;
    uring->sleeping = outlook == SLEEP;
    pthread_mutex_unlock(&queue->lock);
    return outlook;
}

static void wait_for_completion(Uring *uring)
{
    Queue *queue = uring->queue;
    bool working = queue->flying[READ_OP] || queue->flying[WRITE_OP];
    int64_t begin = now_ns();
    ring_enter(&uring->ring, true);
    int64_t passed = now_ns() - begin;
    pthread_mutex_lock(&queue->lock);
    uring->sleeping = false;
    if (working)
        queue->stats.blocked_ns += passed;
    pthread_mutex_unlock(&queue->lock);
}

static void handle(Uring *uring, const struct io_uring_cqe *entry)
{
    Op *op = (Op *)(uintptr_t)entry->user_data;
    if (op)
        land(uring, op, entry->res);
    else
        arm_wake(uring);
    start_ready(uring); /* into its place; submitted before the next copy or the next wait, whichever comes first */
}

/* What only has to be hashed any more makes place for the next at once: hashing a batch takes milliseconds. */
static void make_room(Uring *uring, const struct io_uring_cqe *batch, unsigned count)
{
    bool room = false;
    for (unsigned i = 0; i < count; i++) {
        Op *op = (Op *)(uintptr_t)batch[i].user_data;
        if (!op || op->staged || !op->checksum || batch[i].res < 0 || op->done + (uint64_t)batch[i].res < op->padded)
            continue;
        queue_vacate(uring->queue, op);
        room = true;
    }
    if (room)
        start_ready(uring);
}

static void reap(Uring *uring)
{
    struct io_uring_cqe batch[BATCH];
    unsigned count = ring_reap(&uring->ring, batch, BATCH);
    make_room(uring, batch, count);
    for (unsigned i = 0; i < count; i++)
        handle(uring, &batch[i]);
    if (count)
        queue_signal(uring->queue);
}

static int set_up(Uring *uring)
{
    int error = ring_open(&uring->ring, (unsigned)uring->queue->places + 8);
    if (!error) {
        uring->fixed_file = ring_register_file(&uring->ring, uring->queue->geometry.fd);
        uring->table = ring_buffer_table(&uring->ring, TABLE);
        arm_wake(uring);
    }
    pthread_mutex_lock(&uring->queue->lock);
    uring->error = error;
    uring->started = true;
    pthread_cond_broadcast(&uring->queue->changed);
    pthread_mutex_unlock(&uring->queue->lock);
    return error;
}

static void *uring_main(void *argument)
{
    Worker *worker = argument;
    Uring *uring = worker->queue->backend;
    if (set_up(uring))
        return queue_exit(worker);
    for (;;) {
        serve_pin(uring);
        start_ready(uring);
        enum outlook outlook = look_ahead(uring);
        if (outlook == END) {
            ring_unregister(&uring->ring);
            return queue_exit(worker);
        }
        if (outlook == SLEEP)
            wait_for_completion(uring);
        reap(uring);
    }
}

static void uring_release(Queue *queue)
{
    Uring *uring = queue->backend;
    stage_free(uring->arena, uring->slot * (size_t)queue->places);
    ring_close(&uring->ring);
    if (uring->wake_fd >= 0)
        close(uring->wake_fd);
}

int uring_start(Queue *queue)
{
    Uring *uring = calloc(1, sizeof *uring);
    if (!uring)
        return ENOMEM;
    uring->queue = queue;
    uring->ring.fd = -1;
    uring->wake_fd = eventfd(0, EFD_CLOEXEC); /* blocking: a non-blocking one would not wait on the ring */
    queue->backend = uring;
    queue->wake = uring_wake;
    queue->pin = uring_pin;
    queue->release = uring_release;
    if (uring->wake_fd < 0)
        return errno;
    int error = queue_spawn(queue, 1, uring_main);
    if (error)
        return error;
    pthread_mutex_lock(&queue->lock);
    while (!uring->started)
        pthread_cond_wait(&queue->changed, &queue->lock);
    pthread_mutex_unlock(&queue->lock);
    return uring->error;
}

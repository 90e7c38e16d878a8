/* The vhost-user-blk backend: one thread, one virtqueue that another process serves.
 *
 * The thread looks at the queue for a moment, then sleeps on the device's eventfd; how long it looks follows how long
 * it had to wait lately. Whoever speaks to the device's socket gives it orders: to attach a queue that has been agreed
 * on, to detach when the device is gone, to flush. Without a device operations fail at once.
 */
#define _GNU_SOURCE
#include "queue.h"
#include "virtio.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 20000       /* longest look at the queue: some wake-ups of a thread */
#define FLUSH_SECONDS 30
#define PATIENCE_NS 3000000000ll /* for what is in flight when the queue is closed; then the device is let go */
#define RINGS 8             /* looks at the queue between two looks at the clock */

enum answer { NOTHING, ORDERED, DOING, ANSWERED };

typedef struct {
    Queue *queue;
    Virtqueue ring;
    int kick, call; /* the device's eventfds, or -1 */
    int wake_fd;
    bool sleeping, flushing;
    int64_t wait_ns;  /* for the last completions, on average */
    uint32_t *parts;  /* by place: bytes of the request under way */
    int64_t stop_at;  /* once the queue is being closed */

    enum answer answer;
    int order, fds[2], result;
} Vhost;

static bool attached(const Vhost *vhost) { return vhost->kick >= 0; }
static unsigned flush_place(const Vhost *vhost) { return (unsigned)vhost->queue->places; }

static char *slot_of(const Vhost *vhost, const Op *op)
{
    return vhost->queue->geometry.arena + (size_t)op->place * vhost->queue->geometry.slot;
}

/* ---- requests ---- */

/* Adds [address, address + length) to a request in segments; how much of it found room. */
static uint64_t add(Vhost *vhost, const Op *op, char *address, uint64_t length, unsigned *count)
{
    const Geometry *geometry = &vhost->queue->geometry;
    uint64_t added = 0;
    while (added < length && *count < geometry->segments) {
        uint64_t left = length - added, size = left < geometry->segment ? left : geometry->segment;
        virtio_segment(&vhost->ring, (unsigned)op->place, (*count)++, (uintptr_t)(address + added), (uint32_t)size,
                       op->direction == READ_OP);
        added += size;
    }
    return added;
}

static uint64_t add_pieces(Vhost *vhost, const Op *op, unsigned *count)
{
    uint64_t at = 0, total = 0, skip = op->done;
    for (uint32_t i = 0; i < op->count && *count < vhost->queue->geometry.segments; at += op->pieces[i++].iov_len) {
        uint64_t end = at + op->pieces[i].iov_len, from = skip > at ? skip - at : 0;
        if (end > skip)
            total += add(vhost, op, (char *)op->pieces[i].iov_base + from, end - at - from, count);
    }
    return total;
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Bytes of a staged operation that the next request takes. */
static uint64_t staged_part(const Vhost *vhost, const Op *op)
{
    const Geometry *geometry = &vhost->queue->geometry;
    return least(op->padded - op->done, least(geometry->slot, (uint64_t)geometry->segments * geometry->segment));
}

/* As much of the operation as one request takes. */
static void push(Vhost *vhost, Op *op)
{
    unsigned count = 0;
    uint64_t size = op->staged ? add(vhost, op, slot_of(vhost, op), staged_part(vhost, op), &count)
                               : add_pieces(vhost, op, &count);
    vhost->parts[op->place] = (uint32_t)size;
    virtio_push(&vhost->ring, (unsigned)op->place, op->direction == READ_OP ? READ_REQUEST : WRITE_REQUEST,
                op->offset + op->done, count);
}

static void tell(Vhost *vhost)
{
    if (attached(vhost) && virtio_publish(&vhost->ring))
        eventfd_write(vhost->kick, 1);
}

static void start(Vhost *vhost, Op *op)
{
    if (!attached(vhost)) {
        queue_finish(vhost->queue, op, -ENOTCONN);
        return;
    }
    if (op->staged && op->direction == WRITE_OP) {
        tell(vhost); /* the device need not wait for this copy */
        op_fill(op, slot_of(vhost, op), op->done, staged_part(vhost, op));
    }
    if (queue_launch(vhost->queue, op))
        push(vhost, op);
}

static void start_ready(Vhost *vhost)
{
    Queue *queue = vhost->queue;
    for (;;) {
        pthread_mutex_lock(&queue->lock);
        Op *op = queue_next(queue);
        if (op)
            queue_begin(queue, op);
        pthread_mutex_unlock(&queue->lock);
        if (!op)
            return;
        start(vhost, op);
    }
}

static int64_t result_of(uint8_t status)
{
    return status == 0 ? 0 : status == 2 ? -ENOTSUP : -EIO;
}

static void land(Vhost *vhost, Op *op, int64_t result)
{
    uint32_t size = vhost->parts[op->place];
    if (!queue_land(vhost->queue, op))
        return;
    if (result) {
        queue_finish(vhost->queue, op, result);
        return;
    }
    if (op->staged && op->direction == READ_OP) {
        tell(vhost);
        op_scatter(op, slot_of(vhost, op), op->done, size);
    }
    op->done += size;
    if (op->done < op->padded) {
        queue_resume(vhost->queue, op);
        start(vhost, op);
        return;
    }
    if (!op->staged && op->checksum) {
        queue_vacate(vhost->queue, op);
        start_ready(vhost); /* the device works on while this is hashed */
        tell(vhost);
        op_hash(op);
    }
    queue_finish(vhost->queue, op, (int64_t)op->length);
}

/* ---- orders ---- */

static void answer(Vhost *vhost, int result)
{
    Queue *queue = vhost->queue;
    pthread_mutex_lock(&queue->lock);
    vhost->result = result;
    vhost->answer = ANSWERED;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

static void answer_flush(Vhost *vhost, int result)
{
    pthread_mutex_lock(&vhost->queue->lock);
    bool awaited = vhost->answer == DOING;
    pthread_mutex_unlock(&vhost->queue->lock);
    vhost->flushing = false;
    if (awaited)
        answer(vhost, result);
}

/* The device is gone, and with it what it was working on. */
static void detach(Vhost *vhost, int64_t why)
{
    Queue *queue = vhost->queue;
    if (!attached(vhost))
        return;
    close(vhost->kick);
    close(vhost->call);
    vhost->kick = vhost->call = -1;
    for (int place = 0; place < queue->places; place++) {
        Op *op = queue->running[place];
        if (op && op->state == FLYING)
            land(vhost, op, why);
    }
    if (vhost->flushing)
        answer_flush(vhost, (int)-why);
    queue_signal(queue);
}

static void attach(Vhost *vhost, const int fds[2])
{
    detach(vhost, -ENOTCONN);
    virtio_open(&vhost->ring, vhost->queue->geometry.ring, flush_place(vhost) + 1);
    vhost->kick = fds[0];
    vhost->call = fds[1];
}

static void flush(Vhost *vhost)
{
    vhost->flushing = true;
    virtio_push(&vhost->ring, flush_place(vhost), FLUSH_REQUEST, 0, 0);
    tell(vhost);
}

static void obey(Vhost *vhost)
{
    Queue *queue = vhost->queue;
    pthread_mutex_lock(&queue->lock);
    bool ordered = vhost->answer == ORDERED;
    int order = vhost->order;
    if (ordered)
        vhost->answer = DOING;
    pthread_mutex_unlock(&queue->lock);
    if (!ordered)
        return;
    if (order == FLUSH && attached(vhost) && !vhost->flushing) {
        flush(vhost);
        return; /* answered when the device has */
    }
    if (order == ATTACH)
        attach(vhost, vhost->fds);
    if (order == DETACH)
        detach(vhost, -ENOTCONN);
    answer(vhost, order != FLUSH ? 0 : attached(vhost) ? EBUSY : ENOTCONN);
}

/* Waits for the answer; a flush that the device never answers is given up. */
static int vhost_order(Queue *queue, int order, const int fds[2])
{
    Vhost *vhost = queue->backend;
    int result = ESHUTDOWN;
    int64_t end = now_ns() + FLUSH_SECONDS * 1000000000ll;
    struct timespec deadline = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    pthread_mutex_lock(&queue->lock);
    while (vhost->answer != NOTHING && queue->alive)
        pthread_cond_wait(&queue->changed, &queue->lock);
    if (queue->alive && !queue->stopping) {
        vhost->order = order;
        vhost->fds[0] = fds[0];
        vhost->fds[1] = fds[1];
        vhost->answer = ORDERED;
        queue->wake(queue);
        int late = 0;
        while (vhost->answer != ANSWERED && queue->alive && !late)
            late = pthread_cond_timedwait(&queue->changed, &queue->lock, &deadline);
        result = vhost->answer == ANSWERED ? vhost->result : ETIMEDOUT;
        vhost->answer = NOTHING;
        pthread_cond_broadcast(&queue->changed);
    }
    pthread_mutex_unlock(&queue->lock);
    return result;
}

/* ---- the thread ---- */

static void vhost_wake(Queue *queue)
{
    Vhost *vhost = queue->backend;
    if (vhost->sleeping)
        eventfd_write(vhost->wake_fd, 1);
    vhost->sleeping = false;
}

/* What the device says is not ours to believe: a place that has no request of ours ends the connection. */
static bool handle(Vhost *vhost, int place)
{
    if (place == (int)flush_place(vhost) && vhost->flushing) {
        answer_flush(vhost, (int)-result_of(virtio_status(&vhost->ring, (unsigned)place)));
        return true;
    }
    Op *op = place >= 0 && place < vhost->queue->places ? vhost->queue->running[place] : NULL;
    if (!op || op->state != FLYING)
        return false;
    land(vhost, op, result_of(virtio_status(&vhost->ring, (unsigned)place)));
    start_ready(vhost);
    return true;
}

static bool reap(Vhost *vhost)
{
    int count = 0;
    for (int place; attached(vhost) && (place = virtio_pop(&vhost->ring)) != -1; count++)
        if (!handle(vhost, place))
            detach(vhost, -EPROTO);
    if (count)
        queue_signal(vhost->queue);
    return count > 0;
}

static bool busy(const Vhost *vhost)
{
    const Queue *queue = vhost->queue;
    return attached(vhost) && (queue->flying[READ_OP] || queue->flying[WRITE_OP] || vhost->flushing);
}

/* A look at the queue for a moment, where that has paid lately. */
static bool look(Vhost *vhost, int64_t begin)
{
    if (vhost->wait_ns > SPIN_NS)
        return false;
    while (now_ns() - begin < SPIN_NS)
        for (int i = 0; i < RINGS; i++) {
            if (virtio_ready(&vhost->ring))
                return true;
#if defined(__SSE2__)
            __builtin_ia32_pause();
#endif
        }
    return false;
}

static bool may_sleep(Vhost *vhost)
{
    Queue *queue = vhost->queue;
    pthread_mutex_lock(&queue->lock);
    vhost->sleeping = !queue_next(queue) && vhost->answer != ORDERED && !(queue->stopping && !busy(vhost));
    bool sleeping = vhost->sleeping;
    pthread_mutex_unlock(&queue->lock);
    return sleeping;
}

static void sleep_on(Vhost *vhost)
{
    struct pollfd fds[2] = {{.fd = vhost->wake_fd, .events = POLLIN}, {.fd = vhost->call, .events = POLLIN}};
    eventfd_t seen;
    if (attached(vhost))
        virtio_interrupts(&vhost->ring, true);
    if (!attached(vhost) || !virtio_ready(&vhost->ring)) {
        poll(fds, attached(vhost) ? 2 : 1, vhost->queue->stopping ? 100 : -1);
        if (fds[0].revents)
            eventfd_read(vhost->wake_fd, &seen);
        if (attached(vhost) && fds[1].revents)
            eventfd_read(vhost->call, &seen);
    }
    if (attached(vhost))
        virtio_interrupts(&vhost->ring, false);
}

static void wait_for_device(Vhost *vhost)
{
    bool working = busy(vhost);
    int64_t begin = now_ns();
    if (!(working && look(vhost, begin)) && may_sleep(vhost))
        sleep_on(vhost);
    int64_t passed = now_ns() - begin;
    pthread_mutex_lock(&vhost->queue->lock);
    vhost->sleeping = false;
    if (working)
        vhost->queue->stats.blocked_ns += passed;
    pthread_mutex_unlock(&vhost->queue->lock);
    if (working)
        vhost->wait_ns += (passed - vhost->wait_ns) / 8;
}

/* A device that hangs cannot keep the thread: its memory is shared, so nothing of this process is in its hands. */
static bool ends(Vhost *vhost)
{
    Queue *queue = vhost->queue;
    pthread_mutex_lock(&queue->lock);
    bool stopping = queue->stopping, end = stopping && !queue->flying[READ_OP] && !queue->flying[WRITE_OP];
    pthread_mutex_unlock(&queue->lock);
    if (stopping && !vhost->stop_at)
        vhost->stop_at = now_ns() + PATIENCE_NS;
    if (stopping && !end && now_ns() > vhost->stop_at)
        detach(vhost, -ENOTCONN);
    return end;
}

static void *vhost_main(void *argument)
{
    Worker *worker = argument;
    Vhost *vhost = worker->queue->backend;
    while (!ends(vhost)) {
        obey(vhost);
        start_ready(vhost);
        tell(vhost);
        queue_signal(vhost->queue);
        if (!reap(vhost))
            wait_for_device(vhost);
    }
    detach(vhost, -ENOTCONN);
    return queue_exit(worker);
}

static void vhost_release(Queue *queue)
{
    Vhost *vhost = queue->backend;
    free(vhost->parts);
    if (vhost->wake_fd >= 0)
        close(vhost->wake_fd);
}

static bool within(const Geometry *geometry, const char *part, uint64_t size)
{
    return part >= geometry->shared && size <= geometry->shared_size
           && (uint64_t)(part - geometry->shared) <= geometry->shared_size - size;
}

bool vhost_fits(const Geometry *geometry)
{
    uint64_t unit = geometry->length_alignment;
    return geometry->segments && geometry->segments <= MAX_SEGMENTS && geometry->segment && geometry->slot
           && geometry->segment % unit == 0 && geometry->slot % unit == 0 && geometry->slot <= UINT32_MAX / 2
           && (uint64_t)geometry->segments * geometry->segment <= UINT32_MAX
           && within(geometry, geometry->ring, virtio_bytes((unsigned)geometry->depth + 1))
           && within(geometry, geometry->arena, (uint64_t)geometry->depth * geometry->slot);
}

int vhost_start(Queue *queue)
{
    Vhost *vhost = calloc(1, sizeof *vhost);
    if (!vhost)
        return ENOMEM;
    *vhost = (Vhost){.queue = queue, .kick = -1, .call = -1, .wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    vhost->parts = calloc((size_t)queue->places, sizeof *vhost->parts);
    queue->backend = vhost;
    queue->wake = vhost_wake;
    queue->order = vhost_order;
    queue->release = vhost_release;
    if (vhost->wake_fd < 0 || !vhost->parts)
        return ENOMEM;
    return queue_spawn(queue, 1, vhost_main);
}

/* The backends without io_uring: threads that copy memory, or that sit in preadv and pwritev. */
#define _GNU_SOURCE
#include "queue.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- memory ---- */

static void memory_op(Queue *queue, Op *op)
{
    char *flat = queue->geometry.memory + op->offset;
    if (!queue_launch(queue, op))
        return;
    if (op->direction == READ_OP)
        op_scatter(op, flat, 0, op->length);
    else
        op_gather(op, flat, 0, op->length);
    if (queue_land(queue, op))
        queue_finish(queue, op, (int64_t)op->length);
}

/* ---- file ---- */

static ssize_t timed(Queue *queue, Op *op, const struct iovec *iov, int count, uint64_t offset)
{
    int fd = queue->geometry.fd;
    int64_t begin = now_ns();
    ssize_t moved;
    do
        moved = op->direction == READ_OP ? preadv(fd, iov, count, (off_t)offset) : pwritev(fd, iov, count, (off_t)offset);
    while (moved < 0 && (errno == EINTR || (errno == EAGAIN && op->retries++ < 100)));
    queue_blocked(queue, now_ns() - begin);
    return moved < 0 ? -errno : moved;
}

/* All at once and, should the kernel stop half-way, the rest piece by piece. Returns 0 or a negative errno. */
static int64_t transfer(Queue *queue, Op *op, const struct iovec *iov, int count)
{
    ssize_t moved = timed(queue, op, iov, count, op->offset);
    while (moved > 0 && (op->done += (uint64_t)moved) < op->padded) {
        struct iovec rest = op_rest(op, iov);
        moved = timed(queue, op, &rest, 1, op->offset + op->done);
    }
    return moved < 0 ? moved : op->done < op->padded ? -EIO : 0;
}

static int64_t direct(Queue *queue, Op *op)
{
    int64_t error = transfer(queue, op, op->pieces, (int)op->count);
    if (!error && op->checksum)
        op_hash(op);
    return error;
}

typedef struct {
    char *base;
    size_t size;
} Stage;

static bool stage_grow(Stage *stage, uint64_t size)
{
    if (stage->size >= size)
        return true;
    stage_free(stage->base, stage->size);
    stage->size = stage_size(size);
    stage->base = stage_new(stage->size);
    if (!stage->base)
        stage->size = 0;
    return stage->base != NULL;
}

static void file_op(Queue *queue, Op *op, Stage *stage)
{
    if (op->staged && !stage_grow(stage, op->padded)) {
        queue_finish(queue, op, -ENOMEM);
        return;
    }
    if (op->staged && op->direction == WRITE_OP)
        op_fill(op, stage->base, 0, op->padded);
    if (!queue_launch(queue, op))
        return;
    struct iovec flat = {stage->base, op->padded};
    int64_t error = op->staged ? transfer(queue, op, &flat, 1) : direct(queue, op);
    if (error == -EINVAL && !op->staged) { /* a memory layout that this file cannot take after all */
        queue_restage(queue, op);
        file_op(queue, op, stage);
        return;
    }
    if (!queue_land(queue, op))
        return;
    if (!error && op->staged && op->direction == READ_OP)
        op_scatter(op, stage->base, 0, op->padded);
    queue_finish(queue, op, error ? error : (int64_t)op->length);
}

/* ---- both ---- */

static Op *wait_for_op(Queue *queue)
{
    Op *op = NULL;
    pthread_mutex_lock(&queue->lock);
    while (!(op = queue_next(queue)) && !queue->stopping)
        pthread_cond_wait(&queue->work, &queue->lock);
    if (op) {
        queue_begin(queue, op);
        if (queue_next(queue))
            pthread_cond_signal(&queue->work);
    }
    pthread_mutex_unlock(&queue->lock);
    return op;
}

static void *thread_main(void *argument)
{
    Worker *worker = argument;
    Queue *queue = worker->queue;
    Stage stage = {NULL, 0};
    for (Op *op; (op = wait_for_op(queue));) {
        if (queue->geometry.memory)
            memory_op(queue, op);
        else
            file_op(queue, op, &stage);
        queue_signal(queue);
    }
    stage_free(stage.base, stage.size);
    return queue_exit(worker);
}

int threads_start(Queue *queue)
{
    return queue_spawn(queue, queue->geometry.threads, thread_main);
}

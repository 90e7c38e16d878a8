/* The life of operations: two FIFOs, places, completions, cancelling and counters. No I/O here. */
#define _GNU_SOURCE
#include "queue.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* ---- FIFOs ---- */

static void fifo_append(Fifo *fifo, Op *op)
{
    op->next = NULL;
    *fifo->tail = op;
    fifo->tail = &op->next;
    fifo->length++;
}

static void fifo_pop(Fifo *fifo)
{
    fifo->head = fifo->head->next;
    if (!fifo->head)
        fifo->tail = &fifo->head;
    fifo->length--;
}

/* ---- counters and completions; all with the lock held ---- */

static void account(Queue *queue, int64_t now)
{
    int64_t passed = now - queue->accounted;
    if (queue->reads_outstanding > 0)
        queue->stats.read_busy_ns += passed;
    if (queue->reads_outstanding >= SATURATED)
        queue->stats.read_saturated_ns += passed;
    queue->accounted = now;
}

static void count(Queue *queue, const Op *op, int64_t result)
{
    Stats *stats = &queue->stats;
    if (result < 0) {
        stats->errors += result != -ECANCELED;
    } else if (op->direction == READ_OP) {
        stats->read_bytes += result;
        stats->read_ops++;
        if (queue->reads_outstanding >= SATURATED)
            stats->read_saturated_bytes += result;
    } else {
        stats->write_bytes += result;
        stats->write_ops++;
    }
}

static void complete(Queue *queue, const Op *op, int64_t result)
{
    int64_t now = now_ns();
    account(queue, now);
    count(queue, op, result);
    queue->reads_outstanding -= op->direction == READ_OP;
    if (queue->done_count == queue->done_capacity) {
        size_t capacity = queue->done_capacity ? 2 * queue->done_capacity : 64;
        Done *grown = realloc(queue->done, capacity * sizeof *grown);
        if (!grown)
            abort(); /* a lost completion would hang its caller */
        queue->done = grown;
        queue->done_capacity = capacity;
    }
    queue->done[queue->done_count++] = (Done){
        .tag = op->tag,
        .result = result,
        .crc = result >= 0 && op->checksum ? op->crc : 0,
        .seconds = (double)(now - op->submitted) * 1e-9,
    };
    bool over = --op->batch->left == 0;
    if (over)
        free(op->batch);
    queue->signal_due |= over || result < 0;
}

static void signal_done(Queue *queue)
{
    if (queue->signal_due && !queue->signalled && queue->event_fd >= 0) {
        eventfd_write(queue->event_fd, 1);
        queue->signalled = true;
    }
    queue->signal_due = false;
}

static void vacate(Queue *queue, Op *op)
{
    if (op->place < 0)
        return;
    queue->running[op->place] = NULL;
    queue->free_places[queue->free_count++] = op->place;
    queue->flying[op->direction]--;
    op->place = -1;
}

static void leave(Queue *queue, Op *op)
{
    vacate(queue, op);
    free(op);
}

/* ---- creation and end ---- */

Queue *queue_new(const Geometry *geometry)
{
    Queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return NULL;
    queue->geometry = *geometry;
    queue->owners = 1;
    queue->places = geometry->threads ? geometry->threads : geometry->depth;
    queue->running = calloc((size_t)queue->places, sizeof *queue->running);
    queue->free_places = calloc((size_t)queue->places, sizeof *queue->free_places);
    queue->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    for (int place = queue->places; queue->free_places && place--;)
        queue->free_places[queue->free_count++] = place;
    for (int direction = 0; direction < 2; direction++)
        queue->waiting[direction].tail = &queue->waiting[direction].head;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->work, &monotonic);
    pthread_cond_init(&queue->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    queue->accounted = now_ns();
    if (queue->running && queue->free_places && queue->event_fd >= 0)
        return queue;
    queue_free(queue);
    return NULL;
}

static void teardown(Queue *queue)
{
    if (queue->release)
        queue->release(queue);
    queue->release = NULL;
    if (queue->geometry.fd >= 0)
        close(queue->geometry.fd);
    queue->geometry.fd = -1;
}

void queue_free(Queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    bool last = --queue->owners == 0;
    pthread_mutex_unlock(&queue->lock);
    if (!last)
        return;
    teardown(queue);
    if (queue->event_fd >= 0)
        close(queue->event_fd);
    pthread_mutex_destroy(&queue->lock);
    pthread_cond_destroy(&queue->work);
    pthread_cond_destroy(&queue->changed);
    free(queue->backend);
    free(queue->running);
    free(queue->free_places);
    free(queue->workers);
    free(queue->done);
    free(queue);
}

static void drop_waiting(Queue *queue)
{
    for (int direction = 0; direction < 2; direction++)
        for (Op *op; (op = queue->waiting[direction].head);) {
            fifo_pop(&queue->waiting[direction]);
            complete(queue, op, -ECANCELED);
            free(op);
        }
    signal_done(queue);
}

static bool wait_for_threads(Queue *queue, double timeout)
{
    int64_t end = now_ns() + (int64_t)(timeout * 1e9);
    struct timespec deadline = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    while (queue->alive)
        if (pthread_cond_timedwait(&queue->changed, &queue->lock, &deadline) == ETIMEDOUT)
            return queue->alive == 0;
    return true;
}

bool queue_close(Queue *queue, double timeout)
{
    pthread_mutex_lock(&queue->lock);
    if (queue->stopping) {
        pthread_mutex_unlock(&queue->lock);
        return !queue->orphaned;
    }
    queue->stopping = true;
    drop_waiting(queue);
    pthread_cond_broadcast(&queue->work);
    if (queue->wake)
        queue->wake(queue);
    bool ended = wait_for_threads(queue, timeout);
    if (!ended) {
        queue->orphaned = true;
        queue->owners++;
    }
    close(queue->event_fd);
    queue->event_fd = -1;
    for (int i = 0; i < queue->worker_count && !ended; i++)
        pthread_detach(queue->workers[i].thread);
    pthread_mutex_unlock(&queue->lock);
    for (int i = 0; i < queue->worker_count && ended; i++)
        pthread_join(queue->workers[i].thread, NULL);
    if (ended)
        teardown(queue);
    return ended;
}

int queue_spawn(Queue *queue, int threads, void *(*body)(void *))
{
    sigset_t all, before;
    int error = 0;
    queue->workers = calloc((size_t)threads, sizeof *queue->workers);
    if (!queue->workers)
        return ENOMEM;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the caller's threads */
    pthread_mutex_lock(&queue->lock);
    for (int i = 0; i < threads && !error; i++) {
        Worker *worker = &queue->workers[i];
        *worker = (Worker){.queue = queue, .index = i, .alive = true};
        error = pthread_create(&worker->thread, NULL, body, worker);
        if (error)
            break;
        pthread_setname_np(worker->thread, queue->geometry.name);
        queue->worker_count++;
        queue->alive++;
    }
    pthread_mutex_unlock(&queue->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static int64_t cpu_time(clockid_t clock)
{
    struct timespec used;
    return clock_gettime(clock, &used) ? 0 : used.tv_sec * 1000000000ll + used.tv_nsec;
}

void *queue_exit(Worker *worker)
{
    Queue *queue = worker->queue;
    pthread_mutex_lock(&queue->lock);
    queue->stats.cpu_ns += cpu_time(CLOCK_THREAD_CPUTIME_ID);
    worker->alive = false;
    queue->alive--;
    pthread_cond_broadcast(&queue->changed);
    bool last = queue->orphaned && queue->alive == 0;
    pthread_mutex_unlock(&queue->lock);
    if (last)
        queue_free(queue);
    return NULL;
}

/* ---- the owner's side ---- */

void queue_submit(Queue *queue, Op *list, Batch *batch)
{
    int64_t now = now_ns();
    *batch = (Batch){0};
    for (Op *op = list; op; op = op->next)
        batch->left++;
    pthread_mutex_lock(&queue->lock);
    account(queue, now);
    for (Op *op = list, *next; op; op = next) {
        next = op->next;
        op->submitted = now;
        op->batch = batch;
        queue->reads_outstanding += op->direction == READ_OP;
        fifo_append(&queue->waiting[op->direction], op);
    }
    pthread_cond_signal(&queue->work); /* a thread that starts one wakes the next if there is more */
    if (queue->stopping)
        drop_waiting(queue); /* closed in this very moment by another thread */
    else if (queue->wake)
        queue->wake(queue);
    pthread_mutex_unlock(&queue->lock);
}

size_t queue_poll(Queue *queue, Done **done)
{
    pthread_mutex_lock(&queue->lock);
    size_t ready = queue->done_count;
    *done = ready ? queue->done : NULL;
    if (ready) {
        eventfd_t seen;
        if (queue->signalled && queue->event_fd >= 0)
            eventfd_read(queue->event_fd, &seen);
        queue->done = NULL;
        queue->done_count = queue->done_capacity = 0;
        queue->signal_due = queue->signalled = false;
    }
    pthread_mutex_unlock(&queue->lock);
    return ready;
}

static int by_value(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

static bool among(uint64_t tag, const uint64_t *tags, size_t count)
{
    return bsearch(&tag, tags, count, sizeof tag, by_value) != NULL;
}

static void cancel_waiting(Queue *queue, Fifo *fifo, const uint64_t *tags, size_t tag_count)
{
    Fifo kept = {.tail = &kept.head};
    for (Op *op = fifo->head, *next; op; op = next) {
        next = op->next;
        if (!among(op->tag, tags, tag_count)) {
            fifo_append(&kept, op);
            continue;
        }
        complete(queue, op, -ECANCELED);
        free(op);
    }
    *fifo = kept;
    if (!kept.head)
        fifo->tail = &fifo->head;
}

static void cancel_running(Queue *queue, const uint64_t *tags, size_t tag_count)
{
    for (int place = 0; place < queue->places; place++) {
        Op *op = queue->running[place];
        if (!op || op->given_up || !among(op->tag, tags, tag_count))
            continue;
        if (op->state == STARTING)
            op->given_up = true; /* queue_launch completes it */
        if (op->state == FLYING && op->staged) {
            op->given_up = true; /* queue_land frees its place when the device answers */
            complete(queue, op, -ECANCELED);
        }
    }
}

void queue_cancel(Queue *queue, uint64_t *tags, size_t tag_count)
{
    qsort(tags, tag_count, sizeof *tags, by_value);
    pthread_mutex_lock(&queue->lock);
    cancel_waiting(queue, &queue->waiting[READ_OP], tags, tag_count);
    cancel_waiting(queue, &queue->waiting[WRITE_OP], tags, tag_count);
    cancel_running(queue, tags, tag_count);
    signal_done(queue);
    pthread_mutex_unlock(&queue->lock);
}

void queue_stats(Queue *queue, Stats *stats)
{
    pthread_mutex_lock(&queue->lock);
    account(queue, now_ns());
    *stats = queue->stats;
    stats->queued = (int64_t)(queue->waiting[READ_OP].length + queue->waiting[WRITE_OP].length);
    stats->in_flight = queue->flying[READ_OP] + queue->flying[WRITE_OP];
    for (int i = 0; i < queue->worker_count; i++) {
        clockid_t clock;
        if (queue->workers[i].alive && !pthread_getcpuclockid(queue->workers[i].thread, &clock))
            stats->cpu_ns += cpu_time(clock);
    }
    pthread_mutex_unlock(&queue->lock);
}

/* ---- the backend's side ---- */

/* Reads first. Writes keep out of the way of reads, and leave room for those to come. */
Op *queue_next(Queue *queue)
{
    if (!queue->free_count)
        return NULL;
    if (queue->waiting[READ_OP].head)
        return queue->waiting[READ_OP].head;
    int share = queue->places / (queue->flying[READ_OP] ? 4 : 2);
    return queue->flying[WRITE_OP] < (share ? share : 1) ? queue->waiting[WRITE_OP].head : NULL;
}

void queue_begin(Queue *queue, Op *op)
{
    fifo_pop(&queue->waiting[op->direction]);
    op->state = STARTING;
    op->place = queue->free_places[--queue->free_count];
    queue->running[op->place] = op;
    queue->flying[op->direction]++;
}

bool queue_launch(Queue *queue, Op *op)
{
    pthread_mutex_lock(&queue->lock);
    bool go = !op->given_up;
    op->state = FLYING;
    if (!go) {
        complete(queue, op, -ECANCELED);
        signal_done(queue);
        leave(queue, op);
    }
    pthread_mutex_unlock(&queue->lock);
    return go;
}

void queue_restage(Queue *queue, Op *op)
{
    pthread_mutex_lock(&queue->lock);
    op->staged = true;
    op->state = STARTING;
    op->done = 0;
    pthread_mutex_unlock(&queue->lock);
}

void queue_resume(Queue *queue, Op *op)
{
    pthread_mutex_lock(&queue->lock);
    op->state = STARTING;
    pthread_mutex_unlock(&queue->lock);
}

void queue_vacate(Queue *queue, Op *op)
{
    pthread_mutex_lock(&queue->lock);
    vacate(queue, op);
    pthread_mutex_unlock(&queue->lock);
}

bool queue_land(Queue *queue, Op *op)
{
    pthread_mutex_lock(&queue->lock);
    bool wanted = !op->given_up;
    op->state = LANDING;
    if (!wanted)
        leave(queue, op);
    pthread_mutex_unlock(&queue->lock);
    return wanted;
}

void queue_finish(Queue *queue, Op *op, int64_t result)
{
    pthread_mutex_lock(&queue->lock);
    complete(queue, op, result);
    leave(queue, op);
    if (queue_next(queue))
        pthread_cond_signal(&queue->work);
    pthread_mutex_unlock(&queue->lock);
}

void queue_signal(Queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    signal_done(queue);
    pthread_mutex_unlock(&queue->lock);
}

void queue_blocked(Queue *queue, int64_t ns)
{
    pthread_mutex_lock(&queue->lock);
    queue->stats.blocked_ns += ns;
    pthread_mutex_unlock(&queue->lock);
}

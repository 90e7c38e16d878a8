/* A queue of operations in front of a device, and the life of an operation.
 *
 * queued -> starting -> flying -> landing -> finished. `starting` fills the staging buffer of a write, `flying`
 * is the kernel's part, `landing` empties the staging buffer of a read. Whoever changes a state holds `lock`.
 * A backend (uring.c, threads.c) brings the threads that move an operation along.
 */
#ifndef FOREBAY_QUEUE_H
#define FOREBAY_QUEUE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define READ_OP 0
#define WRITE_OP 1
#define SATURATED 4     /* reads outstanding that count as saturation */
#define MAX_IOVECS 1024 /* the kernel's limit per call */

enum state { QUEUED, STARTING, FLYING, LANDING };
enum order { ATTACH, DETACH, FLUSH };

/* The operations of one submit: the owner is told when the last of them is over, not of each. */
typedef struct {
    uint32_t left;
} Batch;

typedef struct Op {
    struct Op *next;
    Batch *batch;
    uint64_t tag;
    uint64_t offset; /* in the file: the device's start is added */
    uint64_t length;
    uint64_t padded; /* length rounded up to what the device transfers */
    uint64_t done;
    int64_t submitted; /* ns, monotonic */
    uint32_t count;
    uint32_t crc;
    int place;  /* index into `running` while started, -1 from when the device is done with it */
    int region; /* registered buffer that holds the memory, or -1 */
    int retries;
    uint8_t direction;
    uint8_t checksum;
    uint8_t staged;
    uint8_t state;
    uint8_t given_up; /* cancelled after it started */
    struct iovec pieces[];
} Op;

typedef struct {
    Op *head, **tail;
    uint64_t length;
} Fifo;

typedef struct {
    uint64_t tag;
    int64_t result;
    uint32_t crc;
    double seconds;
} Done;

typedef struct {
    int64_t read_bytes, write_bytes, read_ops, write_ops, errors;
    int64_t read_busy_ns, read_saturated_ns, read_saturated_bytes;
    int64_t blocked_ns, cpu_ns, queued, in_flight;
} Stats;

typedef struct {
    int fd;         /* file, or -1 */
    char *memory;   /* region of a memory device, or NULL */
    uint64_t start; /* where the device begins in the file */
    uint64_t capacity;
    uint32_t offset_alignment, length_alignment, memory_alignment; /* powers of two */
    int depth;
    int threads; /* of the threads and memory backends */
    char name[16];
    /* the vhost backend: memory that the device shares, and therein one for the ring and one for staging */
    char *shared, *ring, *arena;
    uint64_t shared_size, slot; /* slot: bytes for staging one operation at a time */
    uint32_t segments, segment; /* of one request, and bytes of each */
} Geometry;

typedef struct {
    struct Queue *queue;
    int index;
    pthread_t thread;
    bool alive;
} Worker;

typedef struct Queue {
    Geometry geometry;
    pthread_mutex_t lock;
    pthread_cond_t work;    /* operations to start, or `stopping` */
    pthread_cond_t changed; /* start-up, a command or a thread is over */

    Fifo waiting[2]; /* by direction */
    Op **running;    /* by place */
    int *free_places;
    int places, free_count;
    int flying[2]; /* started and not finished, by direction */

    Done *done;
    size_t done_count, done_capacity;
    int event_fd;
    bool signal_due, signalled; /* a batch is over or an operation failed, not yet made known; event_fd is readable */

    Stats stats;
    int64_t accounted; /* up to when the time counters are */
    int reads_outstanding;

    Worker *workers;
    int worker_count, alive;
    bool stopping, orphaned;
    int owners; /* the caller, and the threads once they are left behind */

    void (*wake)(struct Queue *); /* tells a sleeping backend about new work; called with the lock held */
    bool (*pin)(struct Queue *, uint64_t address, uint64_t length);
    int (*order)(struct Queue *, int order, const int fds[2]); /* ATTACH, DETACH or FLUSH; 0 or an errno */
    void (*release)(struct Queue *); /* frees what `backend` holds, after the last thread */
    void *backend;                   /* stays until the queue goes: late callers look into it */
} Queue;

int64_t now_ns(void);

/* --- the owner's side --- */
Queue *queue_new(const Geometry *geometry);
int uring_start(Queue *queue);   /* 0 or an errno */
int threads_start(Queue *queue); /* file or memory */
int vhost_start(Queue *queue);
bool vhost_fits(const Geometry *geometry); /* whether the parts of what is shared lie within it */
Op *op_new(uint32_t pieces);
void queue_classify(const Queue *queue, Op *op); /* once all fields are set: direct or staged */
void queue_submit(Queue *queue, Op *list, Batch *batch); /* takes both over */
size_t queue_poll(Queue *queue, Done **done); /* the caller frees `done` */
void queue_cancel(Queue *queue, uint64_t *tags, size_t count);
void queue_stats(Queue *queue, Stats *stats);
bool queue_close(Queue *queue, double timeout); /* false: a thread hangs in the kernel and is left behind */
void queue_free(Queue *queue);

/* --- the backend's side --- */
int queue_spawn(Queue *queue, int count, void *(*body)(void *)); /* body gets a Worker; 0 or an errno */
void *queue_exit(Worker *worker);            /* last call of a thread; may free the queue */
Op *queue_next(Queue *queue);                /* lock held: what may start now, still queued */
void queue_begin(Queue *queue, Op *op);      /* lock held: take it off its FIFO and give it a place */
bool queue_launch(Queue *queue, Op *op);     /* starting -> flying; false: cancelled, gone */
void queue_restage(Queue *queue, Op *op);    /* flying -> starting, through staging: the direct way was refused */
void queue_resume(Queue *queue, Op *op);     /* landing -> starting: there is more of it */
void queue_vacate(Queue *queue, Op *op);     /* the device is done with it and needs more work; it is landed later */
bool queue_land(Queue *queue, Op *op);       /* flying -> landing; false: it had been given up, gone */
void queue_finish(Queue *queue, Op *op, int64_t result);
void queue_signal(Queue *queue);             /* make the completions known; queue_finish alone does not */
void queue_blocked(Queue *queue, int64_t ns);

/* --- copy.c: between an operation's memory and a flat buffer, hashing on the way if it asks for it --- */
void op_gather(Op *op, char *flat, uint64_t from, uint64_t size); /* of the bytes [from, from + size), what there is */
void op_scatter(Op *op, const char *flat, uint64_t from, uint64_t size); /* in order: the hash goes on from `from` */
void op_hash(Op *op); /* direct operations: the bytes never were in a flat buffer */
void op_fill(Op *op, char *stage, uint64_t from, uint64_t size); /* gather, and zeros beyond the length */
struct iovec op_rest(const Op *op, const struct iovec *pieces); /* what is left of the piece where `done` stands */
size_t stage_size(uint64_t least);
char *stage_new(size_t size);
void stage_free(char *stage, size_t size);

#endif

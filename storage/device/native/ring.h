/* The smallest io_uring: raw system calls, one submitting thread. */
#ifndef FOREBAY_RING_H
#define FOREBAY_RING_H

#include <linux/io_uring.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    int fd;
    void *rings;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    size_t rings_size, sqes_size;
    unsigned *submit_tail, *complete_head, *complete_tail;
    unsigned submit_mask, complete_mask;
    unsigned pending; /* prepared and not yet submitted */
} Ring;

int ring_open(Ring *ring, unsigned entries); /* 0 or an errno */
void ring_close(Ring *ring);
struct io_uring_sqe *ring_prepare(Ring *ring);                   /* a zeroed entry; never more than `entries` pending */
void ring_enter(Ring *ring, bool wait);                          /* submit what is pending, optionally wait for one */
unsigned ring_reap(Ring *ring, struct io_uring_cqe *into, unsigned most);
void ring_unregister(Ring *ring);                                /* closing alone lets go of them only some time later */
bool ring_register_file(Ring *ring, int fd);                     /* as fixed file 0 */
bool ring_buffer_table(Ring *ring, unsigned entries);            /* empty; filled by ring_set_buffer */
bool ring_set_buffer(Ring *ring, unsigned index, void *base, size_t size); /* NULL clears */

#endif

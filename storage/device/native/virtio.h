/* The driver's side of one virtqueue: a split ring (virtio 1.2, section 2.7) whose requests are indirect tables.
 *
 * A request occupies one descriptor of the ring, always the same for a place; its table, header and status lie in the
 * place's `Request`. All of it is in memory that the device shares.
 */
#ifndef FOREBAY_VIRTIO_H
#define FOREBAY_VIRTIO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_SEGMENTS 126 /* of a request: what SPDK takes at most */

struct descriptor {
    uint64_t address;
    uint32_t length;
    uint16_t flags, next;
};

struct used {
    uint32_t id, length;
};

/* virtio 1.2, section 5.2.6: the header is exactly 16 bytes, the status exactly one. */
typedef struct {
    struct {
        uint32_t type, reserved;
        uint64_t sector;
    } header;
    uint8_t status;
    struct descriptor table[MAX_SEGMENTS + 2] __attribute__((aligned(16)));
} Request;

typedef struct {
    struct descriptor *descriptors;
    uint16_t *available; /* flags, index, ring[] */
    struct {
        uint16_t flags, index;
        struct used ring[];
    } *used;
    Request *requests;
    uint16_t size;       /* a power of two */
    uint16_t pushed, seen; /* free-running, as the device's own */
} Virtqueue;

enum request_type { READ_REQUEST = 0, WRITE_REQUEST = 1, FLUSH_REQUEST = 4 };

/* How many descriptors a ring for so many places has, and bytes that it and its requests take. */
uint16_t virtio_size(unsigned places);
size_t virtio_bytes(unsigned places);
/* Where it lies at a page, and an empty one there. */
void virtio_locate(Virtqueue *ring, char *memory, unsigned places);
void virtio_open(Virtqueue *ring, char *memory, unsigned places);
/* Descriptors from 1 on of a place's table are the caller's: `segments` of them, filled by virtio_segment. */
void virtio_segment(Virtqueue *ring, unsigned place, unsigned number, uint64_t address, uint32_t length, bool read);
void virtio_push(Virtqueue *ring, unsigned place, enum request_type type, uint64_t offset, unsigned segments);
/* Makes what was pushed visible; whether the device wants to be told. */
bool virtio_publish(Virtqueue *ring);
/* The place of the next finished request, -1 for none, -2 for nonsense. */
int virtio_pop(Virtqueue *ring);
/* 0, 1 for an I/O error, 2 for a request it does not know. */
uint8_t virtio_status(const Virtqueue *ring, unsigned place);
/* Whether the device is to signal; false to true needs a look at virtio_ready before waiting. */
void virtio_interrupts(Virtqueue *ring, bool wanted);
bool virtio_ready(const Virtqueue *ring);

#endif

/* A virtqueue in shared memory. The other side may be any program, so nothing that it writes is trusted. */
#include "virtio.h"

#include <string.h>

_Static_assert(sizeof ((Request *)0)->header == 16, "virtio fixes it");

#define PAGE 4096
#define NEXT 1          /* flags of a descriptor */
#define DEVICE_WRITES 2
#define INDIRECT 4
#define SECTOR 512
#define NO_SIGNAL 1     /* a flag of both rings */

static size_t up(size_t size, size_t unit)
{
    return (size + unit - 1) / unit * unit;
}

uint16_t virtio_size(unsigned places)
{
    unsigned size = 2;
    while (size < places)
        size *= 2;
    return (uint16_t)size;
}

static size_t available_at(size_t size) { return up(size * sizeof(struct descriptor), PAGE); }
static size_t used_at(size_t size) { return available_at(size) + up(2 * (2 + size + 1), PAGE); }
static size_t requests_at(size_t size) { return used_at(size) + up(4 + size * sizeof(struct used) + 2, PAGE); }

size_t virtio_bytes(unsigned places)
{
    return up(requests_at(virtio_size(places)) + places * up(sizeof(Request), 64), PAGE);
}

static Request *request_of(const Virtqueue *ring, unsigned place)
{
    return (Request *)((char *)ring->requests + place * up(sizeof(Request), 64));
}

void virtio_locate(Virtqueue *ring, char *memory, unsigned places)
{
    size_t size = virtio_size(places);
    *ring = (Virtqueue){
        .descriptors = (struct descriptor *)memory,
        .available = (uint16_t *)(memory + available_at(size)),
        .used = (void *)(memory + used_at(size)),
        .requests = (Request *)(memory + requests_at(size)),
        .size = (uint16_t)size,
    };
}

void virtio_open(Virtqueue *ring, char *memory, unsigned places)
{
    memset(memory, 0, virtio_bytes(places));
    virtio_locate(ring, memory, places);
    virtio_interrupts(ring, false);
}

void virtio_segment(Virtqueue *ring, unsigned place, unsigned number, uint64_t address, uint32_t length, bool read)
{
    request_of(ring, place)->table[1 + number] = (struct descriptor){
        address, length, (uint16_t)(NEXT | (read ? DEVICE_WRITES : 0)), (uint16_t)(number + 2)};
}

void virtio_push(Virtqueue *ring, unsigned place, enum request_type type, uint64_t offset, unsigned segments)
{
    Request *request = request_of(ring, place);
    request->header.type = type;
    request->header.reserved = 0;
    request->header.sector = offset / SECTOR;
    request->status = 0xff;
    request->table[0] = (struct descriptor){(uintptr_t)&request->header, sizeof request->header, NEXT, 1};
    request->table[1 + segments] = (struct descriptor){(uintptr_t)&request->status, 1, DEVICE_WRITES, 0};
    ring->descriptors[place] =
        (struct descriptor){(uintptr_t)request->table, (uint32_t)((segments + 2) * sizeof request->table[0]), INDIRECT, 0};
    ring->available[2 + ring->pushed++ % ring->size] = (uint16_t)place;
}

bool virtio_publish(Virtqueue *ring)
{
    if (__atomic_load_n(&ring->available[1], __ATOMIC_RELAXED) == ring->pushed)
        return false;
    __atomic_store_n(&ring->available[1], ring->pushed, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the index, before we look whether the device sleeps */
    return !(__atomic_load_n(&ring->used->flags, __ATOMIC_RELAXED) & NO_SIGNAL);
}

bool virtio_ready(const Virtqueue *ring)
{
    return __atomic_load_n(&ring->used->index, __ATOMIC_ACQUIRE) != ring->seen;
}

int virtio_pop(Virtqueue *ring)
{
    uint16_t index = __atomic_load_n(&ring->used->index, __ATOMIC_ACQUIRE);
    if (index == ring->seen)
        return -1;
    uint32_t id = ring->used->ring[ring->seen % ring->size].id;
    if ((uint16_t)(index - ring->seen) > ring->size || id >= ring->size)
        return -2;
    ring->seen++;
    return (int)id;
}

uint8_t virtio_status(const Virtqueue *ring, unsigned place)
{
    return __atomic_load_n(&request_of(ring, place)->status, __ATOMIC_RELAXED);
}

void virtio_interrupts(Virtqueue *ring, bool wanted)
{
    __atomic_store_n(&ring->available[0], wanted ? 0 : NO_SIGNAL, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* before we look for what came meanwhile */
}

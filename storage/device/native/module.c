/* Python's view of the queues: `Queue`, the CRC-32C, and two memory helpers. Stable ABI, Python 3.11 and later. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include "crc32c.h"
#include "queue.h"
#include "virtio.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    Queue *queue;
} QueueObject;

/* ---- reading operations: (tag, direction, offset, length, ((address, length), ...), checksum) ---- */

static PyObject *item(PyObject *fast, Py_ssize_t i)
{
    return PyList_Check(fast) ? PyList_GetItem(fast, i) : PyTuple_GetItem(fast, i);
}

static bool read_u64(PyObject *tuple, Py_ssize_t i, uint64_t *value)
{
    PyObject *number = PyTuple_GetItem(tuple, i);
    if (!number)
        return false;
    *value = PyLong_AsUnsignedLongLong(number);
    return !(*value == (uint64_t)-1 && PyErr_Occurred());
}

static bool read_pieces(Op *op, PyObject *pieces)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < op->count; i++) {
        PyObject *piece = item(pieces, i);
        uint64_t address, length;
        if (!piece || !PyTuple_Check(piece)) {
            PyErr_SetString(PyExc_TypeError, "memory must be a sequence of (address, length) tuples");
            return false;
        }
        if (!read_u64(piece, 0, &address) || !read_u64(piece, 1, &length))
            return false;
        op->pieces[i] = (struct iovec){(void *)(uintptr_t)address, length};
        total += length;
    }
    if (total == op->length)
        return true;
    PyErr_Format(PyExc_ValueError, "operation %llu: length is %llu but its memory has %llu bytes",
                 (unsigned long long)op->tag, (unsigned long long)op->length, (unsigned long long)total);
    return false;
}

static bool check_range(const Geometry *geometry, const Op *op)
{
    const char *problem = NULL;
    if (op->length == 0)
        problem = "is empty";
    else if (op->offset % geometry->offset_alignment)
        problem = "has an offset that is not a multiple of the device's alignment";
    else if (op->offset > geometry->capacity || op->length > geometry->capacity - op->offset)
        problem = "reaches beyond the device";
    if (problem)
        PyErr_Format(PyExc_ValueError, "operation %llu (offset %llu, length %llu; capacity %llu, alignment %u) %s",
                     (unsigned long long)op->tag, (unsigned long long)op->offset, (unsigned long long)op->length,
                     (unsigned long long)geometry->capacity, geometry->offset_alignment, problem);
    return !problem;
}

static bool fill_op(Op *op, PyObject *tuple, PyObject *pieces, uint64_t direction, const Geometry *geometry)
{
    int checksum = PyObject_IsTrue(PyTuple_GetItem(tuple, 5));
    op->direction = direction != READ_OP;
    op->checksum = checksum == 1;
    return checksum >= 0 && read_u64(tuple, 0, &op->tag) && read_u64(tuple, 2, &op->offset)
        && read_u64(tuple, 3, &op->length) && check_range(geometry, op) && read_pieces(op, pieces);
}

static Op *read_op(const Queue *queue, PyObject *tuple)
{
    uint64_t direction;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 6) {
        PyErr_SetString(PyExc_TypeError, "an operation is (tag, direction, offset, length, memory, checksum)");
        return NULL;
    }
    if (!read_u64(tuple, 1, &direction))
        return NULL;
    PyObject *pieces = PySequence_Fast(PyTuple_GetItem(tuple, 4), "memory must be a sequence of (address, length)");
    if (!pieces)
        return NULL;
    Op *op = op_new((uint32_t)PySequence_Size(pieces));
    if (!op)
        PyErr_NoMemory();
    else if (fill_op(op, tuple, pieces, direction, &queue->geometry))
        queue_classify(queue, op);
    else
        free(op), op = NULL;
    Py_DECREF(pieces);
    return op;
}

static void free_list(Op *op)
{
    for (Op *next; op; op = next) {
        next = op->next;
        free(op);
    }
}

static bool read_ops(const Queue *queue, PyObject *ops, Op **list)
{
    Op **tail = list;
    *list = NULL;
    for (Py_ssize_t i = 0; i < PySequence_Size(ops); i++) {
        PyObject *tuple = item(ops, i);
        Op *op = tuple ? read_op(queue, tuple) : NULL;
        if (!op) {
            free_list(*list);
            return false;
        }
        *tail = op;
        tail = &op->next;
    }
    return true;
}

/* ---- methods ---- */

static bool is_open(const QueueObject *self)
{
    if (!self->queue->stopping)
        return true;
    PyErr_SetString(PyExc_ValueError, "the device is closed");
    return false;
}

static PyObject *queue_object_submit(QueueObject *self, PyObject *argument)
{
    Op *list;
    if (!is_open(self))
        return NULL;
    PyObject *ops = PySequence_Fast(argument, "submit takes a sequence of operations");
    if (!ops)
        return NULL;
    bool read = read_ops(self->queue, ops, &list);
    Py_DECREF(ops);
    if (!read)
        return NULL;
    Batch *batch = list ? malloc(sizeof *batch) : NULL;
    if (list && !batch) {
        free_list(list);
        return PyErr_NoMemory();
    }
    if (list)
        queue_submit(self->queue, list, batch);
    Py_RETURN_NONE;
}

static PyObject *queue_object_poll(QueueObject *self, PyObject *Py_UNUSED(none))
{
    Done *done;
    size_t count = queue_poll(self->queue, &done);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *tuple = Py_BuildValue("(KLId)", (unsigned long long)done[i].tag, (long long)done[i].result,
                                        (unsigned)done[i].crc, done[i].seconds);
        if (!tuple || PyList_SetItem(list, (Py_ssize_t)i, tuple))
            Py_CLEAR(list);
    }
    free(done);
    return list;
}

static PyObject *queue_object_fileno(QueueObject *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromLong(self->queue->event_fd);
}

static PyObject *queue_object_cancel(QueueObject *self, PyObject *argument)
{
    PyObject *tags = PySequence_Fast(argument, "cancel takes a sequence of tags");
    if (!tags)
        return NULL;
    size_t count = (size_t)PySequence_Size(tags);
    uint64_t *numbers = malloc((count + 1) * sizeof *numbers);
    for (size_t i = 0; numbers && i < count; i++)
        numbers[i] = PyLong_AsUnsignedLongLong(item(tags, (Py_ssize_t)i));
    Py_DECREF(tags);
    if (!numbers)
        return PyErr_NoMemory();
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        queue_cancel(self->queue, numbers, count);
        Py_END_ALLOW_THREADS
    }
    free(numbers);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *queue_object_register(QueueObject *self, PyObject *arguments)
{
    unsigned long long address, length;
    bool pinned = false;
    if (!PyArg_ParseTuple(arguments, "KK", &address, &length))
        return NULL;
    if (self->queue->pin) {
        Py_BEGIN_ALLOW_THREADS
        pinned = self->queue->pin(self->queue, address, length);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(pinned);
}

/* Both eventfds stay the caller's; the device's thread works on copies. */
static PyObject *give_order(QueueObject *self, int order, int kick, int call)
{
    int fds[2] = {-1, -1}, error = ENOSYS;
    if (!is_open(self))
        return NULL;
    if (order == ATTACH) {
        fds[0] = fcntl(kick, F_DUPFD_CLOEXEC, 0), fds[1] = fcntl(call, F_DUPFD_CLOEXEC, 0);
        error = fds[0] < 0 || fds[1] < 0 ? errno : error;
    }
    if (self->queue->order && (order != ATTACH || (fds[0] >= 0 && fds[1] >= 0))) {
        Py_BEGIN_ALLOW_THREADS
        error = self->queue->order(self->queue, order, fds);
        Py_END_ALLOW_THREADS
    }
    if (!error)
        Py_RETURN_NONE;
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *queue_object_attach(QueueObject *self, PyObject *arguments)
{
    int kick, call;
    return PyArg_ParseTuple(arguments, "ii", &kick, &call) ? give_order(self, ATTACH, kick, call) : NULL;
}

static PyObject *queue_object_detach(QueueObject *self, PyObject *Py_UNUSED(none))
{
    return give_order(self, DETACH, -1, -1);
}

static PyObject *queue_object_flush(QueueObject *self, PyObject *Py_UNUSED(none))
{
    return give_order(self, FLUSH, -1, -1);
}

static PyObject *queue_object_stats(QueueObject *self, PyObject *Py_UNUSED(none))
{
    Stats s;
    queue_stats(self->queue, &s);
    return Py_BuildValue("(LLLLLLLLLLLL)", s.read_bytes, s.write_bytes, s.read_ops, s.write_ops, s.errors,
                         s.read_busy_ns, s.read_saturated_ns, s.read_saturated_bytes, s.blocked_ns, s.cpu_ns,
                         s.queued, s.in_flight);
}

static PyObject *queue_object_close(QueueObject *self, PyObject *arguments)
{
    double timeout = 5.0;
    bool ended;
    if (!PyArg_ParseTuple(arguments, "|d", &timeout))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    ended = queue_close(self->queue, timeout);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(ended);
}

/* ---- creation ---- */

static bool is_power_of_two(uint32_t value)
{
    return value && !(value & (value - 1));
}

static Queue *open_queue(const char *engine, const Geometry *geometry)
{
    Queue *queue = queue_new(geometry);
    if (!queue) {
        PyErr_NoMemory();
        return NULL;
    }
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = geometry->shared ? vhost_start(queue) : strcmp(engine, "io_uring") ? threads_start(queue) : uring_start(queue);
    if (error) {
        queue_close(queue, 5.0);
        queue_free(queue);
    }
    Py_END_ALLOW_THREADS
    if (!error)
        return queue;
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    return NULL;
}

static PyObject *queue_object_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"engine", "name", "capacity", "depth", "fd", "address", "start", "offset_alignment",
                            "length_alignment", "memory_alignment", "shared", "ring", "arena", "slot", "segments", NULL};
    const char *engine, *name;
    unsigned long long capacity, address = 0, start = 0, shared[2] = {0}, ring = 0, arena = 0, slot = 0;
    Geometry geometry = {.fd = -1, .offset_alignment = 1, .length_alignment = 1, .memory_alignment = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ssKi|$iKKIII(KK)KKK(II)", names, &engine, &name, &capacity,
                                     &geometry.depth, &geometry.fd, &address, &start, &geometry.offset_alignment,
                                     &geometry.length_alignment, &geometry.memory_alignment, &shared[0], &shared[1],
                                     &ring, &arena, &slot, &geometry.segments, &geometry.segment))
        return NULL;
    if (geometry.depth < 1 || geometry.depth > 4096 || (geometry.fd >= 0) + (address != 0) + (shared[0] != 0) != 1
        || !is_power_of_two(geometry.offset_alignment) || !is_power_of_two(geometry.length_alignment)
        || !is_power_of_two(geometry.memory_alignment)) {
        PyErr_SetString(PyExc_ValueError, "Queue: bad depth, alignment, or not exactly one of fd, address and shared");
        return NULL;
    }
    geometry.capacity = capacity;
    geometry.start = start;
    geometry.memory = (char *)(uintptr_t)address;
    geometry.shared = (char *)(uintptr_t)shared[0], geometry.shared_size = shared[1];
    geometry.ring = (char *)(uintptr_t)ring, geometry.arena = (char *)(uintptr_t)arena, geometry.slot = slot;
    geometry.threads = strcmp(engine, "io_uring") && !shared[0] ? geometry.depth : 0;
    if (shared[0] && !vhost_fits(&geometry)) {
        PyErr_SetString(PyExc_ValueError, "Queue: ring, slots or segments do not fit into what is shared");
        return NULL;
    }
    snprintf(geometry.name, sizeof geometry.name, "%s", name);
    if (geometry.fd >= 0 && (geometry.fd = fcntl(geometry.fd, F_DUPFD_CLOEXEC, 0)) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Queue *queue = open_queue(engine, &geometry);
    if (!queue)
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    QueueObject *self = (QueueObject *)allocate(type, 0);
    if (self)
        self->queue = queue;
    return (PyObject *)self;
}

static void queue_object_dealloc(QueueObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->queue) {
        Py_BEGIN_ALLOW_THREADS
        queue_close(self->queue, 5.0);
        queue_free(self->queue);
        Py_END_ALLOW_THREADS
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---- functions ---- */

static PyObject *module_crc32c(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer view;
    unsigned seed = 0;
    uint32_t crc;
    if (!PyArg_ParseTuple(arguments, "y*|I", &view, &seed))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc32c(seed, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *module_crc32c_portable(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer view;
    unsigned seed = 0;
    if (!PyArg_ParseTuple(arguments, "y*|I", &view, &seed))
        return NULL;
    uint32_t crc = crc32c_portable(seed, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *module_crc32c_at(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    unsigned long long address, length;
    unsigned seed = 0;
    uint32_t crc;
    if (!PyArg_ParseTuple(arguments, "KK|I", &address, &length, &seed))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc32c(seed, (const void *)(uintptr_t)address, length);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *module_bind_memory(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    unsigned long long address, length;
    unsigned node;
    unsigned long nodes[16] = {0};
    const unsigned bits = 8 * sizeof nodes[0];
    if (!PyArg_ParseTuple(arguments, "KKI", &address, &length, &node))
        return NULL;
    if (node >= 16 * bits) {
        PyErr_Format(PyExc_ValueError, "NUMA node %u is too large", node);
        return NULL;
    }
    nodes[node / bits] = 1ul << node % bits;
    if (syscall(SYS_mbind, (unsigned long)address, (unsigned long)length, 2 /* MPOL_BIND */, nodes, 16ul * bits, 0ul))
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef queue_methods[] = {
    {"submit", (PyCFunction)queue_object_submit, METH_O, "Queue operations."},
    {"poll", (PyCFunction)queue_object_poll, METH_NOARGS, "Completions since the last call."},
    {"fileno", (PyCFunction)queue_object_fileno, METH_NOARGS, "Eventfd; readable when a batch is over or an operation failed."},
    {"cancel", (PyCFunction)queue_object_cancel, METH_O, "Give up on operations by tag."},
    {"register", (PyCFunction)queue_object_register, METH_VARARGS, "Pin memory; whether it was done."},
    {"attach", (PyCFunction)queue_object_attach, METH_VARARGS, "attach(kick, call): a virtqueue that has been agreed on."},
    {"detach", (PyCFunction)queue_object_detach, METH_NOARGS, "Fail what is in flight; the device is gone."},
    {"flush", (PyCFunction)queue_object_flush, METH_NOARGS, "Make completed writes durable."},
    {"stats", (PyCFunction)queue_object_stats, METH_NOARGS, "Counters in the order of DeviceStats."},
    {"close", (PyCFunction)queue_object_close, METH_VARARGS, "Stop; False when a thread hangs in the kernel."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_doc, "Queue(engine, name, capacity, depth, *, fd | address, ...): operations on a file or memory."},
    {Py_tp_new, queue_object_new},
    {Py_tp_dealloc, queue_object_dealloc},
    {Py_tp_methods, queue_methods},
    {0, NULL},
};

static PyType_Spec queue_spec = {
    .name = "forebay.storage.device._native.Queue",
    .basicsize = sizeof(QueueObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = queue_slots,
};

static PyObject *module_virtqueue(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    unsigned long long address;
    unsigned depth;
    Virtqueue ring;
    if (!PyArg_ParseTuple(arguments, "KI", &address, &depth))
        return NULL;
    virtio_locate(&ring, (char *)(uintptr_t)address, depth + 1); /* one more for flushing */
    return Py_BuildValue("(IKKKK)", (unsigned)ring.size, (unsigned long long)(uintptr_t)ring.descriptors,
                         (unsigned long long)(uintptr_t)ring.used, (unsigned long long)(uintptr_t)ring.available,
                         (unsigned long long)virtio_bytes(depth + 1));
}

static PyMethodDef functions[] = {
    {"virtqueue", module_virtqueue, METH_VARARGS,
     "virtqueue(address, depth): its size, where its three parts lie, and the bytes it takes."},
    {"crc32c", module_crc32c, METH_VARARGS, "crc32c(buffer, seed=0): CRC-32C, continuing `seed`."},
    {"crc32c_at", module_crc32c_at, METH_VARARGS, "crc32c_at(address, length, seed=0)."},
    {"crc32c_portable", module_crc32c_portable, METH_VARARGS, "The table implementation, for tests."},
    {"bind_memory", module_bind_memory, METH_VARARGS, "bind_memory(address, length, node): mbind to a NUMA node."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "forebay.storage.device._native", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__native(void)
{
    crc32c_init();
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module ? PyType_FromSpec(&queue_spec) : NULL;
    if (type && PyModule_AddObjectRef(module, "Queue", type) == 0) {
        Py_DECREF(type);
        return module;
    }
    Py_XDECREF(type);
    Py_XDECREF(module);
    return NULL;
}

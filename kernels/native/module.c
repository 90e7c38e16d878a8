/* Python's view of layers: on addresses, checked by the modules that call it. Stable ABI, Python 3.11 and later. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "rows.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *name;
    const Kernels *kernels;
} Variant;

/* Those this processor can run, best first. */
static const Variant *variants(void)
{
    static Variant found[4];
    int count = 0;
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        found[count++] = (Variant){"avx512", &avx512_kernels};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found[count++] = (Variant){"avx2", &avx2_kernels};
#endif
    found[count] = (Variant){"portable", &portable_kernels};
    return found;
}

static PyObject *variant_names(PyObject *self, PyObject *args)
{
    (void)self, (void)args;
    PyObject *names = PyList_New(0);
    for (const Variant *variant = variants(); names && variant->name; variant++) {
        PyObject *name = PyUnicode_FromString(variant->name);
        if (!name || PyList_Append(names, name))
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static const Kernels *kernels_of(const char *name)
{
    for (const Variant *variant = variants(); variant->name; variant++)
        if (!strcmp(variant->name, name))
            return variant->kernels;
    PyErr_Format(PyExc_ValueError, "no kernels of variant %s on this processor", name);
    return NULL;
}

enum { ADDRESSES = 15 };

/* y, x, router weights and ids, the eight tensors of the weights, and three scales or zeros. */
static int read_addresses(PyObject *tuple, Layer *layer)
{
    void *at[ADDRESSES];
    if (PyTuple_Size(tuple) != ADDRESSES) {
        PyErr_Format(PyExc_ValueError, "%zd addresses, not %d", PyTuple_Size(tuple), ADDRESSES);
        return -1;
    }
    for (int i = 0; i < ADDRESSES; i++)
        at[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
    if (PyErr_Occurred())
        return -1;
    layer->y_TD = at[0];
    layer->x_TD = at[1], layer->topk_weights_TK = at[2], layer->topk_ids_TK = at[3];
    layer->gate_HD = at[4], layer->up_HD = at[5], layer->down_DH = at[6];
    layer->residual_gate_RD = at[7], layer->residual_up_RD = at[8], layer->residual_down_RD = at[9];
    layer->indices_R = at[10], layer->offsets_E1 = at[11];
    layer->gate_scale_H = at[12], layer->up_scale_H = at[13], layer->down_scale_D = at[14];
    return 0;
}

/* Only the backbone may be int8, and only int8 has scales. */
static int choose_elements(Layer *layer, const Kernels *kernels, const int element[3])
{
    int scaled = layer->gate_scale_H && layer->up_scale_H && layer->down_scale_D;
    for (int i = 0; i < 3; i++)
        if (element[i] < 0 || element[i] > (i ? F16 : I8) || (element[0] == I8) != scaled) {
            PyErr_Format(PyExc_ValueError, "no kernels for element types %d, %d, %d", element[0], element[1], element[2]);
            return -1;
        }
    layer->backbone = kernels->elements + element[0];
    layer->residual = kernels->elements + element[1];
    layer->rows = kernels->elements + element[2];
    return 0;
}

static PyObject *forward(PyObject *self, PyObject *args)
{
    (void)self;
    Layer layer;
    PyObject *addresses;
    const char *variant;
    int element[3], threads, result;
    if (!PyArg_ParseTuple(args, "s(iii)iiO!(llllll)", &variant, &element[0], &element[1], &element[2], &layer.activation,
                          &threads, &PyTuple_Type, &addresses, &layer.tokens, &layer.top_k, &layer.experts,
                          &layer.hidden, &layer.model, &layer.kept))
        return NULL;
    const Kernels *kernels = kernels_of(variant);
    if (!kernels || read_addresses(addresses, &layer) || choose_elements(&layer, kernels, element))
        return NULL;
    if (layer.activation < 0 || layer.activation >= ACTIVATIONS || threads < 1)
        return PyErr_Format(PyExc_ValueError, "no activation %d, or fewer than one thread: %d", layer.activation, threads);
    const char *problem = layer_problem(&layer);
    if (problem) {
        PyErr_SetString(PyExc_ValueError, problem);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    result = layer_forward(&layer, kernels, threads);
    Py_END_ALLOW_THREADS
    if (result)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *linear(PyObject *self, PyObject *args)
{
    (void)self;
    Linear layer;
    const char *variant;
    unsigned long long y, x, weight, bias;
    int weights, rows, threads, result;
    if (!PyArg_ParseTuple(args, "s(ii)i(KKKK)(lll)", &variant, &weights, &rows, &threads, &y, &x, &weight, &bias,
                          &layer.m, &layer.n, &layer.k))
        return NULL;
    const Kernels *kernels = kernels_of(variant);
    if (!kernels)
        return NULL;
    if (weights < 0 || weights > F16 || rows < 0 || rows > F16 || threads < 1)
        return PyErr_Format(PyExc_ValueError, "no kernels for element types %d, %d on %d threads", weights, rows, threads);
    if (layer.m < 0 || layer.n < 0 || layer.k < 1)
        return PyErr_Format(PyExc_ValueError, "no product of sizes %ld, %ld, %ld", layer.m, layer.n, layer.k);
    layer.y_MN = (void *)(uintptr_t)y, layer.bias_N = (const void *)(uintptr_t)bias;
    layer.x_MK = (const void *)(uintptr_t)x, layer.weight_NK = (const void *)(uintptr_t)weight;
    layer.weights = kernels->elements + weights, layer.rows = kernels->elements + rows;
    Py_BEGIN_ALLOW_THREADS
    result = linear_forward(&layer, kernels, threads);
    Py_END_ALLOW_THREADS
    if (result)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* RMSNorm where there are weights, else SiLU and product. */
static PyObject *rows(PyObject *self, PyObject *args)
{
    (void)self;
    Rows all;
    const char *variant;
    unsigned long long y, x, weight;
    int elements, threads, result;
    if (!PyArg_ParseTuple(args, "sii(KKK)(ll)f", &variant, &elements, &threads, &y, &x, &weight, &all.n, &all.d,
                          &all.epsilon))
        return NULL;
    const Kernels *kernels = kernels_of(variant);
    if (!kernels)
        return NULL;
    if (elements < 0 || elements > F16 || threads < 1 || all.n < 0 || all.d < 1)
        return PyErr_Format(PyExc_ValueError, "no rows of element type %d and sizes %ld, %ld on %d threads", elements,
                            all.n, all.d, threads);
    all.y = (void *)(uintptr_t)y, all.x = (const void *)(uintptr_t)x, all.weight_D = (const void *)(uintptr_t)weight;
    all.elements = kernels->elements + elements;
    Py_BEGIN_ALLOW_THREADS
    result = rows_forward(&all, weight ? kernels->norm : kernels->gate, threads);
    Py_END_ALLOW_THREADS
    if (result)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* The next of the numbers that describe attention; see attention.py for their order. */
static long long next_of(PyObject *numbers, Py_ssize_t *at)
{
    PyObject *number = PyList_GetItem(numbers, (*at)++);
    return number ? PyLong_AsLongLong(number) : -1;
}

static void *address_of(PyObject *numbers, Py_ssize_t *at) { return (void *)(intptr_t)next_of(numbers, at); }

static void read_segment(PyObject *numbers, Py_ssize_t *at, Segment *segment)
{
    segment->keys = address_of(numbers, at), segment->values = address_of(numbers, at);
    segment->count = next_of(numbers, at);
    segment->key_stride = next_of(numbers, at), segment->key_head = next_of(numbers, at);
    segment->value_stride = next_of(numbers, at), segment->value_head = next_of(numbers, at);
}

enum { PER_ASKER = 6, PER_SEGMENT = 7 };

/* Askers, each followed by its segments, into memory with room for all of them. How many askers there are, or -1. */
static long read_askers(PyObject *numbers, Asker *askers, Segment *segments)
{
    Py_ssize_t at = 0, size = PyList_Size(numbers);
    long count = 0;
    while (size - at >= PER_ASKER) {
        Asker *asker = askers + count++;
        asker->results = address_of(numbers, &at), asker->queries = address_of(numbers, &at);
        asker->count = next_of(numbers, &at), asker->stride = next_of(numbers, &at), asker->head = next_of(numbers, &at);
        asker->segment_count = next_of(numbers, &at), asker->segments = segments;
        if (asker->count < 0 || asker->segment_count < 1 || asker->segment_count > (size - at) / PER_SEGMENT)
            break;
        for (long i = 0; i < asker->segment_count; i++)
            read_segment(numbers, &at, segments++);
        if (at == size && !PyErr_Occurred())
            return count;
    }
    if (!size)
        return 0;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the numbers are not askers, each with its segments");
    return -1;
}

static PyObject *attention(PyObject *self, PyObject *args)
{
    (void)self;
    Attention all;
    PyObject *numbers;
    const char *variant;
    int elements, threads, result = -1;
    if (!PyArg_ParseTuple(args, "sii(lll)O!", &variant, &elements, &threads, &all.kv_heads, &all.group, &all.size,
                          &PyList_Type, &numbers))
        return NULL;
    const Kernels *kernels = kernels_of(variant);
    if (!kernels)
        return NULL;
    if (elements < 0 || elements > F16 || threads < 1 || all.kv_heads < 1 || all.group < 1 || all.size < 1)
        return PyErr_Format(PyExc_ValueError, "no attention of element type %d, %ld x %ld heads of %ld, %d threads",
                            elements, all.kv_heads, all.group, all.size, threads);
    size_t room = (size_t)PyList_Size(numbers) / PER_ASKER + 1;
    Asker *askers = malloc(room * (sizeof(Asker) + sizeof(Segment)));
    if (!askers)
        return PyErr_NoMemory();
    all.askers = askers, all.elements = kernels->elements + elements;
    all.count = read_askers(numbers, askers, (Segment *)(askers + room));
    if (all.count >= 0) {
        Py_BEGIN_ALLOW_THREADS
        result = attention_forward(&all, kernels, threads);
        Py_END_ALLOW_THREADS
    }
    free(askers);
    if (all.count < 0)
        return NULL;
    if (result)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"forward", forward, METH_VARARGS, "One layer; see cpu.py for the order of the addresses and sizes."},
    {"linear", linear, METH_VARARGS, "y = x w^T + bias; see linear.py for the order of the addresses and sizes."},
    {"attention", attention, METH_VARARGS, "Attention without a mask; see attention.py for the order of the numbers."},
    {"rows", rows, METH_VARARGS, "An operation on every row; see rows.py for the order of the addresses and sizes."},
    {"variants", variant_names, METH_NOARGS, "Names of the kernels that this processor can run, best first."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModule_Create(&definition); }

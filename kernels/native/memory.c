/* Memory that calls hand on to the next one. */
#include "layer.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { MOST_KEPT = 128 << 20 };

/* At the start of each piece; what is handed out begins a line further on. */
typedef struct {
    size_t bytes;
} Header;

static _Atomic(Header *) kept[MEMORIES];

void *memory_take(int kind, size_t bytes)
{
    Header *header = atomic_exchange(&kept[kind], NULL);
    if (!header || header->bytes < bytes) {
        free(header);
        bytes = (bytes + LINE - 1) / LINE * LINE;
        header = aligned_alloc(LINE, LINE + bytes);
        if (!header)
            return NULL;
        header->bytes = bytes;
    }
    return (char *)header + LINE;
}

void memory_give(int kind, void *memory)
{
    if (!memory)
        return;
    Header *header = (Header *)((char *)memory - LINE);
    if (header->bytes <= MOST_KEPT)
        header = atomic_exchange(&kept[kind], header);
    free(header);
}

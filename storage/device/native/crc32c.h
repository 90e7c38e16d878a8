/* CRC-32C (Castagnoli), the checksum of stripes. */
#ifndef FOREBAY_CRC32C_H
#define FOREBAY_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Builds the tables and chooses the fastest implementation of this CPU. Call once before the others. */
void crc32c_init(void);

/* Continues `crc` (0 to start) over `length` bytes: crc32c(crc32c(0, a), b) is the checksum of a then b. */
uint32_t crc32c(uint32_t crc, const void *data, size_t length);

/* The same without special instructions, for tests and other CPUs. */
uint32_t crc32c_portable(uint32_t crc, const void *data, size_t length);

#endif

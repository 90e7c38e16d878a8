/* CRC-32C: hardware instructions over three interleaved streams, or slicing-by-8 tables.
 *
 * The crc32 instruction has a latency of three cycles and a throughput of one, so one stream uses a third of
 * it. Three adjacent blocks are hashed side by side and joined: the CRC of "A then B" is the CRC of A moved
 * over |B| zero bytes, xor the CRC of B started at 0. Moving is linear over GF(2), so it is four table lookups.
 */
#include "crc32c.h"

#include <string.h>

#define POLYNOMIAL 0x82F63B78u /* reflected 0x1EDC6F41 */
#define LONG_BLOCK 2048
#define SHORT_BLOCK 256

typedef uint32_t Shift[4][256];

static uint32_t slices[8][256];

static void build_slices(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        slices[0][byte] = crc;
    }
    for (int slice = 1; slice < 8; slice++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = slices[slice - 1][byte];
            slices[slice][byte] = crc >> 8 ^ slices[0][crc & 255];
        }
}

/* `crc` is not inverted here, nor in hardware(): crc32c() does that at both ends. */
static uint32_t portable(uint32_t crc, const uint8_t *data, size_t length)
{
    for (; length >= 8; length -= 8, data += 8) {
        uint32_t low = crc ^ ((uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24);
        crc = slices[7][low & 255] ^ slices[6][low >> 8 & 255] ^ slices[5][low >> 16 & 255] ^ slices[4][low >> 24]
            ^ slices[3][data[4]] ^ slices[2][data[5]] ^ slices[1][data[6]] ^ slices[0][data[7]];
    }
    while (length--)
        crc = crc >> 8 ^ slices[0][(crc ^ *data++) & 255];
    return crc;
}

static uint32_t (*chosen)(uint32_t crc, const uint8_t *data, size_t length) = portable;

#if defined(__x86_64__)
#define HARDWARE __attribute__((target("sse4.2")))
#define STEP8(crc, word) __builtin_ia32_crc32di(crc, word)
#define STEP1(crc, byte) __builtin_ia32_crc32qi((uint32_t)(crc), byte)
static int available(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define HARDWARE
static inline uint64_t STEP8(uint64_t crc, uint64_t word)
{
    uint32_t result;
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w1, %x2" : "=r"(result) : "r"((uint32_t)crc), "r"(word));
    return result;
}
static inline uint32_t STEP1(uint64_t crc, uint8_t byte)
{
    uint32_t result;
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w1, %w2" : "=r"(result) : "r"((uint32_t)crc), "r"((uint32_t)byte));
    return result;
}
static int available(void)
{
    return (getauxval(AT_HWCAP) & (1ul << 7)) != 0; /* HWCAP_CRC32 */
}
#endif

#ifdef HARDWARE
static Shift over_long, over_short;

/* shift[i][b]: what byte i of a CRC, holding b, becomes after `length` zero bytes. */
static void build_shift(Shift shift, size_t length)
{
    static const uint8_t zeros[LONG_BLOCK];
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++)
            shift[byte][value] = portable(value << 8 * byte, zeros, length);
}

static inline uint64_t shifted(Shift shift, uint64_t crc)
{
    return shift[0][crc & 255] ^ shift[1][crc >> 8 & 255] ^ shift[2][crc >> 16 & 255] ^ shift[3][crc >> 24 & 255];
}

static inline uint64_t word_at(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

/* `ahead`: bytes from `data` to what is hashed next. The hardware does not foresee three streams so close together;
 * asking for the lines in order doubles the speed on data that is not in cache (measured on Zen 3). */
HARDWARE static inline uint64_t three_blocks(uint64_t first, const uint8_t *data, size_t block, Shift shift, size_t ahead)
{
    uint64_t second = 0, third = 0;
    const uint8_t *next = data + ahead;
    for (const uint8_t *end = data + block; data < end; data += 64, next += 3 * 64) {
        if (ahead) {
            __builtin_prefetch(next);
            __builtin_prefetch(next + 64);
            __builtin_prefetch(next + 128);
        }
        for (int i = 0; i < 64; i += 8) {
            first = STEP8(first, word_at(data + i));
            second = STEP8(second, word_at(data + block + i));
            third = STEP8(third, word_at(data + 2 * block + i));
        }
    }
    return shifted(shift, shifted(shift, first) ^ second) ^ third;
}

HARDWARE static uint32_t hardware(uint32_t crc, const uint8_t *data, size_t length)
{
    uint64_t state = crc;
    for (; length >= 6 * LONG_BLOCK; length -= 3 * LONG_BLOCK, data += 3 * LONG_BLOCK)
        state = three_blocks(state, data, LONG_BLOCK, over_long, 3 * LONG_BLOCK);
    for (; length >= 3 * LONG_BLOCK; length -= 3 * LONG_BLOCK, data += 3 * LONG_BLOCK)
        state = three_blocks(state, data, LONG_BLOCK, over_long, 0);
    for (; length >= 3 * SHORT_BLOCK; length -= 3 * SHORT_BLOCK, data += 3 * SHORT_BLOCK)
        state = three_blocks(state, data, SHORT_BLOCK, over_short, 0);
    for (; length >= 8; length -= 8, data += 8)
        state = STEP8(state, word_at(data));
    while (length--)
        state = STEP1(state, *data++);
    return (uint32_t)state;
}
#endif

void crc32c_init(void)
{
    build_slices();
#ifdef HARDWARE
    build_shift(over_long, LONG_BLOCK);
    build_shift(over_short, SHORT_BLOCK);
    if (available())
        chosen = hardware;
#endif
}

uint32_t crc32c(uint32_t crc, const void *data, size_t length)
{
    return ~chosen(~crc, data, length);
}

uint32_t crc32c_portable(uint32_t crc, const void *data, size_t length)
{
    return ~portable(~crc, data, length);
}

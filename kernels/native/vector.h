/* Vectors of LANES floats in GCC's portable notation; included once per instruction set. */
#if defined(__AVX2__)
#include <immintrin.h> /* GCC widens 16-bit lanes in four instructions where the processor has one */
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadBits __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

INLINE Vector load_f32(const float *from)
{
    Vector v;
    __builtin_memcpy(&v, from, sizeof(v));
    return v;
}

INLINE void store(float *to, Vector v) { __builtin_memcpy(to, &v, sizeof(v)); }
INLINE Vector splat(float x) { return x - (Vector){0}; }

/* LANES 16-bit patterns, each in the low half of 32 bits. */
INLINE Bits load_halves(const uint16_t *from)
{
#if defined(__AVX512F__)
    return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    Halves raw;
    __builtin_memcpy(&raw, from, sizeof(raw));
    return __builtin_convertvector(raw, Bits);
#endif
}

INLINE Vector load_bf16(const uint16_t *from) { return (Vector)(load_halves(from) << 16); }

/* Moves exponent and mantissa into place and repairs the exponent's bias; that of infinity and NaN stays the highest. */
INLINE Vector load_f16(const uint16_t *from)
{
    Bits wide = load_halves(from);
    Vector magnitude = (Vector)((wide & 0x7fff) << 13) * 0x1p112f;
    Bits highest = (magnitude >= 0x1p16f) & 0x7f800000;
    return (Vector)((Bits)magnitude | highest | (wide & 0x8000) << 16);
}

INLINE Vector load_i8(const int8_t *from)
{
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    Bytes raw;
    __builtin_memcpy(&raw, from, sizeof(raw));
    return __builtin_convertvector(raw, Vector);
#endif
}

INLINE void store_f32(float *to, Vector v) { store(to, v); }

/* The low halves of LANES times 32 bits. */
INLINE void store_halves(uint16_t *to, Bits wide)
{
    Halves narrow = __builtin_convertvector(wide, Halves);
    __builtin_memcpy(to, &narrow, sizeof(narrow));
}

INLINE Bits choose(Bits mask, Bits yes, Bits no) { return (yes & mask) | (no & ~mask); }

INLINE void store_bf16(uint16_t *to, Vector v)
{
    Bits bits = (Bits)v;
    Bits rounded = bits + 0x7fff + (bits >> 16 & 1);
    store_halves(to, choose(v == v, rounded, bits | 0x400000) >> 16);
}

/* Too small for a normal half: 0.5 is added, so that the sum's last bits are the half. Else the exponent's bias is
 * changed, and half a unit added. */
INLINE void store_f16(uint16_t *to, Vector v)
{
    Bits sign = (Bits)v & INT32_MIN, size = (Bits)v ^ sign;
    Bits small = (Bits)((Vector)size + 0.5f) - 0x3f000000;
    Bits normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    Bits half = choose(size < (113 << 23), small, normal);
    half = choose(size >= (143 << 23), 0x7c00 - (Bits){0}, half);
    half = choose(size > 0x7f800000, 0x7e00 - (Bits){0}, half);
    store_halves(to, half | (sign >> 16 & 0x8000));
}

INLINE Quad quad(Vector v)
{
    union {
        Vector all;
        Quad quads[LANES / 4];
    } parts = {v};
    Quad total = parts.quads[0];
    for (int i = 1; i < LANES / 4; i++)
        total += parts.quads[i];
    return total;
}

/* The sums of four vectors. */
INLINE Quad sums(const Vector v[4])
{
    Quad a = quad(v[0]), b = quad(v[1]), c = quad(v[2]), d = quad(v[3]);
    Quad ab = __builtin_shuffle(a, b, (QuadBits){0, 4, 1, 5}) + __builtin_shuffle(a, b, (QuadBits){2, 6, 3, 7});
    Quad cd = __builtin_shuffle(c, d, (QuadBits){0, 4, 1, 5}) + __builtin_shuffle(c, d, (QuadBits){2, 6, 3, 7});
    return __builtin_shuffle(ab, cd, (QuadBits){0, 1, 4, 5}) + __builtin_shuffle(ab, cd, (QuadBits){2, 3, 6, 7});
}

INLINE Vector pick(Bits mask, Vector yes, Vector no) { return (Vector)(((Bits)yes & mask) | ((Bits)no & ~mask)); }

/* e^x to 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, Taylor's polynomial in r, n added to the exponent. */
INLINE Vector exponential(Vector x)
{
    x = pick(x > 88.0f, splat(88.0f), pick(x < -87.0f, splat(-87.0f), x));
    Vector shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: what is left of the sum is n, rounded */
    Vector n = shifted - 12582912.0f;
    Vector r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vector p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (Vector)((__builtin_convertvector(n, Bits) + 127) << 23);
}

INLINE Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

/* GELU with tanh is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). */
INLINE Vector steepness(Vector x) { return x * (1.59576912f + 0.07135481f * x * x); }

/* gate[i] = activation(gate[i]) * up[i]. Works on whole vectors: both have room for them. */
static void activate(float *gate, const float *up, long count, int activation)
{
    if (activation == GELU) {
        for (long i = 0; i < count; i++)
            gate[i] = 0.5f * gate[i] * (1.0f + erff(gate[i] * 0.70710678f)) * up[i];
        return;
    }
    for (long i = 0; i < count; i += LANES) {
        Vector g = load_f32(gate + i);
        store(gate + i, g * sigmoid(activation == SILU ? g : steepness(g)) * load_f32(up + i));
    }
}

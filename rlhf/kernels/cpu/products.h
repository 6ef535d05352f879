/* Products of a few rows with packed weights: on AMX tiles, on pairs of bf16 numbers, and in fp32.
 *
 * Weights are packed in the order in which they are read: chunks of outputs, then inputs. A slab, a
 * part of a chunk's inputs, stays in the L1 cache while all rows are multiplied by it, and the next
 * slab is prefetched meanwhile.
 */

/* The sizes of a product: up to `rows` rows times chunks of `outputs` outputs. `bytes` bytes of
 * weights are read for every `inputs` inputs; a slab has `slab` inputs. */
typedef struct { int64_t rows, outputs, inputs, bytes, slab; } Shape;

/* What to prefetch: `step` more bytes with every Shape.bytes bytes of weights that are read. */
typedef struct { const uint8_t *fetched, *until; int64_t step; } Ahead;

/* The cache into which weights are prefetched: L1, or L2 with AMX, for which L1 has not been
 * measured. */
enum { CACHE_LEVEL = ISA >= AMX ? _MM_HINT_T1 : _MM_HINT_T0 };

static inline void fetch_ahead(Ahead *ahead) {
    ahead->until += ahead->step;
    for (; ahead->fetched < ahead->until; ahead->fetched += 64)
        _mm_prefetch((const char *)ahead->fetched, CACHE_LEVEL);
}

#if HALF && ISA >= AVX512_BF16 /* A pair: two inputs, whose products are added at once. */
enum { PAIR = 2 };
typedef __m512bh pairs;
static inline pairs load_pairs(const void *from) { return (pairs)_mm512_loadu_si512(from); }
static inline pairs all_pairs(const number *from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return (pairs)_mm512_set1_epi32(pair);
}
static inline vec plus_product(vec sum, pairs x, pairs weight) {
    return _mm512_dpbf16_ps(sum, x, weight);
}
#elif HALF
enum { PAIR = 2 };
typedef struct { vec even, odd; } pairs;
static inline pairs split(__m256i both) { /* A bf16 number is the upper half of an fp32 number. */
    const __m256i upper = _mm256_set1_epi32(0xffff0000);
    return (pairs){_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
                   _mm256_castsi256_ps(_mm256_and_si256(both, upper))};
}
static inline pairs load_pairs(const void *from) { return split(_mm256_loadu_si256(from)); }
static inline pairs all_pairs(const number *from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return split(_mm256_set1_epi32(pair));
}
static inline vec plus_product(vec sum, pairs x, pairs weight) {
    return x.odd * weight.odd + (x.even * weight.even + sum);
}
#else
enum { PAIR = 1 };
typedef vec pairs;
static inline pairs load_pairs(const void *from) { return load(from); }
static inline pairs all_pairs(const number *from) { return all(*from); }
static inline vec plus_product(vec sum, pairs x, pairs weight) { return x * weight + sum; }
#endif

/* The sums of ROWS rows and VECS vectors fit into the registers, beside the numbers to multiply:
 * with AVX2 a vector of bf16 pairs takes two registers. */
enum { VECS = HALF && ISA < AVX512_BF16 ? 2 : 3, ROWS = ISA >= AVX512_BF16 ? 8 : 4 };
enum { WORD = VECS * LANES * PAIR * sizeof(number) };
/* At most half of an L1 cache: 48 KiB on CPUs with AVX-512, 32 KiB on others. */
enum { SLAB_BYTES = ISA >= AVX512_BF16 ? 24576 : 12288 };
static const Shape VECTORS = {ROWS, VECS * LANES, PAIR, WORD, SLAB_BYTES / WORD * PAIR};

/* Multiply inputs `from` to `to` of `rows` rows by a slab, and add the products to the sums of the
 * inputs before `from`. `rows` is a constant: every number of rows has its own code. */
ALWAYS_INLINE void multiply_rows(const number *x, const int64_t rows, int64_t inputs, int64_t from,
                                 int64_t to, const uint8_t *slab, Ahead ahead, float *sums) {
    vec sum[ROWS][VECS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < VECS; j++)
            sum[i][j] = from ? load(sums + (i * VECS + j) * LANES) : all(0);
    for (int64_t at = from; at < to; at += PAIR, slab += WORD) {
        fetch_ahead(&ahead);
        pairs weight[VECS];
#pragma GCC unroll 3
        for (int j = 0; j < VECS; j++) weight[j] = load_pairs(slab + j * sizeof(vec));
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const pairs numbers = all_pairs(x + i * inputs + at);
#pragma GCC unroll 3
            for (int j = 0; j < VECS; j++) sum[i][j] = plus_product(sum[i][j], numbers, weight[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < VECS; j++) store(sums + (i * VECS + j) * LANES, sum[i][j]);
}

/* Multiply up to ROWS rows (rows, inputs) by a slab; update sums (rows, outputs). */
static void multiply_vectors(const number *x, int64_t rows, int64_t inputs, int64_t from,
                             int64_t to, const uint8_t *slab, Ahead ahead, float *sums) {
    switch (rows) {
#define CASE(n) case n: multiply_rows(x, n, inputs, from, to, slab, ahead, sums); break
    CASE(1); CASE(2); CASE(3); CASE(4);
#if ISA >= AVX512_BF16
    CASE(5); CASE(6); CASE(7); CASE(8);
#endif
#undef CASE
    }
}

/* Pack weight (outputs, inputs) into (chunks, inputs / PAIR, outputs of a chunk, PAIR). */
static void pack_vectors(const number *weight, int64_t outputs, int64_t inputs, number *packed) {
    enum { BLOCK = 16 }; /* the words of a cache line; a word is a pair of bf16 numbers, or fp32 */
    const int64_t words = inputs / PAIR, width = VECTORS.outputs;
    const uint32_t *from = (const uint32_t *)weight;
#pragma omp parallel for
    for (int64_t chunk = 0; chunk < (outputs + width - 1) / width; chunk++) {
        uint32_t *to = (uint32_t *)packed + chunk * width * words;
        for (int64_t begin = 0; begin < words; begin += BLOCK) {
            const int64_t end = begin + BLOCK < words ? begin + BLOCK : words;
            for (int64_t o = 0; o < width; o++) {
                const int64_t output = chunk * width + o;
                for (int64_t word = begin; word < end; word++)
                    to[word * width + o] = output < outputs ? from[output * words + word] : 0;
            }
        }
    }
}

#if HALF && ISA >= AMX
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE = 16, DEPTH = 32, BLOCKS = 4, TILE_BYTES = 1024 };  /* TILE rows, DEPTH inputs */
static const Shape TILES = {TILE, BLOCKS * TILE, DEPTH, BLOCKS * TILE_BYTES, INT64_MAX};

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

/* Set this thread's tile registers to `rows` rows of x and sums. */
static void set_tiles(int64_t rows) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 7; tile++)
        config.bytes[tile] = 64, config.rows[tile] = tile < 5 ? rows : TILE;
    _tile_loadconfig(&config);
}

/* Multiply a chunk by as many rows as set_tiles set. Tiles: 0-3 sums, 4 rows, 5-6 weights. */
static void multiply_tiles(const number *x, int64_t inputs, const uint8_t *weights, Ahead ahead,
                           float *sums) {
    const int64_t stride = inputs * sizeof(number), sums_stride = TILES.outputs * sizeof(float);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t at = 0; at < inputs; at += DEPTH, weights += TILES.bytes) {
        fetch_ahead(&ahead);
        _tile_loadd(4, x + at, stride);
        _tile_loadd(5, weights, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, weights + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, weights + 2 * TILE_BYTES, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, weights + 3 * TILE_BYTES, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums, sums_stride);
    _tile_stored(1, sums + TILE, sums_stride);
    _tile_stored(2, sums + 2 * TILE, sums_stride);
    _tile_stored(3, sums + 3 * TILE, sums_stride);
}

/* Pack weight (outputs, inputs) into (chunks, inputs / 32, 4 blocks, 16 pairs, 16 outputs, 2). */
static void pack_tiles(const number *weight, int64_t outputs, int64_t inputs, number *packed) {
    const int64_t chunks = (outputs + TILES.outputs - 1) / TILES.outputs, depths = inputs / DEPTH;
#pragma omp parallel for
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t depth = 0; depth < depths; depth++)
            for (int block = 0; block < BLOCKS; block++) {
                uint32_t *tile = (uint32_t *)packed +
                                 ((chunk * depths + depth) * BLOCKS + block) * (TILE_BYTES / 4);
                for (int o = 0; o < TILE; o++) {
                    const int64_t output = chunk * TILES.outputs + block * TILE + o;
                    uint32_t pairs[TILE] = {0};
                    if (output < outputs)
                        memcpy(pairs, weight + output * inputs + depth * DEPTH, sizeof pairs);
                    for (int pair = 0; pair < TILE; pair++) tile[pair * TILE + o] = pairs[pair];
                }
            }
}

/* Request the tile registers from Linux; return 0 if it refuses. */
int decode_enable(void) {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}
#endif

/* Decode steps on a CPU with AMX: linear layers for a few rows, and attention of new tokens.
 *
 * Compiled at first use by compiling.py; amx.py documents the arguments. Both functions are limited
 * by how fast the weights, or the keys and values, can be read from memory: everything is read
 * once, in order. Inputs and outputs are bf16; sums are fp32.
 */
#include <math.h>
#include <omp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

enum { TILE = 16, DEPTH = 32, BLOCKS = 4, CHUNK = TILE * BLOCKS };  /* outputs, inputs per tile */
enum { TILE_BYTES = 1024, DEPTH_BYTES = BLOCKS * TILE_BYTES };
enum { AHEAD = 8192 };  /* prefetch distance of the weights, in bytes */
enum { NO_ACTIVATION, RELU, GELU, GELU_TANH, SILU };
enum { ALONE, PLUS, TIMES };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

/* Request the tile registers from Linux; return 0 if it refuses. */
int amx_enable(void) {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}

/* Pack weight (outputs, inputs) into (chunks, inputs / 32, 4 blocks, 16 pairs, 16 outputs, 2). */
void amx_pack(const bf16 *weight, int64_t outputs, int64_t inputs, bf16 *packed) {
    const int64_t chunks = (outputs + CHUNK - 1) / CHUNK, depths = inputs / DEPTH;
#pragma omp parallel for
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t depth = 0; depth < depths; depth++)
            for (int block = 0; block < BLOCKS; block++) {
                uint32_t *tile = (uint32_t *)packed +
                                 ((chunk * depths + depth) * BLOCKS + block) * (TILE_BYTES / 4);
                for (int o = 0; o < TILE; o++) {
                    const int64_t output = chunk * CHUNK + block * TILE + o;
                    uint32_t pairs[TILE] = {0};
                    if (output < outputs)
                        memcpy(pairs, weight + output * inputs + depth * DEPTH, sizeof pairs);
                    for (int pair = 0; pair < TILE; pair++) tile[pair * TILE + o] = pairs[pair];
                }
            }
}

static inline __m512 sigmoid512(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exp512(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* Return erf by formula 7.1.26 of Abramowitz and Stegun, absolute error 1.5e-7. */
static inline __m512 erf512(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x);
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f), one));
    __m512 p = _mm512_set1_ps(1.061405429f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    const __m512 tail = exp512(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), size), size));
    const __m512 value = _mm512_fnmadd_ps(_mm512_mul_ps(p, t), tail, one);
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_sub_ps(value, negative, _mm512_setzero_ps(), value);
}

static inline __m512 activated(__m512 x, int activation) {
    switch (activation) {
    case RELU: return _mm512_max_ps(x, _mm512_setzero_ps());
    case SILU: return _mm512_mul_ps(x, sigmoid512(x));
    case GELU: {
        const __m512 half = _mm512_set1_ps(0.5f);
        const __m512 tail = erf512(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678f)));
        return _mm512_mul_ps(x, _mm512_fmadd_ps(half, tail, half));
    }
    case GELU_TANH: { /* x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)) */
        const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
        return _mm512_mul_ps(x, sigmoid512(_mm512_mul_ps(inner, _mm512_set1_ps(1.59576912f))));
    }
    default: return x;
    }
}

typedef struct {
    const bf16 *x, *packed, *bias, *other;
    int64_t rows, inputs, outputs;
    int activation, combine;
    bf16 *y;
} Linear;

/* Add the bias, activate, combine with `other` and store one tile of the product. */
static void finish(const Linear *l, const float *sums, int64_t row, int64_t output) {
    const int64_t left = l->outputs - output;
    if (left <= 0) return;
    const __mmask16 mask = left >= TILE ? 0xffff : (1u << left) - 1;
    const __m512 bias = l->bias ? load_bf16(l->bias + output, mask) : _mm512_setzero_ps();
    for (int i = 0; i < TILE && row + i < l->rows; i++) {
        const int64_t at = (row + i) * l->outputs + output;
        __m512 x = activated(_mm512_add_ps(_mm512_loadu_ps(sums + i * TILE), bias), l->activation);
        if (l->combine == PLUS) x = _mm512_add_ps(x, load_bf16(l->other + at, mask));
        if (l->combine == TIMES) x = _mm512_mul_ps(x, load_bf16(l->other + at, mask));
        store_bf16(l->y + at, x, mask);
    }
}

/* The weights to prefetch at each depth: the bytes from `from` to `to` ahead of the weights in use,
 * for the next chunk, and, if `is_soon`, also the weights that are AHEAD bytes later. */
typedef struct { int64_t from, to; int is_soon; } Window;

static inline void fetch_ahead(const uint8_t *weights, Window ahead) {
    if (ahead.is_soon)
        for (int line = 0; line < DEPTH_BYTES; line += 64)
            _mm_prefetch((const char *)weights + AHEAD + line, _MM_HINT_T0);
    for (int64_t line = ahead.from; line < ahead.to; line += 64)
        _mm_prefetch((const char *)weights + line, _MM_HINT_T1);
}

/* Multiply a tile of rows by a chunk of 64 outputs. Tiles: 0-3 sums, 4 rows, 5-6 weights. */
static void product(const Linear *l, int64_t row, int64_t chunk, Window ahead) {
    const int64_t depths = l->inputs / DEPTH, stride = l->inputs * sizeof(bf16);
    const uint8_t *weights = (const uint8_t *)l->packed + chunk * depths * DEPTH_BYTES;
    const bf16 *x = l->x + row * l->inputs;
    float sums[BLOCKS][TILE * TILE] __attribute__((aligned(64)));
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t depth = 0; depth < depths; depth++, weights += DEPTH_BYTES) {
        fetch_ahead(weights, ahead);
        _tile_loadd(4, x + depth * DEPTH, stride);
        _tile_loadd(5, weights, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, weights + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, weights + 2 * TILE_BYTES, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, weights + 3 * TILE_BYTES, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
    for (int block = 0; block < BLOCKS; block++)
        finish(l, sums[block], row, chunk * CHUNK + block * TILE);
}

/* Return the tile configuration for `rows` rows, at most 16. */
static TileConfig tiles_for(int64_t rows) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 7; tile++)
        config.bytes[tile] = 64, config.rows[tile] = tile < 5 ? rows : TILE;
    return config;
}

/* Compute y = combine(activation(x W^T + bias), other).
 *
 * A thread multiplies all rows by one chunk of weights and meanwhile prefetches the next chunk, in
 * equal shares, one per tile of rows. If there is only one tile, and at the thread's first chunk,
 * it prefetches a little ahead of the weights that it reads.
 */
void amx_linear(const Linear *l) {
    const int64_t chunks = (l->outputs + CHUNK - 1) / CHUNK, tiles = (l->rows + TILE - 1) / TILE;
    const int64_t chunk_bytes = l->inputs / DEPTH * DEPTH_BYTES;
    const TileConfig whole = tiles_for(TILE), rest = tiles_for(l->rows - (tiles - 1) * TILE);
#pragma omp parallel
    {
        TileConfig before; /* oneDNN keeps its own configuration in the same registers. */
        _tile_storeconfig(&before);
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t end = chunks * (thread + 1) / threads, begin = chunks * thread / threads;
        for (int64_t chunk = begin; chunk < end; chunk++)
            for (int64_t tile = 0; tile < tiles; tile++) {
                Window ahead = {chunk_bytes + DEPTH_BYTES / 64 * tile / tiles * 64,
                                chunk_bytes + DEPTH_BYTES / 64 * (tile + 1) / tiles * 64,
                                tiles == 1 || (tile == 0 && chunk == begin)};
                if (tiles == 1 || chunk + 1 == end) ahead.to = 0;
                const int is_last = tile == tiles - 1;
                if (tile == 0 || is_last) _tile_loadconfig(is_last ? &rest : &whole);
                product(l, tile * TILE, chunk, ahead);
            }
        _tile_loadconfig(&before);
    }
}

typedef struct {
    const bf16 *query, *key, *value;  /* (tokens, heads, size) with the strides below */
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    bf16 *keys, *values;              /* (rows, kv_heads, capacity, size) */
    const int64_t *rows, *positions;  /* of each token */
    int64_t tokens, heads, kv_heads, capacity, size;
    float scale;
    bf16 *mixed;                      /* (tokens, heads, size) */
} Attention;

static float dot(const bf16 *a, const bf16 *b, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 32) {
        const __mmask32 mask = size - i >= 32 ? 0xffffffffu : (1u << (size - i)) - 1;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(mask, a + i),
                               (__m512bh)_mm512_maskz_loadu_epi16(mask, b + i));
    }
    return _mm512_reduce_add_ps(sum);
}

static void fetch(const bf16 *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch((const char *)from + at, _MM_HINT_T0);
}

/* Replace the scores of `seen` keys by their softmax; all are shifted by the largest score. */
static void softmax(float *scores, int64_t seen) {
    __m512 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t i = seen; i % 16; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < seen; i += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + i));
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t i = 0; i < seen; i += 16) {
        const __mmask16 mask = seen - i >= 16 ? 0xffff : (1u << (seen - i)) - 1;
        const __m512 x = exp512(_mm512_sub_ps(_mm512_loadu_ps(scores + i), largest));
        _mm512_storeu_ps(scores + i, _mm512_maskz_mov_ps(mask, x));
        total = _mm512_mask_add_ps(total, mask, total, x);
    }
    const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
    for (int64_t i = 0; i < seen; i += 16)
        _mm512_storeu_ps(scores + i, _mm512_mul_ps(_mm512_loadu_ps(scores + i), share));
}

/* Store a token's key and value in the KV cache. */
static void remember(const Attention *a, int64_t token, int64_t kv) {
    const int64_t head = a->rows[token] * a->kv_heads + kv, bytes = a->size * sizeof(bf16);
    const int64_t at = (head * a->capacity + a->positions[token]) * a->size;
    memcpy(a->keys + at, a->key + token * a->key_token + kv * a->key_head, bytes);
    memcpy(a->values + at, a->value + token * a->value_token + kv * a->value_head, bytes);
}

/* Compute attention of the query heads that share a key/value head, over the row up to `token`. */
static void read_row(const Attention *a, int64_t token, int64_t kv) {
    const int64_t seen = a->positions[token] + 1, group = a->heads / a->kv_heads;
    const int64_t first = (a->rows[token] * a->kv_heads + kv) * a->capacity * a->size;
    const bf16 *keys = a->keys + first, *values = a->values + first;
    float scores[seen + 16];
    for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
        const bf16 *query = a->query + token * a->query_token + head * a->query_head;
        for (int64_t i = 0; i < seen; i++) {
            fetch(values + i * a->size, a->size * sizeof(bf16));
            scores[i] = a->scale * dot(query, keys + i * a->size, a->size);
        }
        softmax(scores, seen);
        for (int64_t d = 0; d < a->size; d += 64) {
            const int64_t lanes = a->size - d;
            __m512 sums[4];
            __mmask16 masks[4];
            for (int j = 0; j < 4; j++) {
                sums[j] = _mm512_setzero_ps();
                masks[j] = lanes >= 16 * (j + 1) ? 0xffff : 0;
            }
            for (int64_t i = 0; i < seen; i++) {
                const __m512 share = _mm512_set1_ps(scores[i]);
                for (int j = 0; j < 4; j++)
                    sums[j] = _mm512_fmadd_ps(
                        share, load_bf16(values + i * a->size + d + 16 * j, masks[j]), sums[j]);
            }
            bf16 *mixed = a->mixed + (token * a->heads + head) * a->size + d;
            for (int j = 0; j < 4; j++) store_bf16(mixed + 16 * j, sums[j], masks[j]);
        }
    }
}

/* Compute causal attention. All keys and values are stored first: a prompt's tokens share a row. */
void amx_attend(const Attention *a) {
#pragma omp parallel
    {
#pragma omp for collapse(2)
        for (int64_t token = 0; token < a->tokens; token++)
            for (int64_t kv = 0; kv < a->kv_heads; kv++) remember(a, token, kv);
#pragma omp for collapse(2) schedule(dynamic, 4) /* work varies with the position */
        for (int64_t token = 0; token < a->tokens; token++)
            for (int64_t kv = 0; kv < a->kv_heads; kv++) read_row(a, token, kv);
    }
}

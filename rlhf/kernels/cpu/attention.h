/* Norms and rotations of queries and keys, and attention of new tokens over a KV cache. */

/* The queries, keys or values of all tokens: `heads` vectors per token within a buffer. */
typedef struct { int64_t buffer, first, token, head, heads; } Heads;

static inline number *head_at(const Heads *h, const Pass *pass, int64_t token, int64_t head) {
    return pass->buffers[h->buffer] + h->first + token * h->token + head * h->head;
}

typedef struct {
    Heads heads;
    const Norm *norm;        /* of each head, or null */
    const float *cos, *sin;  /* (positions, rotated), or null */
    int64_t rotated;         /* count of a head's first numbers that are rotated */
} Rotary;

/* Normalise each head, then rotate it by its position: x * cos + (x with halves swapped) * sin. */
static void rotate(const Rotary *r, const Pass *pass) {
    const int64_t half = r->rotated / 2;
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t token = 0; token < pass->tokens; token++)
        for (int64_t head = 0; head < r->heads.heads; head++) {
            number *x = head_at(&r->heads, pass, token, head);
            if (r->norm) normalise(r->norm, x, x);
            const float *cos = r->cos + pass->positions[token] * r->rotated;
            const float *sin = r->sin + pass->positions[token] * r->rotated;
            for (int64_t i = 0; r->cos && i < half; i += LANES) {
                const int64_t left = half - i;
                const vec low = load_numbers(x + i, left), high = load_numbers(x + half + i, left);
                const vec low_cos = load(cos + i), high_cos = load(cos + half + i);
                const vec low_sin = load(sin + i), high_sin = load(sin + half + i);
                store_numbers(x + i, low * low_cos + high * low_sin, left);
                store_numbers(x + half + i, high * high_cos + low * high_sin, left);
            }
        }
}

typedef struct {
    Heads query, key, value;
    number *keys, *values;   /* (rows, kv_heads, capacity, size) */
    int64_t capacity, size;
    float scale;
    int64_t mixed;           /* buffer of the results: (tokens, heads, size) */
} Attention;

/* Return the index in the KV cache of the first number of a token's row, for one key/value head. */
static inline int64_t row_of(const Attention *a, const Pass *pass, int64_t token, int64_t kv) {
    return (pass->rows[token] * a->key.heads + kv) * a->capacity * a->size;
}

/* Store all keys and values before any token attends, since a prompt's tokens share a row. */
static void store_kv(const Attention *a, const Pass *pass) {
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t token = 0; token < pass->tokens; token++)
        for (int64_t kv = 0; kv < a->key.heads; kv++) {
            const int64_t at = row_of(a, pass, token, kv) + pass->positions[token] * a->size;
            const int64_t bytes = a->size * sizeof(number);
            memcpy(a->keys + at, head_at(&a->key, pass, token, kv), bytes);
            memcpy(a->values + at, head_at(&a->value, pass, token, kv), bytes);
        }
}

static void prefetch(const number *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch((const char *)from + at, _MM_HINT_T0);
}

enum { KEYS = 4 }; /* keys that are multiplied together */

/* Write the products of a query with KEYS keys. */
ALWAYS_INLINE void dot(const number *query, const number *const *keys, int64_t size, float *to) {
    vec sums[KEYS] = {all(0), all(0), all(0), all(0)};
    for (int64_t i = 0; i < size; i += WIDTH) {
        const numbers part = load_wide(query + i, size - i);
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++)
            sums[j] = plus_products(sums[j], part, load_wide(keys[j] + i, size - i));
    }
    sum_of_4(sums, to);
}

/* Compute attention of one query head over the token's row, up to the token.
 *
 * Values are prefetched while keys are read, and the next head's keys while values are read.
 */
ALWAYS_INLINE void attend_head(const Attention *a, const Pass *pass, int64_t token, int64_t head,
                               const int64_t size) {
    enum { TOGETHER = 4 }; /* vectors of a value that are summed at once */
    const int64_t seen = pass->positions[token] + 1;
    const int64_t at = row_of(a, pass, token, head / (a->query.heads / a->key.heads));
    const number *keys = a->keys + at, *values = a->values + at;
    const number *next = keys + a->capacity * size;
    const number *query = head_at(&a->query, pass, token, head);
    number *mixed = pass->buffers[a->mixed] + (token * a->query.heads + head) * size;
    float scores[seen + LANES];
    for (int64_t i = 0; i < seen; i += KEYS) {
        const number *four[KEYS];
        for (int j = 0; j < KEYS; j++) four[j] = keys + (i + j < seen ? i + j : i) * size;
        prefetch(values + i * size, KEYS * size * sizeof(number));
        dot(query, four, size, scores + i);
    }
    softmax(scores, seen, a->scale);
    for (int64_t d = 0; d < size; d += TOGETHER * LANES) {
        vec sums[TOGETHER] = {all(0), all(0), all(0), all(0)};
        for (int64_t i = 0; i < seen; i++) {
            const vec weight = all(scores[i]);
            const number *value = values + i * size + d;
            if (d == 0) prefetch(next + i * size, size * sizeof(number));
#pragma GCC unroll 4
            for (int j = 0; j < TOGETHER; j++) {
                const int64_t left = size - d - j * LANES;
                if (left > 0) sums[j] = weight * load_numbers(value + j * LANES, left) + sums[j];
            }
        }
        for (int j = 0; j < TOGETHER && d + j * LANES < size; j++)
            store_numbers(mixed + d + j * LANES, sums[j], size - d - j * LANES);
    }
}

/* Compute causal attention: each token attends to its own row, up to its position. */
static void attend(const Attention *a, const Pass *pass) {
    const int64_t all_heads = pass->tokens * a->query.heads;
    const int64_t at_once = all_heads / (8 * omp_get_num_threads()) + 1; /* few: lengths differ */
#pragma omp for schedule(dynamic, at_once) nowait
    for (int64_t i = 0; i < all_heads; i++) {
        const int64_t token = i / a->query.heads, head = i % a->query.heads;
        switch (a->size) { /* Code for the most frequent sizes is compiled with constants. */
        case 64: attend_head(a, pass, token, head, 64); break;
        case 128: attend_head(a, pass, token, head, 128); break;
        default: attend_head(a, pass, token, head, a->size);
        }
    }
}

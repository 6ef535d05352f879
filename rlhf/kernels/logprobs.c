/* Log-probabilities and entropies of tokens, and their gradient, from bf16 logits; fp32 between.
 *
 * Compiled at first use by compiling.py; logprobs.py says what the arguments are.
 */
#include <math.h>

#include "vectors.h"

enum { LANES = 16 };

static inline __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : (1u << left) - 1; }

/* The logarithm of the sum of exponentials of a row, and the mean of its logits under softmax. */
static void reduce(const bf16 *logits, int64_t size, float scale, float *log_sum, float *mean) {
    const __m512 factor = _mm512_set1_ps(scale), none = _mm512_set1_ps(-INFINITY);
    __m512 top = none, total = _mm512_setzero_ps(), weighted = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        top = _mm512_mask_max_ps(top, mask, top, load_bf16(logits + i, mask));
    }
    const float largest = _mm512_reduce_max_ps(top) * scale;
    const __m512 shift = _mm512_set1_ps(largest);
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        const __m512 x = _mm512_fmsub_ps(load_bf16(logits + i, mask), factor, shift);
        const __m512 p = _mm512_maskz_mov_ps(mask, exp512(x));
        total = _mm512_add_ps(total, p);
        weighted = _mm512_fmadd_ps(p, x, weighted);
    }
    const float sum = _mm512_reduce_add_ps(total);
    *log_sum = largest + logf(sum);
    *mean = largest + _mm512_reduce_add_ps(weighted) / sum;
}

/* rows of `size` logits times `scale` -> log-probability of ids and entropy, a row each. */
void logprobs_read(const bf16 *logits, const int64_t *ids, int64_t rows, int64_t size, float scale,
                   float *logprobs, float *entropies) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *own = logits + row * size;
        float log_sum, mean;
        reduce(own, size, scale, &log_sum, &mean);
        const float drawn = _mm512_cvtss_f32(load_bf16(own + ids[row], 1));
        logprobs[row] = drawn * scale - log_sum;
        entropies[row] = log_sum - mean;
    }
}

/* Logits become the slope of sum(slopes * logprobs) by themselves: slope * scale * (1[id] - p). */
void logprobs_slope(bf16 *logits, const int64_t *ids, int64_t rows, int64_t size, float scale,
                    const float *slopes) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        bf16 *own = logits + row * size;
        float log_sum, mean;
        reduce(own, size, scale, &log_sum, &mean);
        const float slope = slopes[row] * scale;
        const float drawn = _mm512_cvtss_f32(load_bf16(own + ids[row], 1)) * scale - log_sum;
        const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(log_sum);
        for (int64_t i = 0; i < size; i += LANES) {
            const __mmask16 mask = lanes(size - i);
            const __m512 x = _mm512_fmsub_ps(load_bf16(own + i, mask), factor, shift);
            store_bf16(own + i, _mm512_mul_ps(_mm512_set1_ps(-slope), exp512(x)), mask);
        }
        store_bf16(own + ids[row], _mm512_set1_ps(slope * (1.0f - expf(drawn))), 1);
    }
}

/* Log-probabilities and entropies of tokens, their gradient, and sampling, from bf16 logits.
 *
 * Compiled at first use by compiling.py; logprobs.py documents the arguments. Sums are fp32.
 */
#include <math.h>

#include "vectors.h"

enum { LANES = 16 };

static inline __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : (1u << left) - 1; }

static float largest_of(const bf16 *logits, int64_t size) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        top = _mm512_mask_max_ps(top, mask, top, load_bf16(logits + i, mask));
    }
    return _mm512_reduce_max_ps(top);
}

/* Compute the log-sum-exp of a row of scaled logits, and the mean of these logits under softmax.
 *
 * A logit of minus infinity adds 0 to both: x log x is 0 at 0. max_ps returns its second argument
 * if either is NaN, so the clamp to `least` keeps NaN.
 */
static void reduce(const bf16 *logits, int64_t size, float scale, float *log_sum, float *mean) {
    const __m512 factor = _mm512_set1_ps(scale);
    __m512 total = _mm512_setzero_ps(), weighted = _mm512_setzero_ps();
    const float largest = largest_of(logits, size) * scale;
    const __m512 shift = _mm512_set1_ps(largest), least = _mm512_set1_ps(-100.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        const __m512 logit = load_bf16(logits + i, mask);
        const __m512 x = _mm512_max_ps(least, _mm512_fmsub_ps(logit, factor, shift));
        const __m512 p = _mm512_maskz_mov_ps(mask, exp512(x));
        total = _mm512_add_ps(total, p);
        weighted = _mm512_fmadd_ps(p, x, weighted);
    }
    const float sum = _mm512_reduce_add_ps(total);
    *log_sum = largest + logf(sum);
    *mean = largest + _mm512_reduce_add_ps(weighted) / sum;
}

/* Compute the log-probability of each row's id and the row's entropy from logits times `scale`. */
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

/* Overwrite logits with d sum(slopes * logprobs) / d logits = slope * scale * (1[id] - p). */
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

/* Draw the tokens at which each row's cumulative softmax passes its draw; compute their log-probs.
 *
 * A barred row cannot draw `end`, but `end` still counts in the log-probability of other tokens.
 */
void logprobs_draw(bf16 *logits, const double *draws, const uint8_t *barred, int64_t rows,
                   int64_t size, float scale, int64_t end, int64_t *tokens, float *logprobs) {
    enum { BLOCK = 1024, LEAST = 0xff80 }; /* LEAST: minus infinity in bf16 */
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        bf16 *own = logits + row * size;
        const int is_barred = barred && barred[row];
        const float end_logit = is_barred ? _mm512_cvtss_f32(load_bf16(own + end, 1)) * scale : 0;
        const bf16 end_before = is_barred ? own[end] : 0;
        if (is_barred) own[end] = LEAST;
        const float largest = largest_of(own, size) * scale;
        const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(largest);
        const int64_t blocks = (size + BLOCK - 1) / BLOCK;
        double ends[blocks], total = 0;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t last = size < (block + 1) * BLOCK ? size : (block + 1) * BLOCK;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = block * BLOCK; i < last; i += LANES) {
                const __mmask16 mask = lanes(last - i);
                const __m512 x = _mm512_fmsub_ps(load_bf16(own + i, mask), factor, shift);
                sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(mask, exp512(x)));
            }
            ends[block] = total += _mm512_reduce_add_ps(sum);
        }
        const double target = draws[row] * total;
        int64_t block = 0;
        while (block < blocks - 1 && ends[block] <= target) block++;
        int64_t token = block * BLOCK; /* stays if a logit is NaN: still a valid token */
        double passed = block ? ends[block - 1] : 0;
        const int64_t last = size < (block + 1) * BLOCK ? size : (block + 1) * BLOCK;
        for (int64_t i = block * BLOCK; i < last; i++) {
            const float x = _mm512_cvtss_f32(load_bf16(own + i, 1)) * scale - largest;
            const float p = x < -87.33f ? 0 : expf(x);
            if (p > 0) token = i; /* rounding may leave the target slightly past the end */
            if ((passed += p) > target && p > 0) break;
        }
        const float drawn = _mm512_cvtss_f32(load_bf16(own + token, 1)) * scale;
        float log_sum = largest + logf((float)total);
        if (is_barred) {
            const float high = fmaxf(log_sum, end_logit), low = fminf(log_sum, end_logit);
            log_sum = high + log1pf(expf(low - high));
            own[end] = end_before;
        }
        tokens[row] = token;
        logprobs[row] = drawn - log_sum;
    }
}

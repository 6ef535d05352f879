/* Log-probabilities and entropies from logits, the gradient of log-probabilities, and sampling.
 *
 * Compiled at first use by compiling.py; logprobs.py documents the arguments. Sums are fp32.
 */
#include <float.h>

#include "vectors.h"

static float largest_of(const number *logits, int64_t size) {
    const int64_t whole = size / LANES * LANES;
    vec top = all(-INFINITY);
    for (int64_t i = 0; i < whole; i += LANES) top = larger(top, load_numbers(logits + i, LANES));
    float largest = max_of(top);
    for (int64_t i = whole; i < size; i++) largest = fmaxf(largest, number_at(logits + i));
    return largest;
}

/* Compute the log-sum-exp and the entropy of scale * logits for each row of a block of logits.
 *
 * An id is counted from the block's first logit; if it is in the block, its logit is written to
 * `picked`. A logit of minus infinity adds 0 to both sums: x log x is 0 at 0. `larger` returns its
 * second argument if either is NaN, so the clamp to `least` keeps NaN.
 */
void logprobs_read(const number *logits, const int64_t *ids, int64_t rows, int64_t size, float scale,
                   float *log_sums, float *entropies, float *picked) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const number *row_logits = logits + row * size;
        const float largest = fmaxf(largest_of(row_logits, size) * scale, -FLT_MAX);
        const vec factor = all(scale), shift = all(largest), least = all(LEAST_EXPONENT);
        vec total = all(0), weighted = all(0);
        for (int64_t i = 0; i < size; i += LANES) {
            const vec x = larger(least, load_numbers(row_logits + i, size - i) * factor - shift);
            const vec p = only(exp_of(x), size - i);
            total += p;
            weighted = p * x + weighted;
        }
        const float sum = sum_of(total), mean = sum_of(weighted) / sum;
        const float log_of_sum = isnan(mean) ? mean : logf(sum); /* exp_of(NaN) is a number */
        log_sums[row] = largest + log_of_sum;
        entropies[row] = log_of_sum - mean;
        if (ids[row] >= 0 && ids[row] < size)
            picked[row] = number_at(row_logits + ids[row]) * scale;
    }
}

/* Overwrite a block of logits with d sum(slopes * logprobs) / d logits.
 *
 * This is slope * scale * (1[id] - p). `log_sums` are the log-sum-exps of the rows of all blocks
 * together; ids are counted as in logprobs_read.
 */
void logprobs_slope(number *logits, const int64_t *ids, int64_t rows, int64_t size, float scale,
                    const float *log_sums, const float *slopes) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        number *row_logits = logits + row * size;
        const int is_here = ids[row] >= 0 && ids[row] < size;
        const float drawn = is_here ? number_at(row_logits + ids[row]) * scale - log_sums[row] : 0;
        const float slope = slopes[row] * scale;
        const vec factor = all(scale), shift = all(log_sums[row]);
        for (int64_t i = 0; i < size; i += LANES) {
            const vec x = load_numbers(row_logits + i, size - i) * factor - shift;
            store_numbers(row_logits + i, all(-slope) * exp_of(x), size - i);
        }
        if (is_here) store_numbers(row_logits + ids[row], all(slope * (1.0f - expf(drawn))), 1);
    }
}

/* Draw each row's token, at which the cumulative softmax passes the draw; compute its log-prob.
 *
 * A barred row cannot draw `end`, but `end` still counts in the log-probability of other tokens.
 */
void logprobs_draw(number *logits, const double *draws, const uint8_t *barred, int64_t rows,
                   int64_t size, float scale, int64_t end, int64_t *tokens, float *logprobs) {
    enum { BLOCK = 1024 }; /* logits per partial sum */
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        number *row_logits = logits + row * size;
        const int is_barred = barred && barred[row];
        const float end_logit = is_barred ? number_at(row_logits + end) * scale : 0;
        const number end_before = is_barred ? row_logits[end] : 0;
        if (is_barred) store_numbers(row_logits + end, all(-INFINITY), 1);
        const float largest = largest_of(row_logits, size) * scale;
        const vec factor = all(scale), shift = all(largest);
        const int64_t blocks = (size + BLOCK - 1) / BLOCK;
        double ends[blocks], total = 0;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t last = size < (block + 1) * BLOCK ? size : (block + 1) * BLOCK;
            vec sum = all(0);
            for (int64_t i = block * BLOCK; i < last; i += LANES)
                sum += only(exp_of(load_numbers(row_logits + i, last - i) * factor - shift),
                            last - i);
            ends[block] = total += sum_of(sum);
        }
        const double target = draws[row] * total;
        int64_t block = 0;
        while (block < blocks - 1 && ends[block] <= target) block++;
        int64_t token = block * BLOCK; /* a valid token, which is returned if a logit is NaN */
        double passed = block ? ends[block - 1] : 0;
        const int64_t last = size < (block + 1) * BLOCK ? size : (block + 1) * BLOCK;
        for (int64_t i = block * BLOCK; i < last; i++) {
            const float x = number_at(row_logits + i) * scale - largest;
            const float p = x < LEAST_EXPONENT ? 0 : expf(x);
            if (p > 0) token = i; /* rounding may leave the target slightly past the end */
            if ((passed += p) > target && p > 0) break;
        }
        const float drawn = number_at(row_logits + token) * scale;
        float log_sum = largest + logf((float)total);
        if (is_barred) {
            const float high = fmaxf(log_sum, end_logit), low = fminf(log_sum, end_logit);
            log_sum = high + log1pf(expf(low - high));
            row_logits[end] = end_before;
        }
        tokens[row] = token;
        logprobs[row] = drawn - log_sum;
    }
}

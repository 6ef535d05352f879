/* Softmax of the rows of attention scores, and its gradient; both overwrite their argument.
 *
 * Compiled at first use by compiling.py; logprobs.py documents the arguments. Sums are fp32.
 */
#include "vectors.h"
#include "softmax.h"

/* Replace each row of scores by its softmax. */
void softmax_rows(number *scores, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        number *row_scores = scores + row * size;
        float exact[size + LANES];
        for (int64_t i = 0; i < size; i += LANES)
            store(exact + i, load_numbers(row_scores + i, size - i));
        softmax(exact, size, 1.0f);
        for (int64_t i = 0; i < size; i += LANES)
            store_numbers(row_scores + i, load(exact + i), size - i);
    }
}

/* Replace `slopes`, the gradient of the softmax `shares`, by scale * the scores' gradient. */
void softmax_slopes(number *slopes, const number *shares, int64_t rows, int64_t size, float scale) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        number *slope = slopes + row * size;
        const number *share = shares + row * size;
        vec total = all(0);
        for (int64_t i = 0; i < size; i += LANES)
            total = load_numbers(slope + i, size - i) * load_numbers(share + i, size - i) + total;
        const vec mean = all(sum_of(total)), factor = all(scale);
        for (int64_t i = 0; i < size; i += LANES) {
            const vec apart = load_numbers(slope + i, size - i) - mean;
            store_numbers(slope + i, load_numbers(share + i, size - i) * factor * apart, size - i);
        }
    }
}

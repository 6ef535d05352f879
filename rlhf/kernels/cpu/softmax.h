/* Softmax of a row of fp32 scores, for attention over a KV cache and for whole sequences. */

/* Replace `size` scores by softmax(scale * scores), shifted by the largest score.
 *
 * The row must be padded: the last vector's lanes beyond the row are overwritten.
 */
static void softmax(float *scores, int64_t size, float scale) {
    vec top = all(-INFINITY), total = all(0);
    for (int64_t i = size; i % LANES; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < size; i += LANES) top = larger(top, load(scores + i));
    const vec largest = all(max_of(top));
    for (int64_t i = 0; i < size; i += LANES) {
        const vec x = only(exp_of((load(scores + i) - largest) * all(scale)), size - i);
        store(scores + i, x);
        total += x;
    }
    const vec share = all(1.0f / sum_of(total));
    for (int64_t i = 0; i < size; i += LANES) store(scores + i, load(scores + i) * share);
}

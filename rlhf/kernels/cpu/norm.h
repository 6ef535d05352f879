/* LayerNorm and RMS norm of the rows of a buffer. */

typedef struct {
    const number *weight, *bias;
    int64_t x, y, size, is_rms;
    float epsilon;
} Norm;

static void normalise(const Norm *n, const number *x, number *y) {
    float mean = 0;
    vec squares = all(0);
    if (!n->is_rms) {
        vec total = all(0);
        for (int64_t i = 0; i < n->size; i += LANES) total += load_numbers(x + i, n->size - i);
        mean = sum_of(total) / n->size;
    }
    for (int64_t i = 0; i < n->size; i += LANES) {
        const vec off = only(load_numbers(x + i, n->size - i) - all(mean), n->size - i);
        squares = off * off + squares;
    }
    const vec factor = all(1 / sqrtf(sum_of(squares) / n->size + n->epsilon));
    for (int64_t i = 0; i < n->size; i += LANES) {
        const int64_t left = n->size - i;
        vec normed = (load_numbers(x + i, left) - all(mean)) * factor;
        if (n->weight) normed *= load_numbers(n->weight + i, left);
        if (n->bias) normed += load_numbers(n->bias + i, left);
        store_numbers(y + i, normed, left);
    }
}

static void norm(const Norm *n, const Pass *pass) {
#pragma omp for schedule(static) nowait
    for (int64_t token = 0; token < pass->tokens; token++)
        normalise(n, pass->buffers[n->x] + token * n->size, pass->buffers[n->y] + token * n->size);
}

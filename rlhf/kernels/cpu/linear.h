/* Linear layers on packed weights: product, bias, activation, and combination with a buffer. */

enum { NO_ACTIVATION, RELU, GELU, GELU_TANH, SILU };
enum { ALONE, PLUS, TIMES };

typedef struct Linear {
    const number *packed, *bias;
    const struct Linear *next; /* the program's next linear layer, or null */
    int64_t x, y, other;       /* buffers */
    int64_t inputs, outputs, activation, combine;
    int64_t keeps_fp32; /* true if the buffer y holds fp32 numbers */
} Linear;

static inline vec activate(vec x, int64_t activation) {
    switch (activation) {
    case RELU: return larger(x, all(0));
    case SILU: return x * sigmoid_of(x);
    case GELU: return x * (all(0.5f) * erf_of(x * all(0.70710678f)) + all(0.5f));
    case GELU_TANH: /* x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)) */
        return x * sigmoid_of((x * x * x * all(0.044715f) + x) * all(1.59576912f));
    default: return x;
    }
}

/* Add the bias to rows of sums (rows, width), activate, combine with `other` and store. */
static void finish(const Linear *l, const Pass *pass, const float *sums, int64_t width,
                   int64_t row, int64_t rows, int64_t output) {
    const int64_t end = l->outputs - output < width ? l->outputs - output : width;
    for (int64_t o = 0; o < end; o += LANES) {
        const vec bias = l->bias ? load_numbers(l->bias + output + o, end - o) : all(0);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = (row + i) * l->outputs + output + o;
            vec x = activate(load(sums + i * width + o) + bias, l->activation);
            if (l->combine == PLUS) x += load_numbers(pass->buffers[l->other] + at, end - o);
            if (l->combine == TIMES) x *= load_numbers(pass->buffers[l->other] + at, end - o);
            if (l->keeps_fp32) store_floats((float *)pass->buffers[l->y] + at, x, end - o);
            else store_numbers(pass->buffers[l->y] + at, x, end - o);
        }
    }
}

/* Return the shape of the products with a weight that has `inputs` inputs. */
static inline Shape shape_for(int64_t inputs) {
    (void)inputs; /* used only with AMX */
#if HALF && ISA >= AMX
    if (inputs % DEPTH == 0) return TILES;
#endif
    return VECTORS;
}

/* Return the count of numbers in the packed weight (outputs, inputs), padding included. */
int64_t decode_packed_size(int64_t outputs, int64_t inputs) {
    const int64_t width = shape_for(inputs).outputs;
    return (outputs + width - 1) / width * width * inputs;
}

/* Copy the weight (outputs, inputs) into the order in which products read it. */
void decode_pack(const number *weight, int64_t outputs, int64_t inputs, number *packed) {
#if HALF && ISA >= AMX
    if (inputs % DEPTH == 0) {
        pack_tiles(weight, outputs, inputs, packed);
        return;
    }
#endif
    pack_vectors(weight, outputs, inputs, packed);
}

/* The chunks of a layer's weights that a thread reads, of `bytes` bytes each. */
typedef struct { int64_t begin, end, bytes; } Chunks;

static Chunks own_chunks(const Linear *l) {
    const Shape shape = shape_for(l->inputs);
    const int64_t chunks = (l->outputs + shape.outputs - 1) / shape.outputs;
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    return (Chunks){chunks * thread / threads, chunks * (thread + 1) / threads,
                    l->inputs / shape.inputs * shape.bytes};
}

/* Return where the weights begin that this thread reads after a chunk, or null at the end. */
static const uint8_t *next_weights(const Linear *l, Chunks own, int64_t chunk) {
    if (chunk + 1 < own.end) return (const uint8_t *)l->packed + (chunk + 1) * own.bytes;
    if (!l->next) return NULL;
    const Chunks next = own_chunks(l->next);
    return (const uint8_t *)l->next->packed + next.begin * next.bytes;
}

/* Multiply rows (rows, inputs) by a chunk of weights; write sums (rows, outputs).
 *
 * All rows, in groups of equal size, are multiplied by one slab after another. Each group
 * prefetches its share of the next slab; `after` is the slab after the last one.
 */
static void multiply(Shape shape, const number *x, int64_t rows, int64_t inputs,
                     const uint8_t *slab, const uint8_t *after, float *sums) {
    const int64_t groups = (rows + shape.rows - 1) / shape.rows;
    const int64_t together = (rows + groups - 1) / groups;
    for (int64_t from = 0, to; from < inputs; from = to) {
        to = inputs - from < shape.slab ? inputs : from + shape.slab;
        const int64_t words = (to - from) / shape.inputs;
        const uint8_t *next = to < inputs ? slab + words * shape.bytes : after;
        const int64_t step = next ? (shape.bytes + groups - 1) / groups : 0;
        for (int64_t row = 0; row < rows; row += together) {
            const int64_t count = rows - row < together ? rows - row : together;
            const Ahead ahead = {next, next, step};
            float *to_sums = sums + row * shape.outputs;
#if HALF && ISA >= AMX
            if (inputs % DEPTH == 0) {
                if (row == 0 || count < together) set_tiles(count);
                multiply_tiles(x + row * inputs, inputs, slab, ahead, to_sums);
            } else
#endif
                multiply_vectors(x + row * inputs, count, inputs, from, to, slab, ahead, to_sums);
            if (next) next += words * step;
        }
        slab += words * shape.bytes;
    }
}

/* Compute y = combine(activation(x W^T + bias), other). Each thread reads its own chunks. */
static void linear(const Linear *l, const Pass *pass) {
    enum { BLOCK = 64 }; /* rows whose sums stay in the L1 cache */
    const Shape shape = shape_for(l->inputs);
    const Chunks own = own_chunks(l);
    float sums[BLOCK * shape.outputs] __attribute__((aligned(64)));
    for (int64_t chunk = own.begin; chunk < own.end; chunk++)
        for (int64_t row = 0; row < pass->tokens; row += BLOCK) {
            const int64_t left = pass->tokens - row, rows = left < BLOCK ? left : BLOCK;
            const uint8_t *weights = (const uint8_t *)l->packed + chunk * own.bytes;
            const uint8_t *after = left > BLOCK ? weights : next_weights(l, own, chunk);
            multiply(shape, pass->buffers[l->x] + row * l->inputs, rows, l->inputs, weights, after,
                     sums);
            finish(l, pass, sums, shape.outputs, row, rows, chunk * shape.outputs);
        }
}

/* A forward pass of a decoder on a CPU: a program of steps that all threads run together.
 *
 * Compiled at first use by compiling.py; decode.py documents the steps and their arguments. One
 * call runs a whole program in one parallel region; threads wait for each other after every step.
 * Sums are fp32; the KV cache and buffers hold `number`s, some buffers fp32 numbers.
 */
#include <omp.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#include "vectors.h"
#include "products.h"

/* The arguments of one run of a program. A buffer holds (tokens, width of the buffer). */
typedef struct {
    number *const *buffers;
    int64_t tokens;
    const int64_t *rows, *positions; /* of each token */
} Pass;

#include "linear.h"
#include "norm.h"
#include "softmax.h"
#include "attention.h"

enum { LINEAR, NORM, ROTATE, STORE_KV, ATTEND };

typedef struct { int64_t kind; const void *arguments; } Step;

void decode_run(const Step *steps, int64_t count, const Pass *pass) {
#pragma omp parallel
    {
#if HALF && ISA >= AMX
        TileConfig before; /* oneDNN keeps its own configuration in the same registers. */
        _tile_storeconfig(&before);
#endif
        for (int64_t i = 0; i < count; i++) {
            switch (steps[i].kind) {
            case LINEAR: linear(steps[i].arguments, pass); break;
            case NORM: norm(steps[i].arguments, pass); break;
            case ROTATE: rotate(steps[i].arguments, pass); break;
            case STORE_KV: store_kv(steps[i].arguments, pass); break;
            case ATTEND: attend(steps[i].arguments, pass); break;
            }
#pragma omp barrier
        }
#if HALF && ISA >= AMX
        _tile_loadconfig(&before);
#endif
    }
}

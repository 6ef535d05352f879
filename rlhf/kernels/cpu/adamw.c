/* One AdamW step, in a single pass, on fp32 weights stored as bf16 weights plus 16 low bits.
 *
 * Compiled at first use by compiling.py; torch_adamw.py documents the numbers. The fp32 weight has
 * the bits 65536 * high + low, with low from -32768 to 32767.
 */
#include <math.h>
#include <stdint.h>

typedef union { uint32_t bits; float value; } Float;

typedef struct {
    uint16_t *high;
    int16_t *low;
    void *first, *second;      /* moments: bf16 or fp32 */
    const uint16_t *gradient;  /* bf16 */
    int64_t size;
    int half_moments;
    float scale, lr, beta1, beta2, eps, decay, correction1, correction2;
} AdamW;

static inline float of_bf16(uint16_t half) { return (Float){.bits = (uint32_t)half << 16}.value; }

static inline uint16_t to_bf16(float value) { /* rounds to nearest, ties to even */
    const uint32_t bits = (Float){.value = value}.bits;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static inline __attribute__((always_inline)) void step(const AdamW *a, const int half) {
    uint16_t *const restrict high = a->high, *const restrict first16 = a->first,
                                            *const restrict second16 = a->second;
    int16_t *const restrict low = a->low;
    float *const restrict first32 = a->first, *const restrict second32 = a->second;
    const uint16_t *const restrict gradients = a->gradient;
    const float keep = 1.0f - a->lr * a->decay, rate = a->lr / a->correction1;
    const float root = 1.0f / sqrtf(a->correction2);
#pragma omp parallel for simd schedule(static) if (a->size > 65536)
    for (int64_t i = 0; i < a->size; i++) {
        const float gradient = of_bf16(gradients[i]) * a->scale;
        float m = half ? of_bf16(first16[i]) : first32[i];
        float v = half ? of_bf16(second16[i]) : second32[i];
        m += (gradient - m) * (1.0f - a->beta1);
        v = v * a->beta2 + gradient * gradient * (1.0f - a->beta2);
        Float weight = {.bits = ((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]};
        weight.value = weight.value * keep - rate * m / (sqrtf(v) * root + a->eps);
        low[i] = (int16_t)weight.bits;
        high[i] = (weight.bits + 0x8000) >> 16;
        if (half) first16[i] = to_bf16(m), second16[i] = to_bf16(v);
        else first32[i] = m, second32[i] = v;
    }
}

void adamw_step(const AdamW *a) {
    if (a->half_moments) step(a, 1);
    else step(a, 0);
}

/* Return the sum of the squares of bf16 numbers. */
double adamw_squares(const uint16_t *numbers, int64_t size) {
    enum { PART = 4096 }; /* numbers per fp32 partial sum */
    double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) if (size > 65536)
    for (int64_t start = 0; start < size; start += PART) {
        const int64_t end = start + PART < size ? start + PART : size;
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t i = start; i < end; i++) part += of_bf16(numbers[i]) * of_bf16(numbers[i]);
        total += part;
    }
    return total;
}

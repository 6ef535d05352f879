/* Vectors of fp32 numbers; rows of `number`s, bf16 or fp32, from which they are loaded.
 *
 * compiling.py chooses with compiler options: ISA, the level of instruction sets, and HALF, which
 * makes a number bf16. All differences between AVX2 and AVX-512 are in this file and products.h.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define AVX2 1
#define AVX512_BF16 2
#define AMX 3

#if HALF
typedef uint16_t number;
#else
typedef float number;
#endif

#if ISA >= AVX512_BF16

enum { LANES = 16 };
typedef __m512 vec;

static inline vec all(float x) { return _mm512_set1_ps(x); }
static inline vec load(const float *from) { return _mm512_loadu_ps(from); }
static inline void store(float *to, vec x) { _mm512_storeu_ps(to, x); }
static inline vec abs_of(vec x) { return _mm512_abs_ps(x); }
static inline float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
static inline float max_of(vec x) { return _mm512_reduce_max_ps(x); }

/* Write the sums of four vectors. */
static inline void sum_of_4(const vec *x, float *to) {
    const vec a = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
    const vec b = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    const vec four = _mm512_castpd_ps(low) + _mm512_castpd_ps(high);
    const __m256 half = _mm512_castps512_ps256(four) + _mm512_extractf32x8_ps(four, 1);
    _mm_storeu_ps(to, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
}

/* Return the larger number in each lane; if either number is NaN, the second number. */
static inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm512_min_ps(a, b); }

static inline __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : (1u << count) - 1; }

/* Return x with zeros from lane `count` on. */
static inline vec only(vec x, int64_t count) { return _mm512_maskz_mov_ps(first(count), x); }

/* Return y with zeros in the lanes in which x is less than `least`, and not NaN. */
static inline vec zero_below(vec y, vec x, vec least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y);
}

static inline vec with_sign_of(vec x, vec sign) {
    const __m512i bit = _mm512_set1_epi32(0x80000000);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        bit, _mm512_castps_si512(sign), _mm512_castps_si512(x), 0xca));
}

static inline vec rounded(vec x) { return _mm512_roundscale_ps(x, 0); }

/* Return x * 2^n, for whole n for which 2^n is a normal number. */
static inline vec scaled(vec x, vec n) { return _mm512_scalef_ps(x, n); }

/* Load the first `count` numbers, at most LANES; the other lanes are 0. */
static inline vec load_numbers(const number *from, int64_t count) {
#if HALF
    const __m256i half = _mm256_maskz_loadu_epi16(first(count), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#else
    return _mm512_maskz_loadu_ps(first(count), from);
#endif
}

/* Store the first `count` lanes, or all; AMD's CPUs take long for a store with a mask. */
static inline void store_numbers(number *to, vec x, int64_t count) {
#if HALF
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(x);
    if (count >= LANES) _mm256_storeu_si256((__m256i *)to, half);
    else _mm256_mask_storeu_epi16(to, first(count), half);
#else
    if (count >= LANES) store(to, x);
    else _mm512_mask_storeu_ps(to, first(count), x);
#endif
}

#else

enum { LANES = 8 };
typedef __m256 vec;

static inline vec all(float x) { return _mm256_set1_ps(x); }
static inline vec load(const float *from) { return _mm256_loadu_ps(from); }
static inline void store(float *to, vec x) { _mm256_storeu_ps(to, x); }
static inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm256_min_ps(a, b); }

static inline vec abs_of(vec x) { return _mm256_andnot_ps(all(-0.0f), x); }

static inline float sum_of(vec x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

static inline float max_of(vec x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

static inline void sum_of_4(const vec *x, float *to) {
    const vec four = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_storeu_ps(to, _mm256_castps256_ps128(four) + _mm256_extractf128_ps(four, 1));
}

static inline __m256i first(int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count < LANES ? count : LANES), lane);
}

static inline vec only(vec x, int64_t count) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(first(count)));
}

static inline vec zero_below(vec y, vec x, vec least) {
    return _mm256_and_ps(y, _mm256_cmp_ps(x, least, _CMP_NLT_UQ));
}

static inline vec with_sign_of(vec x, vec sign) {
    return _mm256_or_ps(_mm256_andnot_ps(all(-0.0f), x), _mm256_and_ps(all(-0.0f), sign));
}

static inline vec rounded(vec x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vec scaled(vec x, vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

static inline vec load_numbers(const number *from, int64_t count) {
#if HALF
    __m128i half = _mm_setzero_si128();
    memcpy(&half, from, count >= LANES ? sizeof half : count * sizeof(number));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#else
    return count >= LANES ? load(from) : _mm256_maskload_ps(from, first(count));
#endif
}

static inline void store_numbers(number *to, vec x, int64_t count) {
#if HALF /* Round to the nearest, ties to even; NaN keeps its upper half and becomes quiet. */
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const vec is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i upper = _mm256_srli_epi32(
        _mm256_blendv_epi8(up, quiet, _mm256_castps_si256(is_nan)), 16);
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(upper),
                                          _mm256_extracti128_si256(upper, 1));
    memcpy(to, &half, count >= LANES ? sizeof half : count * sizeof(number));
#else
    if (count >= LANES) store(to, x);
    else _mm256_maskstore_ps(to, first(count), x);
#endif
}

#endif

/* Store the first `count` lanes, or all, without rounding. */
static inline void store_floats(float *to, vec x, int64_t count) {
    float lanes[LANES];
    store(count < LANES ? lanes : to, x);
    if (count < LANES) memcpy(to, lanes, count * sizeof(float));
}

/* The numbers that one instruction multiplies with as many others, and adds to a vector of sums. */
#if HALF && ISA >= AVX512_BF16
enum { WIDTH = 2 * LANES };
typedef __m512bh numbers;
static inline numbers load_wide(const number *from, int64_t count) {
    const __mmask32 mask = count >= WIDTH ? 0xffffffffu : (1u << count) - 1;
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}
static inline vec plus_products(vec sum, numbers a, numbers b) { return _mm512_dpbf16_ps(sum, a, b); }
#else
enum { WIDTH = LANES };
typedef vec numbers;
static inline numbers load_wide(const number *from, int64_t count) {
    return load_numbers(from, count);
}
static inline vec plus_products(vec sum, numbers a, numbers b) { return a * b + sum; }
#endif

static inline float number_at(const number *from) {
#if HALF
    const uint32_t bits = (uint32_t)*from << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#else
    return *from;
#endif
}

#define LEAST_EXPONENT -87.33f /* exp of a smaller number is denormal */

/* Return exp as 2^n * polynomial, relative error about 1e-7: 0 below LEAST_EXPONENT, exp(88) above 88.
 *
 * The result is never a denormal number: on Intel's CPUs a product with one takes 100 times as long.
 */
static inline vec exp_of(vec exponent) {
    const vec least = all(LEAST_EXPONENT), x = larger(smaller(exponent, all(88.0f)), least);
    const vec n = rounded(x * all(1.44269504f));
    vec r = x - n * all(0.693145752f);
    r = r - n * all(1.42860677e-6f);
    vec p = all(1.0f / 720);
    p = p * r + all(1.0f / 120);
    p = p * r + all(1.0f / 24);
    p = p * r + all(1.0f / 6);
    p = p * r + all(0.5f);
    p = p * r + all(1.0f);
    p = p * r + all(1.0f);
    return zero_below(scaled(p, n), exponent, least);
}

static inline vec sigmoid_of(vec x) { return all(1.0f) / (all(1.0f) + exp_of(-x)); }

/* Return erf by formula 7.1.26 of Abramowitz and Stegun, absolute error 1.5e-7. */
static inline vec erf_of(vec x) {
    const vec size = abs_of(x), t = all(1.0f) / (size * all(0.3275911f) + all(1.0f));
    vec p = all(1.061405429f);
    p = p * t + all(-1.453152027f);
    p = p * t + all(1.421413741f);
    p = p * t + all(-0.284496736f);
    p = p * t + all(0.254829592f);
    return with_sign_of(all(1.0f) - p * t * exp_of(-size * size), x);
}

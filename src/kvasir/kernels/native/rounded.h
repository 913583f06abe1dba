/* ------------------------------------------------------------------------------- products of codes with rounded inputs */

/* A row's inputs are rounded to signed bytes with a scale for each ROUNDED of them, so that a product is a sum of whole
 * numbers. A block holds scales and offsets as in quantized.h, and codes as unsigned bytes, four inputs a word: I8 with
 * 128 added; U4 two words in one, inputs 0 .. 3 in the lower halves of its bytes and 4 .. 7 in the upper ones.
 *
 * A prepared row: the bytes; behind ``inputs`` floats the scale of each block, then the sum of its bytes. The order of
 * summation is the same for any number of rows. */

enum { ROUNDED = 32, SHARED = 4 }; /* inputs of a scale; rows that are multiplied with a panel at a time */

static void round_inputs(int64_t inputs, float *x) {
    int8_t *codes = (int8_t *)x; /* which end before the floats that are still to be read */
    int64_t blocks = inputs / ROUNDED;
    for (int64_t b = 0; b < blocks; b++) {
        float some[ROUNDED], top = 0, bad = 0;
        memcpy(some, x + b * ROUNDED, sizeof some);
        for (int k = 0; k < ROUNDED; k++) {
            float size = some[k] < 0 ? -some[k] : some[k];
            top = size > top ? size : top;
            bad += some[k] - some[k]; /* NaN where an input is no finite number */
        }
        float inverse = top > 1e-30f ? 127 / top : 0;
        int32_t total = 0;
        for (int k = 0; k < ROUNDED; k++) {
            int32_t code = bad == 0 ? (int32_t)__builtin_rintf(some[k] * inverse) : 0;
            codes[b * ROUNDED + k] = (int8_t)code;
            total += code;
        }
        x[inputs + b] = top / 127 + bad;
        x[inputs + blocks + b] = (float)total;
    }
}

/* Add the sums over four inputs of unsigned bytes of weights times the signed bytes of ``x``. */
INLINE ivec dot4(int64_t format, ivec acc, uvec w, int32_t x) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif LANES == 8 && defined(__AVXVNNI__)
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(x));
#elif LANES == 8 && defined(__AVX2__)
    __m256i v = _mm256_set1_epi32(x);
    if (format == U4) /* at most 2 x 15 x 127: no sum is cut */
        return acc + (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, v), _mm256_set1_epi16(1));
    uvec even = w & 0x00ff00ffu, odd = w >> 8 & 0x00ff00ffu;
    __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), high = _mm256_srai_epi16(v, 8);
    return acc + (ivec)_mm256_madd_epi16((__m256i)even, low) + (ivec)_mm256_madd_epi16((__m256i)odd, high);
#else
    for (int j = 0; j < 4; j++)
        acc += (ivec)(w >> 8 * j & 255u) * (int32_t)(int8_t)(x >> 8 * j);
    return acc;
#endif
}

INLINE int32_t word_of(const float *x, int64_t word) {
    int32_t found;
    memcpy(&found, (const char *)x + 4 * word, 4);
    return found;
}

/* ``rows`` rows times one panel. */
INLINE void rounded_rows(const Linear *op, int64_t format, int rows, const float *x, int64_t stride, const char *w,
                         int64_t size, int64_t inputs, vec (*y)[2]) {
    int64_t group = op->group ? op->group : inputs, head = head_bytes(op), blocks = inputs / ROUNDED;
    float zero = format == I8 ? 128 : op->offsets == CENTRED ? 8 : 0;
    UNROLL for (int r = 0; r < rows; r++)
        y[r][0] = y[r][1] = splat(0);
    for (int64_t start = 0; start < inputs; start += group, w += head + code_bytes(format, group)) {
        for (int64_t k = 0; k < group; k += ROUNDED) {
            int64_t b = (start + k) / ROUNDED;
            UNROLL for (int i = 0; i < 2; i++) {
                const char *at = w + i * size + head + code_bytes(format, k);
                ivec acc[SHARED] = {0};
                __builtin_prefetch(at + 4 * AHEAD);
                UNROLL for (int q = 0; q < ROUNDED / 4; q++, at += format == I8 ? 4 * LANES : 2 * LANES) {
                    uvec codes = *(const uvec *)(format == I8 ? at : at - q % 2 * 2 * LANES);
                    if (format == U4)
                        codes = (q % 2 ? codes >> 4 : codes) & 0x0f0f0f0fu;
                    UNROLL for (int r = 0; r < rows; r++)
                        acc[r] = dot4(format, acc[r], codes, word_of(x + r * stride, b * (ROUNDED / 4) + q));
                }
                vec scale = load((const float *)(w + i * size)), offset = offset_of(op, w + i * size);
                UNROLL for (int r = 0; r < rows; r++) {
                    float factor = x[r * stride + inputs + b], total = x[r * stride + inputs + blocks + b];
                    vec part = __builtin_convertvector(acc[r], vec) - splat(zero * total);
                    y[r][i] = fused(part * splat(factor), scale, y[r][i]);
                    if (op->offsets == OFFSETS)
                        y[r][i] = fused(offset, splat(factor * total), y[r][i]);
                }
            }
        }
    }
}

INLINE void panels_of_rounded_format(const Linear *op, int64_t format, const float *x, int64_t stride, int64_t inputs,
                                     int64_t row, int64_t count, int64_t first, int64_t stop) {
    int64_t size = groups_of(op, inputs) * head_bytes(op) + code_bytes(format, inputs);
    vec y[SHARED][2];
    for (; first < stop; first++)
        for (int64_t r = 0, some; r < count; r += some) {
            const char *w = (const char *)op->weights + first * 2 * size;
            some = count - r < SHARED ? 1 : SHARED;
            if (some == SHARED)
                rounded_rows(op, format, SHARED, x + r * stride, stride, w, size, inputs, y);
            else
                rounded_rows(op, format, 1, x + r * stride, stride, w, size, inputs, y);
            for (int64_t i = 0; i < some; i++)
                finish(op, first, row + r + i, y[i][0], y[i][1]);
        }
}

static void panels_of_rounded(const Linear *op, const float *x, int64_t stride, int64_t inputs, int64_t row,
                              int64_t count, int64_t first, int64_t stop) {
    if (op->format == I8)
        panels_of_rounded_format(op, I8, x, stride, inputs, row, count, first, stop);
    else
        panels_of_rounded_format(op, U4, x, stride, inputs, row, count, first, stop);
}

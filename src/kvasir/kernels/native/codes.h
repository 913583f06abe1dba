/* ------------------------------------------------------------------------------------------------------------ codes */

/* Rows of a quantised cache, with the same bits from the same fp32 numbers as kernels/quantize.py and kv/codecs/fp8.py.
 * KEEP_APART keeps a compiler from fusing sums and products that must be rounded separately. */

#define KEEP_APART(at) __asm__ volatile("" ::"r"(at) : "memory")
#define FP16_TINY 0x1p-14f
#define FP16_MAX 65504.0f
#define E4M3_MAX 448.0f
#define META 4 /* bytes beside a row's codes: fp16 scale and bias, or an fp32 scale */

typedef uint8_t byte_vec __attribute__((vector_size(LANES), aligned(1), may_alias));

/* LANES bytes as words, and back: compilers know the instructions, but do not find them. */
INLINE uvec widen(const uint8_t *p) {
#if LANES == 16
    return (uvec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif LANES == 8
    return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const byte_vec *)p, uvec);
#endif
}

INLINE void narrow(uint8_t *p, uvec v) {
#if LANES == 16
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    *(byte_vec *)p = __builtin_convertvector(v, byte_vec);
#endif
}

INLINE vec smaller(vec a, vec b) { return choose(a < b, a, b); }
INLINE vec whole(ivec v) { return __builtin_convertvector(v, vec); }
INLINE float within(float x, float low, float high) { return x < low ? low : x > high ? high : x; } /* NaN stays NaN */
INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }

INLINE float highest(vec v) {
    float y = v[0];
    for (int i = 1; i < LANES; i++)
        y = v[i] > y ? v[i] : y;
    return y;
}

/* The nearest fp16 number, even on a tie, of numbers that do not exceed the largest. */
INLINE uint32_t to_fp16(float x) {
    uint32_t bits = bits_of(x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (size > 0x7f800000)
        return sign | 0x7e00;
    if (size < 0x38800000) /* subnormal: the last bit of a half is worth as much as fp16's */
        return sign | (bits_of(fabsf(x) + 0.5f) - bits_of(0.5f));
    return sign | (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
}

/* fp16 numbers in the low halves of words. */
INLINE vec from_fp16(uvec h) {
    uvec size = (h & 0x7fff) << 13;
    vec normal = (vec)(size + (112u << 23)), small = (vec)(size + (113u << 23)) - FP16_TINY,
        odd = (vec)(size + (224u << 23));
    vec y = choose((ivec)(size < 1u << 23), small, choose((ivec)(size >= 31u << 23), odd, normal));
    return (vec)((uvec)y | (h & 0x8000) << 16);
}

/* x times the block-diagonal matrix of +-1 of Sylvester and Hadamard, blocks of ``order``: sums and differences of
 * two. */
static void butterflies(float *x, int64_t dim, int64_t order) {
    static const ivec LANE = LANE_NUMBERS;
    for (int64_t i = 0; i < dim; i += LANES) { /* partners in one vector */
        vec y = load(x + i);
#define PAIRS(half, ...) if (order > half) y = SHUFFLE(y, y, __VA_ARGS__) + choose((LANE & half) != 0, -y, y);
#if LANES == 16
        PAIRS(1, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
        PAIRS(2, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
        PAIRS(4, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
        PAIRS(8, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#elif LANES == 8
        PAIRS(1, 1, 0, 3, 2, 5, 4, 7, 6)
        PAIRS(2, 2, 3, 0, 1, 6, 7, 4, 5)
        PAIRS(4, 4, 5, 6, 7, 0, 1, 2, 3)
#else
        PAIRS(1, 1, 0, 3, 2)
        PAIRS(2, 2, 3, 0, 1)
#endif
        store(x + i, y);
    }
    for (int64_t half = LANES; half < order; half *= 2)
        for (int64_t i = 0; i < dim; i += i % (2 * half) + LANES == half ? half + LANES : LANES) {
            vec a = load(x + i), b = load(x + i + half);
            store(x + i, a + b);
            store(x + i + half, a - b);
        }
}

/* x R: ``factors`` are R's signs over the root of its order. */
static void turn(float *x, const float *factors, int64_t dim, int64_t order) {
    for (int64_t i = 0; i < dim; i += LANES)
        store(x + i, load(x + i) * load(factors + i));
    KEEP_APART(x);
    butterflies(x, dim, order);
}

/* x R^T, up to the order of roundings. */
static void turn_back(float *x, const float *factors, int64_t dim, int64_t order) {
    butterflies(x, dim, order);
    for (int64_t i = 0; i < dim; i += LANES)
        store(x + i, load(x + i) * load(factors + i));
}

static void encode_floats(const float *x, int64_t dim, uint8_t *codes, float *meta) {
    vec largest = splat(0);
    ivec odd = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        vec size = (vec)((uvec)load(x + i) & 0x7fffffff);
        largest = bigger(size, largest), odd |= size != size;
    }
    float scale = within(highest(largest) / E4M3_MAX, FP16_TINY, FP16_MAX);
    for (int i = 0; i < LANES; i++)
        scale = odd[i] ? NAN : scale;
    *meta = scale;
    for (int64_t i = 0; i < dim; i += LANES) {
        vec y = load(x + i) / scale;
        uvec sign = (uvec)y >> 31 << 7;
        y = smaller((vec)((uvec)y & 0x7fffffff), splat(E4M3_MAX));
        uvec size = (uvec)y, normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3),
            small = (uvec)(y + 16384.0f) - bits_of(16384.0f);
        narrow(codes + i, sign | (uvec)choose(y < 0x1p-6f, (vec)small, (vec)normal));
    }
}

/* Encode one row, in the cache's basis, on its own grid: codes, and scale and bias. */
static void encode(int64_t format, const float *x, int64_t dim, char *at, char *meta) {
    if (format == FP8) {
        encode_floats(x, dim, (uint8_t *)at, (float *)meta);
        return;
    }
    float middle = format == INT4 ? 8 : 128;
    vec least = load(x), most = least;
    ivec odd = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        vec y = load(x + i);
        least = smaller(y, least), most = bigger(y, most), odd |= y != y;
    }
    float low = -highest(-least), high = highest(most);
    for (int i = 0; i < LANES; i++)
        low = odd[i] ? NAN : low;
    uint32_t halves[LANES] = {to_fp16(within((high - low) / (2 * middle - 1), FP16_TINY, FP16_MAX))};
    float scale = from_fp16(*(uvec *)halves)[0];
    halves[1] = to_fp16(within(low + middle * scale, -FP16_MAX, FP16_MAX));
    float bias = from_fp16(*(uvec *)halves)[1];
    uint16_t both[2] = {halves[0], halves[1]};
    memcpy(meta, both, 4);
    uint8_t codes[MAX_DIM], *to = format == INT4 ? codes : (uint8_t *)at;
    for (int64_t i = 0; i < dim; i += LANES) {
        vec y = (load(x + i) - bias) / scale + 0.5f;
        y = choose(y > -middle, smaller(y, splat(middle - 1)), splat(-middle)); /* NaN: anything */
        ivec code = __builtin_convertvector(y, ivec);
        code += whole(code) > y; /* down, not to zero: true is -1 */
        narrow(to + i, (uvec)(code + (int32_t)middle));
    }
    for (int64_t i = 0; format == INT4 && i < dim / 2; i++)
        ((uint8_t *)at)[i] = codes[i] | codes[i + dim / 2] << 4;
}

/* Places of a chunk's rows: values' codes lie ``apart`` bytes behind ``at``, and their scales ``meta_apart`` behind
 * ``meta``. */
typedef struct { const char *at[CHUNK], *meta[CHUNK]; } Places;
typedef struct { const Places *places; int64_t apart, meta_apart; } Coded;

/* LANES numbers of E4M3, over 256. */
INLINE vec from_e4m3(const uint8_t *p) {
#if LANES == 16 /* with their exponents as they are, they are halves */
    __m256i signs_twice = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(signs_twice, _mm256_set1_epi16((short)0xbfff)));
#elif LANES == 8 && defined(__F16C__)
    __m128i signs_twice = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return (vec)_mm256_cvtph_ps(_mm_and_si128(signs_twice, _mm_set1_epi16((short)0xbfff)));
#else
    uvec code = widen(p), size = (code & 0x7f) << 20;
    vec normal = (vec)(size + (112u << 23)), small = (vec)(size + (113u << 23)) - 0x1p-14f;
    return (vec)((uvec)choose((ivec)(size < 1u << 23), small, normal) | code >> 7 << 31);
#endif
}

/* Decode rows low .. high - 1 into x [CHUNK, D], and prefetch those of ``next``, which are decoded next. */
static void decode(int64_t format, Coded from, Coded next, int64_t low, int64_t high, int64_t dim, float *x) {
    float scales[CHUNK], biases[CHUNK];
    uint32_t metas[CHUNK];
    for (int64_t j = low / LANES * LANES; j < (high + LANES - 1) / LANES * LANES; j++)
        memcpy(metas + j, from.places->meta[j < low ? low : j < high ? j : high - 1] + from.meta_apart, 4);
    for (int64_t j = low / LANES * LANES; j < high; j += LANES) {
        uvec meta = *(const uvec *)(metas + j);
        store(scales + j, format == FP8 ? (vec)meta : from_fp16(meta & 0xffff));
        store(biases + j, format == FP8 ? splat(0) : from_fp16(meta >> 16));
    }
    for (int64_t j = low; j < high; j++) {
        const uint8_t *codes = (const uint8_t *)from.places->at[j] + from.apart;
        float *y = x + j * dim;
        for (int64_t i = 0; i < dim >> (format == INT4); i += 64)
            __builtin_prefetch(next.places->at[j] + next.apart + i, 0, 2);
        if (j % LANES == 0)
            __builtin_prefetch(next.places->meta[j] + next.meta_apart, 0, 2);
        vec scale = splat(scales[j]), bias = splat(biases[j]);
        int64_t half = dim / 2, i = 0;
        if (format == FP8)
            for (; i < dim; i += LANES)
                store(y + i, from_e4m3(codes + i) * (scale * 256));
        else if (format == INT8)
            for (; i < dim; i += LANES)
                store(y + i, whole((ivec)widen(codes + i) - 128) * scale + bias);
        else {
#if LANES == 16
            /* looked up in a register */
            vec sixteen = (vec){-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7} * scale + bias;
#endif
            for (; i + LANES <= half; i += LANES) {
                uvec pair = widen(codes + i);
#if LANES == 16
                store(y + i, (vec)_mm512_permutexvar_ps((__m512i)pair, (__m512)sixteen)); /* by the last four bits */
                store(y + i + half, (vec)_mm512_permutexvar_ps((__m512i)(pair >> 4), (__m512)sixteen));
#else
                store(y + i, whole((ivec)(pair & 15) - 8) * scale + bias);
                store(y + i + half, whole((ivec)(pair >> 4) - 8) * scale + bias);
#endif
            }
            for (; i < half; i++) {
                y[i] = (float)((codes[i] & 15) - 8) * scales[j] + biases[j];
                y[i + half] = (float)((codes[i] >> 4) - 8) * scales[j] + biases[j];
            }
        }
    }
}

/* What all kernels share: the structures of a step and of its operations, and vectors. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#ifdef _OPENMP
int omp_get_thread_num(void);
int omp_get_num_threads(void);
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

/* LANES: floats of one register. gcc keeps vectors of several registers in memory between any two operations. TILE:
 * rows that share a loaded weight; with two registers of sums for each, all registers are in use. */
#if defined(__AVX512F__)
#define LANES 16
#define TILE 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
#define LANES 8
#define TILE 4
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANES 4
#define TILE 4
#define LANE_NUMBERS {0, 1, 2, 3}
#endif
#define LINE 16   /* floats of a cache line */
#define CHUNK 64  /* keys between two rescalings of the softmax */
#define HEADS_AT_ONCE 8
#define QUERIES 32 /* of one KV head that read a chunk of keys together */
#define MAX_DIM 512
/* rows up to which every thread prepares all of a product's rows itself, which costs less than a barrier */
#define ROWS 32

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* The layout of these structures is that of the classes of the same names in program.py: all fields have 8 bytes. */
typedef struct {
    int64_t num_rows, num_spans, num_wanted, table_width;
    const int64_t *ids, *positions, *wanted;
    const int32_t *row_start;
    const int32_t *const *context; /* of each cache group: [S], slots that stand before each span */
    const int64_t *const *slots; /* of each cache group: [T], -1: nowhere */
    const int32_t *const *tables; /* of each cache group: [S, table_width] */
    /* [T, num_words]: bits of the rows of its span that a tree's row sees; or none */
    const int64_t *ancestors; int64_t num_words;
} Step;

enum { EMBED, LINEAR, NORM, HEADS, ATTEND, GATHER, OPEN, DRAW };
enum { BF16, FP32, I8, U4 }; /* of weights */
enum { NO_OFFSETS, CENTRED, OFFSETS }; /* of codes: none, -8 scales, or stored ones */
enum { PLAIN, SILU, GELU, GELU_TANH };
enum { NUMBERS, INT4, INT8, FP8 }; /* what a cache holds: fp32 numbers, or codes */

typedef struct { int64_t kind; const float *table; float *y; int64_t width; double scale; } Embed;

typedef struct { /* y = act(norm(x) W^T + bias) * scale, capped; or y += of it */
    int64_t kind; const float *x; float *y; const void *weights; const float *bias, *norm;
    double eps; int64_t format, num_inputs, num_outputs, activation, add, wanted; double scale, softcap;
    int64_t group, offsets; /* codes: inputs of a scale (0: all), and how they are offset */
    int64_t rounded; /* inputs are rounded to 8 bits */
} Linear;

/* y = norm(x), or y += norm(x) */
typedef struct {
    int64_t kind; const float *x; float *y; const float *weight; double eps; int64_t width, add, wanted;
} Norm;

/* Pages of a cache. Strides are in bytes; a row is one token's key or value of one head. ``turn_k``, ``turn_v``:
 * factors of the rotation of keys and of values. */
typedef struct {
    int64_t page_stride, page_slots, group, format, row; char *k, *v, *k_meta, *v_meta; const float *turn_k, *turn_v;
    int64_t order;
} Cache;

typedef struct { /* norm, rotate and write: queries in place, keys and values into their pages */
    int64_t kind; float *heads; const float *norm; double eps; int64_t num_heads, num_kv_heads, dim, writes;
    const float *angles; Cache cache;
} Heads;

typedef struct {
    int64_t kind; const float *heads; float *y; const float *sinks; int64_t num_heads, num_kv_heads, dim, row, window;
    double scale, softcap; Cache cache;
} Attend;

typedef struct { int64_t kind; const float *x; float *y; int64_t width; } Gather;

typedef struct { /* ids, context, tables and slots of decodes, from what is kept of their rows [num_kept] */
    int64_t kind; const int64_t *rows; int64_t *ids; const int32_t *token, *tables;
    const int32_t *forgotten; /* [num_groups, num_kept]; or none */
    int64_t num_kept, num_groups, page_slots;
} Open;

typedef struct { /* the tokens of logits [M, width], of which the first ``count`` columns are tokens */
    int64_t kind; const float *logits; int64_t width, count; const int64_t *rows; int64_t *tokens; int32_t *token;
    const int32_t *top_k; const float *temperature, *top_p, *min_p; const int32_t *stream; /* low and high words */
} Draw;

/* ---------------------------------------------------------------------------------------------------------- vectors */

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
INLINE vec bigger(vec a, vec b) { return choose(a > b, a, b); }

/* a b + c, rounded once where the machine can. Left alone a compiler fuses some sums and not others, and a row's bits
 * then depend on its batch: on some processors gcc unfuses chains that it considers slow. */
INLINE vec fused(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float sum(vec v) {
#if LANES == 16
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif LANES == 8
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
#else
    v += SHUFFLE(v, v, 2, 3, 0, 1);
#endif
    return v[0] + v[1];
}

/* The sums of LANES vectors, as a vector: each round halves what is left to add. */
INLINE vec sums(vec *a) {
#if LANES == 16
    for (int i = 0; i < 8; i++)
        a[i] = SHUFFLE(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
             + SHUFFLE(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        a[i] = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
             + SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        a[i] = SHUFFLE(a[i], a[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
             + SHUFFLE(a[i], a[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(a[0], a[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
         + SHUFFLE(a[0], a[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif LANES == 8
    for (int i = 0; i < 4; i++)
        a[i] = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        a[i] = SHUFFLE(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(a[0], a[1], 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a[0], a[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
    for (int i = 0; i < 2; i++)
        a[i] = SHUFFLE(a[i], a[i + 2], 0, 1, 4, 5) + SHUFFLE(a[i], a[i + 2], 2, 3, 6, 7);
    return SHUFFLE(a[0], a[1], 0, 4, 2, 6) + SHUFFLE(a[0], a[1], 1, 5, 3, 7);
#endif
}

/* e^x to 2 ulp: 2^n times the Taylor series of what is left, |r| < 0.35. Below -87 it is 0; NaN stays NaN. */
INLINE vec exponential(vec x) {
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds: the sum has no bits for a fraction */
    vec safe = choose(n < -126.0f, splat(-126.0f), choose(n > 127.0f, splat(127.0f), n));
    vec r = (x - safe * 0.693359375f) + safe * 2.12194440e-4f;
    r = choose(x < -87.0f, splat(0), r);
    vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ivec power = (__builtin_convertvector(safe, ivec) + 127) << 23;
    vec y = p * (vec)power;
    return choose(x < -87.0f, splat(0), y);
}

INLINE vec tangent(vec x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

INLINE vec activate(int64_t kind, vec x) {
    if (kind == SILU)
        return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) /* 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)) */
        return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x)));
    for (int i = 0; i < LANES; i++)
        x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return x;
}

/* A thread's memory ``mine``, and the team's counter ``next``: the first item that no thread has taken. */
typedef struct { float *mine; int64_t *next; } Team;

INLINE int64_t take(const Team *team) { return __atomic_fetch_add(team->next, 1, __ATOMIC_RELAXED); }

INLINE void share(int64_t items, int64_t *first, int64_t *stop) { /* this thread's part of them */
    int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
    *first = items * me / team;
    *stop = items * (me + 1) / team;
}

static float norm_scale(const float *x, int64_t width, double eps) {
    vec squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < width; i++)
        total += x[i] * x[i];
    return 1.0f / sqrtf(total / width + (float)eps);
}

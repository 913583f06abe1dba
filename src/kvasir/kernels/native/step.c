/* A decoder's step on a CPU: a list of operations that one team of threads runs through, a barrier after each.
 *
 * Numbers are fp32. Weights are fp32, or bf16 where that loses nothing, in panels of 2 x 16 outputs. Every sum has one order,
 * whatever the number of rows and of threads, so a row's bits depend on that row alone. Vectors are the compiler's own: 16
 * floats are one register with AVX-512, two with AVX2, four with NEON.
 *
 * Legend: T rows, M wanted rows, K inputs, N outputs, H query heads, G KV heads, X = H + 2 G, D head dim, P slots per page. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
int omp_get_thread_num(void);
int omp_get_num_threads(void);
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

#define LANES 16
#ifdef __AVX512F__
#define TILE 8    /* rows that share a loaded weight: their sums fill the registers */
#else
#define TILE 2
#endif
#define CHUNK 64  /* keys between two rescalings of the softmax */
#define HEADS_AT_ONCE 8
#define MAX_DIM 512
#define ROWS 32   /* rows whose norms a thread computes at a time */

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* The layout of these structures is that of the classes of the same names in program.py: all fields have 8 bytes. */
typedef struct {
    int64_t num_rows, num_spans, num_wanted, table_width;
    const int64_t *ids, *positions, *wanted;
    const int32_t *row_start, *context;
    const int64_t *const *slots; /* of each cache group: [T], -1: nowhere */
    const int32_t *const *tables; /* of each cache group: [S, table_width] */
} Step;

enum { EMBED, LINEAR, NORM, HEADS, ATTEND, GATHER };
enum { BF16, FP32 };
enum { PLAIN, SILU, GELU, GELU_TANH };

typedef struct { int64_t kind; const float *table; float *y; int64_t width; double scale; } Embed;

typedef struct { /* y = act(norm(x) W^T + bias) * scale, capped; or y += of it */
    int64_t kind; const float *x; float *y; const void *weights; const float *bias, *norm;
    double eps; int64_t format, num_inputs, num_outputs, activation, add, wanted; double scale, softcap;
} Linear;

typedef struct { int64_t kind; const float *x; float *y; const float *weight; double eps; int64_t width, add; } Norm; /* y (+)= norm(x) */

typedef struct { int64_t page_stride, page_slots, group; float *k, *v; } Cache; /* strides in floats */

typedef struct { /* norm, rotate and write: queries in place, keys and values into their pages */
    int64_t kind; float *heads; const float *norm; double eps; int64_t num_heads, num_kv_heads, dim, writes;
    const float *angles; Cache cache;
} Heads;

typedef struct {
    int64_t kind; const float *heads; float *y; const float *sinks; int64_t num_heads, num_kv_heads, dim, row, window;
    double scale, softcap; Cache cache;
} Attend;

typedef struct { int64_t kind; const float *x; float *y; int64_t width; } Gather;

/* ------------------------------------------------------------------------------------------------------------ vectors */

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec splat(float x) { return (vec){0} + x; }
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
INLINE vec bigger(vec a, vec b) { return choose(a > b, a, b); }

INLINE float sum(vec v) {
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

/* The sums of 16 vectors, as a vector: each round halves what is left to add. */
INLINE vec sums(vec *a) {
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

/* ----------------------------------------------------------------------------------------------------------- products */

/* R rows times a panel of 2 x 16 outputs. bf16 panel: for each pair of inputs 16 words a block, the first input's weight in
 * the low half: widening is a shift or a mask. fp32 panel: for each input 16 floats a block. */
#define UNROLL _Pragma("GCC unroll 8")
#define PRODUCT(R)                                                                                                                  \
    static void product_bf16_##R(const float *x, int64_t stride, const uint32_t *w, int64_t inputs, vec out[2][TILE]) {             \
        vec left[R], right[R];                                                                                                      \
        UNROLL for (int r = 0; r < R; r++)                                                                                          \
            left[r] = right[r] = splat(0);                                                                                          \
        const uint32_t *w2 = w + inputs / 2 * LANES;                                                                                \
        for (int64_t k = 0; k < inputs; k += 2, w += LANES, w2 += LANES) {                                                          \
            uvec a = *(const uvec *)w, b = *(const uvec *)w2;                                                                       \
            __builtin_prefetch(w + AHEAD);                                                                                          \
            __builtin_prefetch(w2 + AHEAD);                                                                                         \
            vec a0 = (vec)(a << 16), a1 = (vec)(a & 0xffff0000u), b0 = (vec)(b << 16), b1 = (vec)(b & 0xffff0000u);                 \
            UNROLL for (int r = 0; r < R; r++) {                                                                                    \
                float p = x[r * stride + k], q = x[r * stride + k + 1];                                                             \
                left[r] = a0 * p + left[r];                                                                                         \
                right[r] = b0 * p + right[r];                                                                                       \
                left[r] = a1 * q + left[r];                                                                                         \
                right[r] = b1 * q + right[r];                                                                                       \
            }                                                                                                                       \
        }                                                                                                                           \
        UNROLL for (int r = 0; r < R; r++)                                                                                          \
            out[0][r] = left[r], out[1][r] = right[r];                                                                              \
    }                                                                                                                               \
    static void product_fp32_##R(const float *x, int64_t stride, const float *w, int64_t inputs, vec out[2][TILE]) {                \
        vec left[R], right[R];                                                                                                      \
        UNROLL for (int r = 0; r < R; r++)                                                                                          \
            left[r] = right[r] = splat(0);                                                                                          \
        const float *w2 = w + inputs * LANES;                                                                                       \
        for (int64_t k = 0; k < inputs; k++, w += LANES, w2 += LANES) {                                                             \
            vec a = load(w), b = load(w2);                                                                                          \
            __builtin_prefetch(w + AHEAD);                                                                                          \
            __builtin_prefetch(w2 + AHEAD);                                                                                         \
            UNROLL for (int r = 0; r < R; r++) {                                                                                    \
                left[r] = a * x[r * stride + k] + left[r];                                                                          \
                right[r] = b * x[r * stride + k] + right[r];                                                                        \
            }                                                                                                                       \
        }                                                                                                                           \
        UNROLL for (int r = 0; r < R; r++)                                                                                          \
            out[0][r] = left[r], out[1][r] = right[r];                                                                              \
    }
#ifndef AHEAD
#define AHEAD 512
#endif
PRODUCT(1)
PRODUCT(2)
#if TILE == 8
PRODUCT(3)
PRODUCT(4)
PRODUCT(5)
PRODUCT(6)
PRODUCT(7)
PRODUCT(8)
#define ALL(name) {(Product)name##1, (Product)name##2, (Product)name##3, (Product)name##4, (Product)name##5, (Product)name##6, \
                   (Product)name##7, (Product)name##8}
#else
#define ALL(name) {(Product)name##1, (Product)name##2}
#endif

typedef void (*Product)(const float *, int64_t, const void *, int64_t, vec[2][TILE]);
static const Product PRODUCTS[2][TILE] = {ALL(product_bf16_), ALL(product_fp32_)};

/* ------------------------------------------------------------------------------------------- products in matrix tiles */

#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>

#define tile_load(t, at, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define tile_store(t, at, stride) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define tile_add(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::) /* c += a b */

#ifndef AHEAD_TILES
#define AHEAD_TILES 2048
#endif
enum { TILE_ROWS = 16, TILE_INPUTS = 32 };
typedef uint16_t half_vec __attribute__((vector_size(32), aligned(2), may_alias));

static int tiles_granted(void) { /* the system asks to be asked: 8 KB more state a thread */
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}

static void tiles_begin(int rows) { /* 0 .. 3: sums; 4: weights of one block, 5: of the other; 6, 7: inputs */
    struct { uint8_t palette, start, reserved[14]; uint16_t width[16]; uint8_t rows[16]; } layout = {.palette = 1};
    for (int i = 0; i < 8; i++)
        layout.width[i] = 64, layout.rows[i] = i == 4 || i == 5 ? 16 : rows;
    __asm__ volatile("ldtilecfg %0" ::"m"(layout));
}

static void tiles_end(void) { __asm__ volatile("tilerelease" ::); }

/* An fp32 number is the sum of three bf16 ones, exactly: its 24 bits, eight at a time. Into [K / 32][3][16 rows][32]. */
static void split(const float *x, int64_t stride, int64_t rows, int64_t inputs, float *into) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < inputs; k += LANES) {
            uint16_t *to = (uint16_t *)into + (k / TILE_INPUTS * 3 * TILE_ROWS + r) * TILE_INPUTS + k % TILE_INPUTS;
            vec left = load(x + r * stride + k);
            for (int i = 0; i < 3; i++, to += TILE_ROWS * TILE_INPUTS) {
                uvec top = (uvec)left & 0xffff0000u;
                *(half_vec *)to = __builtin_convertvector(top >> 16, half_vec);
                left -= (vec)top;
            }
        }
}

/* The leading parts have sums of their own: a sum waits for the one before it, and small ones lose less. */
static void product_tiles(const float *x, const char *w, int64_t inputs, float out[4][TILE_ROWS][LANES]) {
    const char *w2 = w + inputs * LANES * 2, *part = (const char *)x;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS, w += 1024, w2 += 1024, part += 3 * 1024) {
        for (int i = 0; i < 1024; i += 64) {
            __builtin_prefetch(w + i + AHEAD_TILES);
            __builtin_prefetch(w2 + i + AHEAD_TILES);
        }
        tile_load(4, w, 64);
        tile_load(5, w2, 64);
        tile_load(6, part + 2048, 64);
        tile_add(2, 6, 4);
        tile_add(3, 6, 5);
        tile_load(7, part, 64);
        tile_add(0, 7, 4);
        tile_add(1, 7, 5);
        tile_load(6, part + 1024, 64);
        tile_add(2, 6, 4);
        tile_add(3, 6, 5);
    }
    tile_store(0, out[0], 64);
    tile_store(1, out[1], 64);
    tile_store(2, out[2], 64);
    tile_store(3, out[3], 64);
}
#endif

INLINE void put(const Linear *op, int64_t row, int64_t column, vec v) {
    float *y = op->y + row * op->num_outputs + column;
    int64_t left = op->num_outputs - column;
    if (left <= 0)
        return;
    float some[LANES] = {0};
    float *at = left < LANES ? some : y;
    if (at == some)
        memcpy(some, y, 4 * left);
    if (op->add)
        v += load(at);
    store(at, v);
    if (at == some)
        memcpy(y, some, 4 * left);
}

INLINE vec biased(const float *bias, int64_t column, int64_t width, vec v) {
    for (int64_t i = 0; bias && i < LANES && column + i < width; i++)
        v[i] += bias[column + i];
    return v;
}

static void finish(const Linear *op, int64_t panel, int64_t row, vec left, vec right) {
    int64_t width = op->num_outputs;
    if (op->activation) { /* the panel's blocks are gate and up of the same 16 outputs */
        left = biased(op->bias, panel * LANES, width, left);
        right = biased(op->bias ? op->bias + width : 0, panel * LANES, width, right);
        put(op, row, panel * LANES, activate(op->activation, left) * right);
        return;
    }
    vec both[2] = {left, right};
    for (int i = 0; i < 2; i++) {
        int64_t column = (2 * panel + i) * LANES;
        vec v = biased(op->bias, column, width, both[i]) * (float)op->scale;
        if (op->softcap > 0)
            v = tangent(v / (float)op->softcap) * (float)op->softcap;
        put(op, row, column, v);
    }
}

/* This thread's panels for rows whose inputs are x, padded. */
static void panels_of(const Linear *op, const float *x, int64_t stride, int64_t inputs, int64_t row, int64_t count, int64_t first, int64_t stop) {
    int64_t panel_bytes = inputs * (op->format == BF16 ? 2 : 4) * 2 * LANES;
    vec out[2][TILE];
    for (int64_t panel = first; panel < stop; panel++)
        for (int64_t r = 0; r < count; r += TILE) {
            int64_t some = count - r < TILE ? count - r : TILE;
            PRODUCTS[op->format][some - 1](x + r * stride, stride, (const char *)op->weights + panel * panel_bytes, inputs, out);
            for (int64_t i = 0; i < some; i++)
                finish(op, panel, row + r + i, out[0][i], out[1][i]);
        }
}

#ifdef TILES
static void panels_of_tiles(const Linear *op, const float *x, int64_t stride, int64_t inputs, int64_t row, int64_t count, int64_t first,
                            int64_t stop, float *scratch) {
    float out[4][TILE_ROWS][LANES] __attribute__((aligned(64)));
    for (int64_t r = 0; r < count; r += TILE_ROWS) {
        int64_t some = count - r < TILE_ROWS ? count - r : TILE_ROWS;
        split(x + r * stride, stride, some, inputs, scratch);
        tiles_begin(some);
        for (int64_t panel = first; panel < stop; panel++) {
            product_tiles(scratch, (const char *)op->weights + panel * inputs * 4 * LANES, inputs, out);
            for (int64_t i = 0; i < some; i++)
                finish(op, panel, row + r + i, load(out[0][i]) + load(out[2][i]), load(out[1][i]) + load(out[3][i]));
        }
    }
    tiles_end();
}
#endif

/* ``scratch``: ROWS rows of padded inputs, and then (ROWS / 2) * 3 / 2 more for their parts. */
static void linear(const Linear *op, int64_t rows, float *scratch, int64_t tiles) {
    int64_t inputs = op->num_inputs, padded = op->format == BF16 ? (inputs + 31) / 32 * 32 : inputs, first, stop;
    int64_t blocks = (op->num_outputs + LANES - 1) / LANES;
    share(op->activation ? blocks : (blocks + 1) / 2, &first, &stop);
    if (first == stop)
        return;
    for (int64_t row = 0; row < rows; row += ROWS) {
        int64_t count = rows - row < ROWS ? rows - row : ROWS, stride = inputs;
        const float *x = op->x + row * inputs;
        if (op->norm || padded > inputs) { /* every thread for itself: less than a barrier costs */
            for (int64_t r = 0; r < count; r++) {
                float scale = op->norm ? norm_scale(x + r * inputs, inputs, op->eps) : 1, *y = scratch + r * padded;
                for (int64_t k = 0; k < inputs; k++)
                    y[k] = op->norm ? x[r * inputs + k] * scale * op->norm[k] : x[r * inputs + k];
                memset(y + inputs, 0, 4 * (padded - inputs));
            }
            x = scratch;
            stride = padded;
        }
#ifdef TILES
        if (tiles && op->format == BF16 && rows >= tiles) {
            panels_of_tiles(op, x, stride, padded, row, count, first, stop, scratch + ROWS * padded);
            continue;
        }
#endif
        panels_of(op, x, stride, padded, row, count, first, stop);
    }
}

/* ---------------------------------------------------------------------------------------------------------- attention */

static void heads(const Heads *op, const Step *step) {
    int64_t rotated = op->num_heads + (op->writes ? op->num_kv_heads : 0), all = rotated + (op->writes ? op->num_kv_heads : 0);
    int64_t dim = op->dim, half = dim / 2, first, stop;
    const Cache *cache = &op->cache;
    share(step->num_rows * all, &first, &stop);
    for (int64_t item = first; item < stop; item++) {
        int64_t row = item / all, head = item % all;
        float *x = op->heads + item * dim, *y = x;
        if (head >= op->num_heads) {
            int64_t slot = step->slots[cache->group][row], g = (head - op->num_heads) % op->num_kv_heads;
            if (slot < 0)
                continue;
            y = (head < rotated ? cache->k : cache->v) + slot / cache->page_slots * cache->page_stride
              + (g * cache->page_slots + slot % cache->page_slots) * dim;
        }
        if (head >= rotated) {
            memcpy(y, x, 4 * dim);
            continue;
        }
        float scale = op->norm ? norm_scale(x, dim, op->eps) : 1;
        const float *weight = op->norm + (op->norm ? head * dim : 0), *cos = op->angles + step->positions[row] * dim, *sin = cos + half;
        for (int64_t i = 0; i < half; i++) {
            float a = x[i] * scale, b = x[i + half] * scale;
            if (op->norm)
                a *= weight[i], b *= weight[i + half];
            y[i] = a * cos[i] - b * sin[i];
            y[i + half] = b * cos[i] + a * sin[i];
        }
    }
}

/* What a query head has seen so far: the largest score, and sums weighted by exp(score - best). */
typedef struct { float best, total; vec out[MAX_DIM / LANES]; } Seen;

/* q . k of 16 keys. */
INLINE vec score(const float *q, const float *const *key, int64_t dim) {
    vec a[LANES];
    _Pragma("GCC unroll 4") for (int i = 0; i < LANES; i += 4) {
        const float *k0 = key[i], *k1 = key[i + 1], *k2 = key[i + 2], *k3 = key[i + 3];
        vec s0 = splat(0), s1 = s0, s2 = s0, s3 = s0;
        for (int64_t d = 0; d < dim; d += LANES) {
            vec part = load(q + d);
            s0 = part * load(k0 + d) + s0;
            s1 = part * load(k1 + d) + s1;
            s2 = part * load(k2 + d) + s2;
            s3 = part * load(k3 + d) + s3;
        }
        a[i] = s0, a[i + 1] = s1, a[i + 2] = s2, a[i + 3] = s3;
    }
    return sums(a);
}

INLINE void fetch(const float *at, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES)
        __builtin_prefetch(at + d, 0, 2);
}

/* One head over ``count`` keys, whose values lie ``apart`` behind them. The key pointers go on to a multiple of 16. */
static void attend_chunk(const Attend *op, const float *q, const float *const *key, int64_t count, int64_t apart, int fresh, Seen *seen) {
    int64_t dim = op->dim, parts = dim / LANES;
    float weight[CHUNK];
    vec peak = splat(-INFINITY), lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t j = 0; j < count; j += LANES) {
        if (fresh) /* the first head to read these: the values, and the keys after these, are on their way meanwhile */
            for (int64_t i = j; i < j + LANES; i++) {
                fetch(key[i] + apart, dim);
                if (i + LANES < count)
                    fetch(key[i + LANES], dim);
            }
        vec s = score(q, key + j, dim) * (float)op->scale;
        if (op->softcap > 0)
            s = tangent(s / (float)op->softcap) * (float)op->softcap;
        s = choose(lane + (float)j < (float)count, s, splat(-INFINITY));
        store(weight + j, s);
        peak = bigger(s, peak);
    }
    float high = seen->best;
    for (int i = 0; i < LANES; i++)
        high = peak[i] > high ? peak[i] : high;
    float fade = high > seen->best ? expf(seen->best - high) : 1, from = high > -INFINITY ? high : 0;
    vec mass = splat(0);
    for (int64_t j = 0; j < count; j += LANES) {
        vec p = exponential(load(weight + j) - from);
        store(weight + j, p);
        mass += p;
    }
    seen->total = seen->total * fade + sum(mass);
    seen->best = high;
    int64_t d = 0;
    for (; d + 4 <= parts; d += 4) {
        vec *out = seen->out + d, a = out[0] * fade, b = out[1] * fade, c = out[2] * fade, e = out[3] * fade;
        for (int64_t j = 0; j < count; j++) {
            const float *v = key[j] + apart + d * LANES;
            a = load(v) * weight[j] + a;
            b = load(v + LANES) * weight[j] + b;
            c = load(v + 2 * LANES) * weight[j] + c;
            e = load(v + 3 * LANES) * weight[j] + e;
        }
        out[0] = a, out[1] = b, out[2] = c, out[3] = e;
    }
    for (; d < parts; d++) {
        vec a = seen->out[d] * fade;
        for (int64_t j = 0; j < count; j++)
            a = load(key[j] + apart + d * LANES) * weight[j] + a;
        seen->out[d] = a;
    }
}

/* ``count`` query heads from ``head`` on, of one KV head, over keys first .. stop - 1 in ``pages``. */
static void attend_heads(const Attend *op, const float *q, float *y, int64_t head, int64_t count, const int32_t *pages, int64_t first,
                         int64_t stop) {
    const Cache *cache = &op->cache;
    int64_t dim = op->dim, size = cache->page_slots, at = head / (op->num_heads / op->num_kv_heads) * size * dim;
    const float *key[CHUNK];
    Seen seen[HEADS_AT_ONCE];
    for (int64_t h = 0; h < count; h++) {
        seen[h].best = -INFINITY, seen[h].total = 0;
        memset(seen[h].out, 0, 4 * dim);
    }
    for (int64_t begin = first; begin < stop; begin += CHUNK) {
        int64_t keys = stop - begin < CHUNK ? stop - begin : CHUNK, page = begin / size, slot = begin % size, j = 0;
        for (; j < keys; j++) {
            key[j] = cache->k + pages[page] * cache->page_stride + at + slot * dim;
            if (++slot == size)
                slot = 0, page++;
        }
        for (; j % LANES; j++)
            key[j] = key[keys - 1];
        for (int64_t h = 0; h < count; h++)
            attend_chunk(op, q + h * dim, key, keys, cache->v - cache->k, h == 0, seen + h);
    }
    for (int64_t h = 0; h < count; h++) {
        float total = seen[h].total, fade = 1;
        if (op->sinks) { /* one more score, without a value */
            float sink = op->sinks[head + h], high = sink > seen[h].best ? sink : seen[h].best;
            fade = expf(seen[h].best - high);
            total = total * fade + expf(sink - high);
        }
        for (int64_t d = 0; d < dim; d += LANES)
            store(y + h * dim + d, seen[h].out[d / LANES] * fade / total);
    }
}

static void attend(const Attend *op, const Step *step) {
    int64_t me = omp_get_thread_num(), team = omp_get_num_threads(), shared = op->num_heads / op->num_kv_heads, span = 0;
    /* Heads that share keys stay together, unless there is too little work for all threads then. */
    int64_t at_once = step->num_rows * op->num_kv_heads < team ? 1 : shared < HEADS_AT_ONCE ? shared : HEADS_AT_ONCE;
    int64_t parts = (shared + at_once - 1) / at_once, per_row = op->num_kv_heads * parts;
    for (int64_t item = me; item < step->num_rows * per_row; item += team) {
        int64_t row = item / per_row, part = item % per_row, head = part / parts * shared + part % parts * at_once;
        int64_t left = shared - part % parts * at_once;
        while (step->row_start[span + 1] <= row)
            span++;
        int64_t stop = step->context[span] + row - step->row_start[span] + 1;
        int64_t first = op->window && stop > op->window ? stop - op->window : 0;
        attend_heads(op, op->heads + row * op->row + head * op->dim, op->y + (row * op->num_heads + head) * op->dim, head,
                     left < at_once ? left : at_once, step->tables[op->cache.group] + span * step->table_width, first, stop);
    }
}

/* --------------------------------------------------------------------------------------------------------------- rows */

static void embed(const Embed *op, const Step *step) {
    int64_t first, stop;
    share(step->num_rows, &first, &stop);
    for (int64_t row = first; row < stop; row++)
        for (int64_t i = 0; i < op->width; i++)
            op->y[row * op->width + i] = op->table[step->ids[row] * op->width + i] * (float)op->scale;
}

static void norm(const Norm *op, int64_t rows) {
    int64_t first, stop;
    share(rows, &first, &stop);
    for (int64_t row = first; row < stop; row++) {
        const float *x = op->x + row * op->width;
        float *y = op->y + row * op->width, scale = norm_scale(x, op->width, op->eps);
        for (int64_t i = 0; i < op->width; i++)
            y[i] = x[i] * scale * op->weight[i] + (op->add ? y[i] : 0);
    }
}

static void gather(const Gather *op, const Step *step) {
    int64_t first, stop;
    share(step->num_wanted, &first, &stop);
    for (int64_t i = first; i < stop; i++)
        memcpy(op->y + i * op->width, op->x + step->wanted[i] * op->width, 4 * op->width);
}

/* ``scratch``: 64-byte aligned, ``scratch_size`` floats a thread, at least ROWS * (the most inputs + 1). */
void kvasir_run(const void *const *ops, int64_t count, const Step *step, int64_t threads, float *scratch, int64_t scratch_size,
                int64_t tiles) {
#pragma omp parallel num_threads(threads)
    {
        float *mine = scratch + omp_get_thread_num() * scratch_size;
        for (int64_t i = 0; i < count; i++) {
            const void *op = ops[i];
            switch (*(const int64_t *)op) {
            case EMBED: embed(op, step); break;
            case LINEAR: linear(op, ((const Linear *)op)->wanted ? step->num_wanted : step->num_rows, mine, tiles); break;
            case NORM: norm(op, step->num_rows); break;
            case HEADS: heads(op, step); break;
            case ATTEND: attend(op, step); break;
            case GATHER: gather(op, step); break;
            }
#pragma omp barrier
        }
    }
}

/* fp32 weights [parts * outputs, inputs] into bf16 panels of ``padded`` inputs; ``blocks`` of 16 outputs a part, which take turns.
 * Returns whether nothing was lost. */
int64_t kvasir_pack(const float *weights, int64_t row, int64_t column, int64_t parts, int64_t outputs, int64_t inputs, int64_t blocks,
                    int64_t padded, uint32_t *to, int64_t threads) {
    uint32_t lost = 0;
    const uint32_t *w = (const uint32_t *)weights;
#pragma omp parallel for num_threads(threads) reduction(| : lost)
    for (int64_t block = 0; block < blocks * parts; block++) {
        int64_t first = block / parts * LANES, count = outputs - first < LANES ? outputs - first : LANES;
        const uint32_t *from = w + (block % parts * outputs + first) * row;
        uint32_t *words = to + block * padded / 2 * LANES;
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t lane = 0; lane < count; lane++) {
                uint32_t bits = from[lane * row + k * column];
                lost |= bits & 0xffff;
                words[k / 2 * LANES + lane] |= k % 2 ? bits & 0xffff0000u : bits >> 16;
            }
    }
    return !lost;
}

/* Whether products can be made in matrix tiles. */
int64_t kvasir_tiles(void) {
#ifdef TILES
    return tiles_granted();
#else
    return 0;
#endif
}

/* The size of the team that a parallel region gets: more than one only where the threads are torch's. */
int64_t kvasir_team(int64_t threads) {
    int64_t team = 0;
#pragma omp parallel num_threads(threads)
    if (omp_get_thread_num() == 0)
        team = omp_get_num_threads();
    return team;
}

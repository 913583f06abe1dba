/* --------------------------------------------------------------------------------------------------------- products */

#define NEAR_FLOATS (192 << 10) /* of input rows that stay in a core's own cache; as in program.py */

/* R rows times a panel of 2 x LANES outputs. bf16 panel: for each pair of inputs LANES words a block, the first input's
 * weight in the low half: widening is a shift or a mask. fp32 panel: for each input LANES floats a block. */
#define UNROLL _Pragma("GCC unroll 8")
#ifndef AHEAD
#define AHEAD 512
#endif

/* A number in a register: gcc would load it again for each row that it is multiplied with. */
INLINE vec held(vec v) {
#if defined(__AVX2__)
    __asm__("" : "+v"(v));
#elif defined(__aarch64__)
    __asm__("" : "+w"(v));
#endif
    return v;
}

/* ``far``: the panel comes from memory, and not from the first cache. */
INLINE void product_floats(const float *x, int64_t stride, const float *w, int64_t inputs, int rows, int far,
                           vec out[2][TILE]) {
    vec left[TILE], right[TILE];
    UNROLL for (int r = 0; r < rows; r++)
        left[r] = right[r] = splat(0);
    const float *w2 = w + inputs * LANES;
    for (int64_t k = 0; k < inputs; k++, w += LANES, w2 += LANES) {
        vec a = held(load(w)), b = held(load(w2));
        if (far) {
            __builtin_prefetch(w + AHEAD);
            __builtin_prefetch(w2 + AHEAD);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vec p = splat(x[r * stride + k]);
            left[r] = fused(a, p, left[r]);
            right[r] = fused(b, p, right[r]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        out[0][r] = left[r], out[1][r] = right[r];
}

#define PRODUCT(R)                                                                                                     \
    static void product_bf16_##R(const float *x, int64_t stride, const uint32_t *w, int64_t inputs, \
                                 vec out[2][TILE]) { \
        vec left[R], right[R];                                                                                         \
        UNROLL for (int r = 0; r < R; r++)                                                                             \
            left[r] = right[r] = splat(0);                                                                             \
        const uint32_t *w2 = w + inputs / 2 * LANES;                                                                   \
        for (int64_t k = 0; k < inputs; k += 2, w += LANES, w2 += LANES) {                                             \
            uvec a = *(const uvec *)w, b = *(const uvec *)w2;                                                          \
            __builtin_prefetch(w + AHEAD);                                                                             \
            __builtin_prefetch(w2 + AHEAD);                                                                            \
            vec a0 = (vec)(a << 16), a1 = (vec)(a & 0xffff0000u), b0 = (vec)(b << 16), b1 = (vec)(b & 0xffff0000u);    \
            UNROLL for (int r = 0; r < R; r++) {                                                                       \
                vec p = splat(x[r * stride + k]), q = splat(x[r * stride + k + 1]);                                    \
                left[r] = fused(a0, p, left[r]);                                                                       \
                right[r] = fused(b0, p, right[r]);                                                                     \
                left[r] = fused(a1, q, left[r]);                                                                       \
                right[r] = fused(b1, q, right[r]);                                                                     \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int r = 0; r < R; r++)                                                                             \
            out[0][r] = left[r], out[1][r] = right[r];                                                                 \
    }                                                                                                                  \
    static void product_fp32_##R(const float *x, int64_t stride, const float *w, int64_t inputs, vec out[2][TILE]) {   \
        product_floats(x, stride, w, inputs, R, 1, out);                                                               \
    }                                                                                                                  \
    static void product_near_##R(const float *x, int64_t stride, const float *w, int64_t inputs, vec out[2][TILE]) {   \
        product_floats(x, stride, w, inputs, R, 0, out);                                                               \
    }
PRODUCT(1)
PRODUCT(2)
PRODUCT(3)
PRODUCT(4)
#if TILE == 8
PRODUCT(5)
PRODUCT(6)
PRODUCT(7)
PRODUCT(8)
#define ALL(name) {(Product)name##1, (Product)name##2, (Product)name##3, (Product)name##4, (Product)name##5, \
                   (Product)name##6, \
                   (Product)name##7, (Product)name##8}
#else
#define ALL(name) {(Product)name##1, (Product)name##2, (Product)name##3, (Product)name##4}
#endif

/* One row times two panels: each sum waits for the one before it, and the two sums of one panel are too few to hide
 * that. */
static void pair_bf16(const float *x, const void *panels, int64_t inputs, vec out[2][TILE]) {
    const uint32_t *w = panels;
    vec y[4] = {0};
    for (int64_t k = 0; k < inputs; k += 2, w += LANES) {
        vec p = splat(x[k]), q = splat(x[k + 1]);
        UNROLL for (int i = 0; i < 4; i++) {
            uvec both = *(const uvec *)(w + i * (inputs / 2 * LANES));
            __builtin_prefetch(w + i * (inputs / 2 * LANES) + AHEAD);
            y[i] = fused((vec)(both << 16), p, y[i]);
            y[i] = fused((vec)(both & 0xffff0000u), q, y[i]);
        }
    }
    for (int i = 0; i < 4; i++)
        out[i % 2][i / 2] = y[i];
}

static void pair_fp32(const float *x, const void *panels, int64_t inputs, vec out[2][TILE]) {
    const float *w = panels;
    vec y[4] = {0};
    for (int64_t k = 0; k < inputs; k++, w += LANES)
        UNROLL for (int i = 0; i < 4; i++) {
            __builtin_prefetch(w + i * inputs * LANES + AHEAD);
            y[i] = fused(load(w + i * inputs * LANES), splat(x[k]), y[i]);
        }
    for (int i = 0; i < 4; i++)
        out[i % 2][i / 2] = y[i];
}

static void (*const PAIRS_OF_PANELS[2])(const float *, const void *, int64_t, vec[2][TILE]) = {pair_bf16, pair_fp32};

typedef void (*Product)(const float *, int64_t, const void *, int64_t, vec[2][TILE]);
static const Product PRODUCTS[2][TILE] = {ALL(product_bf16_), ALL(product_fp32_)};
static const Product NEAR_PRODUCTS[TILE] = ALL(product_near_);

/* ----------------------------------------------------------------------------------------- products in matrix tiles */

#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>

#define tile_load(t, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define tile_store(t, at, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(at), "r"((int64_t)(stride)) : "memory")
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

/* An fp32 number is the sum of three bf16 ones, exactly: its 24 bits, eight at a time. Row ``r`` into [K / 32][3][16
 * rows][32]. */
static void split(const float *x, int64_t inputs, int64_t r, float *into) {
    for (int64_t k = 0; k < inputs; k += LANES) {
        uint16_t *to = (uint16_t *)into + (k / TILE_INPUTS * 3 * TILE_ROWS + r) * TILE_INPUTS + k % TILE_INPUTS;
        vec left = load(x + k);
        for (int i = 0; i < 3; i++, to += TILE_ROWS * TILE_INPUTS) {
            uvec top = (uvec)left & 0xffff0000u;
            *(half_vec *)to = __builtin_convertvector(top >> 16, half_vec);
            left -= (vec)top;
        }
    }
}

/* The leading parts have sums of their own: a sum waits for the one before it, and small sums lose less to rounding. */
static void product_tiles(const float *x, const char *w, int64_t inputs, int fresh, float out[4][TILE_ROWS][LANES]) {
    const char *w2 = w + inputs * LANES * 2, *part = (const char *)x;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS, w += 1024, w2 += 1024, part += 3 * 1024) {
        for (int i = 0; fresh && i < 1024; i += 64) {
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

INLINE void finish(const Linear *op, int64_t panel, int64_t row, vec left, vec right) {
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

/* Panels first .. stop - 1 for ``count`` rows from ``row`` on, whose inputs are x, padded. */
static void panels_of(const Linear *op, const float *x, int64_t stride, int64_t inputs, int64_t row, int64_t count,
                      int64_t first, int64_t stop) {
    int64_t panel_bytes = inputs * (op->format == BF16 ? 2 : 4) * 2 * LANES;
    vec out[2][TILE];
    for (; count == 1 && first + 2 <= stop; first += 2) {
        PAIRS_OF_PANELS[op->format](x, (const char *)op->weights + first * panel_bytes, inputs, out);
        for (int64_t i = 0; i < 2; i++)
            finish(op, first + i, row, out[0][i], out[1][i]);
    }
    for (int64_t panel = first; panel < stop; panel++)
        for (int64_t r = 0, some; r < count; r += some) { /* tiles of one height, or a row less */
            int64_t tiles = (count - r + TILE - 1) / TILE;
            some = (count - r + tiles - 1) / tiles;
            PRODUCTS[op->format][some - 1](x + r * stride, stride, (const char *)op->weights + panel * panel_bytes,
                                           inputs, out);
            for (int64_t i = 0; i < some; i++)
                finish(op, panel, row + r + i, out[0][i], out[1][i]);
        }
}

#ifdef TILES
/* ``panels_of`` for split rows: 16 of them are 24 * inputs floats. */
static void panels_of_tiles(const Linear *op, const float *parts, int64_t inputs, int64_t row, int64_t count,
                            int64_t first, int64_t stop) {
    float out[4][TILE_ROWS][LANES] __attribute__((aligned(64)));
    tiles_begin(count < TILE_ROWS ? count : TILE_ROWS); /* beyond ``count`` lies anything, and nothing comes of it */
    for (int64_t panel = first; panel < stop; panel++)
        for (int64_t r = 0; r < count; r += TILE_ROWS) {
            int64_t some = count - r < TILE_ROWS ? count - r : TILE_ROWS;
            product_tiles(parts + r * inputs * 3 / 2, (const char *)op->weights + panel * inputs * 4 * LANES, inputs,
                          r == 0, out);
            for (int64_t i = 0; i < some; i++)
                finish(op, panel, row + r + i, load(out[0][i]) + load(out[2][i]), load(out[1][i]) + load(out[3][i]));
        }
    tiles_end();
}
#endif

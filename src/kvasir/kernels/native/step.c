/* A decoder's step on a CPU: a list of operations that one team of threads runs through, a barrier after each.
 *
 * Numbers are fp32. Weights are fp32, bf16 where that loses nothing, or codes of 8 or 4 bits, in panels of 2 x LANES
 * outputs. Every sum has one order, whatever the number of rows and threads, so a row's bits depend on that row alone
 * (and on whether the step has enough rows for matrix tiles). Vectors are the compiler's own, one register each: LANES
 * is 16 with AVX-512, 8 with AVX2, else 4.
 *
 * Legend: T rows, M wanted rows, K inputs, N outputs, H query heads, G KV heads, X = H + 2 G, D head dim, P slots per
 * page. */

#include "common.h"
#include "products.h"
#include "quantized.h"
#include "rounded.h"
#include "linear.h"
#include "codes.h"
#include "attention.h"
#include "decode.h"

/* ------------------------------------------------------------------------------------------------------------- rows */

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

/* Run the operations. ``scratch``: 64-byte aligned, ``scratch_size`` floats a thread: a row of the most inputs, plus
 * the larger of ROWS rows in parts (half as much again) and NEAR_FLOATS; to draw, two rows of logits. */
void kvasir_run(const void *const *ops, int64_t count, const Step *step, int64_t threads, float *scratch,
                int64_t scratch_size,
                int64_t tiles) {
    int64_t next[2] = {0, 0}; /* operations take turns: nobody counts with the other one while it is set back */
#pragma omp parallel num_threads(threads)
    {
        Team team = {.mine = scratch + omp_get_thread_num() * scratch_size};
        for (int64_t i = 0; i < count; i++) {
            const void *op = ops[i];
            team.next = next + i % 2;
            if (omp_get_thread_num() == 0)
                next[(i + 1) % 2] = 0;
            switch (*(const int64_t *)op) {
            case EMBED: embed(op, step); break;
            case LINEAR: linear(op, ((const Linear *)op)->wanted ? step->num_wanted : step->num_rows, &team,
                                tiles); break;
            case NORM: norm(op, ((const Norm *)op)->wanted ? step->num_wanted : step->num_rows); break;
            case HEADS: heads(op, step); break;
            case ATTEND: attend(op, step, &team); break;
            case GATHER: gather(op, step); break;
            case OPEN: open_rows(op, step); break;
            case DRAW: draw(op, step, &team); break;
            }
#pragma omp barrier
        }
    }
}

/* Pack fp32 weights [parts * outputs, inputs] into bf16 panels of ``padded`` inputs, with ``blocks`` of LANES outputs
 * for each part in turn. Returns whether the packing is exact. */
int64_t kvasir_pack(const float *weights, int64_t row, int64_t column, int64_t parts, int64_t outputs, int64_t inputs,
                    int64_t blocks,
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

/* Whether products can use matrix tiles. */
int64_t kvasir_tiles(void) {
#ifdef TILES
    return tiles_granted();
#else
    return 0;
#endif
}

/* Floats of a register, and outputs of a panel's block. */
int64_t kvasir_lanes(void) { return LANES; }

/* The size of the team that a parallel region gets: more than one only where the threads are torch's. */
int64_t kvasir_team(int64_t threads) {
    int64_t team = 0;
#pragma omp parallel num_threads(threads)
    if (omp_get_thread_num() == 0)
        team = omp_get_num_threads();
    return team;
}

/* ------------------------------------------------------------------------------------- products with codes of weights */

/* A block of codes holds, for each group of inputs, its outputs' fp32 scales, with OFFSETS their fp32 offsets, and the
 * codes: a weight is scale * code + offset. I8: LANES signed bytes for each input. U4: LANES words for each eight
 * inputs, the first one lowest; a code keeps its place in the word, so it counts 16^j times as much, and the row's
 * input was made as much smaller. The last one of a word is shifted down.
 *
 * A product is summed in fp32 over a piece of a group, then scaled and added to the total: the order is the same for
 * one row and for many, so a row's bits do not depend on the others. */

enum { PIECE = 128 }; /* most inputs of a piece: its codes as fp32 numbers stay in the first cache */
enum { ONCE = 8 }; /* blocks that one row is multiplied with at a time: each sum waits for the one before it */

typedef int8_t bytes_vec __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE int64_t code_bytes(int64_t format, int64_t inputs) { return inputs * LANES / (format == I8 ? 1 : 2); }

INLINE int64_t head_bytes(const Linear *op) { return (op->offsets == OFFSETS ? 8 : 4) * LANES; }

INLINE vec offset_of(const Linear *op, const char *w) {
    return load((const float *)w + (op->offsets == OFFSETS ? LANES : 0));
}

INLINE int64_t groups_of(const Linear *op, int64_t inputs) { return op->group ? inputs / op->group : 1; }

INLINE vec code_i8(const char *w, int64_t k) {
    w += k * LANES; /* by name: gcc converts bytes one by one */
#if LANES == 16 && defined(__AVX512F__)
    ivec code = (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w));
#elif LANES == 8
    ivec code = (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w));
#elif defined(__aarch64__)
    int32_t four;
    memcpy(&four, w, 4);
    ivec code = (ivec)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
#else
    ivec code = __builtin_convertvector(*(const bytes_vec *)w, ivec);
#endif
    return __builtin_convertvector(code, vec);
}

INLINE vec code_u4(uvec words, int j) { /* of 8; times 16^j, except the last */
    uvec code = words >> 28;
    if (j < 7)
        code = words & (15u << 4 * j);
    return __builtin_convertvector((ivec)code, vec);
}

/* Codes of ``count`` inputs, a multiple of 8, as fp32 numbers. */
INLINE void unpack(int64_t format, const char *w, int64_t count, float *to) {
    for (int64_t k = 0; k < count; k += 8, to += 8 * LANES) {
        if (format == I8) {
            UNROLL for (int j = 0; j < 8; j++)
                store(to + j * LANES, code_i8(w, k + j));
            continue;
        }
        uvec words = *(const uvec *)(w + k / 2 * LANES);
        UNROLL for (int j = 0; j < 8; j++)
            store(to + j * LANES, code_u4(words, j));
    }
}

/* One row times ``blocks`` blocks, ``size`` bytes each. */
INLINE void one_row(const Linear *op, int64_t format, int blocks, const float *x, const char *w, int64_t size,
                    int64_t inputs, vec *y) {
    int64_t group = op->group ? op->group : inputs, groups = inputs / group;
    int64_t head = head_bytes(op);
    const float *sums = x + inputs;
    const char *end = w + size;
    UNROLL for (int i = 0; i < blocks; i++)
        y[i] = splat(0);
    for (int64_t g = 0; g < groups; g++, x += group, w += head + code_bytes(format, group)) {
        for (int64_t first = 0; first < group; first += PIECE) {
            int64_t stop = first + PIECE < group ? first + PIECE : group;
            vec part[ONCE] = {0};
            for (int64_t k = first; k < stop; k += 8) {
                const char *at = w + head + code_bytes(format, k), *next = at + 4 * AHEAD;
                if (next >= end) /* of the first block: in the first of the next ones */
                    next += (blocks - 1) * size;
                UNROLL for (int i = 0; i < blocks; i++)
                    __builtin_prefetch(next + i * size);
                if (format == I8) {
                    UNROLL for (int j = 0; j < 8; j++) {
                        vec p = splat(x[k + j]);
                        UNROLL for (int i = 0; i < blocks; i++)
                            part[i] = fused(code_i8(at + i * size, j), p, part[i]);
                    }
                    continue;
                }
                UNROLL for (int j = 0; j < 8; j++) {
                    vec p = splat(x[k + j]);
                    UNROLL for (int i = 0; i < blocks; i++)
                        part[i] = fused(code_u4(*(const uvec *)(at + i * size), j), p, part[i]);
                }
            }
            UNROLL for (int i = 0; i < blocks; i++)
                y[i] = fused(part[i], load((const float *)(w + i * size)), y[i]);
        }
        for (int i = 0; op->offsets && i < blocks; i++)
            y[i] = fused(offset_of(op, w + i * size), splat(sums[g]), y[i]);
    }
}

/* ``count`` rows, at most ROWS, times one panel: every piece is unpacked once. */
INLINE void some_rows(const Linear *op, int64_t format, const float *x, int64_t stride, const char *w, int64_t size,
                      int64_t inputs, int64_t count, vec (*y)[2]) {
    int64_t group = op->group ? op->group : inputs, head = head_bytes(op);
    float codes[2 * PIECE * LANES] __attribute__((aligned(64)));
    vec part[2][TILE];
    for (int64_t r = 0; r < count; r++)
        y[r][0] = y[r][1] = splat(0);
    for (int64_t start = 0; start < inputs; start += group, w += head + code_bytes(format, group)) {
        for (int64_t first = 0; first < group; first += PIECE) {
            int64_t some = group - first < PIECE ? group - first : PIECE;
            for (int64_t i = 0; i < 2; i++)
                unpack(format, w + i * size + head + code_bytes(format, first), some, codes + i * some * LANES);
            for (int64_t r = 0, rows; r < count; r += rows) {
                int64_t tiles = (count - r + TILE - 1) / TILE;
                rows = (count - r + tiles - 1) / tiles;
                NEAR_PRODUCTS[rows - 1](x + r * stride + start + first, stride, codes, some, part);
                for (int64_t i = 0; i < 2; i++) {
                    vec scale = load((const float *)(w + i * size));
                    for (int64_t t = 0; t < rows; t++)
                        y[r + t][i] = fused(part[i][t], scale, y[r + t][i]);
                }
            }
        }
        for (int64_t i = 0; op->offsets && i < 2; i++) {
            vec offset = offset_of(op, w + i * size);
            for (int64_t r = 0; r < count; r++)
                y[r][i] = fused(offset, splat(x[r * stride + inputs + start / group]), y[r][i]);
        }
    }
}

/* ``panels_of`` for codes. Rows are ``stride`` apart; a row's sums over groups follow its inputs. */
INLINE void panels_of_format(const Linear *op, int64_t format, const float *x, int64_t stride, int64_t inputs,
                             int64_t row, int64_t count, int64_t first, int64_t stop) {
    int64_t size = groups_of(op, inputs) * head_bytes(op) + code_bytes(format, inputs);
    const char *w = (const char *)op->weights + first * 2 * size;
    vec one[ONCE], y[ROWS][2];
    for (int64_t some; first < stop; first += some, w += some * 2 * size) {
        some = count == 1 && 2 * (stop - first) >= ONCE ? ONCE / 2 : 1;
        if (count == 1) {
            if (some > 1)
                one_row(op, format, ONCE, x, w, size, inputs, one);
            else
                one_row(op, format, 2, x, w, size, inputs, one);
            for (int64_t i = 0; i < some; i++)
                finish(op, first + i, row, one[2 * i], one[2 * i + 1]);
            continue;
        }
        for (int64_t r = 0, rows; r < count; r += rows) {
            rows = count - r < ROWS ? count - r : ROWS;
            some_rows(op, format, x + r * stride, stride, w, size, inputs, rows, y);
            for (int64_t i = 0; i < rows; i++)
                finish(op, first, row + r + i, y[i][0], y[i][1]);
        }
    }
}

static void panels_of_codes(const Linear *op, const float *x, int64_t stride, int64_t inputs, int64_t row,
                            int64_t count, int64_t first, int64_t stop) {
    if (op->format == I8)
        panels_of_format(op, I8, x, stride, inputs, row, count, first, stop);
    else
        panels_of_format(op, U4, x, stride, inputs, row, count, first, stop);
}

/* Make a prepared row of ``inputs`` numbers, zeros at its end included, one for codes. */
static void for_codes(const Linear *op, int64_t inputs, float *x) {
    int64_t group = op->group ? op->group : inputs;
    for (int64_t start = 0; op->offsets && start < inputs; start += group) {
        vec total = splat(0);
        for (int64_t k = start; k < start + group; k += LANES)
            total += load(x + k);
        x[inputs + start / group] = op->offsets == CENTRED ? -8 * sum(total) : sum(total);
    }
    static const float SMALLER[8] = {1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1};
    for (int64_t k = 0; op->format == U4 && k < inputs; k++)
        x[k] *= SMALLER[k % 8];
}

#ifdef TILES
/* Codes of ``count`` inputs as bf16, a pair of inputs a word. Every code is exact in its 8 bits. */
INLINE void unpack_pairs(int64_t format, const char *w, int64_t count, uint32_t *to) {
    float codes[8 * LANES];
    for (int64_t k = 0; k < count; k += 8) {
        unpack(format, w + code_bytes(format, k), 8, codes);
        for (int64_t j = 0; j < 8; j += 2, to += LANES) {
            uvec low = *(const uvec *)(codes + j * LANES), high = *(const uvec *)(codes + (j + 1) * LANES);
            *(uvec *)to = low >> 16 | (high & 0xffff0000u);
        }
    }
}

/* ``some_rows`` for split rows. Behind 16 of them are their sums over groups, [groups][16]. */
INLINE void some_tiles(const Linear *op, int64_t format, const float *parts, int64_t stride, const char *w,
                       int64_t size, int64_t inputs, int64_t count, vec (*y)[2]) {
    int64_t group = op->group ? op->group : inputs, head = head_bytes(op);
    uint32_t codes[PIECE * LANES] __attribute__((aligned(64)));
    float out[4][TILE_ROWS][LANES] __attribute__((aligned(64)));
    for (int64_t r = 0; r < count; r++)
        y[r][0] = y[r][1] = splat(0);
    for (int64_t start = 0; start < inputs; start += group, w += head + code_bytes(format, group)) {
        for (int64_t first = 0; first < group; first += PIECE) {
            int64_t some = group - first < PIECE ? group - first : PIECE;
            for (int64_t i = 0; i < 2; i++) {
                const char *at = w + i * size + head + code_bytes(format, first);
                for (int64_t line = 0; line < code_bytes(format, some); line += 64)
                    __builtin_prefetch(at + line + AHEAD_TILES);
                unpack_pairs(format, at, some, codes + i * some / 2 * LANES);
            }
            vec scale[2] = {load((const float *)w), load((const float *)(w + size))};
            for (int64_t r = 0; r < count; r += TILE_ROWS) {
                product_tiles(parts + r / TILE_ROWS * stride + (start + first) * TILE_ROWS * 3 / 2,
                              (const char *)codes, some, 0, out);
                for (int64_t t = 0; t < TILE_ROWS && r + t < count; t++)
                    for (int64_t i = 0; i < 2; i++)
                        y[r + t][i] = fused(load(out[i][t]) + load(out[i + 2][t]), scale[i], y[r + t][i]);
            }
        }
        for (int64_t i = 0; op->offsets && i < 2; i++)
            for (int64_t r = 0; r < count; r++) {
                const float *sums = parts + r / TILE_ROWS * stride + inputs * TILE_ROWS * 3 / 2;
                float x = sums[start / group * TILE_ROWS + r % TILE_ROWS];
                y[r][i] = fused(offset_of(op, w + i * size), splat(x), y[r][i]);
            }
    }
}

static void panels_of_codes_in_tiles(const Linear *op, const float *parts, int64_t stride, int64_t inputs, int64_t row,
                                     int64_t count, int64_t first, int64_t stop) {
    int64_t size = groups_of(op, inputs) * head_bytes(op) + code_bytes(op->format, inputs);
    vec y[ROWS][2];
    tiles_begin(count < TILE_ROWS ? count : TILE_ROWS);
    for (; first < stop; first++)
        for (int64_t r = 0, rows; r < count; r += rows) {
            const char *w = (const char *)op->weights + first * 2 * size;
            rows = count - r < ROWS ? count - r : ROWS;
            if (op->format == I8)
                some_tiles(op, I8, parts + r / TILE_ROWS * stride, stride, w, size, inputs, rows, y);
            else
                some_tiles(op, U4, parts + r / TILE_ROWS * stride, stride, w, size, inputs, rows, y);
            for (int64_t i = 0; i < rows; i++)
                finish(op, first, row + r + i, y[i][0], y[i][1]);
        }
    tiles_end();
}
#endif

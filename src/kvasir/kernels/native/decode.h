/* -------------------------------------------------------------------------------------------- both ends of a decode */

/* The inputs of a step's rows, from the state kept for every sequence (kernels/decode_rows.py). */
static void open_rows(const Open *op, const Step *step) {
    int64_t first, stop;
    share(step->num_rows, &first, &stop);
    for (int64_t i = first; i < stop; i++) {
        int64_t row = op->rows[i];
        op->ids[i] = op->token[row];
        for (int64_t group = 0; group < op->num_groups; group++) {
            int64_t kept = group * op->num_kept + row,
                start = step->positions[i] - (op->forgotten ? op->forgotten[kept] : 0), page = start / op->page_slots;
            ((int32_t *)step->context[group])[i] = start;
            const int32_t *table = op->tables + kept * step->table_width;
            memcpy((int32_t *)step->tables[group] + i * step->table_width, table, 4 * (page + 1));
            ((int64_t *)step->slots[group])[i] = table[page] * op->page_slots + start % op->page_slots;
        }
    }
}

/* ln x of positive normal numbers, to 2 ulp, near 1 too: ln 2^n m with m in [sqrt(1/2), sqrt 2), by the series of
 * atanh: s = (m - 1) / (m + 1), ln m = 2 (s + s^3 / 3 + ..). */
INLINE vec logarithm(vec x) {
    ivec bits = (ivec)x - 0x3f3504f3; /* sqrt(1/2) */
    ivec n = bits >> 23;
    vec m = (vec)((bits & 0x007fffff) + 0x3f3504f3), power = __builtin_convertvector(n, vec);
    vec f = m - 1.0f, s = f / (m + 1.0f), z = s * s, p = splat(2.0f / 11);
    p = p * z + 2.0f / 9;
    p = p * z + 2.0f / 7;
    p = p * z + 2.0f / 5;
    p = p * z + 2.0f / 3;
    return power * 0.693359375f + (2.0f * s + (s * z * p + power * -2.12194440e-4f));
}

/* Gumbel noise of 32-bit words: -ln(-ln(1 - v)), v = (word + 0.5) / 2^32 rounded as in kernels/noise.py. The rounding
 * error of 1 - v cancels in the quotient (Goldberg 1991, theorem 4). */
INLINE vec gumbel(uvec word) {
    vec v = (__builtin_convertvector(word, vec) + 0.5f) * 2.3283064365386963e-10f;
    v = choose(v > 0.999999940395355f, splat(0.999999940395355f), v);
    vec w = 1.0f - v, lost = choose(w == 1.0f, splat(1), 1.0f - w);
    return -logarithm(choose(w == 1.0f, v, -logarithm(w) * (v / lost)));
}

/* Philox4x32-10 of LANES counters (quad + lane, position, 0, 0): word i belongs to token 4 (quad + lane) + i. */
static void philox(uint64_t stream, uint32_t position, uint32_t quad, uvec words[4]) {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES], k0 = stream, k1 = stream >> 32;
    for (int i = 0; i < LANES; i++)
        c0[i] = quad + i, c1[i] = position, c2[i] = c3[i] = 0;
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int i = 0; i < LANES; i++) {
            uint64_t p = (uint64_t)c0[i] * 0xD2511F53u, q = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(q >> 32) ^ c1[i] ^ k0, c1[i] = (uint32_t)q;
            c2[i] = (uint32_t)(p >> 32) ^ c3[i] ^ k1, c3[i] = (uint32_t)p;
        }
    memcpy(words, c0, sizeof c0), memcpy(words + 1, c1, sizeof c1), memcpy(words + 2, c2, sizeof c2),
        memcpy(words + 3, c3, sizeof c3);
}

/* A draw is made here only where rounding cannot change it: noise and weights differ from torch's by a few units in the
 * last place, less than a tenth of these bounds. Otherwise the host draws the row. */
#define CLOSE 5e-5f       /* between two scores */
#define CLOSE_MASS 1e-5   /* between a mass and a share of the total, relative to the total */
#define CLOSE_FLOOR 1e-6f /* between a log-weight and that of min-p, relative */
#define BLOCK (4 * LANES) /* tokens whose noise is made together; DRAW_BLOCK in program.py is a multiple */

/* Log-weights y = (x - best) / temperature and scores y + noise of ``count`` tokens, padded with -inf to whole
 * blocks. */
typedef struct { float *y, *score; int64_t count; } Drawn;

static void fill_scores(Drawn *row, const float *x, float best, float temperature, float floor, uint64_t stream,
                        uint32_t position) {
    for (int64_t at = 0; at < row->count; at += BLOCK) {
        float last[BLOCK], noise[4][LANES];
        const float *from = x + at;
        if (at + BLOCK > row->count) {
            for (int64_t i = 0; i < BLOCK; i++)
                last[i] = at + i < row->count ? from[i] : -INFINITY;
            from = last;
        }
        uvec words[4];
        philox(stream, position, at / 4, words);
        for (int i = 0; i < 4; i++)
            store(noise[i], gumbel(words[i]));
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            vec y = (load(from + i) - best) / temperature, g;
            for (int lane = 0; lane < LANES; lane++)
                g[lane] = noise[lane % 4][i / 4 + lane / 4];
            store(row->y + at + i, y);
            store(row->score + at + i, choose(y < floor, splat(-INFINITY), y + g));
        }
    }
}

/* Tokens of log-weight y come before token ``at`` of ``than`` if they are larger, or equal and of a lower id. */
INLINE ivec before(vec y, int64_t i, float than, int64_t at) {
    if (i + LANES <= at)
        return y >= than;
    if (i >= at)
        return y > than;
    ivec lane = LANE_NUMBERS;
    return (y > than) | ((y == than) & (lane + (int32_t)i < (int32_t)at));
}

/* How many tokens come before ``at`` of ``y``, and the sum of their weights. */
static int64_t ahead(const Drawn *row, float y, int64_t at, double *mass) {
    int64_t found = 0;
    *mass = 0;
    for (int64_t i = 0; i < row->count; i += LANES) {
        vec v = load(row->y + i);
        ivec in = before(v, i, y, at);
        float number = sum((vec)(in & (ivec)splat(1)));
        if (number > 0) {
            found += number;
            *mass += sum((vec)(in & (ivec)exponential(v)));
        }
    }
    return found;
}

/* The sum of the weights of the first ``top_k`` tokens: those above the largest value that ``top_k`` tokens reach, and
 * as many tokens of that value as are missing. */
static double mass_of(const Drawn *row, int64_t top_k) {
    double mass;
    if (top_k >= row->count) {
        ahead(row, -INFINITY, row->count, &mass);
        return mass;
    }
    int32_t low = -1, high = 0x7f800000; /* bits of -y: at ``high`` there are enough, at ``low`` not */
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        ivec found = {0};
        for (int64_t i = 0; i < row->count; i += LANES)
            found -= (*(const ivec *)(row->y + i) & 0x7fffffff) <= middle;
        int64_t number = 0;
        for (int lane = 0; lane < LANES; lane++)
            number += found[lane];
        if (number >= top_k)
            high = middle;
        else
            low = middle;
    }
    uint32_t bits = (uint32_t)high | 0x80000000u;
    float value;
    memcpy(&value, &bits, 4);
    int64_t above = ahead(row, value, 0, &mass);
    return mass + (top_k - above) * (double)expf(value);
}

/* The token with the best score among those that the filters keep; -1: the host must decide. Tokens after a dropped one
 * are dropped, too, so each dropped token narrows the choice. */
static int64_t draw_hot(const Drawn *row, int64_t top_k, double top_p, float floor) {
    float behind = -INFINITY;
    int64_t behind_at = row->count;
    double goal = top_p < 1.0 ? top_p * mass_of(row, top_k) : INFINITY, slack = CLOSE_MASS * goal / top_p;
    for (;;) {
        vec bests = splat(-INFINITY);
        for (int64_t i = 0; i < row->count; i += LANES)
            bests = bigger(choose(before(load(row->y + i), i, behind, behind_at), load(row->score + i),
                                  splat(-INFINITY)), bests);
        float best = bests[0];
        for (int lane = 1; lane < LANES; lane++)
            best = bests[lane] > best ? bests[lane] : best;
        if (best == -INFINITY)
            return -1;
        int64_t token = -1, rivals = 0;
        for (int64_t i = 0; i < row->count; i += LANES) {
            ivec near = (load(row->score + i) >= best - CLOSE) & before(load(row->y + i), i, behind, behind_at);
            float any = sum((vec)(near & (ivec)splat(1)));
            if (any > 0) {
                rivals += any;
                for (int lane = 0; lane < LANES; lane++)
                    if (near[lane] && row->score[i + lane] == best)
                        token = i + lane;
            }
        }
        float y = row->y[token];
        if (top_k < row->count || goal < INFINITY) {
            double mass;
            int64_t rank = ahead(row, y, token, &mass);
            if (rank && goal < INFINITY && rank < top_k && mass > goal - slack && mass < goal + slack)
                return -1;
            if (rank >= top_k || (rank && mass >= goal)) {
                behind = y, behind_at = token;
                continue;
            }
        }
        return rivals == 1 && y >= floor * (1 - CLOSE_FLOOR) ? token : -1;
    }
}

/* Where the first vector begins that holds ``value``, which is there. */
static int64_t first_of(const float *x, int64_t count, float value) {
    for (int64_t i = 0; i + LANES <= count; i += LANES)
        if (sum((vec)((load(x + i) == value) & (ivec)splat(1))) > 0)
            return i;
    return count / LANES * LANES;
}

/* One token a wanted row, as kernels/sample.py defines it. -1: the host must draw, or say what is wrong. */
static void draw(const Draw *op, const Step *step, const Team *team) {
    int64_t count = op->count;
    for (int64_t item = take(team); item < step->num_wanted; item = take(team)) {
        int64_t at = step->wanted[item], row = op->rows[at], token = -1, i = 0;
        const float *x = op->logits + item * op->width;
        vec bests = splat(-INFINITY), wrong = splat(0);
        for (; i + LANES <= count; i += LANES)
            bests = bigger(load(x + i), bests), wrong += load(x + i) - load(x + i);
        float best = -INFINITY, bad = sum(wrong);
        for (int lane = 0; lane < LANES; lane++)
            best = bests[lane] > best ? bests[lane] : best;
        for (; i < op->width; i++) { /* the last tokens, and columns that are none */
            bad += x[i] - x[i];
            best = i < count && x[i] > best ? x[i] : best;
        }
        if (bad == 0 && op->temperature[row] >= 1e-5f) { /* not so with NaN and infinities */
            Drawn drawn = {team->mine, team->mine + (count + BLOCK - 1) / BLOCK * BLOCK, count};
            float floor = op->min_p[row] > 0 ? (float)log((double)op->min_p[row]) : -INFINITY;
            uint64_t stream;
            memcpy(&stream, op->stream + 2 * row, 8);
            fill_scores(&drawn, x, best, op->temperature[row], floor * (1 + CLOSE_FLOOR), stream, step->positions[at]);
            token = draw_hot(&drawn, op->top_k[row], op->top_p[row], floor);
        } else if (bad == 0)
            for (token = first_of(x, count, best); x[token] != best;)
                token++;
        op->tokens[at] = token;
        op->token[row] = token < 0 ? 0 : token;
    }
}

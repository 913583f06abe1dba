/* -------------------------------------------------------------------------------------------------------- attention */

#define UNROLL16 _Pragma("GCC unroll 16")

/* Norm and rotate a projection's queries and keys, turn them into the cache's basis, and write keys and values into
 * their slots. */
static void heads(const Heads *op, const Step *step) {
    int64_t rotated = op->num_heads + (op->writes ? op->num_kv_heads : 0),
        all = rotated + (op->writes ? op->num_kv_heads : 0);
    int64_t dim = op->dim, half = dim / 2, first, stop;
    const Cache *cache = &op->cache;
    share(step->num_rows * all, &first, &stop);
    for (int64_t item = first; item < stop; item++) {
        int64_t row = item / all, head = item % all;
        float *x = op->heads + item * dim, *y = x;
        char *meta = 0, *at = 0;
        if (head >= op->num_heads) {
            int64_t slot = step->slots[cache->group][row], g = (head - op->num_heads) % op->num_kv_heads;
            if (slot < 0)
                continue;
            int64_t page = slot / cache->page_slots * cache->page_stride,
                place = g * cache->page_slots + slot % cache->page_slots;
            at = (head < rotated ? cache->k : cache->v) + page + place * cache->row;
            meta = (head < rotated ? cache->k_meta : cache->v_meta) + page + place * META;
            if (cache->format == NUMBERS)
                y = (float *)at;
        }
        if (head >= rotated) {
            if (y != x)
                memcpy(y, x, 4 * dim);
            else {
                if (cache->turn_v)
                    turn(x, cache->turn_v, dim, cache->order);
                encode(cache->format, x, dim, at, meta);
            }
            continue;
        }
        float scale = op->norm ? norm_scale(x, dim, op->eps) : 1;
        const float *weight = op->norm + (op->norm ? head * dim : 0), *cos = op->angles + step->positions[row] * dim,
            *sin = cos + half;
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            vec a = load(x + i) * scale, b = load(x + i + half) * scale, c = load(cos + i), s = load(sin + i);
            if (op->norm)
                a *= load(weight + i), b *= load(weight + i + half);
            store(y + i, a * c - b * s);
            store(y + i + half, b * c + a * s);
        }
        for (; i < half; i++) {
            float a = x[i] * scale, b = x[i + half] * scale;
            if (op->norm)
                a *= weight[i], b *= weight[i + half];
            y[i] = a * cos[i] - b * sin[i];
            y[i + half] = b * cos[i] + a * sin[i];
        }
        if (cache->turn_k)
            turn(y, cache->turn_k, dim, cache->order);
        if (head >= op->num_heads && y == x)
            encode(cache->format, x, dim, at, meta);
    }
}

/* One query head of one row: the positions that it sees, and the state of its softmax so far: the largest score, and
 * sums weighted by exp(score - best). */
typedef struct {
    const float *q; float *y; int64_t head, first, stop; float best, total; vec out[MAX_DIM / LANES];
} Query;

/* CHUNK positions from a multiple of CHUNK on. Keys low .. high - 1 exist; pointers to others repeat these. Values lie
 * ``apart`` behind keys. */
typedef struct { const float *key[CHUNK]; int64_t begin, low, high, apart; int fresh; } Keys;

INLINE void fetch(const float *at, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LINE)
        __builtin_prefetch(at + d, 0, 2);
}

#define AHEAD_KEYS 16

/* The first query to read keys prefetches the values, and the keys 16 further. */
INLINE void fetch_ahead(const Keys *keys, int64_t j, int64_t count, int64_t dim) {
    for (int64_t i = j; keys->fresh && i < j + count; i++) {
        fetch(keys->key[i] + keys->apart, dim);
        if (i + AHEAD_KEYS < keys->high)
            fetch(keys->key[i + AHEAD_KEYS], dim);
    }
}

/* q . k of LANES keys. */
INLINE vec score(const float *q, const float *const *key, int64_t dim) {
    vec a[LANES];
    _Pragma("GCC unroll 4") for (int i = 0; i < LANES; i += 4) {
        const float *k0 = key[i], *k1 = key[i + 1], *k2 = key[i + 2], *k3 = key[i + 3];
        vec s0 = splat(0), s1 = s0, s2 = s0, s3 = s0;
        for (int64_t d = 0; d < dim; d += LANES) {
            vec part = load(q + d);
            s0 = fused(part, load(k0 + d), s0);
            s1 = fused(part, load(k1 + d), s1);
            s2 = fused(part, load(k2 + d), s2);
            s3 = fused(part, load(k3 + d), s3);
        }
        a[i] = s0, a[i + 1] = s1, a[i + 2] = s2, a[i + 3] = s3;
    }
    return sums(a);
}

INLINE vec scaled(const Attend *op, vec s) {
    s *= (float)op->scale;
    if (op->softcap > 0)
        s = tangent(s / (float)op->softcap) * (float)op->softcap;
    return s;
}

INLINE int64_t low_of(const Query *query, const Keys *keys) {
    return query->first - keys->begin > keys->low ? query->first - keys->begin : keys->low;
}

INLINE int64_t high_of(const Query *query, const Keys *keys) {
    return query->stop - keys->begin < keys->high ? query->stop - keys->begin : keys->high;
}

/* Turn scores from .. to of a chunk into weights, zero outside low .. high. Returns the factor of earlier sums. */
static float weigh(Query *query, int64_t low, int64_t high, int64_t from, int64_t to, float weight[CHUNK]) {
    vec peak = splat(-INFINITY), lane = LANE_NUMBERS, mass = splat(0);
    for (int64_t j = from / LANES * LANES; j < to; j += LANES) {
        vec at = lane + (float)j, s = choose((at >= (float)low) & (at < (float)high), load(weight + j),
                                             splat(-INFINITY));
        store(weight + j, s);
        peak = bigger(s, peak);
    }
    float best = query->best;
    for (int i = 0; i < LANES; i++)
        best = peak[i] > best ? peak[i] : best;
    float fade = best > query->best ? expf(query->best - best) : 1, base = best > -INFINITY ? best : 0;
    for (int64_t j = from / LANES * LANES; j < to; j += LANES) {
        vec p = exponential(load(weight + j) - base);
        store(weight + j, p);
        mass += p;
    }
    query->total = query->total * fade + sum(mass);
    query->best = best;
    return fade;
}

typedef struct { float weight[QUERIES][CHUNK], fade[QUERIES]; } Weights; /* of a chunk's keys, for each query */

static void weigh_one(const Attend *op, Query *query, const Keys *keys, float weight[CHUNK], float *fade) {
    int64_t low = low_of(query, keys), high = high_of(query, keys);
    for (int64_t j = low / LANES * LANES; j < high; j += LANES) {
        fetch_ahead(keys, j, LANES, op->dim);
        store(weight + j, scaled(op, score(query->q, keys->key + j, op->dim)));
    }
    if (low < high)
        *fade = weigh(query, low, high, low, high, weight);
}

static void add_one(const Attend *op, Query *query, const Keys *keys, const float weight[CHUNK], float fade) {
    int64_t parts = op->dim / LANES, low = low_of(query, keys), high = high_of(query, keys), d = 0;
    if (low >= high)
        return;
    for (; d + 4 <= parts; d += 4) {
        vec *out = query->out + d, a = out[0] * fade, b = out[1] * fade, c = out[2] * fade, e = out[3] * fade;
        for (int64_t j = low; j < high; j++) {
            const float *v = keys->key[j] + keys->apart + d * LANES;
            vec w = splat(weight[j]);
            a = fused(load(v), w, a);
            b = fused(load(v + LANES), w, b);
            c = fused(load(v + 2 * LANES), w, c);
            e = fused(load(v + 3 * LANES), w, e);
        }
        out[0] = a, out[1] = b, out[2] = c, out[3] = e;
    }
    for (; d < parts; d++) {
        vec a = query->out[d] * fade;
        for (int64_t j = low; j < high; j++)
            a = fused(load(keys->key[j] + keys->apart + d * LANES), splat(weight[j]), a);
        query->out[d] = a;
    }
}

#if LANES >= 8
/* The keys that any of ``n`` queries sees. */
INLINE void any_of(int n, const Query *query, const Keys *keys, int64_t *low, int64_t *high) {
    *low = CHUNK, *high = 0;
    for (int i = 0; i < n; i++) {
        int64_t from = low_of(query + i, keys), to = high_of(query + i, keys);
        if (from < to)
            *low = from < *low ? from : *low, *high = to > *high ? to : *high;
    }
}

/* Two or four queries at once share what is read. Every sum has the order that it has with one query. */
INLINE void weigh_some(const int n, const Attend *op, Query *query, const Keys *keys, float (*weight)[CHUNK],
                       float *fade) {
    const int some = LANES / n;
    int64_t dim = op->dim, low, high;
    any_of(n, query, keys, &low, &high);
    const float *q[4];
    for (int i = 0; i < n; i++)
        q[i] = query[i].q;
    for (int64_t j = low / some * some; j < high; j += some) {
        const float *const *k = keys->key + j;
        vec a[LANES];
        fetch_ahead(keys, j, some, dim);
        UNROLL16 for (int i = 0; i < LANES; i++)
            a[i] = splat(0);
        for (int64_t d = 0; d < dim; d += LANES) {
            vec x[4], y[8];
            UNROLL16 for (int i = 0; i < n; i++)
                x[i] = load(q[i] + d);
            UNROLL16 for (int i = 0; i < some; i++)
                y[i] = load(k[i] + d);
            UNROLL16 for (int i = 0; i < LANES; i++)
                a[i] = fused(x[i / some], y[i % some], a[i]);
        }
        float s[LANES];
        store(s, scaled(op, sums(a)));
        for (int i = 0; i < n; i++)
            memcpy(weight[i] + j, s + some * i, 4 * some);
    }
    for (int i = 0; i < n && low < high; i++)
        fade[i] = weigh(query + i, low_of(query + i, keys), high_of(query + i, keys), low, high, weight[i]);
}

INLINE void add_some(const int n, const Attend *op, Query *query, const Keys *keys, const float (*weight)[CHUNK],
                     const float *fade) {
    const int some = LANES / n < 4 ? LANES / n : 4;
    int64_t parts = op->dim / LANES, low, high, d = 0;
    any_of(n, query, keys, &low, &high);
    if (low >= high)
        return;
    for (; d + some <= parts; d += some) {
        vec a[LANES];
        UNROLL16 for (int i = 0; i < some * n; i++)
            a[i] = query[i / some].out[d + i % some] * fade[i / some];
        for (int64_t j = low; j < high; j++) {
            const float *at = keys->key[j] + keys->apart + d * LANES;
            vec v[4];
            UNROLL16 for (int i = 0; i < some; i++)
                v[i] = load(at + i * LANES);
            UNROLL16 for (int i = 0; i < some * n; i++)
                a[i] = fused(v[i % some], splat(weight[i / some][j]), a[i]);
        }
        UNROLL16 for (int i = 0; i < some * n; i++)
            query[i / some].out[d + i % some] = a[i];
    }
    for (; d < parts; d++)
        for (int i = 0; i < n; i++) {
            vec a = query[i].out[d] * fade[i];
            for (int64_t j = low; j < high; j++)
                a = fused(load(keys->key[j] + keys->apart + d * LANES), splat(weight[i][j]), a);
            query[i].out[d] = a;
        }
}
#endif

/* The slots ``context`` to ``stop`` of its own span that a tree's row sees: those of its ancestors (bits) in its
 * window, from depth ``first`` on. */
typedef struct { const int64_t *bits, *positions; int64_t context, first, stop; } Tree;

INLINE int is_seen(const Tree *tree, int64_t slot) {
    int64_t i = slot - tree->context;
    return i < 0 || ((tree->bits[i / 64] >> i % 64) & 1 && tree->positions[i] >= tree->first);
}

/* Attention of ``count`` queries of one KV head: several rows, several heads of one row, or both. ``place``: place of
 * the head's first slot in a page. ``mine``: this thread's memory. A chunk of a quantised cache is decoded there, keys
 * and then values, once for all queries; it stays in the first-level cache and is read like a plain cache. */
static void attend_queries(const Attend *op, Query *query, int64_t count, const int32_t *pages, int64_t place,
                           const Tree *tree, float *mine) {
    const Cache *cache = &op->cache;
    int64_t dim = op->dim, size = cache->page_slots, first = query[0].first, stop = query[count - 1].stop;
    int coded = cache->format != NUMBERS;
    for (int64_t i = 0; i < count; i++) {
        query[i].best = -INFINITY, query[i].total = 0;
        memset(query[i].out, 0, 4 * dim);
    }
    Keys keys = {.apart = coded ? 0 : (cache->v - cache->k) / 4};
    Places now, then; /* of this chunk, and about where those of the next one are */
    Coded k = {&now, 0, 0}, v = {&now, cache->v - cache->k, cache->v_meta - cache->k_meta}, next = {&then, 0, 0};
    Weights weights;
    int64_t slot = tree && first > tree->context ? tree->context : first, page = slot / size, offset = slot % size,
        ahead = 0;
    for (int64_t begin = first / CHUNK * CHUNK; begin < stop; begin += CHUNK) {
        int64_t j = begin > first ? 0 : first - begin, end = stop - begin < CHUNK ? stop - begin : CHUNK;
        keys.begin = begin, keys.low = j;
        /* a tree's row counts its ancestors only, so its bits are the same without the other rows */
        for (; j < end && (!tree || slot < tree->stop); slot++) {
            if (!tree || is_seen(tree, slot)) {
                const char *at = cache->k + pages[page] * cache->page_stride + (place + offset) * cache->row;
                if (coded) {
                    now.at[j] = at;
                    now.meta[j] = cache->k_meta + pages[page] * cache->page_stride + (place + offset) * META;
                    then.at[j] = now.at[j] + ahead * cache->page_stride,
                        then.meta[j] = now.meta[j] + ahead * cache->page_stride;
                    at = (const char *)(mine + j * dim);
                }
                keys.key[j++] = (const float *)at;
            }
            if (++offset == size) {
                offset = 0, page++;
                ahead = slot + 1 + CHUNK < stop && !tree ? pages[page + CHUNK / size] - pages[page] : 0;
            }
        }
        keys.high = j;
        if (j == keys.low)
            continue;
        for (int64_t i = 0; i < keys.low; i++)
            keys.key[i] = keys.key[keys.low];
        for (; j % LANES; j++)
            keys.key[j] = keys.key[keys.high - 1];
        if (coded)
            decode(cache->format, k, v, keys.low, keys.high, dim, mine);
        int64_t i = 0;
#if LANES >= 8
        for (; i + 4 <= count; i += 4) /* keys, and then values, stay in the first cache */
            keys.fresh = i == 0 && !coded, weigh_some(4, op, query + i, &keys, weights.weight + i, weights.fade + i);
        for (; i + 2 <= count; i += 2)
            keys.fresh = i == 0 && !coded, weigh_some(2, op, query + i, &keys, weights.weight + i, weights.fade + i);
#endif
        for (; i < count; i++)
            keys.fresh = i == 0 && !coded, weigh_one(op, query + i, &keys, weights.weight[i], weights.fade + i);
        if (coded)
            decode(cache->format, v, next, keys.low, keys.high, dim, mine);
        i = 0;
#if LANES >= 8
        for (; i + 4 <= count; i += 4)
            add_some(4, op, query + i, &keys, (const float (*)[CHUNK])weights.weight + i, weights.fade + i);
        for (; i + 2 <= count; i += 2)
            add_some(2, op, query + i, &keys, (const float (*)[CHUNK])weights.weight + i, weights.fade + i);
#endif
        for (; i < count; i++)
            add_one(op, query + i, &keys, weights.weight[i], weights.fade[i]);
    }
    for (; count--; query++) {
        float total = query->total, fade = 1;
        if (op->sinks) { /* one more score, without a value */
            float sink = op->sinks[query->head], high = sink > query->best ? sink : query->best;
            fade = expf(query->best - high);
            total = total * fade + expf(sink - high);
        }
        for (int64_t d = 0; d < dim; d += LANES)
            store(query->y + d, query->out[d / LANES] * fade / total);
        if (cache->turn_v)
            turn_back(query->y, cache->turn_v, dim, cache->order);
    }
}

/* Each thread takes consecutive rows of one span, with query heads that share a KV head. */
static void attend(const Attend *op, const Step *step, const Team *team) {
    int64_t shared = op->num_heads / op->num_kv_heads, base = 0, span = 0, item = take(team);
    /* Heads that share keys stay together, unless that leaves too little work for all threads. */
    int64_t at_once = step->num_rows * op->num_kv_heads < omp_get_num_threads() ? 1
                      : shared < HEADS_AT_ONCE ? shared : HEADS_AT_ONCE;
    int64_t parts = (shared + at_once - 1) / at_once, per_block = op->num_kv_heads * parts;
    Query query[QUERIES];
    for (; span < step->num_spans; span++) {
        int64_t start = step->row_start[span], length = step->row_start[span + 1] - start,
            context = step->context[op->cache.group][span];
        const int64_t *bits = step->ancestors && length ? step->ancestors + start * step->num_words : 0;
        int is_tree = bits && bits[0] & 1; /* a row's bits count itself, and those of a causal span are zero */
        int64_t height = is_tree ? 1 : QUERIES / at_once, items = (length + height - 1) / height * per_block;
        for (; item < base + items; item = take(team)) {
            int64_t block = (item - base) / per_block, part = (item - base) % per_block, group = part / parts,
                skipped = part % parts * at_once;
            int64_t head = group * shared + skipped, heads = shared - skipped < at_once ? shared - skipped : at_once,
                count = 0;
            int64_t i = block * height, last = i + height < length ? i + height : length;
            Tree tree = {bits + i * step->num_words, step->positions + start, context, 0, context + length};
            for (int64_t row = i; row < last; row++)
                for (int64_t h = head; h < head + heads; h++) {
                    /* where it stands; a tree's first row stands behind the context */
                    int64_t depth = context + (is_tree ? step->positions[start + row] - step->positions[start] : row);
                    Query *each = query + count++;
                    each->q = op->heads + (start + row) * op->row + h * op->dim;
                    each->y = op->y + ((start + row) * op->num_heads + h) * op->dim;
                    each->head = h;
                    each->first = op->window && depth >= op->window ? depth + 1 - op->window : 0;
                    each->stop = depth + 1;
                }
            tree.first = query[0].first;
            attend_queries(op, query, count, step->tables[op->cache.group] + span * step->table_width,
                           group * op->cache.page_slots,
                           is_tree ? &tree : 0, team->mine);
        }
        base += items;
    }
}

/* Drafts from a text's longest known suffix: suffix automata that many texts extend; one call serves a step's
 * sequences.
 *
 * It computes what kvasir/speculation/suffixes.py computes, and explains, with the same numbers: states are made in the
 * same order, a state's edges keep the order in which they came, and ties go the same way.
 *
 * A state takes 24 bytes and holds its edge itself if it has only one, as nearly all do. Several edges lie in a block
 * of words whose room is a power of two: tokens first, then targets, and in large blocks an open hash table of them.
 * Outgrown blocks are kept for other states. An automaton of n tokens has at most 2 n states and 3 n edges.
 *
 * If there is no memory a call returns -1, and the stores of its cursors may only be cleared or freed afterwards. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CONTEXT 32     /* tokens read again by a sequence that lives on into a new generation */
#define MAX_COUNTED 64 /* suffixes of a place whose counts are kept up */
#define BRANCHES 4     /* continuations of a place that are proposed */
#define FLOOR 0.03     /* of the chance that a node is reached and right */
#define INDEXED 6      /* log2 of the room from which on edges have a hash table */
#define SIZES 31
#define TOGETHER 8     /* sequences whose trees grow in turns, so that the memory of one is fetched while others grow */

typedef struct {
    int32_t link, length, count;
    uint32_t degree;
    union {
        struct { int32_t token, target; } one; /* degree 1 */
        struct { uint32_t block, size; } many; /* its first word, and log2 of its room */
    };
} State;

typedef struct {
    State *states;
    int32_t *words;
    int64_t num_states, max_states, num_words, max_words, num_tokens;
    uint32_t unused[SIZES]; /* blocks by size, each with the next one in its first word; 0: none */
} Automaton;

typedef struct {
    Automaton young, old; /* without states: empty, and no old one */
    int64_t age, max_tokens, min_match;
    int64_t *held; /* of all stores: tokens, bytes */
} Store;

typedef struct { /* the layout of the class of the same name in suffixes_native.py */
    Store *store;
    int64_t age;
    int32_t last, state, length, num_context;
    int32_t context[CONTEXT]; /* a ring: the last tokens that were read */
} Cursor;

/* ----------------------------------------------------------------------------------------------------------- memory */

static void *grown(void *memory, int64_t *max, int64_t wanted, int64_t size, int64_t *held) {
    int64_t now = *max ? *max : 64;
    while (now < wanted) now *= 2;
    memory = realloc(memory, (size_t)(now * size));
    if (memory) held[1] += (now - *max) * size, *max = now;
    return memory;
}

static int64_t new_state(Automaton *a, int64_t *held) {
    if (a->num_states == a->max_states) {
        if (a->num_states == INT32_MAX) return -1;
        State *states = grown(a->states, &a->max_states, a->num_states + 1, sizeof(State), held);
        if (!states) return -1;
        a->states = states;
    }
    memset(a->states + a->num_states, 0, sizeof(State));
    return a->num_states++;
}

/* A block with room for 1 << size edges; 0: there is no memory. */
static uint32_t new_block(Automaton *a, uint32_t size, int64_t *held) {
    uint32_t block = size < SIZES ? a->unused[size] : 0;
    if (block) {
        a->unused[size] = (uint32_t)a->words[block];
        return block;
    }
    int64_t first = a->num_words ? a->num_words : 1, needed = (size < INDEXED ? 2ll : 4ll) << size;
    if (size >= SIZES || first + needed > UINT32_MAX) return 0;
    if (first + needed > a->max_words) {
        int32_t *words = grown(a->words, &a->max_words, first + needed, sizeof(int32_t), held);
        if (!words) return 0;
        a->words = words;
    }
    a->num_words = first + needed;
    return (uint32_t)first;
}

static void release(Automaton *a, int64_t *held) {
    held[0] -= a->num_tokens;
    held[1] -= a->max_states * (int64_t)sizeof(State) + a->max_words * (int64_t)sizeof(int32_t);
    free(a->states);
    free(a->words);
    memset(a, 0, sizeof *a);
}

/* ------------------------------------------------------------------------------------------------------------ edges */

static uint32_t hash(int32_t token) { return (uint32_t)token * 2654435769u >> 7; }

static void put(int32_t *index, uint32_t mask, int32_t token, uint32_t place) {
    uint32_t at = hash(token) & mask;
    while (index[at]) at = (at + 1) & mask;
    index[at] = (int32_t)place + 1;
}

/* Address of the edge's target; NULL: there is no such edge. */
static int32_t *find(Automaton *a, int64_t state, int32_t token) {
    State *s = a->states + state;
    if (s->degree <= 1) return s->degree && s->one.token == token ? &s->one.target : NULL;
    uint32_t room = 1u << s->many.size;
    int32_t *tokens = a->words + s->many.block, *targets = tokens + room;
    if (s->many.size < INDEXED) {
        for (uint32_t i = 0; i < s->degree; i++)
            if (tokens[i] == token) return targets + i;
        return NULL;
    }
    const int32_t *index = targets + room;
    uint32_t mask = 2 * room - 1, at = hash(token) & mask; /* at most half full: the search ends */
    for (; index[at]; at = (at + 1) & mask)
        if (tokens[index[at] - 1] == token) return targets + index[at] - 1;
    return NULL;
}

/* Fill a block with edges. */
static void fill(int32_t *block, uint32_t size, const int32_t *tokens, const int32_t *targets, uint32_t count) {
    uint32_t room = 1u << size;
    memcpy(block, tokens, count * sizeof *tokens);
    memcpy(block + room, targets, count * sizeof *targets);
    if (size < INDEXED) return;
    int32_t *index = block + 2 * (size_t)room;
    memset(index, 0, 2 * (size_t)room * sizeof *index);
    for (uint32_t i = 0; i < count; i++) put(index, 2 * room - 1, tokens[i], i);
}

/* Add an edge. */
static int add(Automaton *a, int64_t state, int32_t token, int32_t target, int64_t *held) {
    State *s = a->states + state;
    if (!s->degree) {
        s->one.token = token, s->one.target = target, s->degree = 1;
        return 0;
    }
    if (s->degree == 1) {
        uint32_t block = new_block(a, 1, held);
        if (!block) return -1;
        fill(a->words + block, 1, &s->one.token, &s->one.target, 1);
        s->many.block = block, s->many.size = 1;
    } else if (s->degree == 1u << s->many.size) {
        uint32_t old = s->many.block, size = s->many.size, block = new_block(a, size + 1, held);
        if (!block) return -1;
        fill(a->words + block, size + 1, a->words + old, a->words + old + s->degree, s->degree);
        a->words[old] = (int32_t)a->unused[size], a->unused[size] = old;
        s->many.block = block, s->many.size = size + 1;
    }
    uint32_t room = 1u << s->many.size;
    int32_t *block = a->words + s->many.block;
    block[s->degree] = token, block[room + s->degree] = target;
    if (s->many.size >= INDEXED) put(block + 2 * (size_t)room, 2 * room - 1, token, s->degree);
    s->degree++;
    return 0;
}

/* -------------------------------------------------------------------------------------------------------- automaton */

/* Give those suffixes of ``state`` that now end at more places than the others a state of their own. */
static int64_t split(Automaton *a, int64_t at, int32_t token, int64_t state, int64_t *held) {
    int64_t clone = new_state(a, held);
    if (clone < 0) return -1;
    State *c = a->states + clone, *s = a->states + state;
    *c = *s;
    c->length = a->states[at].length + 1;
    if (s->degree > 1) {
        uint32_t size = 1;
        while (1u << size < s->degree) size++;
        c->degree = 0; /* until it has a block of its own */
        uint32_t block = new_block(a, size, held);
        if (!block) return -1;
        const int32_t *from = a->words + s->many.block;
        fill(a->words + block, size, from, from + (1u << s->many.size), s->degree);
        c->degree = s->degree, c->many.block = block, c->many.size = size;
    }
    s->link = (int32_t)clone;
    for (; at >= 0; at = a->states[at].link) {
        int32_t *target = find(a, at, token);
        if (!target || *target != state) break;
        *target = (int32_t)clone;
    }
    return clone;
}

/* The state of the text that ended in ``last``, one token later. */
static int64_t extend(Automaton *a, int64_t last, int32_t token, int64_t *held) {
    if (!a->num_states) {
        if (new_state(a, held) < 0) return -1;
        a->states[0].link = -1;
    }
    int64_t before = a->num_states, state;
    int32_t *found = find(a, last, token);
    if (found) {
        state = *found;
        if (a->states[state].length != a->states[last].length + 1 && (state = split(a, last, token, state,
            held)) < 0) return -1;
    } else {
        if ((state = new_state(a, held)) < 0) return -1;
        a->states[state].length = a->states[last].length + 1;
        int64_t at = last;
        for (; at >= 0 && !(found = find(a, at, token)); at = a->states[at].link)
            if (add(a, at, token, (int32_t)state, held)) return -1;
        if (at >= 0) {
            int64_t target = *found;
            if (a->states[target].length != a->states[at].length + 1 && (target = split(a, at, token, target,
                held)) < 0) return -1;
            a->states[state].link = (int32_t)target;
        }
    }
    if (a->num_states > before) a->num_tokens++, held[0]++;
    int64_t at = state;
    for (int left = MAX_COUNTED; at > 0 && left; left--, at = a->states[at].link)
        a->states[at].count += a->states[at].count < INT32_MAX;
    return state;
}

/* The longest suffix of a foreign text that is known, one token later. */
static void follow(Automaton *a, int32_t *state, int32_t *length, int32_t token) {
    int32_t *target;
    while (!(target = find(a, *state, token)) && *state > 0) {
        *state = a->states[*state].link;
        *length = a->states[*state].length;
    }
    *state = target ? *target : 0;
    *length = target ? *length + 1 : 0;
}

/* ------------------------------------------------------------------------------------------------------------- read */

static int read_one(Cursor *c, int32_t token) {
    Store *s = c->store;
    int64_t last = extend(&s->young, c->last, token, s->held);
    if (last < 0) return -1;
    c->last = (int32_t)last;
    if (s->old.num_states) follow(&s->old, &c->state, &c->length, token);
    return 0;
}

static int read_all(Cursor *c, const int32_t *tokens, int64_t count) {
    Store *s = c->store;
    for (int64_t i = 0; i < count; i++) {
        if (c->age != s->age) {
            c->age = s->age, c->last = c->state = c->length = 0;
            int32_t first = c->num_context > CONTEXT ? c->num_context - CONTEXT : 0;
            for (int32_t k = first; k < c->num_context; k++)
                if (read_one(c, c->context[k % CONTEXT])) return -1;
        }
        if (read_one(c, tokens[i])) return -1;
        c->context[c->num_context % CONTEXT] = tokens[i];
        if (++c->num_context == 2 * CONTEXT) c->num_context = CONTEXT;
        if (s->young.num_tokens >= s->max_tokens) {
            release(&s->old, s->held);
            s->old = s->young;
            memset(&s->young, 0, sizeof s->young);
            s->age++;
        }
    }
    return 0;
}

/* ---------------------------------------------------------------------------------------------------------- propose */

typedef struct { double survival, est; int32_t parent, depth, token, state; } Node;

typedef struct { /* nodes taken, the best first, and then those that may be next, the best first */
    const Automaton *a;
    Node *nodes;
    int64_t min_match;
    double worth, above; /* the survival of the node below which */
    int32_t taken, known, most, length, max_depth;
    int32_t parent, depth, state, matched, shorter; /* the next ones are looked for; state -1: nowhere */
} Tree;

static void offer(Tree *t, double above, double est, int32_t parent, int32_t depth, int32_t token, int32_t state) {
    double survival = above * est;
    if (survival < FLOOR) return;
    int32_t at = t->known;
    while (at > t->taken && t->nodes[at - 1].survival < survival) at--;
    if (at == t->most) return;
    int32_t moved = t->known - at - (t->known == t->most);
    memmove(t->nodes + at + 1, t->nodes + at, (size_t)moved * sizeof(Node));
    t->nodes[at] = (Node){survival, est, parent, depth, token, state};
    t->known += t->known < t->most;
}

/* Offer what follows the tree's place. */
static void push(Tree *t, const State *s) {
    const Automaton *a = t->a;
    double trust = (double)t->matched / (double)(t->matched + 1);
    if (s->degree == 1) { /* nearly always */
        offer(t, t->above, trust, t->parent, t->depth, s->one.token, s->one.target);
        return;
    }
    const int32_t *tokens = a->words + s->many.block, *targets = tokens + (1u << s->many.size);
    struct { int32_t count; uint32_t place; } best[BRANCHES];
    int num_best = 0;
    int64_t sum = 0;
    for (uint32_t i = 0; i < s->degree; i++) {
        int32_t count = a->states[targets[i]].count;
        sum += count;
        int at = num_best;
        while (at && best[at - 1].count < count) at--;
        if (at == BRANCHES) continue;
        num_best += num_best < BRANCHES;
        for (int k = num_best - 1; k > at; k--) best[k] = best[k - 1];
        best[at].count = count, best[at].place = i;
    }
    trust /= (double)sum;
    for (int i = 0; i < num_best; i++)
        offer(t, t->above, best[i].count * trust, t->parent, t->depth, tokens[best[i].place], targets[best[i].place]);
}

/* Begin with the most likely nodes below a match of ``length`` tokens. */
static void begin(Tree *t, const Automaton *a, int32_t state, int32_t length, int64_t min_match, int32_t max_nodes,
                  int32_t max_depth) {
    t->a = a, t->length = t->matched = length, t->min_match = min_match, t->most = max_nodes, t->max_depth = max_depth;
    t->taken = t->known = t->depth = t->shorter = 0, t->worth = 0, t->above = 1, t->parent = -1;
    t->state = a->num_states && max_depth > 0 && max_nodes > 0 ? state : -1;
    if (t->state >= 0) __builtin_prefetch(a->states + state);
}

/* Grow the tree by one place; its state was being fetched while other trees grew. Returns whether there is more to do.
 * */
static int grow(Tree *t) {
    if (t->state < 0) return 0;
    const State *s = t->a->states + t->state;
    if (!s->degree && t->state > 0) { /* to the longest suffix that was ever followed by something */
        t->state = s->link;
        if (s->link >= 0) __builtin_prefetch(t->a->states + s->link);
        t->shorter = 1;
        return 1;
    }
    if (t->shorter && s->length < t->matched) t->matched = s->length;
    t->shorter = 0;
    if (s->degree && t->matched >= t->min_match) push(t, s);
    t->state = -1;
    while (t->taken < t->known) {
        int32_t node = t->taken++;
        const Node *n = t->nodes + node;
        t->worth += n->survival;
        if (n->depth + 1 >= t->max_depth) continue;
        t->parent = node, t->depth = n->depth + 1, t->state = n->state, t->above = n->survival;
        t->matched = t->length + t->depth;
        __builtin_prefetch(t->a->states + t->state);
        return 1;
    }
    return 0;
}

/* Order the nodes of tree ``t`` so that the likeliest child of each follows it. ``below``, ``beside``: first child and
 * next sibling of each node, and below[-1] for the anchor. */
static void order(const Tree *t, int32_t *below, int32_t *beside, int32_t *walk) {
    for (int32_t i = -1; i < t->taken; i++) below[i] = -1;
    for (int32_t i = 0; i < t->taken; i++) {
        int32_t *at = below + t->nodes[i].parent;
        while (*at >= 0 && t->nodes[*at].est >= t->nodes[i].est) at = beside + *at;
        beside[i] = *at, *at = i;
    }
    int32_t node = below[-1];
    for (int32_t i = 0; i < t->taken; i++) {
        walk[i] = node;
        if (below[node] >= 0) node = below[node];
        else {
            while (node >= 0 && beside[node] < 0) node = t->nodes[node].parent;
            if (node >= 0) node = beside[node];
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------ calls */

/* ``held``: the tokens and bytes of all stores that were given it. NULL: there is no memory. */
Store *kvasir_suffix_new(int64_t max_tokens, int64_t min_match, int64_t *held) {
    Store *s = calloc(1, sizeof *s);
    if (s) s->max_tokens = max_tokens, s->min_match = min_match, s->held = held, held[1] += sizeof *s;
    return s;
}

/* Forget all texts. Cursors start again. */
void kvasir_suffix_clear(Store *s) {
    release(&s->young, s->held);
    release(&s->old, s->held);
    s->age++;
}

void kvasir_suffix_free(Store *s) {
    kvasir_suffix_clear(s);
    s->held[1] -= sizeof *s;
    free(s);
}

int64_t kvasir_suffix_cursor_bytes(void) { return sizeof(Cursor); }

/* Read the new tokens of every cursor, so that sequences learn from each other; those of cursor i end at ends[i] of
 * ``tokens``. Then propose a tree of at most max_nodes[i] nodes and max_depth[i] levels for each; NULL: none.
 * counts[i]: nodes of tree i. The trees follow each other in the ``out`` arrays, which have room for the sum of
 * max_nodes. Returns the number of all nodes. */
int64_t kvasir_suffix_step(Cursor **cursors, int64_t num, const int32_t *tokens, const int32_t *ends,
                           const int32_t *max_nodes,
                           const int32_t *max_depth, int32_t *counts, int32_t *out_tokens, int32_t *out_parents,
                               int32_t *out_depths,
                           double *out_est) {
    int64_t start = 0, total = 0;
    for (int64_t i = 0; i < num; start = ends[i++])
        if (read_all(cursors[i], tokens + start, ends[i] - start)) return -1;
    if (!max_nodes) return 0;
    int32_t most = 1;
    for (int64_t i = 0; i < num; i++)
        if (max_nodes[i] > most) most = max_nodes[i];
    char *scratch = malloc((size_t)most * (2 * TOGETHER * sizeof(Node) + 4 * sizeof(int32_t)) + sizeof(int32_t));
    if (!scratch) return -1;
    Tree trees[2 * TOGETHER];
    for (int k = 0; k < 2 * TOGETHER; k++) trees[k].nodes = (Node *)scratch + (size_t)k * most;
    int32_t *below = (int32_t *)((Node *)scratch + (size_t)2 * TOGETHER * most) + 1;
    int32_t *beside = below + most, *walk = beside + most, *place = walk + most;
    for (int64_t first = 0; first < num; first += TOGETHER) {
        int together = num - first < TOGETHER ? (int)(num - first) : TOGETHER;
        for (int k = 0; k < together; k++) {
            const Cursor *c = cursors[first + k];
            const Store *s = c->store;
            int32_t room = c->age == s->age ? max_nodes[first + k] : 0, deep = max_depth[first + k];
            begin(&trees[2 * k], &s->young, c->last, room > 0 ? s->young.states[c->last].length : 0, s->min_match, room,
                  deep);
            begin(&trees[2 * k + 1], &s->old, c->state, c->length, s->min_match, room, deep);
        }
        for (int busy = 1; busy;) {
            busy = 0;
            for (int k = 0; k < 2 * together; k++) busy |= grow(&trees[k]);
        }
        for (int k = 0; k < together; k++) {
            const Tree *t = &trees[2 * k + (trees[2 * k + 1].worth > trees[2 * k].worth)];
            order(t, below, beside, walk);
            for (int32_t i = 0; i < t->taken; i++) {
                const Node *n = t->nodes + walk[i];
                place[walk[i]] = i;
                out_tokens[total + i] = n->token;
                out_parents[total + i] = n->parent < 0 ? -1 : place[n->parent];
                out_depths[total + i] = n->depth;
                out_est[total + i] = n->est;
            }
            counts[first + k] = t->taken;
            total += t->taken;
        }
    }
    free(scratch);
    return total;
}

/* Draft trees of a step, all at once: the worth of their nodes, the nodes to keep, and learning from verified trees.
 *
 * It computes what kvasir/speculation/controller.py computes tree by tree, and explains, with the same bits: sums run
 * in the same order, and nothing is fused where that could change a rounding (volatile). Tree i has the nodes from
 * ends[i - 1] to ends[i]; its parents are numbered within it, -1 for the anchor, and stand before their children.
 *
 * ``bins``: [right, tried] by depth (DEPTHS) and place of the estimate among its edges (PLACES). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEPTHS 8
#define PLACES 8
#define EST_WEIGHT 2.0   /* powers of two: a bin without evidence changes no bit of what is believed */
#define ABOVE_WEIGHT 8.0
#define FORGETTING 0.995

static const double edges[PLACES - 1] = {0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9};

typedef struct { double key; int64_t node; } Ranked;

static int place_of(double est) {
    int place = 0;
    while (place < PLACES - 1 && edges[place] < est) place++;
    return place;
}

static double hazard(const double *bins, int32_t depth, double est) {
    double known = est < 1.0 ? est : 1.0;
    int place = place_of(est), last = depth < DEPTHS - 1 ? depth : DEPTHS - 1;
    for (int above = 0; above <= last; above++) {
        const double *bin = bins + 2 * (above * PLACES + place);
        double weight = above ? ABOVE_WEIGHT : EST_WEIGHT;
        known = (bin[0] + weight * known) / (bin[1] + weight);
        known = known < 1.0 ? known : 1.0;
    }
    return known;
}

/* Merge sort: falling worth, and where it ties, the order in which the nodes stand. */
static void sort(Ranked *items, Ranked *scratch, int64_t count) {
    Ranked *from = items, *to = scratch;
    for (int64_t width = 1; width < count; width *= 2) {
        for (int64_t low = 0; low < count; low += 2 * width) {
            int64_t middle = low + width < count ? low + width : count,
                high = low + 2 * width < count ? low + 2 * width : count;
            int64_t a = low, b = middle;
            for (int64_t k = low; k < high; k++)
                to[k] = a < middle && (b >= high || from[a].key <= from[b].key) ? from[a++] : from[b++];
        }
        Ranked *other = from;
        from = to, to = other;
    }
    if (from != items) memcpy(items, from, (size_t)count * sizeof *items);
}

/* Rank the nodes by the chance to be reached and right, largest first: ``order``. ``expected`` [nodes + 1]: ``first``
 * plus the chances of the best n nodes. Returns -1 if there is no memory. */
int64_t kvasir_forest_rank(int64_t num, const int32_t *ends, const int32_t *parents, const int32_t *depths,
                           const double *est,
                           const double *bins, double first, int32_t *order, double *expected) {
    int64_t count = num ? ends[num - 1] : 0, start = 0;
    Ranked *items = malloc((size_t)(count ? count : 1) * (2 * sizeof(Ranked) + sizeof(double)));
    if (!items) return -1;
    double *survival = (double *)(items + 2 * count);
    for (int64_t i = 0; i < num; start = ends[i++])
        for (int64_t node = start; node < ends[i]; node++) {
            double own = hazard(bins, depths[node], est[node]);
            survival[node] = own * (parents[node] >= 0 ? survival[start + parents[node]] : 1.0);
            items[node] = (Ranked){-survival[node], node};
        }
    sort(items, items + count, count);
    expected[0] = first;
    for (int64_t n = 0; n < count; n++) {
        expected[n + 1] = expected[n] - items[n].key;
        order[n] = (int32_t)items[n].node;
    }
    free(items);
    return 0;
}

/* Keep the nodes order[:count]. A tree that keeps all nodes stays as it is; of a chain the leading part stays; any
 * other tree is walked from the anchor, the likeliest child of each node first. ``out_ends``: as ``ends``. Returns -1
 * if there is no memory. */
int64_t kvasir_forest_keep(int64_t num, const int32_t *ends, const int32_t *tokens, const int32_t *parents,
                           const int32_t *depths,
                           const double *est, const int32_t *order, int64_t count, int32_t *out_ends,
                               int32_t *out_tokens, int32_t *out_parents,
                           int32_t *out_depths, double *out_est) {
    int64_t all = num ? ends[num - 1] : 0, start = 0, total = 0;
    int32_t *below = malloc((size_t)(3 * all + 1) * sizeof *below + (size_t)all);
    if (!below) return -1;
    int32_t *beside = below + all + 1, *place = beside + all;
    uint8_t *kept = (uint8_t *)(place + all);
    memset(kept, 0, (size_t)all);
    for (int64_t n = 0; n < count; n++) kept[order[n]] = 1;
    below++; /* below[-1]: of the anchor */
    for (int64_t i = 0; i < num; start = ends[i++]) {
        int32_t size = (int32_t)(ends[i] - start), chosen = 0;
        for (int32_t node = 0; node < size; node++) chosen += kept[start + node];
        int32_t node = -1;
        below[-1] = -1;
        for (int32_t n = 0; n < size; n++) below[n] = -1;
        for (int32_t n = 0; n < size; n++) {
            if (!kept[start + n]) continue;
            int32_t *at = below + parents[start + n];
            while (*at >= 0 && est[start + *at] >= est[start + n]) at = beside + *at;
            beside[n] = *at, *at = n;
        }
        for (int32_t k = 0; k < chosen; k++) {
            if (chosen == size) node = k;
            else if (below[node] >= 0) node = below[node];
            else {
                while (beside[node] < 0) node = parents[start + node];
                node = beside[node];
            }
            place[node] = k;
            int64_t from = start + node, to = total + k;
            out_tokens[to] = tokens[from], out_depths[to] = depths[from], out_est[to] = est[from];
            out_parents[to] = parents[from] < 0 ? -1 : place[parents[from]];
        }
        total += chosen;
        out_ends[i] = (int32_t)total;
    }
    free(below - 1);
    return total;
}

/* Learn from verified trees. Tree which[k] was right at the nodes on the path that ends at path_ends[k] of ``rows``.
 * rows[first] is the anchor's row; a node's row minus the anchor's is its number plus 1. Every child of a node on the
 * path was tried. ``by_depth``: [tried, accepted], with room for all depths. Returns the number of nodes of these
 * trees. */
int64_t kvasir_forest_learn(int64_t num, const int32_t *which, const int32_t *rows, const int32_t *path_ends,
                            const int32_t *ends,
                            const int32_t *parents, const int32_t *depths, const double *est, double *bins,
                                int64_t *by_depth) {
    int64_t total = 0;
    for (int64_t k = 0, first = 0; k < num; first = path_ends[k++]) {
        int64_t start = which[k] ? ends[which[k] - 1] : 0, last = path_ends[k], at = first + 1;
        int32_t size = (int32_t)(ends[which[k]] - start), tried = -1;
        total += size;
        for (int32_t node = 0; node < size; node++) {
            int32_t parent = parents[start + node], depth = depths[start + node];
            int right = at < last && rows[at] - rows[first] - 1 == node;
            int on_path = parent == -1;
            for (int64_t p = first + 1; !on_path && p < last; p++) on_path = rows[p] - rows[first] - 1 == parent;
            at += right; /* parents stand before children, so a path rises */
            if (!on_path) continue;
            double *bin = bins + 2 * ((depth < DEPTHS - 1 ? depth : DEPTHS - 1) * PLACES + place_of(est[start + node]));
            volatile double before = FORGETTING * bin[0], count = FORGETTING * bin[1];
            bin[0] = before + right;
            bin[1] = count + 1.0;
            if (depth > tried) by_depth[2 * depth]++, tried = depth;
            by_depth[2 * depth + 1] += right;
        }
    }
    return total;
}

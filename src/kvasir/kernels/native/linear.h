/* --------------------------------------------------------------------------------------------- rows by all panels */

/* The form in which a product takes its rows: as stored, normed and padded, or as parts for tiles. A row has ``padded``
 * inputs and begins ``stride`` floats after the one before it, 16 rows in parts ``tall`` floats. */
typedef struct { int64_t padded, stride, tall, copied, tiles; } Shape;

enum { TILE_GROUP = 32 }; /* inputs of a matrix tile, which groups are a multiple of */

static const float *prepare(const Linear *op, const Shape *shape, int64_t row, float *into) { /* one row, padded */
    int64_t inputs = op->num_inputs;
    const float *x = op->x + row * inputs;
    if (!shape->copied)
        return x;
    float scale = op->norm ? norm_scale(x, inputs, op->eps) : 1;
    for (int64_t k = 0; k < inputs; k++)
        into[k] = op->norm ? x[k] * scale * op->norm[k] : x[k];
    memset(into + inputs, 0, 4 * (shape->padded - inputs));
    if (op->rounded)
        round_inputs(shape->padded, into);
    else if (op->format >= I8)
        for_codes(op, shape->padded, into);
    return into;
}

/* Prepare ``count`` rows from ``row`` on, after a row of scratch at ``mine``. */
static const float *prepare_rows(const Linear *op, const Shape *shape, int64_t row, int64_t count, float *mine) {
    float *to = mine + shape->stride;
    for (int64_t r = 0; r < count; r++) {
#ifdef TILES
        if (shape->tiles) {
            float *tall = to + r / TILE_ROWS * shape->tall;
            const float *x = prepare(op, shape, row + r, mine);
            split(x, shape->padded, r % TILE_ROWS, tall);
            tall += TILE_ROWS * shape->padded * 3 / 2 + r % TILE_ROWS;
            for (int64_t g = 0; op->offsets && g < groups_of(op, shape->padded); g++)
                tall[g * TILE_ROWS] = x[shape->padded + g];
            continue;
        }
#endif
        if (!shape->copied)
            return op->x + row * op->num_inputs;
        prepare(op, shape, row + r, to + r * shape->stride);
    }
    return to;
}

static void panels(const Linear *op, const Shape *shape, const float *x, int64_t row, int64_t count, int64_t first,
                   int64_t stop) {
#ifdef TILES
    if (shape->tiles && op->format >= I8) {
        panels_of_codes_in_tiles(op, x, shape->tall, shape->padded, row, count, first, stop);
        return;
    }
    if (shape->tiles) {
        panels_of_tiles(op, x, shape->padded, row, count, first, stop);
        return;
    }
#endif
    if (op->rounded)
        panels_of_rounded(op, x, shape->stride, shape->padded, row, count, first, stop);
    else if (op->format >= I8)
        panels_of_codes(op, x, shape->stride, shape->padded, row, count, first, stop);
    else
        panels_of(op, x, shape->stride, shape->padded, row, count, first, stop);
}

/* With few rows, threads share the panels, and each prepares all rows. With many, each takes the next block of rows,
 * and where blocks are few part of the panels: a block stays in a core's own cache while panels pass by. */
static void linear(const Linear *op, int64_t rows, const Team *team, int64_t tiles_from) {
    int64_t blocks = (op->num_outputs + LANES - 1) / LANES, num_panels = op->activation ? blocks : (blocks + 1) / 2,
        first, stop;
    Shape shape = {.padded = op->format == FP32 ? op->num_inputs : (op->num_inputs + 31) / 32 * 32};
    int64_t more = op->rounded ? 2 * shape.padded / ROUNDED : op->offsets ? groups_of(op, shape.padded) : 0;
    int64_t sums = (more + LINE - 1) / LINE * LINE;
    shape.stride = shape.padded + sums;
    shape.tall = 16 * (shape.padded * 3 / 2 + sums);
    shape.tiles = tiles_from && op->format != FP32 && rows >= tiles_from && op->group % TILE_GROUP == 0 && !op->rounded;
    shape.copied = op->norm || shape.padded > op->num_inputs || op->format == U4 || op->offsets || op->rounded;
    if (rows <= ROWS) {
        share(num_panels, &first, &stop);
        if (first < stop && rows)
            panels(op, &shape, prepare_rows(op, &shape, 0, rows, team->mine), 0, rows, first, stop);
        return;
    }
    int64_t threads = omp_get_num_threads(), height = (rows + 2 * threads - 1) / (2 * threads),
        most = NEAR_FLOATS * 2 / 3 / shape.stride;
    height = (height < most ? height : most) / ROWS * ROWS;
    height = height < ROWS ? ROWS : height;
    int64_t high = (rows + height - 1) / height,
        across = high == threads || high >= 2 * threads ? 1 : (2 * threads + high - 1) / high;
    const float *x = 0;
    for (int64_t item, held = -1; (item = take(team)) < high * across;) {
        int64_t row = item / across * height, count = rows - row < height ? rows - row : height, part = item % across;
        first = num_panels * part / across, stop = num_panels * (part + 1) / across;
        if (first == stop)
            continue;
        if (held != row)
            x = prepare_rows(op, &shape, row, count, team->mine), held = row;
        panels(op, &shape, x, row, count, first, stop);
    }
}

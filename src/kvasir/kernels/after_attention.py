"""All that a layer does after attention for a few rows, in one kernel: o, residual, norm, gate and up, down, residual.

For a small model these products take less time than the launches between them: streaming the weights of Qwen3-0.6B's layer
takes 5.5 us, five kernels three times that. Here one program a multiprocessor stays for all of them, and a *phase* begins when
the programs have counted each other's tiles of the phase before:

1. o: tiles of outputs times splits of K. The last program of a tile adds the parts in order and the residual to h, and leaves
   h times the norm's weight and the tile's sum of squares of each row. The norm's other factor, 1 / rms, waits for all tiles.
2. gate and up: tiles of both, over all of K; times 1 / rms, and activation(gate) * up.
3. down: as o.

No weight depends on another kernel, so a program asks for all of its weights to come to the L2 cache before it waits for
attention's end, and holds the first block of the next phase's before it waits for the others. What it reads of other programs'
results it reads from L2 (``.cg``): its L1 cache may hold what was there before.

Every program must be resident, or those that are would wait for ever: one a multiprocessor is, once earlier kernels end, for these
wait for nobody. Later ones cannot take its place: they start when every program here has (``gdc_launch_dependents``). Two launches
that may run at once could each hold half of the GPU, so all of a process go on one stream.

No atomics but counts: the same bits every time. Bytes: (E x A + 3 x F x E) x itemsize.

Legend: T rows, E model dim, A inputs of o, F width of the feed-forward block, N outputs and K inputs of one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvasir.kernels._triton import INTERPRETED, cdiv, jit, next_power_of_2, pdl, tl
from kvasir.kernels.activation import ACTIVATIONS, KINDS, activate
from kvasir.kernels.gemv import gemv_reference
from kvasir.kernels.hardware import multiprocessors

MAX_ROWS = 64
ALIGNED = 16  # elements, of which every width and every share of K is a multiple


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of a product: outputs of a tile, the block of K that is multiplied at a time, parts of K."""

    block_n: int
    block_k: int
    splits: int = 1


@dataclass(frozen=True, slots=True)
class Config:
    """``gate_up``: half of a tile's outputs are gates; unsplit. ``slices``: every warp multiplies its own slice of a block of K, which
    suits 16 rows: whole warps then do not repeat each other's work; 1, or as many as warps. ``prefetch``: weights come to L2 ahead."""

    o: Tiling
    gate_up: Tiling
    down: Tiling
    warps: int = 8
    slices: int = 1
    prefetch: bool = True


def after_attention_reference(x_TA: torch.Tensor, h_TE: torch.Tensor, o_EA: torch.Tensor, norm: tuple[torch.Tensor, float],
                              gate_up_NE: torch.Tensor, down_EF: torch.Tensor, activation: str) -> torch.Tensor:
    """The residual stream [T, E] after this layer. ``norm``: weight [E] and eps of an RMS norm; gate and up are halves of [2 F, E]."""
    h_TE = gemv_reference(x_TA, o_EA, residual_TO=h_TE)
    inner_TF = gemv_reference(h_TE, gate_up_NE, norm=norm, activation=activation)
    return gemv_reference(inner_TF, down_EF, residual_TO=h_TE)


# ------------------------------------------------------------------------------------------------------------- kernel


@jit
def _outputs(i, tile, N: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The rows of W that are i of a tile, and which exist."""
    if GATED:
        f = tile * (BLOCK_N // 2) + i % (BLOCK_N // 2)
        return f + i // (BLOCK_N // 2) * (N // 2), f < N // 2
    else:
        n = tile * BLOCK_N + i
        return n, n < N


@jit
def _inputs(start, BLOCK_K: tl.constexpr, SLICES: tl.constexpr):
    """A block of K: [BLOCK_K], or [SLICES, BLOCK_K / SLICES]."""
    if SLICES == 1:
        return start + tl.arange(0, BLOCK_K)
    else:
        WIDTH: tl.constexpr = BLOCK_K // SLICES
        return start + tl.arange(0, SLICES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@jit
def _weights(w_ptr, tile, split, ahead, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr,
             SLICES: tl.constexpr, GATED: tl.constexpr):
    """A block of W, ``ahead`` of its share's start: [BLOCK_N, BLOCK_K], or its slices. Read once, it pushes nothing out of L2."""
    n, live = _outputs(tl.arange(0, BLOCK_N), tile, N, BLOCK_N, GATED)
    k = _inputs(split * SHARE + ahead, BLOCK_K, SLICES)
    inside = k < tl.minimum((split + 1) * SHARE, K)
    if SLICES == 1:
        at, held = w_ptr + n[:, None] * K + k[None, :], live[:, None] & inside[None, :]
    else:
        at, held = w_ptr + (n * K)[None, :, None] + k[:, None, :], live[None, :, None] & inside[:, None, :]
    if N % BLOCK_N == 0 and SHARE % BLOCK_K == 0 and K % SHARE == 0:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=held, other=0.0, eviction_policy="evict_first")


@jit
def _columns(x_ptr, x_row, split, ahead, rows, K: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr,
             SLICES: tl.constexpr):
    """The same block of x^T: [BLOCK_K, ROWS], or its slices."""
    m = tl.arange(0, ROWS)
    k = _inputs(split * SHARE + ahead, BLOCK_K, SLICES)
    inside = k < tl.minimum((split + 1) * SHARE, K)
    if SLICES == 1:
        at, held = x_ptr + m[None, :] * x_row + k[:, None], (m < rows)[None, :] & inside[:, None]
    else:
        at, held = x_ptr + m[None, None, :] * x_row + k[:, :, None], (m < rows)[None, None, :] & inside[:, :, None]
    return tl.load(at, mask=held, other=0.0, cache_modifier=".cg")


@jit
def _product(w, x_ptr, x_row, w_ptr, tile, split, rows, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             SHARE: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, GATED: tl.constexpr):
    """[BLOCK_N, ROWS] fp32 of a tile over a share of K, of which w is the first block."""
    x = _columns(x_ptr, x_row, split, 0, rows, K, BLOCK_K, SHARE, ROWS, SLICES)
    if SLICES == 1:
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        acc = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    for ahead in range(BLOCK_K, SHARE, BLOCK_K):
        next_w = _weights(w_ptr, tile, split, ahead, N, K, BLOCK_N, BLOCK_K, SHARE, SLICES, GATED)  # on its way while this block is multiplied
        next_x = _columns(x_ptr, x_row, split, ahead, rows, K, BLOCK_K, SHARE, ROWS, SLICES)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w, x = next_w, next_x
    acc = tl.dot(w, x, acc, input_precision="ieee")
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    return acc


@jit
def _residual(h_ptr, h_row, scale_ptr, tile, rows, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """A tile of h, asked for before the product that it waits for, and the norm's weights."""
    m = tl.arange(0, ROWS)
    n, live = _outputs(tl.arange(0, BLOCK_N), tile, N, BLOCK_N, False)
    h = tl.load(h_ptr + m[None, :] * h_row + n[:, None], mask=live[:, None] & (m < rows)[None, :], other=0.0, cache_modifier=".cg")
    return h, tl.load(scale_ptr + n, mask=live, other=0.0)


@jit
def _add(y, h, scale, h_ptr, h_row, part_ptr, arrived_ptr, scaled_ptr, squares_ptr, tile, split, rows, N: tl.constexpr, BLOCK_N: tl.constexpr,
         SPLITS: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, COUNT: tl.constexpr):
    """A part of a tile is done: whoever is the tile's last adds all of them to h. NORM: and begins the norm of h."""
    i, m = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    part = part_ptr + tile * (SPLITS * BLOCK_N * ROWS) + m[None, :] * BLOCK_N + i[:, None]
    some = (m < rows)[None, :]
    last = True
    if SPLITS > 1:
        tl.store(part + split * (BLOCK_N * ROWS), y, mask=some)
        tl.debug_barrier()  # the whole program's part is stored before it counts
        last = tl.atomic_add(arrived_ptr + 1 + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        n, live = _outputs(i, tile, N, BLOCK_N, False)
        held = live[:, None] & some
        if SPLITS > 1:
            tl.store(arrived_ptr + 1 + tile, 0)
            y = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for s in tl.static_range(SPLITS):
                y += tl.load(part + s * (BLOCK_N * ROWS), mask=some, other=0.0, cache_modifier=".cg")
        rounded = (y + h.to(tl.float32)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + m[None, :] * h_row + n[:, None], rounded, mask=held)
        if NORM:  # of what the stream holds
            wide = rounded.to(tl.float32)
            tl.store(scaled_ptr + m[None, :] * N + n[:, None], (wide * scale.to(tl.float32)[:, None]).to(scaled_ptr.dtype.element_ty), mask=held)
            tl.store(squares_ptr + tile * ROWS + m, tl.sum(wide * wide, 0))
        if COUNT:
            _arrive(arrived_ptr)


@jit
def _to_residual(w, x_ptr, x_row, w_ptr, h_ptr, h_row, part_ptr, arrived_ptr, scale_ptr, scaled_ptr, squares_ptr, rows, N: tl.constexpr,
                 K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
                 SLICES: tl.constexpr, PROGRAMS: tl.constexpr, NORM: tl.constexpr, COUNT: tl.constexpr):
    """h += x W^T; ``w`` is the first block of the program's first task."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TASKS: tl.constexpr = TILES * SPLITS
    first = tl.minimum(tl.program_id(0), TASKS - 1)
    h, scale = _residual(h_ptr, h_row, scale_ptr, first % TILES, rows, N, BLOCK_N, ROWS)
    y = _product(w, x_ptr, x_row, w_ptr, first % TILES, first // TILES, rows, N, K, BLOCK_N, BLOCK_K, SHARE, ROWS, SLICES, False)
    if tl.program_id(0) < TASKS:
        _add(y, h, scale, h_ptr, h_row, part_ptr, arrived_ptr, scaled_ptr, squares_ptr, first % TILES, first // TILES, rows, N, BLOCK_N, SPLITS,
             ROWS, NORM, COUNT)
    if TASKS > PROGRAMS:
        for task in range(tl.program_id(0) + PROGRAMS, TASKS, PROGRAMS):
            w = _weights(w_ptr, task % TILES, task // TILES, 0, N, K, BLOCK_N, BLOCK_K, SHARE, SLICES, False)
            h, scale = _residual(h_ptr, h_row, scale_ptr, task % TILES, rows, N, BLOCK_N, ROWS)
            y = _product(w, x_ptr, x_row, w_ptr, task % TILES, task // TILES, rows, N, K, BLOCK_N, BLOCK_K, SHARE, ROWS, SLICES, False)
            _add(y, h, scale, h_ptr, h_row, part_ptr, arrived_ptr, scaled_ptr, squares_ptr, task % TILES, task // TILES, rows, N, BLOCK_N, SPLITS,
                 ROWS, NORM, COUNT)


@jit
def _inner(w, x_ptr, w_ptr, inner_ptr, arrived_ptr, squares_ptr, tile, eps, rows, E: tl.constexpr, F: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_K: tl.constexpr, TILES_PAD: tl.constexpr, O_TILES: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, KIND: tl.constexpr,
           COUNT: tl.constexpr):
    """activation(gate) * up of the norm of h for a tile; a tile beyond the last is no one's."""
    HALF: tl.constexpr = BLOCK_N // 2
    TILES: tl.constexpr = (F + HALF - 1) // HALF
    m, t = tl.arange(0, ROWS), tl.arange(0, TILES_PAD)
    squares = tl.load(squares_ptr + t[:, None] * ROWS + m[None, :], mask=(t < O_TILES)[:, None], other=0.0, cache_modifier=".cg")
    both = _product(w, x_ptr, E, w_ptr, tl.minimum(tile, TILES - 1), 0, rows, 2 * F, E, BLOCK_N, BLOCK_K, E, ROWS, SLICES, True)
    factor = tl.rsqrt(tl.sum(squares, 0) / E + eps)[None, :]
    gate, up = tl.split(tl.permute(tl.reshape(both, [2, HALF, ROWS]), (1, 2, 0)))
    if tile < TILES:
        f = tile * HALF + tl.arange(0, HALF)
        inner = activate(gate * factor, up * factor, KIND).to(inner_ptr.dtype.element_ty)
        tl.store(inner_ptr + m[None, :] * F + f[:, None], inner, mask=(f < F)[:, None] & (m < rows)[None, :])
        if COUNT:
            _arrive(arrived_ptr)


@jit
def _arrive(arrived_ptr):
    """Count a tile, all of whose results are stored."""
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="release")


@jit
def _wait(arrived_ptr, goal):
    """Until so many tiles were counted. One thread looks; the others stand at a barrier."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred other, early;
        .reg .b32 seen;
        mov.u32 seen, %tid.x;
        setp.ne.u32 other, seen, 0;
        @other bra SEEN;
        LOOK:
        ld.acquire.gpu.global.b32 seen, [$1];
        setp.lt.s32 early, seen, $2;
        @early bra LOOK;
        SEEN:
        mov.u32 $0, 0;
        }""", "=r,l,r", [arrived_ptr, goal], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@jit
def _prefetch(w_ptr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
              PROGRAMS: tl.constexpr):
    """Ask for the weights of all tasks of a phase to come to L2: a thread for a row of a tile, the same number in every warp, for a warp's
    threads ask one after the other."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    SHARED: tl.constexpr = (BLOCK_N + tl.extra.cuda.num_warps() - 1) // tl.extra.cuda.num_warps()
    thread = tl.arange(0, tl.extra.cuda.num_threads())
    i = thread // 32 * SHARED + thread % 32
    for task in range(tl.program_id(0), TILES * SPLITS, PROGRAMS):
        n, live = _outputs(i, task % TILES, N, BLOCK_N, GATED)
        start = task // TILES * SHARE
        size = tl.minimum(SHARE, K - start) * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
        asked = tl.where((thread % 32 < SHARED) & (i < BLOCK_N) & live, size, 0)
        tl.inline_asm_elementwise(
            """{
            .reg .pred asked;
            setp.gt.s32 asked, $2, 0;
            @asked cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""", "=r,l,r", [w_ptr + n * K + start, asked], dtype=tl.int32, is_pure=False, pack=1)


@jit(do_not_specialize=["rows"])
def _after_attention(x_ptr, h_ptr, o_ptr, scale_ptr, gate_up_ptr, down_ptr, part_ptr, scaled_ptr, squares_ptr, inner_ptr, arrived_ptr, eps, rows,
                     x_row, h_row, E: tl.constexpr, A: tl.constexpr, F: tl.constexpr, O_N: tl.constexpr, O_K: tl.constexpr,
                     O_SHARE: tl.constexpr, O_SPLITS: tl.constexpr, G_N: tl.constexpr, G_K: tl.constexpr, D_N: tl.constexpr,
                     D_K: tl.constexpr, D_SHARE: tl.constexpr, D_SPLITS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr,
                     TILES_PAD: tl.constexpr, PROGRAMS: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
                     PREFETCH: tl.constexpr, PDL: tl.constexpr):
    """Phases ``FIRST`` to ``LAST``; programs wait for each other where there is more than one. ``arrived`` [1 + tiles]: tiles that are
    done, and parts of each; zeros between launches."""
    TOGETHER: tl.constexpr = FIRST < LAST
    O_TILES: tl.constexpr = (E + O_N - 1) // O_N
    G_TILES: tl.constexpr = (2 * F + G_N - 1) // G_N
    D_TILES: tl.constexpr = (E + D_N - 1) // D_N
    pid = tl.program_id(0)
    if PDL:  # it takes effect when every program is here
        tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH:
        if O_SHARE > O_K or O_TILES * O_SPLITS > PROGRAMS:
            _prefetch(o_ptr, E, A, O_N, O_SHARE, O_SPLITS, False, PROGRAMS)
        _prefetch(gate_up_ptr, 2 * F, E, G_N, E, 1, True, PROGRAMS)
        _prefetch(down_ptr, E, F, D_N, D_SHARE, D_SPLITS, False, PROGRAMS)
    if FIRST == 0:
        task = tl.minimum(pid, O_TILES * O_SPLITS - 1)
        w = _weights(o_ptr, task % O_TILES, task // O_TILES, 0, E, A, O_N, O_K, O_SHARE, SLICES, False)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if FIRST == 0:
        _to_residual(w, x_ptr, x_row, o_ptr, h_ptr, h_row, part_ptr, arrived_ptr, scale_ptr, scaled_ptr, squares_ptr, rows, E, A, O_N, O_K, O_SHARE,
                     O_SPLITS, ROWS, SLICES, PROGRAMS, True, TOGETHER)
    if FIRST <= 1 and LAST >= 1:
        w = _weights(gate_up_ptr, tl.minimum(pid, G_TILES - 1), 0, 0, 2 * F, E, G_N, G_K, E, SLICES, True)
        if TOGETHER:
            _wait(arrived_ptr, O_TILES)
        _inner(w, scaled_ptr, gate_up_ptr, inner_ptr, arrived_ptr, squares_ptr, pid, eps, rows, E, F, G_N, G_K, TILES_PAD, O_TILES, ROWS,
               SLICES, KIND, TOGETHER)
        if G_TILES > PROGRAMS:
            for tile in range(pid + PROGRAMS, G_TILES, PROGRAMS):
                w = _weights(gate_up_ptr, tile, 0, 0, 2 * F, E, G_N, G_K, E, SLICES, True)
                _inner(w, scaled_ptr, gate_up_ptr, inner_ptr, arrived_ptr, squares_ptr, tile, eps, rows, E, F, G_N, G_K, TILES_PAD, O_TILES, ROWS,
                       SLICES, KIND, TOGETHER)
    if LAST == 2:
        task = tl.minimum(pid, D_TILES * D_SPLITS - 1)
        w = _weights(down_ptr, task % D_TILES, task // D_TILES, 0, E, F, D_N, D_K, D_SHARE, SLICES, False)
        if TOGETHER:
            _wait(arrived_ptr, O_TILES + G_TILES)
            tl.atomic_add(arrived_ptr, 1, sem="relaxed")  # looks at it no more
        _to_residual(w, inner_ptr, F, down_ptr, h_ptr, h_row, part_ptr, arrived_ptr, scale_ptr, scaled_ptr, squares_ptr, rows, E, F, D_N, D_K,
                     D_SHARE, D_SPLITS, ROWS, SLICES, PROGRAMS, False, False)
        if TOGETHER and pid == PROGRAMS - 1:
            _wait(arrived_ptr, O_TILES + G_TILES + PROGRAMS)
            tl.store(arrived_ptr, 0)


def counters(num_outputs: int, device: torch.device | str) -> torch.Tensor:
    """What ``after_attention`` counts in, for results [T, num_outputs]."""
    return torch.zeros(1 + cdiv(num_outputs, ALIGNED), dtype=torch.int32, device=device)


def after_attention(x_TA: torch.Tensor, h_TE: torch.Tensor, o_EA: torch.Tensor, norm: tuple[torch.Tensor, float], gate_up_NE: torch.Tensor,
                    down_EF: torch.Tensor, activation: str, config: Config, arrived: torch.Tensor) -> torch.Tensor:
    """``after_attention_reference`` in one launch; h is overwritten with the result, and returned.

    ``arrived``: ``counters`` of h's width, zeros before and after; launches that may run at once need one each, and see above.
    """
    (rows, inputs), width, inner = x_TA.shape, h_TE.shape[1], down_EF.shape[1]
    weights = (o_EA, (width, inputs)), (gate_up_NE, (2 * inner, width)), (down_EF, (width, inner))
    assert rows <= MAX_ROWS and x_TA.stride(1) == 1 and h_TE.stride(1) == 1 and len(h_TE) == rows, "a few dense rows"
    assert all(16 <= t.block_n <= 32 * config.warps for t in (config.o, config.gate_up, config.down)) and config.slices in (1, config.warps)
    assert all(w.shape == shape and w.is_contiguous() and not any(n % ALIGNED for n in shape) for w, shape in weights), "dense, aligned weights"
    if rows == 0:
        return h_TE
    device, padded, early = x_TA.device, max(16, next_power_of_2(rows)), pdl(x_TA.device)
    o, gate_up, down = config.o, config.gate_up, config.down
    o_share, down_share = (cdiv(cdiv(k, t.splits), ALIGNED) * ALIGNED for t, k in ((o, inputs), (down, inner)))
    tiles, splits = [cdiv(width, t.block_n) for t in (o, down)], [cdiv(inputs, o_share), cdiv(inner, down_share)]
    part = torch.empty(max(n * s * t.block_n for n, s, t in zip(tiles, splits, (o, down))) * padded, dtype=torch.float32, device=device)
    squares = torch.empty(tiles[0], padded, dtype=torch.float32, device=device)
    scaled, between = (torch.empty(rows, n, dtype=x_TA.dtype, device=device) for n in (width, inner))
    programs = multiprocessors(device)
    phases = [(p, p) for p in range(3)] if INTERPRETED else [(0, 2)]  # the interpreter's programs run one after the other: none may wait
    for first, last in phases:
        _after_attention[(programs,)](
            x_TA, h_TE, o_EA, norm[0], gate_up_NE, down_EF, part, scaled, squares, between, arrived, norm[1], rows, x_TA.stride(0), h_TE.stride(0),
            E=width, A=inputs, F=inner, O_N=o.block_n, O_K=o.block_k, O_SHARE=o_share, O_SPLITS=splits[0], G_N=gate_up.block_n, G_K=gate_up.block_k,
            D_N=down.block_n, D_K=down.block_k, D_SHARE=down_share, D_SPLITS=splits[1], ROWS=padded, SLICES=config.slices,
            TILES_PAD=next_power_of_2(tiles[0]), PROGRAMS=programs, KIND=KINDS[ACTIVATIONS[activation]], FIRST=first, LAST=last,
            PREFETCH=config.prefetch and early, PDL=early, num_warps=config.warps, num_stages=1, launch_pdl=early)
    return h_TE


# ------------------------------------------------------------------------------------------------------------- chooser

# (rows up to, E, A, F) -> the config that made a decode step faster on an H200.
MEASURED: dict[tuple[int, int, int, int], Config] = {}
STEPS = (8, 16, 32, 64)


def fits(*products: Any) -> bool:
    """Whether the kernel takes these linear layers: their weights alone, of aligned widths, at places that 32 bits count."""
    return all(p.bias_N is None and not any(n % ALIGNED for n in p.weight_NK.shape) and p.weight_NK.numel() < 1 << 31 for p in products)


def choose(rows: int, width: int, inputs: int, inner: int) -> Config | None:
    """The config for this many rows of such a layer; None: its products go one by one."""
    step = next((s for s in STEPS if 0 < rows <= s), None)
    return MEASURED.get((step, width, inputs, inner))


@dataclass(frozen=True)
class Case:
    """One point of the test grid."""

    rows: int
    width: int
    inputs: int
    inner: int
    config: Config
    activation: str = "silu"


def grid() -> Iterator[Case]:
    whole = Config(Tiling(16, 32), Tiling(16, 32), Tiling(16, 64), 4)
    split = Config(Tiling(32, 32, 2), Tiling(32, 32), Tiling(16, 16, 3), 4)
    sliced = Config(Tiling(16, 64), Tiling(32, 64), Tiling(32, 64, 2), 4, slices=4)
    for config in (whole, split, sliced):
        for rows in (0, 1, 8, 17):
            yield Case(rows, 64, 96, 128, config)
        yield Case(3, 80, 48, 112, config, "gelu_tanh")  # nothing is a multiple of a block, more tiles than the interpreter has programs
    yield Case(33, 64, 64, 96, split, "gelu")
    yield Case(64, 64, 64, 96, split)

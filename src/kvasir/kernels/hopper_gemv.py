"""Products of 17 to 64 rows for Hopper, with the copies placed by hand: y = x W^T, whose time is that of streaming W
once.

A program requests as many blocks of W as shared memory holds, by tile copies (TMA), before it waits for the kernel
before it (programmatic dependent launch): they arrive while that one ends. A BLAS cannot start early, and ``gemv`` has
one block in flight by then. The rows of x follow, all together where there is room: they come from the L2 cache, whose
latency would otherwise be paid once a ring. Blocks are large, since each costs barriers of all warps: along K, 256 are
faster than 64. The kernel is best where all that a program reads of W fits, as with Qwen3-0.6B's 1,024 inputs;
Llama-8B's 4,096 gain nothing.

Slower: the norm of x in the same kernel, through registers; K undivided where outputs are few.

The reference is ``gemv_reference`` without norm and bias. Bytes: N x K x itemsize.

Legend: T rows, K inputs, N rows of W (F of gate, then F of up, where they are gated), O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels._triton import by_hand, cdiv, gl, gluon_jit, hopper, pdl, tl
from kvasir.kernels.gemv import ending, join, result_of

MIN_ROWS = tuned.HOPPER_GEMV_ROWS.value  # rows of x; for fewer, ``gemv`` is as fast
MAX_ROWS = 64  # rows of x that one product takes
GATES = None, "silu"  # activations that the kernel can end in

if hopper is not None:
    mbarrier = hopper.mbarrier
    gdc_wait, gdc_launch = tl.extra.cuda.gdc_wait, tl.extra.cuda.gdc_launch_dependents


@dataclass(frozen=True, slots=True)
class Ring:
    """Build parameters of the kernel: outputs of a program, inputs of a block, and the blocks of W and of x that it
    holds at a time (W has two blocks where gate and up are separate). Several blocks need at least two slots: one is
    filled again while the next block is multiplied. A second kernel adds the ``splits`` of K."""

    block_n: int = 32
    block_k: int = 256
    w_blocks: int = 4
    x_blocks: int = 4
    splits: int = 1


@gluon_jit
def _ask(desc, slots, full, i, k0, row, up_row, RING: gl.constexpr, PARTS: gl.constexpr):
    """Start the copy of block i of K, from ``row`` on; with two parts, also from ``up_row`` on."""
    K: gl.constexpr = desc.block_type.shape[1]
    slot = i % RING
    mbarrier.expect(full.index(slot), PARTS * desc.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(desc, [row, k0 + i * K], full.index(slot), slots.index(PARTS * slot))
    if PARTS == 2:
        hopper.tma.async_copy_global_to_shared(desc, [up_row, k0 + i * K], full.index(slot),
                                               slots.index(PARTS * slot + 1))


@gluon_jit
def _ring(desc, RING: gl.constexpr, PARTS: gl.constexpr):
    """Slots, each with a barrier that changes phase when its bytes have arrived."""
    slots = gl.allocate_shared_memory(desc.dtype, [PARTS * RING] + desc.block_type.shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
    return slots, full


@gluon_jit
def _fold(w_desc, w_slots, w_full, x_desc, x_slots, x_full, acc, up, i, k0, n0, up0, BLOCKS: gl.constexpr,
          W_RING: gl.constexpr,
          X_RING: gl.constexpr, PARTS: gl.constexpr):
    """Add block i. By then every warp has read the block before it, and its slots are filled again."""
    mbarrier.wait(w_full.index(i % W_RING), i // W_RING & 1)
    mbarrier.wait(x_full.index(i % X_RING), i // X_RING & 1)
    x = x_slots.index(i % X_RING)
    acc = hopper.warpgroup_mma(x, w_slots.index(PARTS * (i % W_RING)).permute((1, 0)), acc, is_async=True)
    if PARTS == 2:
        up = hopper.warpgroup_mma(x, w_slots.index(PARTS * (i % W_RING) + 1).permute((1, 0)), up, is_async=True)
    if i >= 1 and i - 1 + min(W_RING, X_RING) < BLOCKS:  # some slot is asked for again
        if PARTS == 2:
            acc, up = hopper.warpgroup_mma_wait(2, deps=(acc, up))
        else:
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        gl.thread_barrier()
        if i - 1 + W_RING < BLOCKS:
            _ask(w_desc, w_slots, w_full, i - 1 + W_RING, k0, n0, up0, W_RING, PARTS)
        if i - 1 + X_RING < BLOCKS:
            _ask(x_desc, x_slots, x_full, i - 1 + X_RING, k0, 0, 0, X_RING, 1)
    return acc, up


@gluon_jit(do_not_specialize=["rows"])
def _stream_rows(w_desc, x_desc, y_ptr, part_ptr, rows, y_row, OUT: gl.constexpr, N: gl.constexpr,
                 BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr,
                 W_RING: gl.constexpr, X_RING: gl.constexpr, SPLIT: gl.constexpr, GATED: gl.constexpr,
                 RESIDUAL: gl.constexpr,
                 PDL: gl.constexpr):
    """``BLOCK_N`` outputs of every row over ``BLOCKS`` blocks of K: y, or ``part`` [splits, T, N] fp32."""
    PARTS: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    w_slots, w_full = _ring(w_desc, W_RING, PARTS)
    x_slots, x_full = _ring(x_desc, X_RING, 1)
    hopper.fence_async_shared()
    gl.thread_barrier()
    n0 = gl.program_id(0) * BLOCK_N
    k0 = gl.program_id(1) * (BLOCKS * x_desc.block_type.shape[1])
    if PDL:
        gdc_launch()
    for i in gl.static_range(min(W_RING, BLOCKS)):
        _ask(w_desc, w_slots, w_full, i, k0, n0, OUT + n0, W_RING, PARTS)
    if PDL:
        gdc_wait()
    for i in gl.static_range(min(X_RING, BLOCKS)):
        _ask(x_desc, x_slots, x_full, i, k0, 0, 0, X_RING, 1)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, sums)
    up = gl.zeros([ROWS, BLOCK_N], gl.float32, sums)
    for i in gl.static_range(BLOCKS):
        acc, up = _fold(w_desc, w_slots, w_full, x_desc, x_slots, x_full, acc, up, i, k0, n0, OUT + n0, BLOCKS, W_RING,
                        X_RING, PARTS)
    if GATED:
        acc, up = hopper.warpgroup_mma_wait(0, deps=(acc, up))
        acc = acc / (1.0 + gl.exp(-acc)) * up
    else:
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    # 16 bytes a thread
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BLOCK_N // 8), BLOCK_N // 8], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, wide))
    live = (m < rows)[:, None] & (n < OUT)[None, :]
    y = gl.convert_layout(acc, wide)
    if SPLIT:
        gl.store(part_ptr + (gl.program_id(1) * rows + m)[:, None] * N + n[None, :], y, mask=live)
    else:
        at = y_ptr + m[:, None] * y_row + n[None, :]
        if RESIDUAL:
            y += gl.load(at, mask=live, other=0.0).to(gl.float32)
        gl.store(at, y.to(y_ptr.dtype.element_ty), mask=live)


def stream_rows(x_TK: torch.Tensor, w_NK: torch.Tensor, ring: Ring, *, gated: bool = False,
                residual_TO: torch.Tensor | None = None, out_TO: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T; where ``gated``, silu(gate) * up; plus ``residual_TO``, which is overwritten with the result. bf16 or
    fp16. ``out_TO``: memory for the result, of any dtype."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (rows, width), num_rows = x_TK.shape, w_NK.shape[0]
    outputs = num_rows // 2 if gated else num_rows
    blocks = width // (ring.block_k * ring.splits)
    assert x_TK.stride(1) == 1 and x_TK.stride(0) % 8 == 0 and w_NK.is_contiguous(), \
        "copies are of rows aligned to 16 bytes"
    assert 0 < rows <= MAX_ROWS and width % (ring.block_k * ring.splits) == 0 and not (gated and ring.splits > 1), \
        "whole blocks of a few rows"
    y_TO = result_of(x_TK, outputs, residual_TO, out_TO)
    assert blocks == 1 or min(ring.w_blocks, ring.x_blocks) > 1, \
        "with one slot the next block would be waited for before it is asked for"
    split = ring.splits > 1
    part = torch.empty(ring.splits, rows, num_rows, dtype=torch.float32, device=x_TK.device) if split else y_TO
    layout = gl.NVMMASharedLayout(128, 16, 2)
    descriptors = [TensorDescriptor.from_tensor(x, [size, ring.block_k], layout) for x,
                   size in ((w_NK, ring.block_n), (x_TK, MAX_ROWS))]
    early = pdl(x_TK.device)
    _stream_rows[(cdiv(outputs, ring.block_n), ring.splits)](
        *descriptors, y_TO, part, rows, y_TO.stride(0), OUT=outputs, N=num_rows, BLOCK_N=ring.block_n, BLOCKS=blocks,
        W_RING=min(ring.w_blocks, blocks), X_RING=min(ring.x_blocks, blocks), SPLIT=split, GATED=gated,
        RESIDUAL=residual_TO is not None and not split, PDL=early, num_warps=4, launch_pdl=early)
    if split:
        join(part, part, y_TO, y_TO, 0.0, width,
             {"NORM": False, **ending(x_TK.device, None, None, residual_TO)})
    return y_TO


# (N, K, whether N is gate and up) -> the fastest ring.
MEASURED = {key: Ring(*shape) for key, shape in tuned.HOPPER_GEMV.value.items()}


def choose_ring(rows: int, w_NK: torch.Tensor, gated: bool) -> Ring | None:
    """Ring for ``rows`` rows of x; None: other kernels are as fast, nobody measured the shape, or the kernel does not
    run here."""
    if not MIN_ROWS <= rows <= MAX_ROWS:
        return None
    ring = MEASURED.get((*w_NK.shape, gated))
    return ring if ring is not None and by_hand(w_NK.device) else None


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``outputs`` is O."""

    rows: int
    outputs: int
    width: int
    ring: Ring
    gated: bool = False
    residual: bool = False


def grid() -> Iterator[Case]:
    for (num_rows, width, gated), ring in MEASURED.items():
        for rows in (MIN_ROWS, 33, 64):
            yield Case(rows, num_rows // (1 + gated), width, ring, gated, residual=not gated)
    # whole, and with slots that are filled again
    for ring in (Ring(x_blocks=3), Ring(16, 64, 5, 3), Ring(64, 128, 2, 8), Ring(32, 256, 2, 2)):
        for gated in (False, True):
            yield Case(20, 96, 1024, ring, gated)
    yield Case(1, 72, 512, Ring(), residual=True)  # half a tile of outputs
    yield Case(64, 40, 256, Ring(), gated=True, residual=True)  # one block
    yield Case(5, 256, 1536, Ring(32, 128, 2, 3, splits=3))

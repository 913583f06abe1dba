"""Steering hidden states: rows move along a direction of their set of hooks, by how far they already point there.

A row's word names its set, by slot, and which of the set's gates are open (``gate_rows``, once a step). At each site
``steer`` moves every head of the rows whose gate is open, in place; all other rows keep their bits. The parameters of
all resident sets are stacked, so that a captured step reads whatever set a slot holds when it is replayed.

A head h moves to h + k u. By mode:

- ``ADD`` (0): u the direction, k the gain;
- ``DOT``: k = gain (u . h), so that a gain of -1 leaves no component of a unit direction;
- ``THRESHOLD``, ``SOFT`` with ``DOT``: k times 1[p > 0] or sigmoid(p), for a probe p = w . h + b;
- ``NORM``: the result is scaled to the length that h had;
- ``SHIFT``: of several probes u_j with margins m_j = u_j . h + b_j, the one furthest below ``target`` is raised to it
  by the shortest move: k = gain max(0, target - m_j) / |u_j|^2.

Sums run over one head in one order, so a row's bits do not depend on its batch. Bytes: 2 D itemsize and 4 C D a head of
an open row; 4 a closed one. Legend: T rows, H heads (1: the whole state), D width of a head, S slots and one before
them for rows without a set, C vectors, V vocabulary, J hooks of a set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl, use_triton

ADD, DOT, NORM, THRESHOLD, SOFT, SHIFT = 0, 1, 2, 4, 8, 16
MAX_HOOKS = 8  # hooks of a set: bits of a row's word below its slot
SLOT_SHIFT = 8  # bits of a row's word below the slot of its set
ADAPTER_BITS = 16  # bits of a row's variant that hold its adapter (``types.HOOK_SHIFT``)
BLOCK = 256  # rows of a program that opens gates
PADDED = 64  # elements; a multiple of the vectors of any CPU


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of all resident sets. ``tokens_SV`` uint8: bit j: the gate of hook j admits this input token.
    ``windows_SJ2`` int32: the first position that it admits, and the end."""

    tokens_SV: torch.Tensor
    windows_SJ2: torch.Tensor


@dataclass(frozen=True, slots=True)
class Steers:
    """The resident parameters of one hook at one site of one layer. ``vectors_SCHD``, ``biases_SCH`` fp32: direction
    and probe, or the probes of ``SHIFT``. ``numbers_S2`` fp32: gain, target. ``words_S3`` int32: mode; the gate's bit
    (0: the set has no hook here); how many vectors ``SHIFT`` has. ``heads_SH`` int32: 1 where the head moves.
    ``shifts``: whether any set may have the mode ``SHIFT``."""

    vectors_SCHD: torch.Tensor
    biases_SCH: torch.Tensor
    numbers_S2: torch.Tensor
    words_S3: torch.Tensor
    heads_SH: torch.Tensor
    shifts: bool


def gate_rows_reference(variants_T: torch.Tensor, ids_T: torch.Tensor, positions_T: torch.Tensor,
                        gates: Gates) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each row's adapter, and the word of its set of hooks (0: no gate is open), both int32 [T]. A gate
    knows a row's input token and position, and nothing else."""
    slot_T = variants_T >> ADAPTER_BITS
    at_T = slot_T.long()
    bits_T = gates.tokens_SV.view(-1).index_select(0, at_T * gates.tokens_SV.shape[1] + ids_T).int()
    windows_TJ2 = gates.windows_SJ2.index_select(0, at_T)
    inside_TJ = (positions_T[:, None] >= windows_TJ2[..., 0]) & (positions_T[:, None] < windows_TJ2[..., 1])
    shifts_J = torch.arange(MAX_HOOKS, dtype=torch.int32, device=ids_T.device)
    bits_T = bits_T & (inside_TJ.int() << shifts_J).sum(1, dtype=torch.int32)
    words_T = torch.where(bits_T > 0, (slot_T << SLOT_SHIFT) | bits_T, 0).int()
    return variants_T & ((1 << ADAPTER_BITS) - 1), words_T


def steer_reference(x_THD: torch.Tensor, words_T: torch.Tensor, steers: Steers,
                    out_THD: torch.Tensor | None = None) -> None:
    """Move the heads of ``x_THD`` in place, or add the moves to ``out_THD``. The same calls whatever the rows, so that
    a tape may repeat them."""
    at_T = (words_T >> SLOT_SHIFT).long()
    words_T3, numbers_T2 = steers.words_S3.index_select(0, at_T), steers.numbers_S2.index_select(0, at_T)
    mode_T1, gain_T1, target_T1 = words_T3[:, :1], numbers_T2[:, :1], numbers_T2[:, 1:]
    h_THD, v_TCHD = x_THD.float(), steers.vectors_SCHD.index_select(0, at_T)
    biases_TCH, count = steers.biases_SCH.index_select(0, at_T), v_TCHD.shape[1]
    dots_TCH = (v_TCHD * h_THD[:, None]).sum(-1)
    u_THD = v_TCHD[:, 0]
    k_TH = gain_T1 * torch.where((mode_T1 & DOT) > 0, dots_TCH[:, 0], 1.0)
    if count > 1:
        p_TH = dots_TCH[:, 1] + biases_TCH[:, 1]
        k_TH = k_TH * torch.where((mode_T1 & THRESHOLD) > 0, (p_TH > 0).float(), 1.0)
        k_TH = k_TH * torch.where((mode_T1 & SOFT) > 0, _sigmoid(p_TH), 1.0)
    if steers.shifts:
        lacks_TCH = target_T1[:, None] - (dots_TCH + biases_TCH)
        held_TC1 = (torch.arange(count, device=x_THD.device) < words_T3[:, 2:])[..., None]
        lack_TH, worst_TH = torch.where(held_TC1, lacks_TCH, -torch.inf).max(1)
        worst_THD = v_TCHD.gather(1, worst_TH[:, None, :, None].expand(-1, 1, -1, v_TCHD.shape[3]))[:, 0]
        raise_TH = gain_T1 * lack_TH.clamp(min=0) / (worst_THD * worst_THD).sum(-1).clamp(min=1e-30)
        shifts_T1 = (mode_T1 & SHIFT) > 0
        k_TH = torch.where(shifts_T1, raise_TH, k_TH)
        u_THD = torch.where(shifts_T1[..., None], worst_THD, u_THD)
    y_THD = h_THD + k_TH[..., None] * u_THD
    scale_TH = ((h_THD * h_THD).sum(-1) / (y_THD * y_THD).sum(-1).clamp(min=1e-30)).sqrt()
    y_THD = torch.where(((mode_T1 & NORM) > 0)[..., None], y_THD * scale_TH[..., None], y_THD)
    moved_TH = ((words_T & words_T3[:, 1]) > 0)[:, None] & (steers.heads_SH.index_select(0, at_T) > 0) & (k_TH != 0)
    if out_THD is None:
        x_THD.copy_(torch.where(moved_TH[..., None], y_THD.to(x_THD.dtype), x_THD))
    else:
        sum_THD = (out_THD.float() + (y_THD - h_THD)).to(out_THD.dtype)
        out_THD.copy_(torch.where(moved_TH[..., None], sum_THD, out_THD))


def _sigmoid(p_TH: torch.Tensor) -> torch.Tensor:
    """The sigmoid of each element, whose bits do not depend on its place: rows are padded to whole vectors, because a
    CPU computes the last elements of a tensor by other instructions."""
    return F.pad(p_TH, (0, -p_TH.shape[1] % PADDED)).sigmoid()[:, : p_TH.shape[1]]


# -------------------------------------------------------------------------------------------------------------- kernels


@jit(do_not_specialize=["num_rows"])
def _gate_rows(variants_ptr, ids_ptr, positions_ptr, tokens_ptr, windows_ptr, adapters_ptr, words_ptr, num_rows, V,
               ADAPTER_BITS: tl.constexpr, SLOT_SHIFT: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    variant = tl.load(variants_ptr + row, mask=inside, other=0)
    slot = variant >> ADAPTER_BITS
    token = tl.load(ids_ptr + row, mask=inside, other=0)
    position = tl.load(positions_ptr + row, mask=inside, other=0)
    bits = tl.load(tokens_ptr + slot.to(tl.int64) * V + token, mask=inside & (slot > 0), other=0).to(tl.int32)
    for j in tl.static_range(J):
        first = tl.load(windows_ptr + (slot * J + j) * 2, mask=inside, other=0)
        end = tl.load(windows_ptr + (slot * J + j) * 2 + 1, mask=inside, other=0)
        bits = tl.where((position >= first) & (position < end), bits, bits & ~(1 << j))
    tl.store(adapters_ptr + row, variant & ((1 << ADAPTER_BITS) - 1), mask=inside)
    tl.store(words_ptr + row, tl.where(bits > 0, (slot << SLOT_SHIFT) | bits, 0), mask=inside)


@jit
def _steer(x_ptr, out_ptr, words_ptr, vectors_ptr, biases_ptr, numbers_ptr, modes_ptr, heads_ptr, x_row, out_row,
           H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, SLOT_SHIFT: tl.constexpr,
           SHIFTS: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr):
    """One head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    word = tl.load(words_ptr + row)  # a step's first kernels wrote it, and none of them lets others start early
    slot = word >> SLOT_SHIFT
    live = word > 0
    if live:
        live = ((word & tl.load(modes_ptr + slot * 3 + 1)) > 0) & (tl.load(heads_ptr + slot * H + head) > 0)
    if PDL:
        tl.extra.cuda.gdc_wait()  # also where nothing is left to do: the next kernel relies on it
    if live:
        mode, gain = tl.load(modes_ptr + slot * 3), tl.load(numbers_ptr + slot * 2)
        d = tl.arange(0, BLOCK)
        inside = d < D
        x = x_ptr + row.to(tl.int64) * x_row + head * D + d
        h = tl.load(x, mask=inside, other=0.0).to(tl.float32)
        vectors = vectors_ptr + (slot * C * H + head).to(tl.int64) * D + d
        biases = biases_ptr + slot * C * H + head
        u = tl.load(vectors, mask=inside, other=0.0)
        along = tl.sum(u * h, 0)
        k = gain * tl.where((mode & 1) > 0, along, 1.0)
        if C > 1:
            p = tl.sum(tl.load(vectors + H * D, mask=inside, other=0.0) * h, 0) + tl.load(biases + H)
            k *= tl.where((mode & 4) > 0, (p > 0).to(tl.float32), 1.0)
            k *= tl.where((mode & 8) > 0, 1.0 / (1.0 + tl.exp(-p)), 1.0)
        if SHIFTS and (mode & 16) > 0:
            target, count = tl.load(numbers_ptr + slot * 2 + 1), tl.load(modes_ptr + slot * 3 + 2)
            lack = target - (along + tl.load(biases))
            for c in tl.static_range(1, C):
                other = tl.load(vectors + c * H * D, mask=inside, other=0.0)
                more = target - (tl.sum(other * h, 0) + tl.load(biases + c * H))
                worse = (c < count) & (more > lack)
                lack = tl.where(worse, more, lack)
                u = tl.where(worse, other, u)
            k = gain * tl.maximum(lack, 0.0) / tl.maximum(tl.sum(u * u, 0), 1e-30)
        y = h + k * u
        if (mode & 2) > 0:
            y *= tl.sqrt(tl.sum(h * h, 0) / tl.maximum(tl.sum(y * y, 0), 1e-30))
        if k != 0:
            if ADDS:
                out = out_ptr + row.to(tl.int64) * out_row + head * D + d
                y = tl.load(out, mask=inside, other=0.0).to(tl.float32) + (y - h)
                tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)
            else:
                tl.store(x, y.to(x_ptr.dtype.element_ty), mask=inside)


def gate_rows(variants_T: torch.Tensor, ids_T: torch.Tensor, positions_T: torch.Tensor,
              gates: Gates) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``gate_rows_reference``, in one launch on a GPU."""
    if not use_triton(ids_T):
        return gate_rows_reference(variants_T, ids_T, positions_T, gates)
    adapters_T, words_T = torch.empty_like(variants_T), torch.empty_like(variants_T)
    count = len(ids_T)
    if count:
        _gate_rows[(cdiv(count, BLOCK),)](
            variants_T, ids_T, positions_T, gates.tokens_SV, gates.windows_SJ2, adapters_T, words_T, count,
            gates.tokens_SV.shape[1], ADAPTER_BITS, SLOT_SHIFT, MAX_HOOKS, BLOCK)
    return adapters_T, words_T


def steer(x_THD: torch.Tensor, words_T: torch.Tensor, steers: Steers, out_THD: torch.Tensor | None = None) -> None:
    """Compute ``steer_reference``, in one launch on a GPU. Heads of a row lie side by side."""
    if not use_triton(x_THD):
        return steer_reference(x_THD, words_T, steers, out_THD)
    (rows, heads, width), out = x_THD.shape, x_THD if out_THD is None else out_THD
    assert x_THD.stride()[1:] == (width, 1) and out.stride()[1:] == (width, 1), "heads of a row lie side by side"
    if rows:
        block, early = next_power_of_2(width), pdl(x_THD.device)
        _steer[(rows, heads)](
            x_THD, out, words_T, steers.vectors_SCHD, steers.biases_SCH, steers.numbers_S2, steers.words_S3,
            steers.heads_SH, x_THD.stride(0), out.stride(0), heads, width, steers.vectors_SCHD.shape[1], block,
            SLOT_SHIFT, steers.shifts, out_THD is not None, early, num_warps=max(1, min(8, block // 256)),
            launch_pdl=early)
    return None


# ------------------------------------------------------------------------------------------------------- the test grid


@dataclass(frozen=True, slots=True)
class Case:
    """``slots``: the set of each row, 0: none. ``modes``: of each set. ``count``: vectors of the buffers. ``adds``: the
    moves are added to another tensor."""

    slots: tuple[int, ...]
    modes: tuple[int, ...]
    heads: int
    width: int
    count: int = 1
    adds: bool = False


def grid() -> list[Case]:
    """Cases of every mode, alone and mixed, at widths that are powers of two and are not."""
    rows = (1, 0, 2, 2, 0, 3, 1)
    probed = DOT | NORM | THRESHOLD, DOT | NORM | SOFT, DOT | SOFT
    return [
        Case(rows, (ADD, DOT, DOT | NORM), 4, 64),
        Case(rows, probed, 3, 80, 2),
        Case(rows, (SHIFT, DOT | NORM, SHIFT), 1, 192, 3),
        Case(rows, (SHIFT, ADD, DOT | NORM | SOFT), 1, 320, 4, adds=True),
        Case((1,), (DOT | NORM,), 2, 128),
        Case((0, 0, 0), (DOT | NORM,), 2, 32),
    ]

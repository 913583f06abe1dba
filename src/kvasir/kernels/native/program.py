"""A list of operations for the C kernels, over fixed memory: built once, run in one call a step.

The classes that mirror structures of the C sources have the same names and fields.

Legend: T rows, S spans, A words of ancestor bits, M wanted rows, K inputs, N outputs, H query heads, G KV heads, D head
dim, W pages, P slots per page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from kvasir import tuned
from kvasir.kernels.decode_rows import Kept

LINE = 16  # floats of a cache line; head dims are multiples of it
ROWS = 32  # rows of a product up to which every thread prepares all of them for itself
NEAR_FLOATS = 192 << 10  # floats of input rows that stay in a core's own cache
MAX_DIM = 512
META = 4  # bytes of scale and bias that go with a row of codes
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
BF16, FP32, I8, U4 = 0, 1, 2, 3  # formats of weights
NO_OFFSETS, CENTRED, OFFSETS = 0, 1, 2  # of codes: none, -8 scales, or stored ones
# Layouts of pages that the C sources know, by the word that codecs have for them (``Codec.kernel``).
LAYOUTS = {"plain": 0, "int4": 1, "int8": 2, "fp8": 3}
TILES_FROM = tuned.MATRIX_TILE_ROWS.value  # rows
DRAW_BLOCK = 64  # tokens that are scored at a time
UNDRAWN = -1  # the token of a row that the host must draw
BF16_INPUTS = 32  # inputs of a bf16 panel: a multiple of it, what a matrix tile takes
ROUNDED = 32  # inputs of a scale, where they are rounded to 8 bits; as in rounded.h


class StepArgs(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("num_rows", "num_spans", "num_wanted", "table_width")] + [
        (name, c_void_p) for name in ("ids", "positions", "wanted", "row_start", "context", "slots", "tables",
                                      "ancestors")] + [
        ("num_words", c_int64)]


class Cache(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("page_stride", "page_slots", "group", "format", "row")] + [
        (name, c_void_p) for name in ("k", "v", "k_meta", "v_meta", "turn_k", "turn_v")] + [("order", c_int64)]


class Op(ctypes.Structure):
    """The fields that every operation begins with."""

    KIND = -1
    _fields_ = [("kind", c_int64)]


class Embed(Op):
    KIND = 0
    _fields_ = [("table", c_void_p), ("y", c_void_p), ("width", c_int64), ("scale", c_double)]


class Linear(Op):
    KIND = 1
    _fields_ = [(name, c_void_p) for name in ("x", "y", "weights", "bias", "norm")] + [("eps", c_double)] + [
        (name, c_int64) for name in ("format", "num_inputs", "num_outputs", "activation", "add", "wanted")] + [
        ("scale", c_double), ("softcap", c_double), ("group", c_int64), ("offsets", c_int64), ("rounded", c_int64)]


class Norm(Op):
    KIND = 2
    _fields_ = [("x", c_void_p), ("y", c_void_p), ("weight", c_void_p), ("eps", c_double), ("width", c_int64),
                ("add", c_int64),
                ("wanted", c_int64)]


class Heads(Op):
    KIND = 3
    _fields_ = [("heads", c_void_p), ("norm", c_void_p), ("eps", c_double)] + [
        (name, c_int64) for name in ("num_heads", "num_kv_heads", "dim", "writes")] + [
        ("angles", c_void_p), ("cache", Cache)]


class Attend(Op):
    KIND = 4
    _fields_ = [("heads", c_void_p), ("y", c_void_p), ("sinks", c_void_p)] + [
        (name, c_int64) for name in ("num_heads", "num_kv_heads", "dim", "row", "window")] + [
        ("scale", c_double), ("softcap", c_double), ("cache", Cache)]


class Gather(Op):
    KIND = 5
    _fields_ = [("x", c_void_p), ("y", c_void_p), ("width", c_int64)]


class Open(Op):
    KIND = 6
    _fields_ = [(name, c_void_p) for name in ("rows", "ids", "token", "tables", "forgotten")] + [
        (name, c_int64) for name in ("num_kept", "num_groups", "page_slots")]


class Draw(Op):
    KIND = 7
    _fields_ = [("logits", c_void_p), ("width", c_int64), ("count", c_int64)] + [
        (name, c_void_p) for name in ("rows", "tokens", "token", "top_k", "temperature", "top_p", "min_p", "stream")]


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [N, K] (gated: [2N, K], gate first) in panels of two registers' outputs, padded with zeros. ``format``:
    bf16, fp32, or codes (``quantized.py``) with a scale for each ``group`` of inputs (0: all). ``rounded``: for inputs
    that are rounded to 8 bits."""

    data: torch.Tensor
    format: int
    num_outputs: int
    num_inputs: int
    gated: bool
    group: int = 0
    offsets: int = NO_OFFSETS
    rounded: bool = False

    @property
    def row_floats(self) -> int:
        """Floats of a prepared row: its inputs, padded, and its sums over groups, or scales and sums of its blocks."""
        padded = -(-self.num_inputs // BF16_INPUTS) * BF16_INPUTS
        groups = (padded // self.group if self.group else 1) if self.offsets else 0
        groups = 2 * padded // ROUNDED if self.rounded else groups
        return padded + -(-groups // LINE) * LINE


def pack(library: ctypes.CDLL, weight_NK: torch.Tensor, gated: bool = False) -> Packed:
    """Pack ``weight_NK`` (fp32 on a CPU): as bf16 where that loses nothing, otherwise as fp32. A panel's two blocks are
    neighbours, or gate and up of the same outputs. A block holds, for each input (bf16: pair of inputs), its outputs'
    weights."""
    assert weight_NK.dtype == torch.float32 and weight_NK.device.type == "cpu", "fp32 weights on a CPU"
    parts, lanes = 2 if gated else 1, library.kvasir_lanes()
    outputs, inputs = weight_NK.shape[0] // parts, weight_NK.shape[1]
    blocks = -(-outputs // lanes) if gated else -(-outputs // (2 * lanes)) * 2
    padded = -(-inputs // BF16_INPUTS) * BF16_INPUTS
    words = torch.zeros(parts * blocks * lanes * padded // 2, dtype=torch.int32)
    if library.kvasir_pack(weight_NK.data_ptr(), *weight_NK.stride(), parts, outputs, inputs, blocks, padded,
                           words.data_ptr(),
                           torch.get_num_threads()):
        return Packed(words, BF16, outputs, inputs, gated)
    wide = weight_NK.new_zeros(parts, blocks * lanes, inputs)
    wide[:, :outputs] = weight_NK.reshape(parts, outputs, inputs)
    panels = wide.view(parts, blocks, lanes, inputs).permute(1, 0, 3, 2)  # a part's blocks take turns
    return Packed(panels.contiguous().view(torch.int32).view(-1), FP32, outputs, inputs, gated)


class Program:
    """Operations and the memory that they use. ``run`` does one step."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.tiles = TILES_FROM if library.kvasir_tiles() else 0
        self._ops: list[Op] = []
        self._held: list[object] = []
        self._array: ctypes.Array | None = None
        self._width = 1  # the most floats of a product's row
        self._floats = 0  # that drawing takes

    def __len__(self) -> int:
        return len(self._ops)

    def tensor(self, *shape: int) -> torch.Tensor:
        """fp32 memory that lives as long as the program. The system provides it when it is first touched."""
        found = torch.from_numpy(np.zeros(shape, np.float32))
        self._held.append(found)
        return found

    def _address(self, tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        if tensor is None:
            return None
        assert tensor.dtype == dtype and tensor.device.type == "cpu", \
            f"{dtype} on the CPU, not {tensor.dtype} on {tensor.device}"
        self._held.append(tensor)
        return tensor.data_ptr()

    def _dense(self, tensor: torch.Tensor | None) -> int | None:
        assert tensor is None or tensor.is_contiguous(), "dense memory"
        return self._address(tensor)

    def _add(self, kind: type[Op], **fields: object) -> None:
        self._ops.append(kind(kind=kind.KIND, **fields))
        self._array = None

    # ------------------------------------------------------------------------------------------------------ operations

    def embed(self, table_VE: torch.Tensor, y_TE: torch.Tensor, scale: float = 1.0) -> None:
        """y = scale * table[ids]."""
        self._add(Embed, table=self._dense(table_VE), y=self._dense(y_TE), width=table_VE.shape[1], scale=scale)

    def linear(self, x_TK: torch.Tensor, packed: Packed, y_TN: torch.Tensor, *, bias_N: torch.Tensor | None = None,
               norm: tuple[torch.Tensor, float] | None = None, activation: str | None = None, add: bool = False,
               wanted: bool = False, scale: float = 1.0, softcap: float | None = None) -> None:
        """Append y = f(norm(x) W^T + bias), or y += f(...) with ``add``. ``norm``: scale [K] and eps of an RMS norm. f:
        with ``activation``, activation(gate) times up; else times ``scale``, and capped. ``wanted``: M rows instead of
        T."""
        assert packed.gated == (activation is not None), "a gated weight and its activation"
        self._width = max(self._width, packed.row_floats)
        self._add(Linear, x=self._dense(x_TK), y=self._dense(y_TN), weights=self._address(packed.data, torch.int32),
                  bias=self._dense(bias_N),
                  norm=None if norm is None else self._dense(norm[0]), eps=0.0 if norm is None else norm[1],
                  format=packed.format,
                  num_inputs=packed.num_inputs, num_outputs=packed.num_outputs, activation=ACTIVATIONS[activation],
                  add=add,
                  wanted=wanted, scale=scale, softcap=softcap or 0.0, group=packed.group, offsets=packed.offsets,
                  rounded=packed.rounded)

    def norm(self, x_TE: torch.Tensor, y_TE: torch.Tensor, norm: tuple[torch.Tensor, float], *, add: bool = False,
             wanted: bool = False) -> None:
        """Append y = norm(x), or y += norm(x). ``wanted``: M rows instead of T."""
        self._add(Norm, x=self._dense(x_TE), y=self._dense(y_TE), weight=self._dense(norm[0]), eps=norm[1],
                  width=x_TE.shape[1], add=add,
                  wanted=wanted)

    def heads(self, heads_TXD: torch.Tensor, planes: Planes, angles_PD: torch.Tensor, num_heads: int, num_kv_heads: int,
              *, norm: tuple[torch.Tensor, float] | None = None, writes: bool = True) -> None:
        """Append norm (scale [X, D]) and rotation of queries, in place, and keys; keys and values are written into
        their slots. ``angles_PD``: cosines and sines by position. Without ``writes`` there are queries only."""
        self._add(Heads, heads=self._dense(heads_TXD), norm=None if norm is None else self._dense(norm[0]),
                  eps=0.0 if norm is None else norm[1], num_heads=num_heads, num_kv_heads=num_kv_heads,
                  dim=heads_TXD.shape[2], writes=writes,
                  angles=self._dense(angles_PD), cache=self._cache(planes, heads_TXD.shape[2]))

    def attend(self, heads_TXD: torch.Tensor, y_TE: torch.Tensor, planes: Planes, num_heads: int, num_kv_heads: int, *,
               scale: float, window: int | None = None, softcap: float | None = None,
               sinks_H: torch.Tensor | None = None) -> None:
        """Causal attention of the first H heads of each row over its span's pages."""
        _, per_row, dim = heads_TXD.shape
        assert dim % LINE == 0 and dim <= MAX_DIM, f"head dim {dim}"
        self._add(Attend, heads=self._dense(heads_TXD), y=self._dense(y_TE), sinks=self._dense(sinks_H),
                  num_heads=num_heads,
                  num_kv_heads=num_kv_heads, dim=dim, row=per_row * dim, window=window or 0, scale=scale,
                  softcap=softcap or 0.0,
                  cache=self._cache(planes, heads_TXD.shape[2]))

    def gather(self, x_TE: torch.Tensor, y_ME: torch.Tensor) -> None:
        """The wanted rows of x."""
        self._add(Gather, x=self._dense(x_TE), y=self._dense(y_ME), width=x_TE.shape[1])

    def open_rows(self, kept: Kept, decodes: Decodes) -> None:
        """A step's ids, context, tables and slots, from the rows of ``decodes`` in ``kept`` and its positions."""
        num_groups, num_kept, width = kept.tables.shape
        assert kept.tables.is_contiguous() and decodes.tables.shape[2] == width, "tables of one width"
        self._add(Open, rows=self._address(decodes.rows, torch.int64), ids=self._address(decodes.ids, torch.int64),
                  token=self._address(kept.token, torch.int32), tables=self._address(kept.tables, torch.int32),
                  forgotten=None if kept.forgotten is None else self._address(kept.forgotten, torch.int32),
                  num_kept=num_kept, num_groups=num_groups,
                  page_slots=decodes.page_slots)

    def draw(self, kept: Kept, decodes: Decodes, logits_MV: torch.Tensor, num_tokens: int) -> None:
        """Append the draw of tokens for the wanted rows of ``decodes``, as ``kernels.sample`` defines it, with the
        numbers in ``kept``; tokens go into both. UNDRAWN marks rows that the host must draw: rounding might decide, or
        the logits are invalid."""
        numbers = {name: self._address(getattr(kept, name),
                                       torch.int32 if name in ("token", "top_k", "stream") else torch.float32)
                   for name in ("token", "top_k", "temperature", "top_p", "min_p", "stream")}
        self._floats = max(self._floats, 2 * (num_tokens + DRAW_BLOCK))
        self._add(Draw, logits=self._dense(logits_MV), width=logits_MV.shape[1], count=num_tokens,
                  rows=self._address(decodes.rows, torch.int64),
                  tokens=self._address(decodes.tokens, torch.int64), **numbers)

    def _cache(self, planes: Planes, dim: int) -> Cache:
        k, v = planes.k_NGPW, planes.v_NGPW
        width, size = dim // 2 if planes.layout == "int4" else dim, k.shape[2]
        assert k.shape == v.shape and k.shape[3] == width and k.stride() == v.stride() \
            and k.stride()[1:] == (size * width, width, 1), "dense heads"
        stride = k.stride(0) * k.itemsize
        for meta in (planes.k_meta, planes.v_meta):
            assert meta is None or meta.stride(0) * meta.itemsize == stride and meta[0, 0, 0].nbytes == META, \
                "in the same pages"
        return Cache(stride, size, planes.group, LAYOUTS[planes.layout], width * k.itemsize,
                     *(self._address(x, x.dtype) for x in (k, v)),
                     *(None if x is None else self._address(x, x.dtype) for x in (planes.k_meta, planes.v_meta)),
                     *map(self._dense, (planes.turn_k_D, planes.turn_v_D)), planes.order)

    # ------------------------------------------------------------------------------------------------------------- run

    def run(self, step: StepInputs | Decodes, first: int = 0, stop: int | None = None) -> None:
        """Run operations ``first`` .. ``stop`` (None: all) on one step's rows."""
        if self._array is None:
            self._array = (c_void_p * len(self._ops))(*map(ctypes.addressof, self._ops))
            self._threads = torch.get_num_threads()
            held = max(ROWS * self._width * 3 // 2, NEAR_FLOATS)  # rows in three parts of half their size
            self._size = -(-max(self._width + held, self._floats) // LINE) * LINE
            self._scratch = torch.empty(self._threads, self._size)
            self._starts = [ctypes.addressof(self._array) + i * ctypes.sizeof(c_void_p)
                            for i in range(len(self._ops) + 1)]
            self._memory = self._scratch.data_ptr()
        stop = len(self._ops) if stop is None else stop
        self._library.kvasir_run(self._starts[first], stop - first, step.at, self._threads, self._memory, self._size,
                                 self.tiles)


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of a layer's keys and values [N, G, P, W], and the group whose page tables and slots it uses.
    ``layout``: plain fp32, or codes, with a scale (and bias) a row in ``*_meta``. ``turn_*``: factors [D] of a rotation
    in blocks of ``order``: signs over the root of it."""

    k_NGPW: torch.Tensor
    v_NGPW: torch.Tensor
    group: int = 0
    layout: str = "plain"
    k_meta: torch.Tensor | None = None
    v_meta: torch.Tensor | None = None
    turn_k_D: torch.Tensor | None = None
    turn_v_D: torch.Tensor | None = None
    order: int = 0


class StepInputs:
    """A step's tensors as the kernels take them. int64: ids, positions, slots of each cache group [T], wanted [M];
    int32: row_start [S + 1], context [S], of each cache group or one for all, tables of each cache group [S, W]. A
    span's row i sees slots up to context + i; with ``ancestors`` (int64 [T, A], as in ``StepBatch``) a tree's row sees
    the context and its ancestors."""

    def __init__(self, ids: torch.Tensor, positions: torch.Tensor, row_start: torch.Tensor,
                 context: torch.Tensor | Sequence[torch.Tensor], tables: Sequence[torch.Tensor],
                 slots: Sequence[torch.Tensor], wanted: torch.Tensor,
                 ancestors: torch.Tensor | None = None) -> None:
        context = [context] * len(slots) if isinstance(context, torch.Tensor) else context
        self._held = ids, positions, row_start, context, tables, slots, wanted, ancestors
        if ancestors is not None:
            _check((ancestors,), torch.int64)
        _check((ids, positions, wanted, *slots), torch.int64)
        _check((row_start, *context, *tables), torch.int32)
        pointers = [(c_void_p * len(of))(*(t.data_ptr() for t in of)) for of in (context, slots, tables)]
        self._pointers = pointers
        self.args = StepArgs(ids.shape[0], row_start.shape[0] - 1, wanted.shape[0], tables[0].shape[1] if tables else 0,
                             ids.data_ptr(),
                             positions.data_ptr(), wanted.data_ptr(), row_start.data_ptr(),
                             *map(ctypes.addressof, pointers), None if ancestors is None else ancestors.data_ptr(),
                             0 if ancestors is None else ancestors.shape[1])
        self.at = ctypes.addressof(self.args)


class Decodes:
    """The inputs of steps of one row a sequence, in fixed memory: at most B rows of G page tables, W pages each. Only
    ``rows`` and ``positions`` change from step to step; ``open_rows`` derives the rest, and ``draw`` the ``tokens``."""

    def __init__(self, max_rows: int, num_groups: int, num_pages: int, page_slots: int) -> None:
        self.page_slots = page_slots
        self.rows, self.positions, self.ids, self.tokens = (torch.zeros(max_rows, dtype=torch.int64) for _ in range(4))
        self.wanted = torch.arange(max_rows)
        self.context = torch.zeros(num_groups, max_rows, dtype=torch.int32)
        self.row_start = torch.arange(max_rows + 1, dtype=torch.int32)
        # taken when it is touched first
        self.tables = torch.from_numpy(np.zeros((num_groups, max_rows, num_pages), np.int32))
        self.slots = torch.zeros(num_groups, max_rows, dtype=torch.int64)
        whole = StepInputs(self.ids, self.positions, self.row_start, self.context.unbind(), self.tables.unbind(),
                           self.slots.unbind(), self.wanted)
        self._whole, self.args, self.at = whole, whole.args, whole.at
        self._first_wanted = self.wanted.data_ptr()
        self._rows, self._positions, self._tokens = self.rows.numpy(), self.positions.numpy(), self.tokens.numpy()

    def set(self, rows: list[int], positions: list[int]) -> None:
        """Set the rows and positions of the next step."""
        count = len(rows)
        self._rows[:count], self._positions[:count] = rows, positions
        self.args.num_rows = self.args.num_spans = count

    def want(self, first: int, stop: int) -> None:
        """Select the rows whose logits are computed next."""
        self.args.num_wanted = stop - first
        self.args.wanted = self._first_wanted + 8 * first

    def drawn(self, first: int, stop: int) -> list[int]:
        """The tokens drawn for rows ``first`` .. ``stop``."""
        return self._tokens[first:stop].tolist()


def _check(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    for t in tensors:
        assert t.dtype == dtype and t.is_contiguous() and t.device.type == "cpu", f"dense {dtype} on the CPU"

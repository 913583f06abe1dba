"""A decoder's step as one call: the model's layers as operations of ``kernels.native``.

It reads the decoder's own weights (a copy in panels, in bf16 where that is exact) and writes to the same pages, so
native and other steps may follow each other. Codes are not copied but moved to the panels where no usual step reads
them elsewhere; another kind of step makes them again.

Legend: T rows, M rows with logits, E model dim, F FFN dim, H query heads, G KV heads, X = H + 2 G, D head dim, V
vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.profiler import record_function

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels.decode_rows import Kept
from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import (
    LAYOUTS,
    LINE,
    MAX_DIM,
    UNDRAWN,
    Decodes,
    Packed,
    Planes,
    Program,
    StepInputs,
    pack,
)
from kvasir.kernels.native.quantized import pack_codes, unpack_codes
from kvasir.kv.codec import LayerCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.weight_format import Weight
from kvasir.models.decoder import Block, Decoder
from kvasir.types import StepBatch

# Most rows of a native step. Memory is taken when it is touched first.
MAX_ROWS = 4096
# Rows whose logits are computed in one call.
LOGIT_ROWS = 128
# Most rows of a native step where a register holds four floats, with prompts and of decodes alone. Larger products are
# left to a BLAS.
NARROW_ROWS, NARROW_DECODES = 32, 128

UNNAMED = nullcontext()

Scratch = Callable[[str, int], torch.Tensor]  # memory [MAX_ROWS, width] for one purpose
Logits = torch.Tensor | Callable[[int, int], torch.Tensor]  # [M, V], or a function that computes rows first .. stop


def why_not(model: Decoder, caches: Sequence[LayerCache], backend: AttentionBackend) -> str | None:
    """The reason why this model's steps cannot run natively; None: they can."""
    if model.place.device.type != "cpu" or model.place.dtype != torch.float32:
        return f"it is for fp32 on a CPU, not {model.place.dtype} on {model.place.device.type}"
    if model.place.exact:
        return "exact mode has an order of its own"
    if not backend.reference:
        return f"attention is by {backend.name}"
    if not all(block.native for block in model.blocks):
        return "some layers are not plain grouped-query attention and a dense block"
    if (other := next((cache.codec.name for cache in caches if not _is_known(cache)), None)) is not None:
        return f"no native kernel knows the cache's layout: '{other}'"
    if (other := next((w.format.name for w in model.weights() if not w.format.native), None)) is not None:
        return f"no native kernel knows the weights' format: '{other}'"
    if model.never_drawn is not None:
        return "the model has a token that is never drawn"
    if any(rope is None or rope.shape[1] != dim for rope, dim in _turned(model)):
        return "some layers rotate a part of a head, or nothing"
    dims = {block.mixer.attention.head_dim for block in model.blocks}
    if any(dim % LINE or dim > MAX_DIM for dim in dims):
        return f"the head dim is not a multiple of {LINE} up to {MAX_DIM}: {sorted(dims)}"
    return None if native().library is not None else native().reason  # last: it may have to be compiled


class NativeDecoder:
    """Runs the steps that ``takes`` accepts. It is built when the first one comes: the copy of the weights takes a
    moment and memory."""

    def __init__(self, model: Decoder, caches: Sequence[LayerCache]) -> None:
        self.model = model
        self._caches = caches
        self._program: Program | None = None
        self._kept: Kept | None = None
        self._num_tokens = 0
        self.most_decodes = 0  # most sequences of a step that ``decode`` runs

    def keep(self, kept: Kept, num_tokens: int) -> None:
        """Let ``decode`` work on the seats of ``kept`` and draw from the first ``num_tokens`` columns. Called before
        the first step."""
        assert self._program is None, "the program is built"
        num_groups, num_kept, width = kept.tables.shape
        self._kept, self._num_tokens = kept, num_tokens
        self.most_decodes = min(num_kept, MAX_ROWS if self._wide() else NARROW_DECODES)
        self._decodes = Decodes(self.most_decodes, num_groups, width, self._caches[0].planes["k"].shape[2])

    def decode(
        self, seats: list[int], positions: list[int], undrawn: Callable[[list[int], torch.Tensor], list[int]]
    ) -> list[int]:
        """Draw one token for each of these seats, whose last tokens stand at ``positions``. The tokens are returned,
        and left in ``Kept``.

        Where a token cannot be drawn here, ``undrawn(places, logits)`` draws it: for places in ``seats``, from their
        logits."""
        program, decodes, count = self._begin(seats, positions)
        tokens: list[int] = []
        for first in range(0, count, LOGIT_ROWS):
            stop = min(first + LOGIT_ROWS, count)
            decodes.want(first, stop)
            with _named():
                program.run(decodes, 0 if not first else self._tail)
            drawn = decodes.drawn(first, stop)
            if UNDRAWN in drawn:
                left = [i for i, token in enumerate(drawn) if token == UNDRAWN]
                for i, token in zip(left, undrawn([first + i for i in left], self._logits_MV[left])):
                    drawn[i] = token
            tokens += drawn
        return tokens

    def decode_logits(self, seats: list[int], positions: list[int]) -> Logits:
        """Logits fp32 of decodes in these seats, as ``logits`` returns them."""
        program, decodes, count = self._begin(seats, positions)
        decodes.want(0, min(count, LOGIT_ROWS))
        with _named():
            program.run(decodes, 0, self._draw if count <= LOGIT_ROWS else self._tail)
        if count <= LOGIT_ROWS:
            return self._logits_MV[:count]

        def some(first: int, stop: int) -> torch.Tensor:
            parts = []
            for at in range(first, stop, LOGIT_ROWS):
                decodes.want(at, min(at + LOGIT_ROWS, stop))
                program.run(decodes, self._tail, self._draw)
                parts.append(self._logits_MV[: min(LOGIT_ROWS, stop - at)].clone())
            return torch.cat(parts)

        return some

    def _begin(self, seats: list[int], positions: list[int]) -> tuple[Program, Decodes, int]:
        if self._program is None:
            self._program = self._build(native().library)
        self._decodes.set(seats, positions)
        return self._program, self._decodes, len(seats)

    def takes(self, num_rows: int, num_spans: int) -> bool:
        """Whether a step of so many rows in so many spans is run best here. Guests are not: they hold no token."""
        if self._wide():
            return num_rows <= MAX_ROWS
        return num_rows <= NARROW_ROWS or num_rows <= NARROW_DECODES and num_rows == num_spans

    def can_tap(self, layers: Container[int]) -> bool:
        """Whether ``logits`` can hand out the outputs of these layers. The last one computes only rows whose logits are
        wanted."""
        return len(self.model.blocks) - 1 not in layers

    def weights_changed(self) -> None:
        """Drop the copy of the weights: the next step makes another."""
        self._program = None

    @torch.inference_mode()
    def logits(self, batch: StepBatch, taps: dict[int, torch.Tensor] | None = None) -> Logits:
        """Logits fp32 of ``batch.logit_rows``, valid until the next call; keys and values are in their pages by then.
        ``taps`` maps layers, except the last, to buffers [T, E] that receive their outputs, as in `Decoder.forward`."""
        if self._program is None:
            self._program = self._build(native().library)
        count, num_rows, first = batch.logit_rows.shape[0], batch.input_ids.shape[0], self._body
        with _named():
            inputs = _inputs(batch, batch.logit_rows)
            for layer, buffer in sorted((taps or {}).items()):  # run the list up to the end of each, and pause
                self._program.run(inputs, first, self._ends[layer])
                buffer.copy_(self._states_TE[:num_rows])
                first = self._ends[layer]
            self._program.run(inputs, first, self._draw if 0 < count <= LOGIT_ROWS else self._tail)
        return self._logits_MV[:count] if count <= LOGIT_ROWS else lambda first, stop: self._some(batch, first, stop)

    def _some(self, batch: StepBatch, first: int, stop: int) -> torch.Tensor:
        """Logits of the wanted rows first .. stop, after the layers have run."""
        parts = []
        for rows in batch.logit_rows[first:stop].split(LOGIT_ROWS):
            self._program.run(_inputs(batch, rows), self._tail, self._draw)
            parts.append(self._logits_MV[: len(rows)].clone())
        return torch.cat(parts)

    def _build(self, library: ctypes.CDLL) -> Program:
        model, program = self.model, Program(library)
        h_TE = self._states_TE = program.tensor(MAX_ROWS, model.spec.hidden_size)
        self._ends: list[int] = []  # operations up to the end of each layer
        if self._kept is not None:
            program.open_rows(self._kept, self._decodes)
        self._body = len(program)  # operations before it, and from ``_draw`` on, are for ``decode`` alone
        program.embed(model.embed_VE, h_TE, model.embed_scale)
        shared: dict[tuple[str, int], torch.Tensor] = {}  # by all layers

        def scratch(what: str, width: int) -> torch.Tensor:
            if (what, width) not in shared:
                shared[what, width] = program.tensor(MAX_ROWS, width)
            return shared[what, width]

        for block, cache, rope in zip(model.blocks, self._caches, model.rope_of):
            attended_TE = self._attend(program, block, cache, model.ropes[rope].table, h_TE, scratch)
            wanted = block is model.blocks[-1]
            if wanted:  # from here on, only rows whose logits are wanted are computed
                self._tail = len(program)
                states_TE, h_TE = h_TE, program.tensor(LOGIT_ROWS, model.spec.hidden_size)
                all_TE, attended_TE = attended_TE, program.tensor(LOGIT_ROWS, attended_TE.shape[1])
                program.gather(states_TE, h_TE)
                program.gather(all_TE, attended_TE)
            self._join(program, attended_TE, block.mixer.o, block.mixer_post_norm, h_TE, scratch, wanted)
            self._feed(program, block, h_TE, scratch, wanted)
            self._ends.append(len(program))
        self._logits_MV = program.tensor(LOGIT_ROWS, model.spec.vocab_size)
        program.linear(
            h_TE,
            _pack(model.head, once=self._wide()),
            self._logits_MV,
            norm=_norm(model.norm),
            wanted=True,
            scale=model.spec.logit_scale,
            softcap=model.spec.logit_softcap,
        )
        self._draw = len(program)
        if self._kept is not None:
            program.draw(self._kept, self._decodes, self._logits_MV, self._num_tokens)
        return program

    def _wide(self) -> bool:
        """Whether products of many rows keep up with a BLAS."""
        return native().library.kvasir_lanes() > 4

    def _attend(
        self,
        program: Program,
        block: Block,
        cache: LayerCache,
        angles: torch.Tensor,
        h_TE: torch.Tensor,
        scratch: Scratch,
    ) -> torch.Tensor:
        """Add a layer's attention to the program. Returns where its result [T, H D] will lie."""
        mixer = block.mixer
        spec, attention = mixer.spec, mixer.attention
        heads_TN = scratch("heads", mixer.qkv.num_outputs)
        program.linear(h_TE, self._packed(mixer.qkv), heads_TN, bias_N=mixer.qkv.bias_N, norm=_norm(block.mixer_norm))
        heads_TXD = heads_TN.view(MAX_ROWS, -1, spec.head_dim)
        planes = planes_of(cache)
        program.heads(
            heads_TXD,
            planes,
            angles,
            spec.num_heads,
            spec.num_kv_heads,
            norm=None if mixer.qk_norm is None else _norm(mixer.qk_norm),
            writes=mixer.writes,
        )
        out_TE = scratch("attended", spec.num_heads * spec.head_dim)
        program.attend(
            heads_TXD,
            out_TE,
            planes,
            spec.num_heads,
            spec.num_kv_heads,
            scale=spec.scale,
            window=attention.window,
            softcap=attention.softcap,
            sinks_H=mixer.sinks_H,
        )
        return out_TE

    def _feed(self, program: Program, block: Block, h_TE: torch.Tensor, scratch: Scratch, wanted: bool) -> None:
        ffn = block.ffn
        gated_TF = scratch("gated", ffn.down.num_inputs)
        program.linear(
            h_TE,
            self._packed(ffn.gate_up, gated=True),
            gated_TF,
            bias_N=ffn.gate_up.bias_N,
            norm=_norm(block.ffn_norm),
            activation=ffn.activation,
            wanted=wanted,
        )
        self._join(program, gated_TF, ffn.down, block.ffn_post_norm, h_TE, scratch, wanted)

    def _join(
        self,
        program: Program,
        x_TK: torch.Tensor,
        out: Linear,
        post: RMSNorm | None,
        h_TE: torch.Tensor,
        scratch: Scratch,
        wanted: bool,
    ) -> None:
        """Add a sublayer's last product to the residual stream, at once or behind its norm."""
        if post is None:
            program.linear(x_TK, self._packed(out), h_TE, bias_N=out.bias_N, add=True, wanted=wanted)
            return
        y_TE = scratch("joining", h_TE.shape[1])
        program.linear(x_TK, self._packed(out), y_TE, bias_N=out.bias_N, wanted=wanted)
        program.norm(y_TE, h_TE, _norm(post), add=True, wanted=wanted)

    def _packed(self, layer: Linear, gated: bool = False) -> Packed:
        return _pack(layer.weight, gated, once=self._wide())


def _pack(weight: Weight, gated: bool = False, once: bool = False) -> Packed:
    """The weight in panels. ``once``: its codes are held there alone, until another kind of step asks for them."""
    library, form = native().library, weight.format
    codes = form.codes(weight)
    if codes is None:
        return pack(library, weight.dequantise(), gated)
    packed = pack_codes(
        library, codes.codes_NK, codes.scales_NG, codes.zeros_NG, gated, codes.offsets_NG, codes.rounded
    )
    if once and form.code_planes:
        weight.lend(lambda: form.of_codes(unpack_codes(library, packed)))
    return packed


def _turned(model: Decoder) -> list[tuple[torch.Tensor | None, int]]:
    """The table of angles and the head dim of every layer."""
    tables = [None if rope is None else model.ropes[rope].table for rope in model.rope_of]
    return [(table, block.mixer.attention.head_dim) for table, block in zip(tables, model.blocks)]


def _is_known(cache: LayerCache) -> bool:
    return cache.codec.native and cache.codec.kernel in LAYOUTS


def planes_of(cache: LayerCache) -> Planes:
    """A layer's pages as the C kernels take them."""
    codec, found = cache.codec, cache.planes
    planes = Planes(found["k"], found["v"], cache.group, codec.kernel, found.get("k_meta"), found.get("v_meta"))
    rotations = [codec.rotation(side, cache.head_dim) for side in ("k", "v")]
    if rotations[0] is None:
        return planes
    turn_k, turn_v = (None if r is None else r.factors_D for r in rotations)
    return replace(planes, turn_k_D=turn_k, turn_v_D=turn_v, order=rotations[0].order)


def _named() -> AbstractContextManager:
    """Name the step for a profiler, which sees none of the C kernels."""
    return record_function("native_step") if torch.autograd._profiler_enabled() else UNNAMED


def _inputs(batch: StepBatch, wanted_M: torch.Tensor) -> StepInputs:
    return StepInputs(
        batch.input_ids,
        batch.positions,
        batch.row_start,
        [batch.of(group).context for group in range(len(batch.tables))],
        batch.tables,
        batch.slots,
        wanted_M,
        batch.ancestors,
    )


def _norm(norm: RMSNorm) -> tuple[torch.Tensor, float]:
    return norm.parameters

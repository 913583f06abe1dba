"""A decoder's step as one call: the model's layers as operations of ``kernels.native``.

It reads the decoder's own weights (a copy in panels, bf16 where that is exact) and writes to the same pages, so steps of
either kind may follow each other.

Legend: T rows, M rows with logits, E model dim, F FFN dim, H query heads, G KV heads, X = H + 2 G, D head dim, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.profiler import record_function

from kvasir.attention.backend import AttentionBackend
from kvasir.attention.backends.torch import TorchBackend
from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import CACHES, LANES, MAX_DIM, Packed, Planes, Program, StepInputs, pack
from kvasir.kv.codec import LayerCache
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.quantized import QuantizedCodec
from kvasir.layers.ffn.dense import FFN
from kvasir.layers.linear import Linear
from kvasir.layers.mixers.gqa import Mixer
from kvasir.layers.norm import RMSNorm
from kvasir.models.decoder import Block, Decoder
from kvasir.types import StepBatch

MAX_ROWS = 4096  # of a step; memory is taken when it is touched first
LOGIT_ROWS = 128  # whose logits are computed in one call
NARROW_ROWS = 32  # where vectors are narrow, products of more prompt rows are left to a BLAS
NARROW_DECODES = 128

Scratch = Callable[[str, int], torch.Tensor]  # memory [MAX_ROWS, width] for one purpose
Logits = torch.Tensor | Callable[[int, int], torch.Tensor]  # [M, V], or a function that computes rows first .. stop of them


def why_not(model: Decoder, caches: Sequence[LayerCache], backend: AttentionBackend) -> str | None:
    """Why this model's steps do not run natively; None: they can."""
    if model.place.device.type != "cpu" or model.place.dtype != torch.float32:
        return f"it is for fp32 on a CPU, not {model.place.dtype} on {model.place.device.type}"
    if model.place.exact:
        return "exact mode has an order of its own"
    if type(backend) is not TorchBackend:
        return f"attention is by {backend.name}"
    if (other := next((cache.codec.name for cache in caches if not _is_known(cache)), None)) is not None:
        return f"no native kernel knows the cache's layout: '{other}'"
    if any(type(block.mixer) is not Mixer or type(block.ffn) is not FFN for block in model.blocks):
        return "some layers are neither grouped-query attention nor a dense block"
    dims = {block.mixer.spec.head_dim for block in model.blocks}
    if any(dim % LANES or dim > MAX_DIM for dim in dims):
        return f"the head dim is not a multiple of {LANES} up to {MAX_DIM}: {sorted(dims)}"
    return None if native().library is not None else native().reason  # last: it may have to be compiled


class NativeDecoder:
    """``takes`` says which steps. Built when the first comes: the copy of the weights takes a moment and memory."""

    def __init__(self, model: Decoder, caches: Sequence[LayerCache]) -> None:
        self.model = model
        self._caches = caches
        self._program: Program | None = None

    def takes(self, batch: StepBatch) -> bool:
        num_rows = batch.input_ids.shape[0]
        if batch.guests is not None:  # they hold no token, and hidden states of theirs are asked for
            return False
        if self._wide():
            return num_rows <= MAX_ROWS
        return num_rows <= NARROW_ROWS or num_rows <= NARROW_DECODES and num_rows == len(batch.starts)

    @torch.inference_mode()
    def logits(self, batch: StepBatch, taps: dict[int, torch.Tensor] | None = None) -> Logits:
        """Logits fp32 of ``batch.logit_rows``, valid until the next call. Keys and values are in their pages then. ``taps`` maps layers
        but the last one to buffers [T, E] that receive their outputs, as of `Decoder.forward`."""
        if self._program is None:
            self._program = self._build(native().library)
        count, num_rows, first = batch.logit_rows.shape[0], batch.input_ids.shape[0], 0
        with record_function("native_step") if torch.autograd._profiler_enabled() else nullcontext():  # else a step of ours has no name
            inputs = _inputs(batch, batch.logit_rows)
            for layer, buffer in sorted((taps or {}).items()):  # the list is run up to each, and paused
                self._program.run(inputs, first, self._ends[layer])
                buffer.copy_(self._states_TE[:num_rows])
                first = self._ends[layer]
            self._program.run(inputs, first, stop=self._tail if not 0 < count <= LOGIT_ROWS else None)
        return self._logits_MV[:count] if count <= LOGIT_ROWS else lambda first, stop: self._some(batch, first, stop)

    def _some(self, batch: StepBatch, first: int, stop: int) -> torch.Tensor:
        """Logits of rows first .. stop of those that are wanted, after the layers have run."""
        parts = []
        for rows in batch.logit_rows[first:stop].split(LOGIT_ROWS):
            self._program.run(_inputs(batch, rows), first=self._tail)
            parts.append(self._logits_MV[:len(rows)].clone())
        return torch.cat(parts)

    def _build(self, library: ctypes.CDLL) -> Program:
        model, program = self.model, Program(library)
        h_TE = self._states_TE = program.tensor(MAX_ROWS, model.spec.hidden_size)
        self._ends: list[int] = []  # operations up to the end of each layer
        program.embed(model.embed_VE, h_TE, model.embed_scale)
        shared: dict[tuple[str, int], torch.Tensor] = {}  # of all layers

        def scratch(what: str, width: int) -> torch.Tensor:
            if (what, width) not in shared:
                shared[what, width] = program.tensor(MAX_ROWS, width)
            return shared[what, width]

        for block, cache, rope in zip(model.blocks, self._caches, model.rope_of):
            attended_TE = self._attend(program, block, cache, model.ropes[rope].table, h_TE, scratch)
            wanted = block is model.blocks[-1]
            if wanted:  # from here on only rows count whose logits are wanted
                self._tail = len(program)
                states_TE, h_TE = h_TE, program.tensor(LOGIT_ROWS, model.spec.hidden_size)
                all_TE, attended_TE = attended_TE, program.tensor(LOGIT_ROWS, attended_TE.shape[1])
                program.gather(states_TE, h_TE)
                program.gather(all_TE, attended_TE)
            self._join(program, attended_TE, block.mixer.o, block.mixer_post_norm, h_TE, scratch, wanted)
            self._feed(program, block, h_TE, scratch, wanted)
            self._ends.append(len(program))
        self._logits_MV = program.tensor(LOGIT_ROWS, model.spec.vocab_size)
        program.linear(h_TE, pack(library, model.head_VE), self._logits_MV, norm=_norm(model.norm), wanted=True, scale=model.spec.logit_scale,
                       softcap=model.spec.logit_softcap)
        return program

    def _wide(self) -> bool:
        library = native().library
        return bool(library.kvasir_wide() or library.kvasir_tiles())

    def _attend(self, program: Program, block: Block, cache: LayerCache, angles: torch.Tensor, h_TE: torch.Tensor,
                scratch: Scratch) -> torch.Tensor:
        """What the heads have found [T, H D]."""
        mixer = block.mixer
        spec, attention = mixer.spec, mixer.attention
        heads_TN = scratch("heads", mixer.qkv.weight_NK.shape[0])
        program.linear(h_TE, self._packed(mixer.qkv), heads_TN, bias_N=mixer.qkv.bias_N, norm=_norm(block.mixer_norm))
        heads_TXD = heads_TN.view(MAX_ROWS, -1, spec.head_dim)
        planes = planes_of(cache)
        program.heads(heads_TXD, planes, angles, spec.num_heads, spec.num_kv_heads, norm=None if mixer.qk_norm is None else _norm(mixer.qk_norm),
                      writes=mixer.writes)
        out_TE = scratch("attended", spec.num_heads * spec.head_dim)
        program.attend(heads_TXD, out_TE, planes, spec.num_heads, spec.num_kv_heads, scale=spec.scale, window=attention.window,
                       softcap=attention.softcap, sinks_H=mixer.sinks_H)
        return out_TE

    def _feed(self, program: Program, block: Block, h_TE: torch.Tensor, scratch: Scratch, wanted: bool) -> None:
        ffn = block.ffn
        gated_TF = scratch("gated", ffn.down.weight_NK.shape[1])
        program.linear(h_TE, self._packed(ffn.gate_up, gated=True), gated_TF, bias_N=ffn.gate_up.bias_N, norm=_norm(block.ffn_norm),
                       activation=ffn.activation, wanted=wanted)
        self._join(program, gated_TF, ffn.down, block.ffn_post_norm, h_TE, scratch, wanted)

    def _join(self, program: Program, x_TK: torch.Tensor, out: Linear, post: RMSNorm | None, h_TE: torch.Tensor, scratch: Scratch,
              wanted: bool) -> None:
        """The sublayer's last product joins the residual stream, at once or behind its norm."""
        if post is None:
            program.linear(x_TK, self._packed(out), h_TE, bias_N=out.bias_N, add=True, wanted=wanted)
            return
        y_TE = scratch("joining", h_TE.shape[1])
        program.linear(x_TK, self._packed(out), y_TE, bias_N=out.bias_N, wanted=wanted)
        program.norm(y_TE, h_TE, _norm(post), add=True, wanted=wanted)

    def _packed(self, layer: Linear, gated: bool = False) -> Packed:
        return pack(native().library, layer.weight_NK, gated)


def _is_known(cache: LayerCache) -> bool:
    return isinstance(cache.codec, (PlainCodec, QuantizedCodec)) and cache.codec.kernel in CACHES


def planes_of(cache: LayerCache) -> Planes:
    """A layer's pages as the kernels take them."""
    codec, found = cache.codec, cache.planes
    planes = Planes(found["k"], found["v"], cache.group, codec.kernel, found.get("k_meta"), found.get("v_meta"))
    rotations = [codec.rotation(side, cache.head_dim) if isinstance(codec, QuantizedCodec) else None for side in ("k", "v")]
    if rotations[0] is None:
        return planes
    turn_k, turn_v = (None if r is None else r.factors_D for r in rotations)
    return replace(planes, turn_k_D=turn_k, turn_v_D=turn_v, order=rotations[0].order)


def _inputs(batch: StepBatch, wanted_M: torch.Tensor) -> StepInputs:
    return StepInputs(batch.input_ids, batch.positions, batch.row_start, batch.context, batch.tables, batch.slots, wanted_M, batch.ancestors)


def _norm(norm: RMSNorm) -> tuple[torch.Tensor, float]:
    return norm.parameters

"""The assembler: one decoder for every model, put together from its spec.

Legend: T rows, M rows with logits, E model dim, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels.steer import Gates, gate_rows
from kvasir.kv.codec import CachedLayer, LayerCache
from kvasir.layers.layer_embedding import LayerEmbeddings, LayerInput
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm, Stream
from kvasir.layers.products import matrix
from kvasir.layers.rope import Angles, RopeTable
from kvasir.layers.steering import LayerHooks
from kvasir.layers.weight_format import MATRIX, Weight
from kvasir.layers.weights import Placement, Slot
from kvasir.models.mtp import MTPLayer
from kvasir.models.sidecar import Sidecar
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.types import StepBatch


class Block:
    """One layer: a mixer and a feed-forward block on the residual stream, with norms before each, after each, or
    both. ``index``: its place among the layers."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, place: Placement) -> None:
        self.index = index
        mixer = importlib.import_module(f"kvasir.layers.mixers.{spec.mixer.kind}")
        ffn = importlib.import_module(f"kvasir.layers.ffn.{spec.ffn.kind}")
        self.mixer_norm = self.ffn_norm = self.mixer_post_norm = self.ffn_post_norm = None
        if spec.norms != "post":
            self.mixer_norm, self.ffn_norm = (RMSNorm(hidden_size, spec.norm, place) for _ in range(2))
        if spec.norms != "pre":
            self.mixer_post_norm, self.ffn_post_norm = (RMSNorm(hidden_size, spec.norm, place) for _ in range(2))
        here = place.within(f"layers.{index}")
        self.mixer = mixer.Mixer(spec.mixer, hidden_size, here.within("mixer"), writes=spec.cache_of is None)
        self.ffn = ffn.FFN(spec.ffn, hidden_size, here.within("ffn"))
        self.ffn_fuses = getattr(self.ffn, "fuses", False)
        self.residual_scale = spec.residual_scale
        # Whether a sublayer's last product may add to the stream.
        self.adds = spec.norms == "pre" and spec.residual_scale == 1
        # Whether the C kernels run it (``models/native_decoder.py``).
        plain = spec.norms != "post" and spec.residual_scale == 1 and spec.embedding is None and not spec.scaled
        self.native = self.mixer.native and self.ffn.native and plain
        self.ffn_reads_stream = getattr(self.ffn, "reads_stream", False)
        self.embedding = self.scale_1 = None
        self.hooks: LayerHooks | None = None
        if spec.embedding is not None:
            self.embedding = LayerInput(spec.embedding, hidden_size, here.within("embedding"))
        if spec.scaled:
            self.scale_1 = torch.empty(1, device=place.device, dtype=place.dtype)

    def forward(
        self,
        stream: Stream,
        angles: Angles,
        cache: LayerCache,
        backend: AttentionBackend,
        batch: StepBatch,
        wanted_M: torch.Tensor | None = None,
    ) -> None:
        """Run both sublayers: each reads the stream and adds to it, at once where it can, else with the next norm. With
        ``wanted_M``, only these rows go on after attention, and the stream holds only them from then on."""
        x_TE, norm = stream.enter(self.mixer_norm)
        if wanted_M is not None:
            stream.h_TE = stream.h_TE.index_select(0, wanted_M)
        if self.adds:
            stream.h_TE = self.mixer.forward(x_TE, angles, cache, backend, batch, norm, stream.h_TE, wanted_M)
        else:
            out_TE = self.mixer.forward(x_TE, angles, cache, backend, batch, norm, wanted_M=wanted_M)
            self._add(stream, out_TE, self.mixer_post_norm)
        x_TE, norm = (stream.value(), self.ffn_norm) if self.ffn_reads_stream else stream.enter(self.ffn_norm)
        if wanted_M is not None:
            batch = batch.only(wanted_M)
        if not self.ffn_fuses:
            out_TE = self.ffn.forward(x_TE if norm is None else norm(x_TE), batch=batch)
            self._add(stream, out_TE, self.ffn_post_norm)
        elif self.adds:
            stream.h_TE = self.ffn.forward(x_TE, norm, stream.h_TE, batch)
        else:
            self._add(stream, self.ffn.forward(x_TE, norm, batch=batch), self.ffn_post_norm)
        if self.embedding is not None:
            input_TP = stream.inputs_TLP[:, self.index]
            if wanted_M is not None:
                input_TP = input_TP.index_select(0, wanted_M)
            stream.add(self.embedding.forward(stream.value(), input_TP), self.embedding.norm)
        if self.scale_1 is not None:
            stream.h_TE = stream.value().mul_(self.scale_1)
        if self.hooks is not None and batch.hooks is not None:
            self.hooks.leave(stream, batch)

    @property
    def records(self) -> bool:
        """Whether a hook copies states of this layer, so that all rows are computed to its end."""
        return self.hooks is not None and bool(self.hooks.recorders)

    def _add(self, stream: Stream, out_TE: torch.Tensor, post: RMSNorm | None) -> None:
        """Let a sublayer's result join the stream."""
        stream.add(out_TE if self.residual_scale == 1 else out_TE.mul_(self.residual_scale), post)

    def slots(self) -> dict[str, Slot]:
        parts = {
            "mixer_norm": self.mixer_norm,
            "mixer": self.mixer,
            "mixer_post_norm": self.mixer_post_norm,
            "ffn_norm": self.ffn_norm,
            "ffn": self.ffn,
            "ffn_post_norm": self.ffn_post_norm,
            "embedding": self.embedding,
        }
        found = {
            f"{part}.{name}": slot
            for part, module in parts.items()
            if module is not None
            for name, slot in module.slots().items()
        }
        return found if self.scale_1 is None else found | {"scale": Slot(self.scale_1)}


class Decoder:
    """A model of any family. Its weights are uninitialised until the loader has filled ``slots()``. ``num_positions``
    is the number of rows of the RoPE tables (default: ``spec.max_position``); positions beyond are an error."""

    def __init__(self, spec: ModelSpec, place: Placement, num_positions: int | None = None) -> None:
        self.spec = spec
        self.place = place
        self.gates: Gates | None = None  # of the sets of hooks that are loaded; None: there are none
        self.never_drawn: int | None = None  # a token of the vocabulary that only stands for unknown ones
        self.sidecar, self.adapters = Sidecar(), None  # set where they are read, and where there are some
        self.embed_VE = torch.empty(spec.vocab_size, spec.hidden_size, device=place.device, dtype=place.dtype)
        # The scale is rounded to the model's dtype, as the models were trained.
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=place.dtype).item()
        self.layer_embeddings = None
        if (own := spec.layer_embedding) is not None:
            here = place.within("layer_embeddings")
            self.layer_embeddings = LayerEmbeddings(own, len(spec.layers), spec.vocab_size, spec.hidden_size, here)
        self.blocks = [Block(layer, i, spec.hidden_size, place) for i, layer in enumerate(spec.layers)]
        self.norm = RMSNorm(spec.hidden_size, spec.final_norm, place)
        headless = spec.tied or spec.labels is not None
        shared = {"place": place.plain(), "planes": {MATRIX: self.embed_VE}} if headless else {"place": place}
        self.head = Weight({"head": spec.vocab_size}, spec.hidden_size, **shared)
        self.head.copies = False  # the largest matrix
        self.labels_LE = matrix(spec.labels, spec.hidden_size, place=place) if spec.labels else None
        kinds = list(dict.fromkeys(layer.rope for layer in spec.all_layers if layer.rope is not None))
        self.ropes = [RopeTable(kind, num_positions or spec.max_position, place.device) for kind in kinds]
        rope_of = [None if layer.rope is None else kinds.index(layer.rope) for layer in spec.all_layers]
        self.rope_of = rope_of[: len(spec.layers)]
        self.mtp: MTPLayer | None = None
        if spec.mtp is not None:
            block = Block(spec.mtp.layer, len(spec.layers), spec.hidden_size, place)
            self.mtp = MTPLayer(spec, block, None if rope_of[-1] is None else self.ropes[rope_of[-1]], place)

    def cached_layers(self) -> list[CachedLayer]:
        """The layers that write keys and values of their own."""
        tables = [None if rope is None else self.ropes[rope].table for rope in self.rope_of]
        if self.mtp is not None:
            tables.append(None if self.mtp.rope is None else self.mtp.rope.table)
        rows = [None if layer.cache_of is not None else layer.mixer.cache_row() for layer in self.spec.all_layers]
        own = len(self.blocks)
        return [CachedLayer(i, row, t, i >= own) for i, (row, t) in enumerate(zip(rows, tables)) if row is not None]

    @property
    def rounds_from(self) -> int:
        """Rows of prompts from which experts round their rows in a step; 0: they never do."""
        return min((n for block in self.blocks if (n := getattr(block.ffn, "rounds_from", 0))), default=0)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        caches: Sequence[LayerCache],
        backend: AttentionBackend,
        taps: dict[int, torch.Tensor] | None = None,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] before the final norm. ``caches``: one per layer; ``backend.plan(batch)`` was called.

        ``taps`` maps a layer's index to a buffer of at least T rows that receives the layer's output. ``wanted_M`` are
        the rows, at least one, whose hidden states [M, E] are wanted. For the other rows the last layer computes keys,
        values and attention only, which saves a fiftieth of a long prompt's time for 32 layers.
        """
        batch = self.begin(batch)
        h_TE = self.embed(batch.input_ids)
        if batch.inputs is not None:
            h_TE.index_copy_(0, batch.guests[0], batch.inputs)
        angles = self.angles(batch.positions)
        stream = self.stream(batch.input_ids, h_TE)
        last = len(self.blocks) - 1
        early = wanted_M if taps is None or last not in taps else None
        if batch.hooks is not None and self.blocks[last].records:
            early = None
        for i, block in enumerate(self.blocks):
            block.forward(stream, angles[i], caches[i], backend, batch, early if i == last else None)
            if taps is not None and i in taps:
                stream.peek(taps[i][: len(h_TE)])
        return stream.value() if wanted_M is None or early is not None else stream.value().index_select(0, wanted_M)

    def begin(self, batch: StepBatch) -> StepBatch:
        """The batch as layers see it: where sets of hooks are loaded, each row's adapter and its open gates apart."""
        if self.gates is None or batch.variants is None:
            return batch
        adapters_T, hooks_T = gate_rows(batch.variants, batch.input_ids, batch.positions, self.gates)
        return replace(batch, variants=adapters_T, hooks=hooks_T)

    def stream(self, ids_T: torch.Tensor, h_TE: torch.Tensor) -> Stream:
        """The residual stream of a step, which begins with the embeddings ``h_TE`` of its rows."""
        own = self.layer_embeddings
        return Stream(h_TE, None if own is None else own(ids_T, h_TE))

    def angles(self, positions_T: torch.Tensor) -> list[Angles]:
        """The angles of rows at these positions, for every layer."""
        tables, nothing = [Angles(table, positions_T) for table in self.ropes], Angles(None, positions_T)
        return [nothing if rope is None else tables[rope] for rope in self.rope_of]

    def logits(self, hidden_ME: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of hidden states that ``forward`` returned: in the model's dtype, or in fp32 where they are
        scaled or capped. A sampler that wants fp32 converts as it reads; the values are the same."""
        return self.scaled(self._head(hidden_ME))

    def read_out(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of states [..., E] that went through a norm already, such as a drafter's own."""
        return self.scaled(F.linear(normed, self.head.dequantise()))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., E] as the first layer reads them."""
        embedded = F.embedding(ids, self.embed_VE)
        return embedded if self.embed_scale == 1.0 else embedded * self.embed_scale

    def scaled(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """Raw logits, scaled and capped as the model says, without the token that is never drawn; changed in place
        where they are fp32."""
        if self.spec.logit_scale != 1.0 or self.spec.logit_softcap is not None:
            logits_MV = logits_MV.float()
        if self.spec.logit_scale != 1.0:
            logits_MV *= self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits_MV = logits_MV.div_(self.spec.logit_softcap).tanh_().mul_(self.spec.logit_softcap)
        if self.never_drawn is not None:
            logits_MV[..., self.never_drawn].fill_(float("-inf"))
        return logits_MV

    def _head(self, hidden_ME: torch.Tensor) -> torch.Tensor:
        """Run the final norm and the head, in one kernel where few rows are wanted."""
        return self.head(hidden_ME, norm=self.norm)

    def forget_copies(self) -> None:
        """Drop what was made of the weights for faster products, since they have changed; it is made again when
        needed."""
        for weight in self.weights():
            weight.forget()

    def weights(self) -> Iterator[Weight]:
        """The weights of all products."""
        yield self.head
        for part in (*self.blocks, self.layer_embeddings, self.mtp):
            if part is not None:
                yield from _weights(part)

    @property
    def weight_bytes(self) -> float:
        """Average bytes of an element of the matrices, scales included."""
        found = list(self.weights())
        return sum(w.num_bytes for w in found) / sum(w.num_outputs * w.num_inputs * (w.count or 1) for w in found)

    def slots(self) -> dict[str, Slot]:
        """Every place that a stored tensor goes to, by our names. The head is among them only if it is not the
        embedding."""
        found = {"embed.weight": Slot(self.embed_VE), "norm.weight": self.norm.slots()["weight"]}
        if self.head.planes.get(MATRIX) is not self.embed_VE:
            found |= self.head.slots()
        if self.labels_LE is not None:
            found["labels.weight"] = Slot(self.labels_LE)
        if self.layer_embeddings is not None:
            found |= {f"layer_embeddings.{name}": slot for name, slot in self.layer_embeddings.slots().items()}
        for i, block in enumerate(self.blocks):
            found |= {f"layers.{i}.{name}": slot for name, slot in block.slots().items()}
        return found if self.mtp is None else found | self.mtp.slots()


def _weights(part: object) -> Iterator[Weight]:
    """The weights of a part of the model, and of its own parts."""
    values = vars(part).values()
    for value in (*values, *(one for some in values if isinstance(some, list) for one in some)):
        if isinstance(value, Weight):
            yield value
        elif isinstance(value, Linear):
            yield value.weight
        elif callable(getattr(value, "slots", None)) and not isinstance(value, type):
            yield from _weights(value)

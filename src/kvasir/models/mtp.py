"""An MTP layer: it predicts the token after the next one, from a hidden state and the embedding of the next token.

Multi-token prediction as in DeepSeek V3 (arXiv 2412.19437, equations 21 to 23). Row i joins the normed embedding of
token i + 1 and the normed hidden state of row i by one product, runs one decoder layer of the model's own kind, and
predicts token i + 2 through its last norm and the model's output matrix. The hidden state is that behind the model's
final norm. For a longer chain, the state behind the layer's last norm takes its place.

Legend: T rows, E model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from kvasir.attention.backend import AttentionBackend
from kvasir.kv.codec import LayerCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm, Stream
from kvasir.layers.rope import Angles, RopeTable
from kvasir.layers.weight_format import Weight
from kvasir.layers.weights import Placement, Slot
from kvasir.models.mtp_fields import PREFIX
from kvasir.models.spec import ModelSpec
from kvasir.types import StepBatch


class Model(Protocol):
    """The parts of the model that the layer shares (`kvasir.models.decoder.Decoder`)."""

    embed_scale: float
    head: Weight

    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...

    def scaled(self, logits_MV: torch.Tensor) -> torch.Tensor: ...


class MTPLayer:
    """The weights of an MTP layer around a decoder layer ``block`` (`kvasir.models.decoder.Block`). ``rope``: the table
    that its keys are turned by (None: they are not)."""

    def __init__(self, spec: ModelSpec, block: Any, rope: RopeTable | None, place: Placement) -> None:
        own, size = spec.mtp, spec.hidden_size
        self.spec, self.block, self.rope = own, block, rope
        self.embed_norm, self.hidden_norm, self.norm = (RMSNorm(size, spec.final_norm, place) for _ in range(3))
        here = replace(place, path=PREFIX)
        self.proj = Linear(2 * size, {"proj": size}, bias=False, place=here)
        self.embed_VE = None
        if own.own_embed:
            self.embed_VE = torch.empty(spec.vocab_size, size, device=place.device, dtype=place.dtype)
        self.head = Weight({"head": spec.vocab_size}, size, here) if own.own_head else None
        if self.head is not None:
            self.head.copies = False

    @property
    def index(self) -> int:
        """The place of its keys and values among those of all layers."""
        return self.block.index

    def embed(self, model: Model, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., E] of tokens as this layer reads them."""
        if self.embed_VE is None:
            return model.embed(ids)
        embedded = F.embedding(ids, self.embed_VE)
        return embedded if model.embed_scale == 1.0 else embedded * model.embed_scale

    def enter(self, embedded_TE: torch.Tensor, hidden_TE: torch.Tensor) -> torch.Tensor:
        """The decoder layer's inputs [T, E]: both inputs of a row, normed and joined."""
        parts = self.embed_norm(embedded_TE), self.hidden_norm(hidden_TE)
        return self.proj(torch.cat(parts[::-1] if self.spec.hidden_first else parts, -1))

    def keep(self, x_TE: torch.Tensor, cache: LayerCache, backend: AttentionBackend, batch: StepBatch) -> None:
        """Write keys and values of rows, which depend on no other row, and compute nothing else. ``x_TE``: from
        ``enter``."""
        x_TE, norm = Stream(x_TE).enter(self.block.mixer_norm)
        self.block.mixer.keep(x_TE, self._angles(batch), cache, backend, batch, norm)

    def forward(
        self, x_TE: torch.Tensor, cache: LayerCache, backend: AttentionBackend, batch: StepBatch
    ) -> torch.Tensor:
        """States [T, E] behind the last norm of rows from ``enter``. ``backend.plan(batch)`` was called."""
        stream = Stream(x_TE)
        self.block.forward(stream, self._angles(batch), cache, backend, batch)
        return self.norm(stream.value())

    def logits(self, model: Model, state_TE: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of states from ``forward``, as the model would scale and cap them."""
        return model.scaled((self.head or model.head)(state_TE))

    def _angles(self, batch: StepBatch) -> Angles:
        return Angles(self.rope, batch.positions)

    def slots(self) -> dict[str, Slot]:
        """The places of its stored tensors. Those of the decoder layer have the names of a layer behind the last."""
        norms = {"embed_norm": self.embed_norm, "hidden_norm": self.hidden_norm, "norm": self.norm}
        found = {f"mtp.{name}.weight": norm.slots()["weight"] for name, norm in norms.items()}
        for part in (self.proj, self.head):
            found |= {} if part is None else {f"mtp.{name}": slot for name, slot in part.slots().items()}
        if self.embed_VE is not None:
            found["mtp.embed.weight"] = Slot(self.embed_VE)
        return found | {f"layers.{self.index}.{name}": slot for name, slot in self.block.slots().items()}

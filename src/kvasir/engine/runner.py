"""Runs a plan on the device: copy pages, pack, forward, sample. It holds the model, the pool and nothing of any request.

``launch`` does not wait for the device; the handle's ``read`` does. At depth 0 the engine reads at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.decoding.sampler import SampleOutput, Sampler
from kvasir.engine.batch import Packer
from kvasir.engine.decode_tapes import DecodeTapes
from kvasir.kv.pool import KVPool
from kvasir.models.decoder import Decoder
from kvasir.types import Plan, SpanResult


@dataclass(slots=True)
class Handle:
    """A launched step. ``read`` waits for it and returns one result per span, in plan order."""

    output: SampleOutput

    def read(self) -> list[SpanResult]:
        return self.output.read()


class Runner:
    def __init__(self, model: Decoder, pool: KVPool, backend: AttentionBackend, sampler: Sampler, device: torch.device) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self.sampler = sampler
        self.caches = [pool.layer(i) for i in range(len(model.spec.layers))]
        self.packer = Packer(pool.page_slots, len(pool.groups), device)
        self.tapes = DecodeTapes(model, pool, backend) if DecodeTapes.can_serve(model, pool, backend) else None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Handle:
        if plan.copies:
            self.pool.copy(plan.copies)
        taped = None if self.tapes is None else self.tapes.logits(plan.spans)
        if taped is not None:
            return Handle(self.sampler.sample(taped, self.sampler.pack(plan.spans)))
        batch = self.packer.pack(plan.spans)
        rows = self.sampler.pack(plan.spans)
        self.backend.plan(batch)
        hidden_TE = self.model.forward(batch, self.caches, self.backend)
        if batch.logit_rows.numel() == hidden_TE.shape[0]:
            wanted_ME = hidden_TE
        else:
            wanted_ME = hidden_TE.index_select(0, batch.logit_rows)
        # The sampler asks for logits slice by slice, so that a long scored prompt never needs [T, V] at once.
        return Handle(self.sampler.sample(lambda a, b: self.model.logits(wanted_ME[a:b]), rows))

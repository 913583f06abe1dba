"""Swaps of a drafter's weights on a GPU, between captured steps of trees in bf16: exact mode keeps every token."""

from __future__ import annotations

import pytest
import torch

from kvasir.config import EngineConfig
from kvasir.engine.engine import Engine
from kvasir.speculation.versions import Versions, copy
from kvasir_lab.studies.swap_times import replies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCH, TOKENS, EVERY = 8, 200, 7


def test_swaps_keep_every_token():
    plain = Engine(EngineConfig.of(batch_invariant=True, max_num_seqs=16))
    right = replies(plain, BATCH, TOKENS)
    plain.close()
    drafter = dict(drafter="eagle:model=new", draft_control="fixed")
    engine = Engine(EngineConfig.of(batch_invariant=True, max_num_seqs=16, **drafter))
    live = engine.proposals.drafting.drafter.weights()
    versions = Versions(live)
    copy(versions._candidate, {name: torch.randn_like(tensor) for name, tensor in live.items()})
    versions.candidate, served = 1, []

    def swap() -> None:
        served.append(versions.serve(not len(served) % 2))

    assert replies(engine, BATCH, TOKENS, EVERY, swap) == right
    assert len(served) > TOKENS // EVERY - 2 and set(served) == {0, 1}
    assert engine.stats().drafted_tokens > BATCH * TOKENS, "drafts of several tokens"
    engine.close()

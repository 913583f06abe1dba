"""KV policies on a GPU: graphs and mixed steps count places, and what is kept does not depend on the way to run."""

from __future__ import annotations

import pytest
import torch

from tests.engine.driver import Driver
from tests.engine.test_forgetting import LAZY, SNAP, WINDOW, requests, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def outputs(spec: str, **options) -> dict:
    given = {"device": "cuda", "dtype": "float32", "batch_invariant": False, "max_num_seqs": 16, "kv_policy": spec}
    driver = Driver(**given | options)
    found = tokens_of(driver.run(requests(driver)))
    assert not driver.errors and driver.engine.stats().forgotten_tokens > 0
    driver.close()
    return found


@pytest.mark.parametrize("spec", [WINDOW, SNAP, f"{SNAP}+{LAZY}", "cake:budget=40,window=16"])
@pytest.mark.parametrize(
    "options", [dict(), dict(overlap=False), dict(drafter="suffix", draft_control="fixed")], ids=str
)
def test_same_tokens_in_every_way(spec, options):
    """fp32, where these requests have no ties; eager steps that are read one by one are the reference."""
    want = outputs(spec, cuda_graphs=False, overlap=False)
    assert outputs(spec, **options) == want


@pytest.mark.parametrize("spec", [WINDOW, SNAP])
def test_exact_mode_repeats_itself(spec):
    """In exact mode the same tokens stay alone and in a crowd, for any cut of prompts."""
    want = outputs(spec, batch_invariant=True)
    assert outputs(spec, batch_invariant=True, max_num_seqs=2, max_num_batched_tokens=48) == want

"""Embeddings on a GPU: those of a CPU, kernel by kernel, in graphs, in chunks, and behind steps in flight."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir.client.admission import admit_pooling
from kvasir.config import EngineConfig
from kvasir.engine.engine import Engine
from kvasir.models.checkpoint import resolve
from kvasir.types import PoolingParams
from tests.pooling_checkpoints import add_modules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PROMPTS = [[5 + (i * (k + 3)) % 600 for i in range(1 + k * 37)] for k in range(12)]
WAYS = {
    "eager": dict(cuda_graphs=False),
    "graphs": {},
    "chunks": dict(max_num_batched_tokens=96),
    "chunks, not overlapped": dict(max_num_batched_tokens=96, overlap=False),
    "exact": dict(batch_invariant=True, max_num_batched_tokens=128),
}


@functools.cache
def folder_of(rows: str) -> Path:
    """The package's model as sentence-transformers would store it."""
    folder = Path(tempfile.mkdtemp()) / rows
    shutil.copytree(resolve("nano"), folder)
    add_modules(folder, {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}[rows], normalize=True)
    return folder


def vectors(rows: str, rounds: int = 1, **options) -> list[np.ndarray]:
    """Embeddings of the prompts by the model in the package, from the last of ``rounds``; steps are captured in
    between."""
    options = {"max_model_len": 512, "num_pages": 256, "page_slots": 16} | options
    engine = Engine(EngineConfig.of(model=str(folder_of(rows)), **options))
    found: dict[str, np.ndarray] = {}
    for turn in range(rounds):
        for i, ids in enumerate(PROMPTS):
            request = admit_pooling(ids, PoolingParams(), engine.info, id=f"{turn}.{i}", arrival=0.0, tenant=str(turn))
            assert engine.submit(request)[0].kind == "accepted"
        while engine.has_work():
            found |= {e.request_id: np.frombuffer(e.pooled, "<f4") for e in engine.step() if e.pooled is not None}
        while engine.idle():
            pass
    engine.close()
    return [found[f"{rounds - 1}.{i}"] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def wanted():
    return {rows: vectors(rows, device="cpu") for rows in ("last", "mean", "cls")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", ["last", "mean", "cls"])
def test_the_vectors_of_a_cpu(wanted, rows, way):
    found = vectors(rows, rounds=4, device="cuda", dtype="float32", **WAYS[way])
    for a, b in zip(found, wanted[rows], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)  # products in TF32 at most


@pytest.mark.parametrize("rows", ["last", "mean"])
def test_narrow_types_point_the_same_way(wanted, rows):
    found = vectors(rows, rounds=4, device="cuda", dtype="bfloat16")
    assert min(float(a @ b) for a, b in zip(found, wanted[rows], strict=True)) > 0.995


def test_exact_mode_gives_the_same_bits_in_any_batch():
    """Last-token pooling; the sum of a mean depends on its chunks."""
    many = vectors("last", rounds=3, device="cuda", batch_invariant=True)
    few = vectors("last", device="cuda", batch_invariant=True, max_num_batched_tokens=64, max_num_seqs=2)
    for a, b in zip(many, few, strict=True):
        np.testing.assert_array_equal(a, b)

"""Embeddings through a server of its own process, and after its engine process was killed at work."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import numpy as np
import openai
import torch.nn.functional as F

from kvasir.client.admission import admit_pooling
from kvasir.client.engine_client import AsyncEngine
from kvasir.config import EngineConfig
from kvasir.types import PoolingParams
from tests import pooling_checkpoints
from tests.api.test_llm_pooling import add_tokenizer
from tests.integration.serving import Served

COUNT, CLOSE = 24, 1e-4


def test_a_killed_engine_loses_no_vector(tmp_path):
    """The engine dies when a few vectors were delivered; the others come from the next one, means included."""
    folder = pooling_checkpoints.embedding(tmp_path / "m", rows="mean_tokens")
    prompts = [[3 + (i * j + j) % 90 for j in range(60 + i)] for i in range(COUNT)]

    async def run() -> list[np.ndarray]:
        engine = AsyncEngine(
            EngineConfig.of(
                model=str(folder), num_threads=1, max_num_batched_tokens=16, num_pages=64, page_slots=16, max_num_seqs=4
            )
        )
        await engine.start()
        found: dict[int, np.ndarray] = {}
        killed = False

        async def read(i: int) -> None:
            nonlocal killed
            request = admit_pooling(prompts[i], PoolingParams(), engine.info, id=f"r{i}", arrival=time.monotonic())
            async for event in engine.generate(request):
                if event.pooled is None:
                    continue
                assert i not in found, "delivered twice"
                found[i] = np.frombuffer(event.pooled, "<f4")
                if len(found) == COUNT // 4 and not killed:
                    killed = True
                    os.kill(engine.replica.child.pid, signal.SIGKILL)

        try:
            await asyncio.gather(*map(read, range(COUNT)))
            assert killed and engine.num_restarts == 1
        finally:
            await engine.stop(0.0)
        return [found[i] for i in range(COUNT)]

    for ids, vector in zip(prompts, asyncio.run(run()), strict=True):
        want = F.normalize(pooling_checkpoints.states(folder, ids).mean(0), dim=0).numpy()
        np.testing.assert_allclose(vector, want, atol=CLOSE)


def test_a_server_of_an_embedding_model(tmp_path):
    folder = pooling_checkpoints.embedding(tmp_path / "m", rows=None, vocab_size=512)
    add_tokenizer(folder)
    served = Served(tmp_path, "--num-pages", "64", "--page-slots", "16", model=str(folder))
    try:
        texts = ["Hello there, world!", "The quick brown fox"]
        reply = served.client.embeddings.create(model=str(folder), input=texts)
        for text, item in zip(texts, reply.data, strict=True):
            ids = served.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
            want = F.normalize(pooling_checkpoints.states(folder, ids)[-1], dim=0).numpy()
            np.testing.assert_allclose(item.embedding, want, atol=CLOSE)
        ranked = served.http.post("/rerank", json={"query": texts[0], "documents": texts[::-1]}).json()["results"]
        assert ranked[0]["index"] == 1 and abs(ranked[0]["relevance_score"] - 1) < CLOSE
        try:
            served.client.chat.completions.create(model=str(folder), messages=[{"role": "user", "content": "a"}])
            raise AssertionError("not refused")
        except openai.BadRequestError as e:
            assert "is an embedding model; it serves /v1/embeddings" in e.message
        served.until_idle()
        end = time.monotonic() + 60  # counters come with the engine's next heartbeat
        while not served.metrics()["kvasir:prompt_tokens_total"]:
            assert time.monotonic() < end, "no prompt token was counted"
            time.sleep(0.05)
        assert httpx.get(served.url + "/health").status_code == 200
    finally:
        served.kill()

"""A strategy over HTTP on a real engine gives what the same strategy gives in Python, and a suffix drafter changes no token of it."""

from __future__ import annotations

import asyncio

from kvasir.config import EngineConfig
from kvasir.lab.task import load_task
from kvasir.scaling.endpoint import Sampling
from kvasir.scaling.engine_endpoint import EngineEndpoint
from kvasir.scaling.ledger import Budget
from kvasir.scaling.primitives import opened
from kvasir.scaling.problem import Problem
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from tests.integration.serving import served

ENGINE = dict(model="nano", device="cpu", num_threads=1, batch_invariant=True, max_model_len=512, cpu_cache_bytes=1 << 25)
SPECS = ("rsa:N=3,K=2,T=2", "best_of_n:n=4,by=lowest", "a_star:k=2,expansions=3,tokens=12")
QUESTION = load_task("countdown").problems("test", 3, 1)[0].messages


async def solved(**options) -> tuple[dict[str, str], object]:
    endpoint = EngineEndpoint(EngineConfig.of(**ENGINE, **options), "nano")
    found = {}
    async with opened([endpoint]):
        for spec in SPECS:
            done = await solve(load_strategy(spec), [Problem("p0", tuple(QUESTION))], [endpoint], seed=11, sampling=Sampling(max_tokens=40),
                               problem_budget=Budget(tokens=1 << 20, generated=1 << 19, calls=4096))
            found[spec] = done.solved[0].result.text
        await asyncio.sleep(0.7)  # until a heartbeat has carried the counters over
        return found, endpoint.engine.stats()


def test_python_with_drafts_and_http_without_agree(tmp_path):
    found, stats = asyncio.run(solved(drafter="suffix", draft_control="fixed"))
    # What a recombination's prompt quotes of its parents, and what siblings wrote before, is what the drafter proposes.
    assert stats.accepted_tokens > 0
    with served(tmp_path, "--batch-invariant", "--max-model-len", "512", "--cpu-cache-bytes", str(1 << 25), "--device", "cpu") as server:
        for spec in SPECS:
            body = server.http.post("/v1/chat/completions", json={"messages": list(QUESTION), "seed": 11, "max_tokens": 40,
                                                                  "scaling": {"strategy": spec}}).json()
            assert body["choices"][0]["message"]["content"] == found[spec], spec
        server.until_idle()

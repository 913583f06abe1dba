"""Strategies on real engines give the same answers over HTTP and in Python, with and without a drafter, and after the
server's death."""

from __future__ import annotations

import asyncio
import time

from kvasir.config import EngineConfig
from kvasir.scaling.endpoint import Sampling
from kvasir.scaling.engine_endpoint import EngineEndpoint
from kvasir.scaling.ledger import Budget
from kvasir.scaling.primitives import opened
from kvasir.scaling.problem import Problem
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from kvasir_lab.lookup import load_task
from tests.integration.serving import Served, served

ENGINE = dict(
    model="nano", device="cpu", num_threads=1, batch_invariant=True, max_model_len=512, cpu_cache_bytes=1 << 25
)
SPECS = ("rsa:N=3,K=2,T=2", "best_of_n:n=4,by=lowest", "a_star:k=2,expansions=3,tokens=12")
QUESTION = load_task("countdown").problems("test", 3, 1)[0].messages


async def solved(**options) -> dict[str, str]:
    """The answer of each strategy. Waits until the engine has counted accepted drafts."""
    endpoint = EngineEndpoint(EngineConfig.of(**ENGINE, **options), "nano")
    found = {}
    async with opened([endpoint]):
        for spec in SPECS:
            done = await solve(
                load_strategy(spec),
                [Problem("p0", tuple(QUESTION))],
                [endpoint],
                seed=11,
                sampling=Sampling(max_tokens=40),
                problem_budget=Budget(tokens=1 << 20, generated=1 << 19, calls=4096),
            )
            found[spec] = done.solved[0].result.text
        async with asyncio.timeout(60):  # the counters come with a heartbeat
            while not endpoint.engine.stats().accepted_tokens:
                await asyncio.sleep(0.05)
        return found


def test_python_with_drafts_and_http_without_agree(tmp_path):
    # Drafts come from the text that prompts of recombinations quote and from what siblings wrote before.
    found = asyncio.run(solved(drafter="suffix", draft_control="fixed"))

    with served(
        tmp_path, "--batch-invariant", "--max-model-len", "512", "--cpu-cache-bytes", str(1 << 25), "--device", "cpu"
    ) as server:
        for spec in SPECS:
            body = server.http.post(
                "/v1/chat/completions",
                json={"messages": list(QUESTION), "seed": 11, "max_tokens": 40, "scaling": {"strategy": spec}},
            ).json()
            assert body["choices"][0]["message"]["content"] == found[spec], spec
        server.until_idle()


def test_a_background_run_outlives_a_killed_server(tmp_path):
    """After kill -9 the next server ends the run with the result of an undisturbed one, and repeats no call."""
    options = ("--batch-invariant", "--max-model-len", "512", "--cpu-cache-bytes", str(1 << 25), "--device", "cpu")
    body = {
        "strategy": "rsa:N=3,K=2,T=4",
        "seed": 3,
        "max_tokens": 48,
        "problems": [{"messages": list(p.messages)} for p in load_task("countdown").problems("test", 3, 2)],
    }
    kept = (*options, "--scaling-runs", str(tmp_path / "runs"))
    first = Served(tmp_path, *kept)
    try:
        name = first.http.post("/v1/scaling/runs", json=body).json()["id"]
        calls = tmp_path / "runs" / f"{name}.calls.jsonl"
        while not calls.exists() or calls.read_bytes().count(b"\n") < 5:
            time.sleep(0.005)
    finally:
        first.kill()
    known = calls.read_bytes().splitlines()
    with served(tmp_path, *kept) as second:
        found = ended(second, name)
        undisturbed = ended(second, second.http.post("/v1/scaling/runs", json=body).json()["id"])
        assert second.log.count("1 scaling runs go on") == 1
    assert found["status"] == undisturbed["status"] == "done" and len(known) >= 5
    for a, b in zip(found["results"], undisturbed["results"], strict=True):
        assert a["text"] == b["text"] and a["votes"] == b["votes"] and a["cost"]["calls"] == b["cost"]["calls"] == 10
        assert all(a["cost"][kind] == b["cost"][kind] for kind in ("generated", "discarded"))


def ended(server: Served, name: str) -> dict:
    end = time.monotonic() + 240
    while (run := server.http.get(f"/v1/scaling/runs/{name}").json())["status"] == "running":
        assert time.monotonic() < end
        time.sleep(0.02)
    return run

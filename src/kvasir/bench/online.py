"""``kvasir bench serve``: load a running server with requests that do not wait for answers (open loop).

Arrivals are Poisson, so a slow server meets a growing queue, as in production. Latency counts from the moment a request
was due, not from when a busy client sent it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.bench.client import root
from kvasir.bench.result import arm, finish, percentile, result
from kvasir.errors import ConfigError


@dataclass(slots=True)
class Sample:
    """Times of one request in seconds from when it was due.

    ``status`` is that of the reply, or of the error that ended its stream; 0 means that the connection failed.
    """

    status: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    tokens: int = 0


def run(
    url: str,
    *,
    rate: float,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    api_key: str | None,
    output: Path | None,
    commit: str | None = None,
) -> None:
    metrics = asyncio.run(load(root(url), rate, num_requests, prompt_tokens, output_tokens, api_key))
    if not metrics["requests_by_status"].get("200"):
        raise ConfigError(
            f"no request succeeded; by status: {metrics['requests_by_status']} (0: the connection failed)"
        )
    config = {
        "url": url,
        "rate": rate,
        "num_requests": num_requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    finish(result("serve", [arm("kvasir", config, metrics)]), output, commit)


async def load(
    url: str, rate: float, num_requests: int, prompt_tokens: int, output_tokens: int, api_key: str | None
) -> dict[str, Any]:
    try:
        import httpx
    except ImportError as e:
        raise ConfigError("kvasir bench serve needs httpx: pip install httpx") from e
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    rng = random.Random(0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as client:
        model = await _model(client, url)
        started, due, tasks = time.perf_counter(), 0.0, []
        for _ in range(num_requests):
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            body = {
                "model": model,
                "prompt": [rng.randrange(256, 1024) for _ in range(prompt_tokens)],
                "max_tokens": output_tokens,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            }
            tasks.append(asyncio.create_task(_one(client, body, started + due)))
            due += rng.expovariate(rate) if rate > 0 else 0.0
        samples = await asyncio.gather(*tasks)
        return summarise(samples, time.perf_counter() - started)


async def _model(client: Any, url: str) -> str:
    import httpx

    try:
        reply = await client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise ConfigError(f"no server answers at {url}: {e or type(e).__name__}. Start one with `kvasir serve`.") from e
    if reply.status_code in (401, 403):
        raise ConfigError(f"{url} requires a key: pass --api-key")
    try:
        return reply.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as e:
        raise ConfigError(f"{url} answers {reply.status_code}, but not with the OpenAI API's list of models") from e


async def _one(client: Any, body: dict[str, Any], due: float) -> Sample:
    import httpx

    sample, last = Sample(), due
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            sample.status = reply.status_code
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk, now = json.loads(line[6:]), time.perf_counter()
                if "error" in chunk:
                    sample.status = 500
                elif chunk.get("choices"):
                    if sample.first is None:
                        sample.first = now - due
                    else:
                        sample.gaps.append(now - last)
                    last = now
                if chunk.get("usage"):
                    sample.tokens = chunk["usage"]["completion_tokens"]
    except httpx.HTTPError:
        sample.status = 0
    sample.total = time.perf_counter() - due
    return sample


def summarise(samples: list[Sample], seconds: float) -> dict[str, Any]:
    done = [s for s in samples if s.status == 200 and s.first is not None]
    by_status: dict[str, int] = {}
    for s in samples:
        by_status[str(s.status)] = by_status.get(str(s.status), 0) + 1
    metrics: dict[str, Any] = {
        "seconds": round(seconds, 2),
        "requests_by_status": by_status,
        "output_tok_s": round(sum(s.tokens for s in done) / seconds, 1),
        "requests_s": round(len(done) / seconds, 2),
    }
    gaps = [g for s in done for g in s.gaps]
    for name, values in (("ttft_ms", [s.first for s in done]), ("itl_ms", gaps), ("e2e_ms", [s.total for s in done])):
        for share in (0.5, 0.9, 0.99):
            if values:
                metrics[f"{name}_p{share * 100:.0f}"] = round(1000 * percentile(values, share), 2)
    return metrics

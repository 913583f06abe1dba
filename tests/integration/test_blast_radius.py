"""Eleven healthy requests (31 in `make test-all`) and one bad one at a time, from the whole catalogue: the real server
refuses each bad one, and the healthy ones get the same tokens as without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.test_bad_input import CHAT, IN_CHAT, IN_RESPONSES, IN_TEXT, JSON, RAW, RESPONSES, TEXT, USER
from tests.integration.serving import Served, served

HEALTHY = [11, pytest.param(31, marks=pytest.mark.slow)]  # eleven are all kinds of `healthy`
# What passes every check at the door and fails in the engine.
LATE = {
    "grammar-without-tokens": (TEXT, {"prompt": "x", "guided_regex": "[0-9]+", "allowed_token_ids": [5]}),
    "grammar-that-does-not-compile": (TEXT, {"prompt": "x", "guided_regex": "("}),
    "schema-with-a-missing-reference": (
        CHAT,
        {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
        },
    ),
    "nothing-but-a-ban": (
        TEXT,
        {"prompt": "x", "allowed_token_ids": [400], "bad_words": ["x"], "logit_bias": {"400": -100}, "stream": True},
    ),
}
# Fine here: ids at the end of the catalogue's own vocabulary, and an empty text, which has a BOS. The context is as
# long as there.
HARMLESS = {"15-logits-width", "16-padding", "34-above", "35-range", "38-range", "13-empty"}


def catalogue() -> list[tuple[str, dict]]:
    """The path and the arguments of a POST, for every bad request."""
    bad = [(path, {"content": body, "headers": JSON}) for path in (CHAT, TEXT) for body, _ in RAW.values()]
    for path, base, changes in (
        (CHAT, {"messages": USER, "max_tokens": 4}, IN_CHAT),
        (TEXT, {"prompt": "x"}, IN_TEXT),
        (RESPONSES, {"input": "x"}, IN_RESPONSES),
    ):
        for name, (change, _) in changes.items():
            if name not in HARMLESS:
                body = {**base, **change}
                if "max_completion_tokens" in change and "max_tokens" not in change:
                    del body["max_tokens"]
                bad.append((path, {"json": body}))
    return bad + [(path, {"json": body}) for path, body in LATE.values()]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(
        tmp_path_factory.mktemp("server"),
        "--batch-invariant",
        "--max-num-batched-tokens",
        "64",
        "--max-model-len",
        "1024",
    ) as it:
        yield it


async def healthy(http: httpx.AsyncClient, i: int) -> tuple:
    body = {
        "prompt": [300 + (i * 29 + j * 3) % 900 for j in range(4 + 2 * i)],
        "temperature": i % 2,
        "seed": i,
        "max_tokens": 40,
        "ignore_eos": True,
        "n": 1 + (i % 8 == 7),
        "logprobs": 1 if i % 5 == 0 else None,
        "frequency_penalty": 0.5 * (i % 3 == 2),
    }
    if i % 10 == 9:
        body |= {"guided_regex": "[a-z ]{60,80}", "max_tokens": 100}
    r = await http.post(TEXT, json={k: v for k, v in body.items() if v is not None})
    assert r.status_code == 200, r.text
    return tuple((c["text"], c["finish_reason"], json.dumps(c["logprobs"])) for c in r.json()["choices"])


async def hung_up(http: httpx.AsyncClient) -> None:
    """A client that leaves in the middle of its stream."""
    async with http.stream(
        "POST", TEXT, json={"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 4}
    ) as r:
        async for _ in r.aiter_raw():
            return


async def rounds(server: Served, count: int) -> AsyncIterator[list[tuple]]:
    """The healthy requests run alone, then again and again with a third of the catalogue, until all of it was sent."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as http:
        yield await asyncio.gather(*(healthy(http, i) for i in range(count)))
        left = catalogue()
        third = len(left) // 3 + 1
        while left:
            later = max(0, len(left) - third)
            async with asyncio.TaskGroup() as group:
                crowd = [group.create_task(healthy(http, i)) for i in range(count)]
                await hung_up(http)
                while len(left) > later and not all(task.done() for task in crowd):
                    await refused(http, *left.pop())
            yield [task.result() for task in crowd]


async def refused(http: httpx.AsyncClient, path: str, arguments: dict) -> None:
    what = f"{path} {str(arguments)[:200]}"
    try:
        r = await http.post(path, **arguments)
    except (httpx.WriteError, httpx.ReadError):
        assert len(arguments.get("content", b"")) > 1 << 20, what  # the server may hang up on a body that is too long
        return
    if r.status_code == 200 and arguments["json"].get("stream"):
        assert '"error"' in r.text or "[DONE]" in r.text, what
        return
    assert 400 <= r.status_code < 500, (what, r.status_code, r.text[:300])
    assert r.json()["error"]["message"], what


@pytest.mark.parametrize("crowd", HEALTHY)
def test_the_healthy_do_not_notice(server, crowd):
    async def run() -> int:
        count, alone = 0, None
        async for outputs in rounds(server, crowd):
            alone = alone or outputs
            assert outputs == alone
            count += 1
        return count

    assert asyncio.run(run()) > 2
    assert server.log.count("Traceback") == 0, server.log
    server.until_idle()

"""``return_drafters``: who drafted a token, next to its log-probability, streamed and collected alike."""

from __future__ import annotations

import json

import httpx

from tests.api.fake_client import FakeClient
from tests.api.running import running

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "say: hello world to everyone"}], "logprobs": True}


def entries(http: httpx.Client, **more) -> list[dict]:
    return http.post(CHAT, json={**BODY, **more}).json()["choices"][0]["logprobs"]["content"]


def test_drafters_are_named_when_asked_for():
    client = FakeClient()
    client.drafter, client.group = "ngram", 4
    with running(client) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        collected = entries(http, return_drafters=True)
        assert [e["drafter"] for e in collected[:4]] == [None, "ngram", None, "ngram"]
        lines = http.post(CHAT, json={**BODY, "return_drafters": True, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        streamed = [e for c in chunks for choice in c["choices"] for e in (choice["logprobs"] or {}).get("content", [])]
        assert streamed == collected
        assert not any("drafter" in e for e in entries(http)), "OpenAI's form stays as it is"
        error = http.post(CHAT, json={**BODY, "logprobs": False, "return_drafters": True})
        assert error.status_code == 400 and error.json()["error"]["param"] == "return_drafters"

"""Responses on a real engine: continued ones are the whole conversation, and background ones outlive their server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.integration.serving import Served, served

OPTIONS = ("--batch-invariant", "--max-model-len", "1024", "--cpu-cache-bytes", str(1 << 25), "--device", "cpu")
QUESTION = "Compute modulo 97: start 12; +45; *3; -7; *2; +30."
ASK = {"input": QUESTION, "temperature": 1.0, "seed": 5, "max_output_tokens": 700, "ignore_eos": True}


def ended(server: Served, name: str) -> dict:
    end = time.monotonic() + 240
    while (r := server.http.get(f"/v1/responses/{name}").json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.02)
    return r


def create(server: Served, **body) -> dict:
    r = server.http.post("/v1/responses", json=body)
    assert r.status_code == 200, r.text
    return r.json()


def text(response: dict) -> str:
    return "".join(p["text"] for item in response["output"] for p in item["content"])


def test_a_continued_response_gives_the_tokens_of_the_whole_conversation(tmp_path):
    with served(tmp_path, *OPTIONS) as server:
        more = {"temperature": 1.0, "max_output_tokens": 40}
        first = create(server, input=QUESTION, seed=1, **more)
        second = create(server, input="And plus one?", seed=2, previous_response_id=first["id"], **more)
        third = create(server, input="Say it again.", seed=3, previous_response_id=second["id"], **more)
        items = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "And plus one?"}]
        whole = create(server, input=items, seed=2, cache_salt="a cold cache", **more)
        assert text(whole) == text(second) and whole["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0, "its pages were found again"
        assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 0, "and those of another salt were not"
        items += [*second["output"], {"role": "user", "content": "Say it again."}]
        assert text(create(server, input=items, seed=3, cache_salt="b", **more)) == text(third)
        other = create(server, input=[items[0], *items[2:]], seed=3, cache_salt="b", **more)
        assert text(other) != text(third), "negative control: without one of its items the answer is another"
        server.until_idle()


@pytest.mark.parametrize("orderly", [False, True], ids=["kill -9", "SIGTERM"])
def test_a_background_response_outlives_its_server(tmp_path: Path, orderly):
    """The next server ends it with the result of an undisturbed run. After an orderly stop it goes on after the tokens
    that were journalled; after a kill it generates them again from the same seed, which nobody had to send."""
    kept = (*OPTIONS, "--journal", str(tmp_path / "journal"), "--drain-timeout", "0")
    ask = {k: v for k, v in ASK.items() if k != "seed"}
    first = Served(tmp_path, *kept)
    try:
        name = create(first, **ask, background=True)["id"]
        while not (begun := first.http.get(f"/v1/responses/{name}").json())["output"]:
            time.sleep(0.005)
        assert begun["status"] == "in_progress"
        if orderly:
            assert first.terminate() == 0
    finally:
        first.kill()
    lines = (tmp_path / "journal").read_bytes().splitlines()
    assert len(lines) == (2 if orderly else 1)
    with served(tmp_path, *kept) as second:
        found = ended(second, name)
        assert "1 background responses go on" in second.log
        seed = json.loads(lines[0])["seed"]
        undisturbed = create(second, **ask, seed=seed)
        assert found["status"] == undisturbed["status"] == "incomplete"
        assert text(found) == text(undisturbed) and found["usage"]["output_tokens"] == 700
        generated = second.counted()["kvasir:generation_tokens_total"]
        assert (generated < 1400) == orderly, "what the journal held was not generated again"
        second.until_idle()

"""Hooks over HTTP and in LLM: the list, what becomes of a request's name and strength, and what is refused."""

from __future__ import annotations

import httpx
import pytest

from kvasir import LLM, SamplingParams
from kvasir.hooks.hook import Gate, Hook
from kvasir.types import HookInfo, Variant
from tests.api.running import running
from tests.hooks import LAYERS, write_hooks

USER = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": USER},
    "/v1/responses": {"input": "hello"},
}


@pytest.fixture(scope="module")
def server():
    with running() as server:
        hooks = server.service.info.hooks
        hooks["calm"] = HookInfo(name="calm", path="x", key="k1", answers=True, parts=("rotate at head_out",))
        hooks["warm"] = HookInfo(name="warm", path="y", key="k2", changes_kv=False)
        yield server


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(http, path="/v1/completions", **more):
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return http.post(path, json={**BODIES[path], most: 4, **more})


@pytest.mark.parametrize("path", BODIES)
def test_every_route_takes_a_hook(http, server, path):
    assert ask(http, path, hook="calm", hook_strength=2).status_code == 200
    made = server.engine.seen[-1]
    assert made.hook == Variant("calm", "k1", len(made.prompt_ids) - 1, True, 2.0)
    assert ask(http, path, hook="warm").status_code == 200
    assert server.engine.seen[-1].hook == Variant("warm", "k2", 0, False, 1.0)
    assert ask(http, path, hook="calm", hook_strength=0).status_code == 200
    assert server.engine.seen[-1].hook is None
    assert ask(http, path).status_code == 200 and server.engine.seen[-1].hook is None


@pytest.mark.parametrize(
    "fields, status, words",
    [
        (dict(hook="clam"), 404, ["hook", "no hooks 'clam'", "calm, warm", "Did you mean 'calm'?"]),
        (dict(hook="calm", hook_strength=9), 400, ["hook_strength", "from 0 to 8"]),
        (dict(hook="calm", hook_strength=-0.1), 400, ["hook_strength", "from 0 to 8"]),
        (dict(hook="calm", hook_strength="high"), 400, ["hook_strength"]),
        (dict(hook=["calm"]), 400, ["hook"]),
    ],
)
def test_what_is_refused_names_the_parameter(http, fields, status, words):
    refused = ask(http, **fields)
    error = refused.json()["error"]
    assert refused.status_code == status and error["param"] == words[0]
    assert all(word in error["message"] for word in words[1:]), error["message"]


def test_the_list(http):
    found = http.get("/v1/hooks").json()
    assert [one["id"] for one in found["data"]] == ["calm", "warm"]
    assert found["data"][0] == {
        "id": "calm",
        "object": "hook",
        "hooks": ["rotate at head_out"],
        "key": "k1",
        "from": "answer",
        "changes_kv": True,
    }


def test_llm_runs_a_hook(tmp_path):
    folder = write_hooks(tmp_path / "x", [Hook("head_out", tuple(range(LAYERS)), "rotate:c=-4", Gate(answers=True))])
    params = [SamplingParams(temperature=0.0, max_tokens=6, hook=h, hook_strength=8.0) for h in (None, "x")]
    with LLM("nano", device="cpu", hook=[f"x={folder}"], batch_invariant=True) as llm:
        plain, hooked = llm.generate(["Once upon a time"] * 2, params)
        assert plain.outputs[0].token_ids != hooked.outputs[0].token_ids
        assert list(llm.info.hooks) == ["x"]

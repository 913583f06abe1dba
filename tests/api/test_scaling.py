"""Test-time scaling over HTTP: answers, costs, progress, cancellation, and bad input that gets a 4xx and costs
nothing."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from tests.api.running import running

CHAT, RUNS = "/v1/chat/completions", "/v1/scaling/runs"
SAY = [{"role": "user", "content": "say: hello\nAnswer: 7"}]


def ask(http, scaling, **body):
    return http.post(CHAT, json={"messages": SAY, "scaling": scaling, "max_tokens": 40} | body)


def test_a_strategy_answers_a_chat(http, server):
    body = ask(http, {"strategy": "majority:n=4", "answer": "last_line"}, seed=3).json()
    choice, usage = body["choices"][0], body["usage"]
    assert (
        body["object"] == "chat.completion"
        and choice["message"]["content"] == "hello\nAnswer: 7"
        and choice["finish_reason"] == "stop"
    )
    told = usage["scaling"]
    assert told["votes"] == {"answer: 7": 4} and told["agreement"] == 1.0 and told["calls"] == 1 and told["why"] == ""
    # Every generated token counts, of all four replies.
    request = server.engine.seen[-1]
    assert (
        usage["completion_tokens"]
        == told["generated"] + told["discarded"]
        == 4 * len(server.engine.plan(request, 0)[0])
    )
    assert usage["prompt_tokens"] == len(request.prompt_ids) and request.params.n == 4


def test_streamed_progress_is_for_those_who_look(http):
    with http.stream(
        "POST",
        CHAT,
        json={
            "messages": SAY,
            "stream": True,
            "stream_options": {"include_usage": True},
            "scaling": {"strategy": "majority:n=2"},
        },
    ) as reply:
        lines = [line for line in reply.iter_lines() if line]
    comments = [json.loads(line.removeprefix(": scaling ")) for line in lines if line.startswith(": scaling ")]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    assert [c["event"] for c in comments] == ["begin", "end"] and lines[-1] == "data: [DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "hello\nAnswer: 7"
    assert chunks[-1]["usage"]["scaling"]["calls"] == 1 and chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_a_budget_means_fewer_replies_or_none(http):
    few = ask(http, {"strategy": "majority:n=8", "budget": {"generated": 100}}).json()
    assert few["usage"]["scaling"]["votes"] == {"7": 2}, "two whole replies of 40 fit into 100"
    none = ask(http, {"strategy": "majority:n=8", "budget": {"generated": 10}})
    assert none.status_code == 400 and none.json()["error"]["code"] == "budget_too_small"


BAD = {
    "no strategy": ({}, {}, "scaling.strategy"),
    "unknown strategy": ({"strategy": "magic"}, {}, "scaling.strategy"),
    "a path": ({"strategy": "../os"}, {}, "scaling.strategy"),
    "unknown option": ({"strategy": "majority:m=3"}, {}, "scaling.strategy"),
    "bad option": ({"strategy": "majority:n=x"}, {}, "scaling.strategy"),
    "zero": ({"strategy": "majority:n=0"}, {}, "scaling.strategy"),
    "huge": ({"strategy": "majority:n=1000000000"}, {}, "scaling.strategy"),
    "another model": ({"strategy": "majority:model=gpt"}, {}, "scaling.strategy"),
    "a file": ({"strategy": "./majority.py:n=2"}, {}, "scaling.strategy"),
    "two models": ({"strategy": "specreason"}, {}, "scaling.strategy"),
    "unknown answer": ({"strategy": "majority", "answer": "regex"}, {}, "scaling.answer"),
    "unknown field": ({"strategy": "majority", "code": "import os"}, {}, "scaling.code"),
    "negative budget": ({"strategy": "majority", "budget": {"tokens": -1}}, {}, "scaling.budget.tokens"),
    "boundless budget": ({"strategy": "majority", "budget": {"tokens": 1 << 40}}, {}, "scaling.budget.tokens"),
    "dollars": ({"strategy": "majority", "budget": {"dollars": 1}}, {}, "scaling.budget.dollars"),
    "not an object": ("majority", {}, "scaling"),
    "n": ({"strategy": "majority"}, {"n": 2}, "n"),
    "tools": ({"strategy": "majority"}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "logprobs": ({"strategy": "majority"}, {"logprobs": True}, "logprobs"),
    "too long": ({"strategy": "majority"}, {"max_tokens": 100_000}, "max_tokens"),
    "too long by its newer name": (
        {"strategy": "majority"},
        {"max_tokens": None, "max_completion_tokens": 100_000},
        "max_completion_tokens",
    ),
    "no tokens": ({"strategy": "majority"}, {"max_tokens": 0}, "max_tokens"),
    "fewer than none": (
        {"strategy": "majority"},
        {"max_tokens": None, "max_completion_tokens": -5, "stream": True},
        "max_completion_tokens",
    ),
    "a seed of too many bits": ({"strategy": "majority"}, {"seed": -1 << 64}, "seed"),
    "hot": ({"strategy": "majority"}, {"temperature": 11.0}, "temperature"),
    "another model served": ({"strategy": "majority"}, {"model": "gpt"}, "model"),
    "a prompt that cannot fit": (
        {"strategy": "majority"},
        {"messages": [{"role": "user", "content": "fox " * 100_000}]},
        "messages",
    ),
    "an image": (
        {"strategy": "majority"},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_blocks(http, server, case):
    block, extra, param = BAD[case]
    seen = len(server.engine.seen)
    reply = ask(http, block, **extra)
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]["param"] == param and len(server.engine.seen) == seen
    server.idle()


def test_a_client_that_leaves_cancels_everything(server):
    server.engine.delay = 0.05
    try:
        patience = httpx.Timeout(60, read=0.4)
        with httpx.Client(base_url=server.url, timeout=patience) as http, pytest.raises(httpx.ReadTimeout):
            http.post(
                CHAT,
                json={
                    "messages": [{"role": "user", "content": "say: " + "fox " * 200}],
                    "scaling": {"strategy": "majority:n=4"},
                },
            )
        server.idle()
    finally:
        server.engine.delay = 0.0


# ------------------------------------------------------------------------------------------------------------- runs


def problems(count, **extra):
    return {
        "strategy": "majority:n=3",
        "seed": 5,
        "max_tokens": 40,
        "problems": [{"messages": SAY} for _ in range(count)],
    } | extra


def ended(http, name, seconds=120.0):
    end = time.monotonic() + seconds
    while (run := http.get(f"{RUNS}/{name}").json())["status"] == "running":
        assert time.monotonic() < end
        time.sleep(0.01)
    return run


def test_a_run_from_start_to_end(http, server):
    begun = http.post(RUNS, json=problems(3))
    assert begun.status_code == 202 and begun.json()["status"] == "running" and begun.json()["object"] == "scaling.run"
    name = begun.json()["id"]
    run = ended(http, name)
    assert run["status"] == "done" and run["done"] == 3 and [r["id"] for r in run["results"]] == ["p0", "p1", "p2"]
    assert all(r["answer"] == "7" and r["votes"] == {"7": 3} and r["why"] == "" for r in run["results"])
    assert run["usage"]["completion_tokens"] == sum(r["usage"]["completion_tokens"] for r in run["results"])
    with http.stream("GET", f"{RUNS}/{name}/events") as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert (
        [e["event"] for e in events].count("end") == 3
        and events[-1] == {"event": "run.end", "status": "done"}
        and lines[-1] == "data: [DONE]"
    )
    again = http.delete(f"{RUNS}/{name}").json()
    assert again["status"] == "done", "ending what has ended changes nothing"
    server.idle()


def test_events_come_while_it_runs_and_deleting_ends_it(http, server):
    server.engine.delay = 0.02
    try:
        slow = problems(40)
        slow["problems"] = [
            {"id": f"q{i}", "messages": [{"role": "user", "content": "say: " + "fox " * 30}]} for i in range(40)
        ]
        name = http.post(RUNS, json=slow).json()["id"]
        with http.stream("GET", f"{RUNS}/{name}/events") as reply:
            assert "begin" in next(reply.iter_lines())
        assert http.get(f"{RUNS}/{name}").json()["status"] == "running", "a watcher that leaves ends nothing"
        assert http.delete(f"{RUNS}/{name}").json()["status"] == "cancelled"
        server.idle()
    finally:
        server.engine.delay = 0.0


def test_a_run_within_its_budget(http):
    run = ended(http, http.post(RUNS, json=problems(6, budget={"calls": 2}, max_tokens=30)).json()["id"])
    assert (
        run["status"] == "done"
        and sum(bool(r["why"]) for r in run["results"]) == 4
        and sum(r["cost"]["calls"] for r in run["results"]) == 2
    )


def test_a_dead_engine_fails_the_run(http, server):
    from kvasir.errors import RequestError

    server.engine.refusal = RequestError("the engine is down", status=400, code="nope")
    try:
        run = ended(http, http.post(RUNS, json=problems(2)).json()["id"])
        assert run["status"] == "done" and all(r["text"] == "" for r in run["results"]), "a refusal is an answer: none"
    finally:
        server.engine.refusal = None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"problems": []}, "problems"),
        ({"problems": [{"messages": []}]}, "problems[0].messages"),
        ({"strategy": "magic"}, "strategy"),
        ({"problems": [{"id": "a b", "messages": SAY}]}, "problems[0].id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 99}, "temperature"),
        ({"problems": [{"id": "a", "messages": SAY}] * 2}, "problems"),
        ({"budget": {"tokens": 0}}, "budget.tokens"),
        ({"seed": "x"}, "seed"),
        ({"seed": 1 << 70}, "seed"),
        ({"problems": [{"messages": SAY}] * 257}, "problems"),
        ({"stream": True}, "stream"),
        ({"problems": [{"messages": SAY}, {"messages": [{"role": "x"}]}]}, "problems[1].messages[0].role"),
        (
            {"problems": [{"messages": SAY}, {"messages": [{"role": "user", "content": "fox " * 100_000}]}]},
            "problems[1].messages",
        ),
        (
            {"problems": [{"messages": SAY}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]},
            "problems[1].messages[0].content[0].type",
        ),
        ({"problem_budget": {"calls": 5000}}, "problem_budget.calls"),
    ],
)
def test_bad_runs(http, change, param):
    reply = http.post(RUNS, json=problems(1) | change)
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]["param"] == param


def test_runs_of_others_are_nobodys_business():
    with running(api_key=("one", "two")) as server, httpx.Client(base_url=server.url, timeout=120) as http:

        def key(name):
            return {"headers": {"authorization": f"Bearer {name}"}}

        name = http.post(RUNS, json=problems(1), **key("one")).json()["id"]
        assert http.get(f"{RUNS}/{name}", **key("one")).status_code == 200
        for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
            assert http.request(method, f"{RUNS}/{name}{path}", **key("two")).status_code == 404
            assert http.request(method, f"{RUNS}/{name}{path}").status_code == 401
        tenants = {r.tenant for r in server.engine.seen}
        assert len(tenants) == 1 and tenants != {""}, "its prompts stay in its own part of the prefix cache"


def test_too_many_runs_and_a_server_that_stops():
    from kvasir.api.scaling.scaling_runs import MAX_RUNNING

    with running() as server, httpx.Client(base_url=server.url, timeout=120) as http:
        server.engine.delay = 0.2
        replies = [http.post(RUNS, json=problems(4)) for _ in range(MAX_RUNNING + 1)]
        assert [r.status_code for r in replies] == [202] * MAX_RUNNING + [429] and "retry-after" in replies[-1].headers
    assert not server.engine.open and not server.service.concurrency.open


def test_an_unknown_run(http):
    assert http.get(f"{RUNS}/nobody").json()["error"]["code"] == "run_not_found"
    assert http.post(f"{RUNS}/nobody/events").status_code == 405


def test_old_events_go_first():
    from kvasir.api.scaling import scaling_runs

    async def body():
        run = scaling_runs.ScalingRun.__new__(scaling_runs.ScalingRun)
        run.status, run._events, run._first, run._news = "done", [], 0, asyncio.Event()
        for i in range(scaling_runs.MAX_EVENTS + 5):
            run._add({"event": "x", "i": i})
        return [e["i"] async for e in run.events()]

    assert asyncio.run(body()) == list(range(5, scaling_runs.MAX_EVENTS + 5))

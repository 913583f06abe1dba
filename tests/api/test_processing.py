"""Processors and thinking budgets over HTTP and in LLM: what becomes of them, and what is refused by name."""

from __future__ import annotations

import json

import httpx
import pytest

from kvasir import LLM, SamplingParams
from kvasir.api.calls.reasoning_parsers.qwen3 import Qwen3
from kvasir.api.text.processing import Processing
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar, Thinking
from tests.api.fake_client import tokenizer
from tests.api.running import running

START, END = (tuple(tokenizer().encode(mark, parse_special=True)) for mark in ("<think>", "</think>"))
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with running(processors=("cyclic_reflex", "tip")) as server:
        yield server


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(http, path=CHAT, **more):
    return http.post(path, json={"messages": USER, "max_tokens": 8} | more)


def made(server):
    return server.engine.seen[-1].processors


def test_the_budget_of_vllm_and_of_anthropic(http, server):
    assert ask(http, thinking_token_budget=5).status_code == 200
    [budget] = made(server)
    assert budget.spec == "budget:num_ignore=0,max_thinking=5"
    assert budget.thinking == Thinking(START, END, "before", "</think>")
    r = ask(http, MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024})
    assert r.status_code == 200 and "warning" not in r.headers
    assert made(server)[0].spec.endswith("max_thinking=1024")
    ask(http, MESSAGES, thinking={"type": "disabled"}, thinking_token_budget=3)
    assert made(server)[0].thinking.prompt_ends == "after"
    both = ask(http, MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024}, thinking_token_budget=3)
    assert both.status_code == 400 and "thinking.budget_tokens" in both.text


def test_processors_keep_their_order_and_their_words_are_ids(http, server):
    specs = ["tip:beta=7,words=a|e", "cyclic-reflex:amplitude=3,words=a"]
    assert ask(http, processors=specs, thinking_token_budget=9).status_code == 200
    budget, *named = made(server)
    assert [p.spec for p in named] == specs and budget.spec.startswith("budget")
    assert set(named[1].ids["words"]) <= set(named[0].ids["words"]) and named[1].ids["words"]


@pytest.mark.parametrize(
    "more, words",
    [
        (dict(thinking_token_budget=-1), ["thinking_token_budget", "out of range"]),
        (dict(thinking_token_budget=1.5), ["thinking_token_budget"]),
        (dict(thinking_token_budget="3"), ["thinking_token_budget"]),
        (dict(processors=["constant:words=a"]), ["processors", "'constant' is not allowed", "cyclic_reflex, tip"]),
        (dict(processors=["./mine.py"]), ["processors", "not allowed"]),
        (dict(processors=["tip:gamma=1"]), ["processors", "no option 'gamma'"]),
        (dict(processors=["tip:alpha=x"]), ["processors", "expected float"]),
        (dict(processors=["tip:ids=1|99999"]), ["processors", "out of range"]),
        (dict(processors=["cyclic_reflex:words=a,amplitude=1e300"]), ["processors", "-100 to 100"]),
        (dict(processors=["cyclic_reflex:words=a,period=" + "9" * 400]), ["processors", "period"]),
        (dict(processors=["cyclic_reflex:words=a,shift=1e308"]), ["processors", "shift"]),
        (dict(processors=["tip:words=hippopotamus"]), ["processors", "single token"]),
        (dict(processors=["tip:words=a"] * 5), ["processors", "at most 4"]),
        (dict(processors="tip"), ["processors"]),
    ],
)
def test_bad_ones_are_refused_by_name(http, more, words):
    r = ask(http, **more)
    assert r.status_code == 400 and all(word in r.text for word in words), r.text


def test_a_server_allows_installed_names_only():
    with pytest.raises(ConfigError, match="no files"):
        Processing(tokenizer(), Qwen3, ["./mine.py"])
    with pytest.raises(ConfigError, match="Did you mean 'tip'"):
        Processing(tokenizer(), Qwen3, ["tipp"])


def test_a_model_that_does_not_think_has_no_budget():
    with pytest.raises(RequestError, match="no reasoning parser") as e:
        Processing(tokenizer(), None)(SamplingParams(thinking_token_budget=4), [1])
    assert e.value.param == "thinking_token_budget"


def test_forced_tokens_are_marked_in_a_field_that_clients_ignore(http, server):
    """The places are those in the choice's output tokens, streamed or not, for chat and plain completions."""
    from openai.types.chat import ChatCompletionChunk

    server.engine.forced, server.engine.group = (1, 2), 2
    try:
        text = {"messages": [{"role": "user", "content": "say: hello world to everyone"}], "max_tokens": 8}
        whole = http.post(CHAT, json=text).json()
        assert whole["choices"][0]["kvasir"] == {"forced": [1, 2]}
        assert whole["usage"]["completion_tokens_details"]["forced_tokens"] == 2
        lines = http.post(CHAT, json=text | {"stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        marks = [c["kvasir"]["forced"] for chunk in chunks for c in chunk["choices"] if "kvasir" in c]
        assert marks == [[1], [2]]
        assert all(ChatCompletionChunk.model_validate(chunk) for chunk in chunks)
        plain = {"prompt": "say: hello world to everyone", "max_tokens": 8}
        assert http.post("/v1/completions", json=plain).json()["choices"][0]["kvasir"] == {"forced": [1, 2]}
    finally:
        server.engine.forced, server.engine.group = (), 1
    assert "kvasir" not in http.post(CHAT, json=text).json()["choices"][0]


def test_conflicts_are_seen_at_admission():
    processing, inside = Processing(tokenizer(), Qwen3), [5, *START]
    regex = Grammar("regex", "a+")
    with pytest.raises(RequestError, match=r"grammar \(regex\).*'budget'"):
        processing(SamplingParams(thinking_token_budget=4, grammar=regex), inside)
    for params, ids in [
        (SamplingParams(thinking_token_budget=4, grammar=regex), [5]),  # it may not think at all
        (SamplingParams(thinking_token_budget=4, grammar=Grammar("regex", "a+", END)), inside),
        (SamplingParams(processors=["tip:words=a"], grammar=regex), inside),
    ]:
        assert processing(params, ids)
    with pytest.raises(RequestError, match="both force"):
        processing(SamplingParams(thinking_token_budget=4, processors=["budget"]), inside)


def test_where_the_prompt_ends():
    processing = Processing(tokenizer(), Qwen3)
    for ids, where in [
        ([5], "before"),
        ([5, *START], "inside"),
        ([5, *START, 6, *END], "after"),
        ([5, *START, 6, 7], "inside"),
        ([5, *START, 6, *END, 7], "before"),
    ]:
        assert processing.thinking(ids).prompt_ends == where


def test_llm_runs_processors():
    with LLM("nano", device="cpu", batch_invariant=True) as llm:
        ids = llm.get_tokenizer().encode("The cat", add_special=False)
        prompt = {"prompt_token_ids": ids}
        greedy = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)
        [plain] = llm.generate(prompt, greedy)
        first = plain.outputs[0].token_ids[0]
        off = SamplingParams(
            temperature=0.0, max_tokens=6, detokenize=False, processors=[f"constant:value=-99,ids={first}"]
        )
        [steered] = llm.generate(prompt, off)
        assert first not in steered.outputs[0].token_ids
        with pytest.raises(RequestError, match="thinking_token_budget"):
            llm.generate(prompt, SamplingParams(thinking_token_budget=-2))

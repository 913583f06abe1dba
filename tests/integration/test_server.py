"""The whole system: ``kvasir serve`` with a model of the package, used through OpenAI's own client."""

from __future__ import annotations

import json
import math
import re
import signal
import threading
import time

import jsonschema
import numpy as np
import openai
import psutil
import pytest

from kvasir_lab.lookup import load_task
from kvasir_lab.tasks.tool import Tool
from tests.integration.serving import Served, served

PROMPT = "Once upon a time there was a king who had"
CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["king", "fox", "witch"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # Exact mode: what is asked twice must come out the same, whatever else runs.
    with served(
        tmp_path_factory.mktemp("server"), "--batch-invariant", "--page-slots", "16", "--max-model-len", "2048"
    ) as it:
        yield it
        it.until_idle()


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client


def chat(client, messages=CHAT, **more):
    return client.chat.completions.create(
        **{"model": "nano", "messages": messages, "max_tokens": 24, "temperature": 0, **more}
    )


def complete(client, prompt=PROMPT, **more):
    return client.completions.create(**{"model": "nano", "prompt": prompt, "max_tokens": 24, "temperature": 0, **more})


# ----------------------------------------------------------------------------------------------------------------- text


def test_the_model_works_out_chains(client):
    task = load_task("chain")
    problems = task.problems("test", 11, 8)
    replies = [chat(client, list(p.messages), max_tokens=200).choices[0] for p in problems]
    assert sum(task.check(p, r.message.content) for p, r in zip(problems, replies)) >= 7
    assert {r.finish_reason for r in replies} == {"stop"}


def test_completion_with_logprobs(client):
    r = complete(client, logprobs=3)
    found = r.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 24 == r.usage.completion_tokens
    assert "".join(found.tokens) == r.choices[0].text and r.choices[0].text and r.choices[0].finish_reason == "length"
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        assert top[token] == logprob == max(top.values()) <= 0, "greedy takes the most likely"
    assert [found.text_offset[i + 1] - found.text_offset[i] for i in range(23)] == [len(t) for t in found.tokens[:-1]]


def test_echo_scores_a_text_as_its_generation_did(client):
    done = complete(client, logprobs=1)
    scored = complete(client, PROMPT + done.choices[0].text, echo=True, max_tokens=0, logprobs=1)
    assert scored.choices[0].text == PROMPT + done.choices[0].text and scored.usage.completion_tokens == 0
    logprobs = scored.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == scored.usage.prompt_tokens
    # The last tokens of the echoed text are those that were generated, if both encode alike.
    assert logprobs.tokens[-24:] == done.choices[0].logprobs.tokens
    assert logprobs.token_logprobs[-24:] == pytest.approx(done.choices[0].logprobs.token_logprobs, abs=1e-5)
    both = complete(client, echo=True, logprobs=0, max_tokens=4)
    assert both.choices[0].text.startswith(PROMPT) and len(both.choices[0].logprobs.tokens) == both.usage.total_tokens


def test_several_prompts_and_branches(client):
    r = complete(client, [PROMPT, "The fox said"], n=2, temperature=1, seed=5, max_tokens=8)
    assert [c.index for c in r.choices] == [0, 1, 2, 3]
    alone = [complete(client, p, n=2, temperature=1, seed=5, max_tokens=8).choices for p in (PROMPT, "The fox said")]
    assert [c.text for c in r.choices] == [c.text for pair in alone for c in pair]
    assert r.choices[0].text != r.choices[1].text
    assert complete(client, [5, 6, 7, 300]).usage.prompt_tokens == 4


@pytest.mark.parametrize("n", [1, 3])
def test_streaming_equals_not_streaming(client, n):
    body = dict(n=n, temperature=1, seed=9, max_tokens=40, logprobs=True, top_logprobs=2)
    whole = chat(client, **body)
    texts, reasons, logprobs, usage = [""] * n, [None] * n, [[] for _ in range(n)], None
    for chunk in chat(client, **body, stream=True, stream_options={"include_usage": True}):
        for c in chunk.choices:
            texts[c.index] += c.delta.content or ""
            logprobs[c.index] += c.logprobs.content if c.logprobs else []
            reasons[c.index] = c.finish_reason or reasons[c.index]
        usage = chunk.usage or usage
    assert texts == [c.message.content for c in whole.choices] and all(texts)
    assert reasons == [c.finish_reason for c in whole.choices]
    assert logprobs == [c.logprobs.content for c in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_seed_repeats_and_none_does_not(client):
    def text(**more):
        return complete(client, temperature=1, max_tokens=30, **more).choices[0].text

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()
    assert text(seed=-1) == text(seed=2**64 - 1)


def test_seeds_hold_in_a_crowd(client):
    """Sixteen requests at once give the same answers as each alone."""
    alone = [complete(client, temperature=1, seed=s, max_tokens=20).choices[0].text for s in range(16)]
    crowd: dict[int, str] = {}

    def ask(seed: int) -> None:
        crowd[seed] = complete(client, temperature=1, seed=seed, max_tokens=20).choices[0].text

    threads = [threading.Thread(target=ask, args=(s,)) for s in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [crowd[s] for s in range(16)] == alone and len(set(alone)) > 10


# ---------------------------------------------------------------------------------------------------------- constraints


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_schema(client, temperature):
    for seed in range(3):
        r = chat(
            client,
            [{"role": "user", "content": "Describe somebody as JSON."}],
            temperature=temperature,
            seed=seed,
            max_tokens=160,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
            },
        )
        assert r.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(r.choices[0].message.content), SCHEMA)


def test_json_object(client):
    r = chat(
        client,
        [{"role": "user", "content": "Give me a JSON record with the fields name (string), age (integer)."}],
        max_tokens=100,
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(r.choices[0].message.content), dict)


@pytest.mark.parametrize("pattern", [r"[A-Z]{3}-\d{4}", r"(yes|no), (\d{1,3}\.){3}\d{1,3}"])
def test_regex(client, pattern):
    for seed in range(3):
        r = complete(client, temperature=1, seed=seed, max_tokens=60, extra_body={"guided_regex": pattern})
        assert re.fullmatch(pattern, r.choices[0].text), r.choices[0]
        assert r.choices[0].finish_reason == "stop"


def test_text_that_is_forced_is_counted_and_streams_alike(client):
    pattern = "The whole of this text is fixed, except for the number [0-9] and this tail of it."
    how = dict(temperature=1, seed=3, max_tokens=60, extra_body={"guided_regex": pattern}, logprobs=1)
    whole = complete(client, **how)
    details = whole.usage.completion_tokens_details
    assert 10 < details.forced_tokens < whole.usage.completion_tokens
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens)
    chunks = list(complete(client, **how, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage and len(chunks) < whole.usage.completion_tokens / 2
    free = complete(client, max_tokens=5)
    assert getattr(free.usage.completion_tokens_details, "forced_tokens", None) is None


def test_ebnf(client):
    grammar = 'root ::= "SELECT " col " FROM " [a-z]{1,9}\ncol ::= "*" | [a-z]{1,9}'
    r = complete(client, temperature=1, seed=1, max_tokens=60, extra_body={"structured_outputs": {"grammar": grammar}})
    assert re.fullmatch(r"SELECT (\*|[a-z]{1,9}) FROM [a-z]{1,9}", r.choices[0].text)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_format_next_to_tools(client, choice):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    for seed in range(4):
        r = chat(
            client,
            [{"role": "user", "content": "Describe somebody as JSON."}],
            temperature=1,
            seed=seed,
            max_tokens=200,
            tools=[{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}],
            tool_choice=choice,
            response_format={"type": "json_schema", "json_schema": {"name": "age", "schema": schema}},
        )
        message = r.choices[0].message
        assert r.choices[0].finish_reason in ("stop", "tool_calls")
        for call in message.tool_calls or []:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert message.tool_calls or choice == "auto"
        if not message.tool_calls:
            jsonschema.validate(json.loads(message.content), schema)


def test_choice(client):
    choices = ["a golden ring", "a golden rose", "nothing"]
    texts = {
        complete(client, temperature=1, seed=s, extra_body={"structured_outputs": {"choice": choices}}).choices[0].text
        for s in range(8)
    }
    assert texts <= set(choices)


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_calls_parse(client, stream):
    rng = np.random.default_rng(3)
    for _ in range(2):
        problem = Tool().draw(rng, "test")
        function = problem.tools[0]["function"]
        for choice in ("required", {"type": "function", "function": {"name": function["name"]}}):
            r = chat(
                client,
                list(problem.messages[:1]),
                tools=list(problem.tools),
                tool_choice=choice,
                max_tokens=120,
                stream=stream,
            )
            if stream:
                pieces = [c.delta.tool_calls for chunk in r for c in chunk.choices if c.delta.tool_calls]
                calls = [call.function for piece in pieces for call in piece if call.index == 0]
                name, arguments = "".join(c.name or "" for c in calls), "".join(c.arguments or "" for c in calls)
            else:
                assert r.choices[0].finish_reason in ("tool_calls", "stop")
                name, arguments = (
                    r.choices[0].message.tool_calls[0].function.name,
                    r.choices[0].message.tool_calls[0].function.arguments,
                )
            tool = next(t["function"] for t in problem.tools if t["function"]["name"] == name)
            jsonschema.validate(json.loads(arguments), tool["parameters"])
            assert choice == "required" or name == function["name"]


def test_a_bad_grammar_is_a_400(client):
    for body in (
        {"guided_regex": "(unclosed"},
        {"guided_grammar": "start: nonsense"},
        {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}},
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                complete(client, extra_body=body, stream=stream)
            assert caught.value.param == next(iter(body)), caught.value


# ------------------------------------------------------------------------------------------------------------- sampling


def test_stop_strings(client):
    free = complete(client, max_tokens=40).choices[0].text
    stop = free[12:17]  # wherever the tokens' borders are
    r = complete(client, max_tokens=40, stop=[stop, "never to be seen"]).choices[0]
    assert (r.text, r.finish_reason, r.stop_reason) == (free[: free.index(stop)], "stop", stop)
    shown = complete(client, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert shown.text == free[: free.index(stop) + len(stop)]
    streamed = "".join(
        c.text for chunk in complete(client, max_tokens=40, stop=stop, stream=True) for c in chunk.choices
    )
    assert streamed == r.text


def test_stop_token_ids(client):
    ids = complete(client, extra_body={"return_token_ids": True}).choices[0].token_ids
    at = next(i for i in range(3, 24) if ids[i] not in ids[:i])
    r = complete(client, extra_body={"stop_token_ids": [ids[at]], "return_token_ids": True}).choices[0]
    assert r.token_ids == ids[: at + 1] and (r.finish_reason, r.stop_reason) == ("stop", ids[at])


def test_min_tokens(client):
    hello = [{"role": "user", "content": "Hello!"}]
    short = chat(client, hello, max_tokens=100)
    assert short.choices[0].finish_reason == "stop" and short.usage.completion_tokens < 50
    longer = chat(client, hello, max_tokens=100, extra_body={"min_tokens": 60})
    assert longer.usage.completion_tokens >= 60
    forever = chat(client, hello, max_tokens=70, extra_body={"ignore_eos": True})
    assert forever.usage.completion_tokens == 70 and forever.choices[0].finish_reason == "length"


def test_logit_bias_and_allowed_ids(client):
    def ids(**more):
        extra = {"return_token_ids": True} | more.pop("extra_body", {})
        return complete(client, temperature=1, seed=1, max_tokens=20, extra_body=extra, **more).choices[0].token_ids

    free = ids()
    assert set(ids(logit_bias={"400": 100})) == {400}
    assert free[0] not in ids(logit_bias={str(free[0]): -100})
    assert set(ids(extra_body={"allowed_token_ids": [400, 401, 402]})) <= {400, 401, 402}


def test_bad_words(client):
    free = complete(client, max_tokens=40).choices[0].text
    word = max(re.findall(r"[a-z]+", free), key=len)
    assert word not in complete(client, max_tokens=40, extra_body={"bad_words": [word]}).choices[0].text


def test_penalties_and_truncation_change_the_text(client):
    free = complete(client, max_tokens=60).choices[0].text
    assert complete(client, max_tokens=60, frequency_penalty=2).choices[0].text != free
    assert complete(client, max_tokens=60, extra_body={"repetition_penalty": 2}).choices[0].text != free
    for greedy_in_effect in ({"extra_body": {"top_k": 1}}, {"top_p": 1e-6}, {"extra_body": {"min_p": 1.0}}):
        assert complete(client, max_tokens=60, **{"temperature": 1, **greedy_in_effect}).choices[0].text == free


def test_prompt_logprobs(client):
    r = complete(client, extra_body={"prompt_logprobs": 2}, max_tokens=1)
    found = r.choices[0].prompt_logprobs
    assert len(found) == r.usage.prompt_tokens and found[0] is None
    assert all(2 <= len(table) <= 3 and all(math.isfinite(e["logprob"]) for e in table.values()) for table in found[1:])


# ------------------------------------------------------------------------------------------------------- the rest of it


def test_usage_tells_what_was_cached(client, server):
    prompt = "A miller had three sons, and the youngest of them was called a simpleton; he was mocked. " * 4
    before = server.counted()
    first, second = complete(client, prompt).usage, complete(client, prompt).usage
    assert first.prompt_tokens == second.prompt_tokens
    assert not first.prompt_tokens_details.cached_tokens
    assert 0 < first.prompt_tokens - second.prompt_tokens_details.cached_tokens <= 16, "all but what is left of a page"
    after = server.counted()
    names = ("cached_tokens", "prefix_query_tokens", "prompt_tokens")
    grown = {name: after[f"kvasir:{name}_total"] - before[f"kvasir:{name}_total"] for name in names}
    assert grown == {
        "cached_tokens": second.prompt_tokens_details.cached_tokens,
        "prefix_query_tokens": 2 * first.prompt_tokens,
        "prompt_tokens": 2 * first.prompt_tokens,
    }


def test_the_queue_histogram_is_filled(client, server):
    before = server.metrics()["kvasir:queue_seconds_count"]
    complete(client, n=2, temperature=1)
    after = server.metrics()
    assert after["kvasir:queue_seconds_count"] == before + 1 and 0 <= after["kvasir:queue_seconds_sum"] < 60


def test_responses(client):
    body = dict(model="nano", input="Hello!", temperature=0, max_output_tokens=40)
    whole = client.responses.create(**body)
    assert whole.status == "completed" and whole.output_text
    text = "".join(
        e.delta for e in client.responses.create(**body, stream=True) if e.type == "response.output_text.delta"
    )
    assert (
        text
        == whole.output_text
        == chat(client, [{"role": "user", "content": "Hello!"}], max_tokens=40).choices[0].message.content
    )


def test_tokenize_agrees_with_usage(client, server):
    found = server.http.post("/tokenize", json={"messages": CHAT}).json()
    assert found["count"] == chat(client, max_tokens=1).usage.prompt_tokens and found["max_model_len"] == 2048
    ids = server.http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == PROMPT


def test_the_context_limit(client):
    full = complete(client, [300 + i % 900 for i in range(2040)], max_tokens=8, extra_body={"ignore_eos": True})
    assert full.usage.total_tokens == 2048
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, [300] * 2040, max_tokens=9)
    assert caught.value.param == "max_tokens"
    to_the_end = complete(
        client, [300 + i % 900 for i in range(2030)], max_tokens=None, extra_body={"ignore_eos": True}
    )
    assert to_the_end.usage.completion_tokens == 16, "OpenAI's default"


def test_leaving_a_stream_gives_everything_back(client, server):
    for _ in range(5):
        stream = chat(client, stream=True, max_tokens=1900, extra_body={"ignore_eos": True}, n=3, temperature=1)
        next(iter(stream))
        stream.close()
    server.until_idle()


def test_nobody_waits_busily(tmp_path):
    """Between requests neither process uses the CPU: not the event loop, not the step loop, not the compute threads."""
    with served(tmp_path, "--num-threads", "2") as server:
        complete(server.client)
        server.until_idle()
        processes = [psutil.Process(pid) for pid in (server.process.pid, server.engine_pid())]

        def of_a_second() -> float:
            before = sum(sum(process.cpu_times()[:2]) for process in processes)
            time.sleep(1)
            return sum(sum(process.cpu_times()[:2]) for process in processes) - before

        assert min(of_a_second() for _ in range(3)) < 0.2, "what spins takes a second of each"


def test_sigterm_drains(tmp_path):
    """After SIGTERM the server is not ready at once, refuses new requests, finishes the open stream, and exits with
    0."""
    server = Served(tmp_path, "--drain-timeout", "30")
    try:
        stream = iter(chat(server.client, stream=True, max_tokens=600, extra_body={"ignore_eos": True}))
        pieces = [next(stream) for _ in range(3)]
        server.process.send_signal(signal.SIGTERM)
        while server.http.get("/health/ready").status_code == 200:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as refused:
            chat(server.client)
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        pieces += stream
        assert pieces[-1].choices[0].finish_reason == "length"
        assert server.process.wait(120) == 0 and "Traceback" not in server.log
    finally:
        server.kill()

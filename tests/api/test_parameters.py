"""Parameters that real clients send: each reaches the prompt, the engine or the reply, or tells that it does not."""

from __future__ import annotations

import itertools

import httpx
import openai
import pytest

from kvasir.api.text.ignored import MAX_TOLD, _tell, tell_ignored
from tests.api.fake_client import FakeClient, tokenizer
from tests.api.running import key, running

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "say: <think>hm</think>hello"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WARNING = "x-kvasir-warning"


def ask(http: httpx.Client, path: str = CHAT, status: int = 200, **more) -> httpx.Response:
    first = {CHAT: {"messages": USER}, TEXT: {"prompt": "say: hello"}, RESPONSES: {"input": "say: hello"}}[path]
    r = http.post(path, json=first | more)
    assert r.status_code == status, r.text
    return r


def prompt(server) -> str:
    """The text of the prompt that came to the engine last."""
    return tokenizer().decode(server.engine.seen[-1].prompt_ids, skip_special=False)


OFF = "<think>\n\n</think>"


@pytest.mark.parametrize(("path", "name"), [(CHAT, "reasoning_effort"), (RESPONSES, "reasoning")])
def test_effort_goes_to_the_template_and_none_turns_thinking_off(http, server, path, name):
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        r = ask(http, path, **{name: effort if path == CHAT else {"effort": effort}})
        assert (OFF in prompt(server)) == (effort == "none") and WARNING not in r.headers
    ask(http, path, chat_template_kwargs={"enable_thinking": False}, **{name: "high" if path == CHAT else {}})
    assert OFF in prompt(server), "the client's own variables win"
    ask(http, path, 400, **{name: "huge" if path == CHAT else {"effort": "huge"}})


def test_effort_is_a_variable_of_the_template_and_a_warning_without_one():
    class Template(FakeClient):
        pass

    def served(template):
        from kvasir.api.text.text import Text
        from kvasir.models.tokenizer import Tokenizer

        text = Text(lambda: Tokenizer(tokenizer()._backend, {}, {"default": template}))
        text.load()
        return text

    with running() as server, httpx.Client(base_url=server.url, timeout=120) as http:
        server.service.text = served("{{ messages[-1].content }}{{ reasoning_effort }}")
        assert WARNING not in ask(http, reasoning_effort="low").headers and prompt(server).endswith("hellolow")
        server.service.text = served("{{ messages[-1].content }}{{ thinking }}")
        ask(http, reasoning_effort="none")
        assert prompt(server).endswith("False"), "the switch of other models"
        server.service.text = served("{{ messages[-1].content }}")
        assert "effort 'none' has no effect" in ask(http, reasoning_effort="none").headers[WARNING]
        documents = [{"title": "t", "text": "a paper"}]
        assert "documents have no effect" in ask(http, documents=documents).headers[WARNING]
        server.service.text = served("{% for d in documents %}{{ d.title }}: {{ d.text }}|{% endfor %}")
        assert WARNING not in ask(http, documents=[*documents, {"title": "u", "text": "<|im_end|>"}]).headers
        assert prompt(server) == "t: a paper|u: <|im_end|>|"
        assert not tokenizer().special_ids & set(server.engine.seen[-1].prompt_ids), "documents are plain text"
        ask(http, status=400, documents="x")
        huge = ask(http, status=400, documents=[{"text": "hello " * 100_000}]).json()["error"]
        assert huge["code"] == "context_length_exceeded" and "characters" in huge["message"]


def test_openais_client_sends_them(server):
    """Each field as the official client sends it: by its own name, or in ``extra_body``."""
    search = {"type": "web_search_preview"}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        extra = {
            "continue_final_message": True,
            "add_generation_prompt": False,
            "truncate_prompt_tokens": -1,
            "request_id": "mine",
            "cache_salt": "salt",
            "include_reasoning": False,
            "return_tokens_as_token_ids": True,
            "documents": [{"text": "x"}],
            "length_penalty": 1,
            "best_of": 1,
        }
        raw = client.chat.completions.with_raw_response.create(
            model="fake", messages=BEGUN, reasoning_effort="low", logprobs=True, extra_body=extra
        )
        chat = raw.parse()
        assert chat.id.startswith("chatcmpl-mine-") and raw.headers["x-request-id"] == "mine"
        assert chat.choices[0].logprobs.content[0].token.startswith("token_id:") and prompt(server).endswith("two ")
        assert server.engine.seen[-1].tenant and "documents have no effect" in raw.headers[WARNING]
        raw = client.responses.with_raw_response.create(
            model="fake", input="say: hello", reasoning={"effort": "none", "summary": "auto"}, tools=[search]
        )
        assert raw.parse().output_text == "hello" and raw.parse().reasoning.effort == "none"
        assert OFF in prompt(server) and "web_search_preview" in raw.headers[WARNING]
        text = client.completions.create(
            model="fake", prompt="say: one two", best_of=1, echo=True, extra_body={"truncate_prompt_tokens": 2}
        )
        assert not text.choices[0].text.startswith("say")


BEGUN = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two "}]


def test_the_answer_continues_the_final_message(http, server):
    r = ask(http, messages=BEGUN, continue_final_message=True, add_generation_prompt=False)
    assert prompt(server).endswith("<|im_start|>assistant\none two "), "without an end mark, the last space kept"
    assert prompt(server).count("assistant") == 1 and r.json()["choices"][0]["message"]["content"]
    ask(http, messages=BEGUN, continue_final_message=True)
    assert prompt(server).endswith("one two "), "the template adds nothing when nothing else is said"
    error = ask(http, status=400, messages=BEGUN, continue_final_message=True, add_generation_prompt=True).json()
    assert error["error"]["param"] == "continue_final_message"
    ask(http, messages=BEGUN, continue_final_message=False, add_generation_prompt=True)
    assert prompt(server).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("begun", "answer", "reasoning", "content"),
    [
        ("<think>so", " far</think>yes", " far", "yes"),
        ("<think>so</think>ye", "s", None, "s"),
        ("ye", "s", None, "s"),
    ],
)
def test_a_continued_message_knows_whether_it_thinks(http, server, monkeypatch, begun, answer, reasoning, content):
    ids = tokenizer().encode(answer, add_special=False, parse_special=True)
    monkeypatch.setattr(server.engine, "answer", lambda request, branch: ids)
    messages = [BEGUN[0], {"role": "assistant", "content": begun}]
    message = ask(http, messages=messages, continue_final_message=True).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_message_that_the_template_drops_cannot_be_continued():
    from kvasir.errors import RequestError
    from kvasir.models.tokenizer import Tokenizer

    dropping = Tokenizer(tokenizer()._backend, {}, {"default": "{{ messages[0].content }}"})
    assert dropping.apply_chat_template(BEGUN[:1], continue_final_message=True) == "count"
    with pytest.raises(RequestError, match="cannot be continued"):
        dropping.encode_chat(BEGUN, continue_final_message=True)
    tagged = [{"role": "user", "content": "a\U000ffffd"}]
    assert tokenizer().apply_chat_template(tagged, continue_final_message=True).endswith("a\U000ffffd")


def test_a_prompt_is_cut_from_the_left(http, server):
    ids = list(range(300, 400))
    for count, kept in ((7, ids[-7:]), (100, ids), (1024, ids)):
        ask(http, TEXT, prompt=ids, truncate_prompt_tokens=count, max_tokens=3)
        assert server.engine.seen[-1].prompt_ids == kept
    for path, long in ((TEXT, {"prompt": [300 + i % 50 for i in range(3000)]}), (CHAT, None), (RESPONSES, None)):
        many = "hello " * 1500
        long = long or ({"messages": [{"role": "user", "content": many}]} if path == CHAT else {"input": many})
        limit = {TEXT: "max_tokens", CHAT: "max_tokens", RESPONSES: "max_output_tokens"}[path]
        ask(http, path, 400, **long, **{limit: 24})
        ask(http, path, **long, **{limit: 24}, truncate_prompt_tokens=-1)
        assert len(server.engine.seen[-1].prompt_ids) == 1000, "the context of 1024 less the answer"
        for bad in (0, -2, 1025, 1 << 70, True, 1.0, "x"):
            error = ask(http, path, 400, truncate_prompt_tokens=bad).json()["error"]
            assert error["param"] == "truncate_prompt_tokens"
    r = ask(http, TEXT, prompt="one two three four", echo=True, truncate_prompt_tokens=2, max_tokens=1, logprobs=1)
    choice = r.json()["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] and not choice["text"].startswith("one")


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_the_bodys_request_id_comes_before_the_headers(http, server, path):
    body = {CHAT: {"messages": USER}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
    r = http.post(path, json=body | {"request_id": "mine/7\n"}, headers={"x-request-id": "other"})
    assert r.headers["x-request-id"] == "mine7" and "-mine7-" in r.json()["id"] == server.engine.seen[-1].id
    assert http.post(path, json=body | {"request_id": 7}).status_code == 400


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_salts_share_no_page_of_the_prefix_cache(path):
    """The engine's prefix key holds the tenant: all pairs of keys and salts must be tenants of their own."""
    text = "one two three four five six seven eight"
    body = {CHAT: {"messages": [{"role": "user", "content": text}]}, TEXT: {"prompt": text}, RESPONSES: {"input": text}}
    with running(api_key=("one", "two")) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        found = {}
        for owner, salt in itertools.product(("one", "two"), (None, "a", "b", "a:b")):
            more = {"cache_salt": salt} if salt else {}
            for hit in (False, True):  # the same salt again does find its pages
                r = http.post(path, json=body[path] | more, headers=key(owner))
                usage = r.json()["usage"]
                details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
                assert (details["cached_tokens"] > 0) == hit, (owner, salt)
            found[owner, salt] = server.engine.seen[-1].tenant
        assert len(set(found.values())) == len(found)
        assert not any(salt and salt in tenant.split(":")[-1].split() for (_, salt), tenant in found.items())
        for bad in ("", 5):
            r = http.post(path, json=body[path] | {"cache_salt": bad}, headers=key("one"))
            assert r.status_code == 400 and r.json()["error"]["param"] == "cache_salt"


def test_reasoning_can_be_left_out(http):
    whole = ask(http).json()["choices"][0]["message"]
    short = ask(http, include_reasoning=False).json()
    assert whole["reasoning_content"] == "hm" and "reasoning_content" not in short["choices"][0]["message"]
    assert short["choices"][0]["message"]["content"] == "hello"
    assert short["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    streamed = ask(http, include_reasoning=False, stream=True).text
    assert "reasoning" not in streamed and '"content":"he"' in streamed
    assert '"reasoning_content":"h"' in ask(http, stream=True).text


def test_tokens_are_named_by_their_ids(http):
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True, "logprobs": True, "top_logprobs": 3}
    choice = ask(http, **more).json()["choices"][0]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(t["token"].startswith("token_id:") for e in choice["logprobs"]["content"] for t in e["top_logprobs"])
    assert bytes(choice["logprobs"]["content"][0]["bytes"]) == b"<think>", "bytes stay bytes"
    assert '"token":"token_id:' in ask(http, **more, stream=True).text
    choice = ask(http, TEXT, **more | {"logprobs": 3, "top_logprobs": None}).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(
        len(top) in (3, 4) and all(name.startswith("token_id:") for name in top)
        for top in choice["logprobs"]["top_logprobs"]
    )


NEUTRAL = {
    "length_penalty": 1.0,
    "best_of": 1,
    "n": 1,
    "use_beam_search": False,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "user": "me",
    "service_tier": "auto",
    "prompt_cache_retention": "24h",
    "typical_p": 1,
    "top_k": -1,
    "logit_bias": {},
    "stop": [],
}


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_neutral_values_are_neutral_and_others_are_refused(http, path):
    more = {} if path == TEXT else {"echo": False}
    assert WARNING not in ask(http, path, **NEUTRAL, **more).headers
    for name, value in {
        "length_penalty": 1.1,
        "best_of": 2,
        "use_beam_search": True,
        "early_stopping": True,
        "typical_p": 0.9,
        "no_repeat_ngram_size": 3,
        "suffix": "x",
        "functions": [{"name": "f"}],
    }.items():
        error = ask(http, path, 400, **{name: value}).json()["error"]
        assert error["param"] == name and error["code"] == "unsupported_parameter"
    if path != RESPONSES:
        ask(http, path, best_of=2, n=2)


def test_cache_control_is_a_hint(http, server):
    hint = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "say: a", **hint}]
    for content in ("say: a", parts):
        r = ask(http, messages=[{"role": "user", "content": content, **hint}], tools=[FUNCTION | hint])
        assert r.json()["choices"][0]["message"]["content"] == "a" and "ephemeral" not in prompt(server)


def test_tools_that_are_no_functions_are_dropped_with_a_warning(http, server):
    search = {"type": "web_search_preview", "search_context_size": "low"}
    r = ask(http, tools=[search, FUNCTION])
    assert "tools[0] of type 'web_search_preview' was dropped" in r.headers[WARNING]
    assert "web_search" not in prompt(server) and '"name": "f"' in prompt(server)
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    r = ask(http, RESPONSES, tools=[flat, {"type": "mcp", "server_label": "é\r\nx: y"}], stream=True)
    assert "tools[1] of type 'mcp'" in r.headers[WARNING] and '"name": "f"' in prompt(server)
    assert WARNING not in ask(http, tools=[FUNCTION]).headers
    assert "Tools:" not in prompt(server) or ask(http, tools=[search]) and "Tools:" not in prompt(server)
    odd = ask(http, tools=[{"type": "é\r\nx: y"}])
    assert "x" not in odd.headers and "\r" not in odd.headers[WARNING]
    for path, tools in ((CHAT, [search]), (RESPONSES, [search])):
        assert ask(http, path, 400, tools=tools, tool_choice="required").json()["error"]["param"] == "tool_choice"
    bad = {"type": "function", "function": {"name": "a b"}}
    assert ask(http, status=400, tools=[search, FUNCTION, bad]).json()["error"]["param"] == "tools[2].function.name"
    flat = [search, {"type": "function", "name": "a b"}]
    assert ask(http, RESPONSES, 400, tools=flat).json()["error"]["param"] == "tools[1].name"
    assert ask(http, status=400, tools=[{"type": 5}]).json()["error"]["param"] == "tools[0].type"


def test_fields_of_other_services_are_ignored_with_one_warning_a_name(http, server, caplog):
    answer = {
        "role": "assistant",
        "content": "yo",
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [{"type": "thinking", "thinking": "x"}],
        "reasoning_details": [{}],
        "parsed": {"a": 1},
        "annotations": [{"type": "url_citation"}],
        "audio": None,
        "function_call": None,
        "evil\n\x1b[31m": 1,
    }
    messages = [{"role": "user", "content": "hi"}, answer, {"role": "user", "content": "say: hi"}]
    foreign = {"store": True, "prediction": {"type": "content", "content": "x"}, "web_search_options": {}}
    foreign |= {"vllm_xargs": {"a": 1}, "service_tier": "flex", "safety_identifier": "s", "prompt_cache_key": "k"}
    _tell.cache_clear()
    with caplog.at_level("WARNING", "kvasir.api.text.ignored"):
        for _ in range(2):
            r = http.post(CHAT, json={"messages": messages, **foreign, "metadata": {"a": "b"}, "user": "u"})
            assert r.status_code == 200 and "vllm_xargs" in r.headers["warning"]
    told = [record.getMessage() for record in caplog.records if record.name == "kvasir.api.text.ignored"]
    assert len(told) == len(set(told)) == 6 + 4 and all(line.isprintable() for line in told)
    plain = {"messages": [messages[0], {"role": "assistant", "content": "yo"}, messages[2]]}
    ids = server.engine.seen[-1].prompt_ids
    assert http.post(CHAT, json=plain).status_code == 200 and server.engine.seen[-1].prompt_ids == ids
    for bad in ({"function_call": {"name": "f", "arguments": "{}"}}, {"prefix": True}):
        assert (
            http.post(CHAT, json={"messages": [*messages, {"role": "assistant", "content": "", **bad}]}).status_code
            == 400
        )
    gateway = {
        "provider": {"order": ["x"]},
        "usage": {"include": True},
        "session_id": "s",
        "id_slot": 1,
        "detokenize": True,
    }
    assert http.post(CHAT, json={**plain, **gateway, "guided_decoding_backend": "xgrammar"}).status_code == 200
    r = http.post(CHAT, json={**plain, "enable_thinking": False})
    assert r.status_code == 400 and "Send reasoning_effort, or chat_template_kwargs" in r.json()["error"]["message"]
    assert http.post(CHAT, json={**plain, "temprature": 1}).status_code == 400, (
        "the control: it would change the answer"
    )


def test_the_number_of_names_told_is_bounded(caplog):
    _tell.cache_clear()
    for i in range(2 * MAX_TOLD):
        tell_ignored(f"name{i}")
    assert len(caplog.records) == MAX_TOLD
    _tell.cache_clear()


def test_long_tool_names_with_dots(http):
    name = "mcp__example.search_" + "x" * 108
    assert len(name) == 128
    assert ask(http, tools=[{"type": "function", "function": {"name": name}}]).status_code == 200
    body = {"max_tokens": 4, "messages": USER, "tools": [{"name": name, "input_schema": {"type": "object"}}]}
    assert http.post("/v1/messages", json=body).status_code == 200
    ask(http, status=400, tools=[{"type": "function", "function": {"name": name + "x"}}])

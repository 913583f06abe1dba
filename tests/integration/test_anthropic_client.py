"""Anthropic's own client: against a server whose answers are known, and against a real one."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.running import Running, running
from tests.integration.serving import served

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def server():
    with running(api_key=("secret",)) as it:
        yield it
        it.idle()


@pytest.fixture(scope="module")
def client(server: Running):
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as it:
        yield it


def say(text: str, **more) -> dict:
    return {"model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": f"say: {text}"}], **more}


def same(message) -> list[dict]:
    """The content without ids, which differ from reply to reply, and without fields that only a stream's helper has."""
    dropped = {"id", "parsed_output", "citations", "caller", "toolset_name"}
    return [{k: v for k, v in block.model_dump().items() if k not in dropped} for block in message.content]


def test_create(client):
    message = client.messages.create(**say("hello world"))
    assert message.content[0].text == "hello world" and message.stop_reason == "end_turn"
    assert message._request_id and message.usage.output_tokens == 4


def test_streams_give_the_message(client):
    body = say(f"<think>hm</think>\n\nlook {CALL}\n{CALL}", tools=[WEATHER])
    whole = client.messages.create(**body)
    assert [b.type for b in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use" and whole.content[2].input == {"city": "Paris"}
    with client.messages.stream(**body) as stream:
        texts = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert texts == whole.content[1].text and same(final) == same(whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens and final.usage.cache_read_input_tokens > 0
    kinds = [event.type for event in client.messages.create(**body, stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


def test_a_loop_of_tools(client):
    turns = [{"role": "user", "content": f"say: <think>hm</think>{CALL}"}]
    first = client.messages.create(model="fake", max_tokens=99, messages=turns, tools=[WEATHER])
    use = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "say: bye"}]},
    ]
    last = client.messages.create(model="fake", max_tokens=99, messages=turns, tools=[WEATHER])
    assert last.content[0].text == "bye"


def test_counts(client):
    body = say("hello", system="be nice", tools=[WEATHER])
    usage = client.messages.create(**body).usage
    del body["max_tokens"]
    counted = client.messages.count_tokens(**body).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_models(client):
    assert [m.id for m in client.models.list()] == ["fake"] and client.models.retrieve("fake").display_name == "fake"


def test_beta_routes(client):
    assert client.beta.messages.create(**say("hello"), betas=["x-2025-01-01"]).content[0].text == "hello"


def test_errors_have_the_classes_of_the_client(client, server):
    with pytest.raises(anthropic.BadRequestError, match="temperature") as e:
        client.messages.create(**say("x", extra_body={"temperature": -1}))
    assert e.value.request_id and e.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(**{**say("x"), "model": "claude"})
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(**say("x"))
    with (
        anthropic.Anthropic(base_url=server.url + "/v1", api_key="secret", max_retries=0) as other,
        pytest.raises(anthropic.NotFoundError, match="it has /v1 twice"),
    ):
        other.messages.create(**say("x"))


def test_async_client(server):
    async def run() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, auth_token="secret", api_key=None) as client,
            client.messages.stream(**say("hello")) as stream,
        ):
            return await stream.get_final_text()

    assert asyncio.run(run()) == "hello"


@pytest.mark.slow
def test_a_real_model_answers_as_over_chat(tmp_path):
    """The same conversation gives the same tokens over both protocols, streamed and not."""
    turns = [{"role": "user", "content": "Tell me a story about a fox."}]
    body = {"model": "nano", "messages": turns, "max_tokens": 24}
    greedy = {**body, "extra_body": {"temperature": 0}}  # newer clients have no such argument
    with (
        served(tmp_path, "--batch-invariant", "--max-model-len", "2048") as it,
        anthropic.Anthropic(base_url=it.url, api_key="none", max_retries=0) as client,
    ):
        expected = it.client.chat.completions.create(**body, temperature=0).choices[0]
        message = client.messages.create(**greedy)
        with client.messages.stream(**greedy) as stream:
            streamed = stream.get_final_message()
        text = "".join(b.text for b in message.content if b.type == "text")
        thought = "".join(b.thinking for b in message.content if b.type == "thinking")
        assert text == (expected.message.content or "")
        assert thought == (getattr(expected.message, "reasoning_content", None) or "")
        assert same(streamed) == same(message) and message.stop_reason == "max_tokens"
        plan = client.messages.create(
            **{**greedy, "max_tokens": 120},
            tools=[WEATHER],
            tool_choice={"type": "tool", "name": "weather"},
            thinking={"type": "disabled"},
        )
        uses = [b for b in plan.content if b.type == "tool_use"]
        assert [b.name for b in uses] == ["weather"] and plan.stop_reason in ("tool_use", "max_tokens")
        it.until_idle()

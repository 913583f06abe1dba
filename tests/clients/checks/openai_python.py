"""OpenAI's Python client: its own routes, and the further parameters that users send with ``extra_body``."""

import json

import openai
from pydantic import BaseModel

CAT = [{"role": "user", "content": "Once upon a time there was a cat"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def client(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)


def chat(url, **more):
    more = {"model": "nano", "messages": CAT, "max_tokens": 8, "temperature": 0, **more}
    return client(url).chat.completions.create(**more)


def check_models(url):
    assert [m.id for m in client(url).models.list()] == ["nano"]
    assert client(url).models.retrieve("nano").id == "nano"


def check_chat(url):
    reply = chat(url)
    assert reply.choices[0].message.role == "assistant" and reply.usage.completion_tokens <= 8


def check_chat_streams_the_same_text(url):
    chunks = list(chat(url, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat(url).choices[0].message.content and chunks[-1].usage.completion_tokens


def check_completions(url):
    reply = client(url).completions.create(
        model="nano", prompt=["Once", "A dog"], max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    assert [c.index for c in reply.choices] == [0, 1] and reply.choices[0].text.startswith("Once")
    assert len(reply.choices[0].logprobs.tokens) == len(reply.choices[0].logprobs.token_logprobs)


def check_logprobs(url):
    content = chat(url, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(len(t.top_logprobs) == 3 and t.logprob <= 0 for t in content)


def check_a_forced_tool(url):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        reply = chat(url, tools=[WEATHER], tool_choice=choice, max_tokens=64, parallel_tool_calls=False)
        call = reply.choices[0].message.tool_calls[0].function
        assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
        assert reply.choices[0].finish_reason == "tool_calls"


def check_a_tool_result(url):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *CAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"},
    ]
    assert chat(url, messages=messages, tools=[WEATHER]).choices[0].message.role == "assistant"


def check_parse(url):
    class Answer(BaseModel):
        yes: bool

    reply = client(url).chat.completions.parse(
        model="nano", messages=CAT, response_format=Answer, max_tokens=32, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed.yes, bool)


def check_responses(url):
    made = client(url).responses.create(model="nano", input="Once upon a time", max_output_tokens=8, temperature=0)
    events = client(url).responses.create(
        model="nano", input="Once upon a time", max_output_tokens=8, temperature=0, stream=True
    )
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert made.output_text == text


def check_errors_name_the_parameter(url):
    try:
        chat(url, temperature=-1)
    except openai.BadRequestError as e:
        assert e.param == "temperature"
    else:
        raise AssertionError("no error")
    try:
        chat(url, model="other")
    except openai.NotFoundError as e:
        assert e.code == "model_not_found"
    else:
        raise AssertionError("no error")


# ------------------------------------------------------------------------------------------- parameters of vLLM's users


def check_reasoning_effort(url):
    for effort in ("none", "low", "high"):
        chat(url, reasoning_effort=effort)


def check_reasoning_effort_of_responses(url):
    made = client(url).responses.create(
        model="nano", input="Once", max_output_tokens=4, reasoning={"effort": "low"}, temperature=0
    )
    assert made.reasoning.effort == "low"


def check_continue_final_message(url):
    begun = [*CAT, {"role": "assistant", "content": "The cat was"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = chat(url, messages=begun, extra_body={**more, "return_token_ids": True}).prompt_token_ids
    whole = chat(url, messages=begun, extra_body={"return_token_ids": True}).prompt_token_ids
    assert len(prompt) < len(whole) and prompt == whole[: len(prompt)]


def check_truncate_prompt_tokens(url):
    reply = chat(url, extra_body={"truncate_prompt_tokens": 5})
    assert reply.usage.prompt_tokens == 5


def check_request_id(url):
    assert "my-request" in chat(url, extra_body={"request_id": "my-request"}).id


def check_cache_salt(url):
    def cached(salt):
        prompt = [{"role": "user", "content": "word " * 300}]
        return chat(url, messages=prompt, extra_body={"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens

    cached("one")
    assert cached("one") > 0 and cached("two") == 0


def check_include_reasoning(url):
    message = chat(url, extra_body={"include_reasoning": False}).choices[0].message
    assert not getattr(message, "reasoning_content", None)


def check_return_tokens_as_token_ids(url):
    content = chat(url, logprobs=True, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs.content
    assert all(t.token.startswith("token_id:") for t in content)


def check_documents(url):
    chat(url, extra_body={"documents": [{"title": "Cats", "text": "Cats sleep."}]})


def check_neutral_values(url):
    plain = chat(url).choices[0].message.content
    neutral = {"length_penalty": 1.0, "best_of": 1, "use_beam_search": False, "repetition_penalty": 1.0}
    assert chat(url, extra_body=neutral).choices[0].message.content == plain
    client(url).completions.create(model="nano", prompt="Once", max_tokens=2, best_of=1)


def check_tools_that_are_no_functions_are_dropped(url):
    raw = client(url).responses.with_raw_response.create(
        model="nano", input="Once", max_output_tokens=4, tools=[{"type": "web_search"}]
    )
    assert any("web_search" in value for value in raw.headers.values())

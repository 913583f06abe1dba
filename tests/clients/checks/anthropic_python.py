"""Anthropic's Python client: messages, streams, tools, system, stop sequences, thinking, token counts and errors."""

import anthropic

CAT = [{"role": "user", "content": "Once upon a time there was a cat"}]
# This version of the client has no argument for the temperature any more.
GREEDY = {"model": "nano", "messages": CAT, "extra_body": {"temperature": 0}}
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


def create(url, **more):
    return client(url).messages.create(**{**GREEDY, "max_tokens": 8, **more})


def check_messages(url):
    made = create(url, system="Tell a story.")
    assert made.role == "assistant" and made.content[0].type == "text" and made.usage.output_tokens <= 8


def check_a_stream_is_the_message(url):
    with client(url).messages.stream(**GREEDY, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text == create(url).content[0].text


def check_stop_sequences(url):
    text = create(url).content[0].text
    made = create(url, stop_sequences=[text[3:6]])
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", text[3:6])
    assert made.content[0].text == text[: text.index(text[3:6])]


def check_a_forced_tool(url):
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        made = create(url, tools=[WEATHER], tool_choice=choice, max_tokens=64)
        use = made.content[-1]
        assert (use.type, use.name, made.stop_reason) == ("tool_use", "weather", "tool_use")
        assert use.input["city"] in ("Paris", "Rome")


def check_a_forced_tool_streams(url):
    more = {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 64}
    with client(url).messages.stream(**GREEDY, **more) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input["city"] in ("Paris", "Rome")


def check_a_tool_result(url):
    messages = [
        *CAT,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "20 degrees"}]},
    ]
    assert create(url, messages=messages, tools=[WEATHER]).role == "assistant"


def check_cache_control(url):
    part = {"type": "text", "text": "Tell a story.", "cache_control": {"type": "ephemeral"}}
    assert create(url, system=[part], messages=[{"role": "user", "content": [part]}]).role == "assistant"


def check_count_tokens(url):
    counted = client(url).messages.count_tokens(model="nano", messages=CAT)
    usage = create(url).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def check_errors_have_its_shape(url):
    try:
        create(url, extra_body={"temperature": -1})
    except anthropic.BadRequestError as e:
        assert e.body["type"] == "error" and e.body["error"]["type"] == "invalid_request_error"
        assert "temperature" in e.body["error"]["message"]
    else:
        raise AssertionError("no error")
    try:
        create(url, model="other")
    except anthropic.NotFoundError as e:
        assert e.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("no error")

"""LiteLLM through its providers ``openai``, ``hosted_vllm`` and ``anthropic``."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
os.environ["LITELLM_TELEMETRY"] = "False"

import litellm  # noqa: E402

CAT = [{"role": "user", "content": "Once upon a time there was a cat"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def complete(url, provider="openai", **more):
    base = url if provider == "anthropic" else url + "/v1"
    more = {"messages": CAT, "max_tokens": 8, "temperature": 0, "api_base": base, "api_key": "none", **more}
    return litellm.completion(model=f"{provider}/nano", num_retries=0, **more)


def check_both_providers(url):
    texts = {complete(url, provider).choices[0].message.content for provider in ("openai", "hosted_vllm")}
    assert len(texts) == 1


def check_stream(url):
    chunks = complete(url, "hosted_vllm", stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == complete(url).choices[0].message.content


def check_a_forced_tool(url):
    for provider in ("openai", "hosted_vllm"):
        reply = complete(url, provider, tools=[WEATHER], tool_choice="required", max_tokens=64)
        assert json.loads(reply.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")


def check_text_completion(url):
    reply = litellm.text_completion(
        model="text-completion-openai/nano", prompt="Once", max_tokens=4, api_base=url + "/v1", api_key="none"
    )
    assert reply.choices[0].text is not None


def check_cache_control(url):
    part = {"type": "text", "text": "Tell a story.", "cache_control": {"type": "ephemeral"}}
    for provider in ("openai", "hosted_vllm"):
        complete(url, provider, messages=[{"role": "system", "content": [part]}, *CAT])
        complete(url, provider, messages=[{**CAT[0], "cache_control": {"type": "ephemeral"}}])


def check_reasoning_effort(url):
    complete(url, "hosted_vllm", reasoning_effort="low")


def check_anthropic(url):
    assert complete(url, "anthropic").choices[0].message.content == complete(url).choices[0].message.content

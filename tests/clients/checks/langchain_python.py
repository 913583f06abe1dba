"""LangChain's ChatOpenAI, OpenAI and ChatAnthropic: calls, streams, tools and structured output."""

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

CAT = [SystemMessage("Tell a story."), HumanMessage("Once upon a time there was a cat")]


def chat(url, **more):
    more = {"max_tokens": 64, "temperature": 0, "max_retries": 0, **more}
    return ChatOpenAI(model="nano", base_url=url + "/v1", api_key="none", **more)


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"20 degrees in {city}"


def check_invoke_and_stream(url):
    whole = chat(url, max_tokens=8).invoke(CAT)
    assert whole.usage_metadata["output_tokens"] <= 8
    assert "".join(chunk.content for chunk in chat(url, max_tokens=8).stream(CAT)) == whole.content


def check_tools(url):
    for choice in ("any", "weather"):
        reply = (
            chat(url, max_tokens=200).bind_tools([weather], tool_choice=choice, parallel_tool_calls=False).invoke(CAT)
        )
        assert reply.tool_calls and reply.tool_calls[0]["name"] == "weather" or reply.invalid_tool_calls


def check_structured_output(url):
    class Answer(BaseModel):
        yes: bool

    for method in ("json_schema", "function_calling"):
        answer = chat(url).with_structured_output(Answer, method=method).invoke(CAT)
        assert isinstance(answer.yes, bool), method


def check_completions(url):
    model = OpenAI(model="nano", base_url=url + "/v1", api_key="none", max_tokens=4, temperature=0, best_of=1)
    assert isinstance(model.invoke("Once upon a time"), str)


def check_responses(url):
    reply = chat(url, use_responses_api=True).invoke(CAT)
    assert reply.text


def check_anthropic(url):
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="nano", base_url=url, api_key="none", max_tokens=8, temperature=0, max_retries=0)
    whole = model.invoke(CAT)
    assert "".join(chunk.text for chunk in model.stream(CAT)) == whole.text

"""Calls that models write wrongly: what is left of them, and the calls behind them."""

import pytest

from tests.api import test_tools
from tests.api.test_tool_formats import parsed, parser, whole

NOW = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "now", "parameters": {}}',
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
    "glm45": "<tool_call>now\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "openai": "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
    "pythonic": "```tool_code\nnow()\n```",
}
PARIS = ("get_weather", {"city": "Paris"})
KEY = "<arg_key>city</arg_key>\n"
VALUE = "<arg_value>Paris</arg_value>\n"


@pytest.mark.parametrize(
    "kind, text, content, call",
    [
        # The quote of the last string is missing.
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris}}\n</tool_call>\n', "", PARIS),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris}}\n', "", PARIS),
        ("hermes", '<tool_call>\n{"name": "get_weather}}\n', '<tool_call>\n{"name": "get_weather}}', None),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris}', "", PARIS),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris}}]', "", PARIS),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris}<tool_call|>', "", PARIS),
        ("openai", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris}<|call|>', "", PARIS),
        ("pythonic", "```tool_code\nget_weather(days=3, city='Paris)\n```\n", " city='Paris)\n```",
         ("get_weather", {"days": 3})),
        # A backslash that escapes nothing.
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "C:\\new\\q\\d+"}}</tool_call>', "",
         ("get_weather", {"city": "C:\new\\q\\d+"})),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"c\\ty\\.": ["\\u12", "\\u00g"]}}</tool_call>', "",
         ("get_weather", {"c\ty\\.": ["\\u12", "\\u00g"]})),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "\\w"}}', "", ("get_weather", {"city": "\\w"})),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "\\w"}', "", ("get_weather", {"city": "\\w"})),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "\\w"}}]', "",
         ("get_weather", {"city": "\\w"})),
        ("openai", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "\\w"}<|call|>', "",
         ("get_weather", {"city": "\\w"})),
        # The brackets or marks that close the call are missing.
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"\n</tool_call>', "", PARIS),
        ("gemma4", "<|tool_call>call:get_weather{days:3<tool_call|>", "", ("get_weather", {"days": 3})),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days<tool_call|>', "days", PARIS),
        ("pythonic", "```tool_code\nget_weather(city='Paris'\n```\n", "", PARIS),
        ("pythonic", "```tool_code\nget_weather(city='Paris')\n", "", PARIS),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n", "", PARIS),
        # A part of GLM's calls is missing, or comes twice.
        ("glm45", f"<tool_call>get_weather\n<arg_key>city{VALUE}</tool_call>\n", "", PARIS),
        ("glm45", f"<tool_call>get_weather\ncity</arg_key>{VALUE}</tool_call>\n", "", PARIS),
        ("glm45", f"<tool_call>get_weather\n{KEY}Paris</arg_value></tool_call>\n", "", PARIS),
        ("glm45", f"<tool_call>get_weather\n{KEY}<arg_value>Paris</tool_call>\n", "", PARIS),
        ("glm45", f"<tool_call>get_weather\n{KEY}<arg_value>Paris", "", PARIS),
        ("glm45", f"<tool_call>get_weather\n{KEY}{VALUE}", "", PARIS),
        ("glm45", f"<tool_call>get_weather\n{KEY}{VALUE}<arg_key>days</arg_key></tool_call>",
         "<arg_key>days</arg_key>", PARIS),
        ("glm45", f"<tool_call>get_weather\n{KEY}{VALUE}<arg_value>3</arg_value></tool_call>",
         "<arg_value>3</arg_value>", PARIS),
        ("glm45", f"<tool_call>get_weather\n{KEY}{VALUE}{KEY}<arg_value>Rome</arg_value></tool_call>",
         "<arg_key>city</arg_key><arg_value>Rome</arg_value>", PARIS),
        ("glm45", "<tool_call>get_weather\n<arg_key>"
         f"{KEY.strip()}</arg_key><arg_value>{VALUE.strip()}</arg_value></tool_call></tool_call>", "", PARIS),
        ("glm45", f"<tool_call>get_weather\n{KEY}</tool_call>", f"<tool_call>get_weather\n{KEY}</tool_call>", None),
        # Members of the object that are no arguments.
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}, "days": 3}</tool_call>',
         '"days": 3', PARIS),
    ],
)  # fmt: skip
def test_a_broken_call_does_not_swallow_the_next(kind, text, content, call):
    text += NOW[kind]
    assert whole(kind, text) == (content, [call, ("now", {})] if call else [("now", {})])
    assert parsed(kind, [*text, ""]) == parsed(kind, [text])


@pytest.mark.parametrize(
    "kind, text, calls",
    [
        ("hermes", '<tool_call>\n{"name": "now"}\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
         "</tool_call>", [("now", {}), PARIS]),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}} {"name": "get_weather", "arguments": '
         '{"city": "Paris"}}]', [("now", {}), PARIS]),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris}}, {"name": "now", '
         '"arguments": {}}]', [PARIS, ("now", {})]),
        ("hermes", '<tool_call>[{"name": "now"}, {"name": "get_weather", "arguments": {"city": "Paris"}}]\n'
         "</tool_call>", [("now", {}), PARIS]),
        ("hermes", '<tool_call>\n```json\n{"name": "now"}\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
         "```\n</tool_call>", [("now", {}), PARIS]),
        ("hermes", '<tool_call>```\n[{"name": "get_weather", "arguments": {"city": "Paris}}, {"name": "now"}]\n```'
         "</tool_call>", [PARIS, ("now", {})]),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>',
         [("now", {})]),
        ("mistral", '[TOOL_CALLS][{"function": "now", "arguments": {}}]', [("now", {})]),
        ("glm45", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>get_weather\n'
         f"{KEY}{VALUE}</tool_call>", [("now", {}), PARIS]),
        ("glm45", f"<tool_call>get_weather\n{KEY}{VALUE}</tool_call>"
         '<tool_call>```json\n[{"name": "now"}]\n```</tool_call>', [PARIS, ("now", {})]),
        ("glm45", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris}}\n</tool_call>\n'
         "<tool_call>now\n</tool_call>", [PARIS, ("now", {})]),
        ("qwen3_coder", "<tool_call>\n<function='now'>\n</function>\n</tool_call>\n<function=\"get_weather\">\n"
         '<parameter="city">\nParis\n</parameter>\n</function>', [("now", {}), PARIS]),
    ],
)  # fmt: skip
def test_calls_without_marks_between_them(kind, text, calls):
    assert whole(kind, text) == ("", calls)
    assert parsed(kind, [*text, ""]) == parsed(kind, [text])


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"name": "add"}{"name": "get_weather"}', ("", [("add", "{}"), ("get_weather", "{}")])),
        ('Sure: {"name": "add", "parameters": {"a": 1}}', ("Sure:", [("add", '{"a": 1}')])),
        ('So.\n\n{"name": "add"}\n{"name": "add"}\nDone.', ("So.\nDone.", [("add", "{}")] * 2)),
        ('Wait.<|python_tag|>{"name": "add"}', ("Wait.", [("add", "{}")])),
        ('{"answer": {"name": "add"}} {"name": "add"}', ('{"answer": {"name": "add"}}', [("add", "{}")])),
        ('{"name": "Bob"} or {"a": [1]}: {"name": "add"}', ('{"name": "Bob"} or {"a": [1]}:', [("add", "{}")])),
        ('{"name": "add", "parameters": {"b": "x}}\n{"name": "add"}', ("", [("add", '{"b": "x"}'), ("add", "{}")])),
        ('{"name": "add", "parameters": {"b": "x}}; {"name": "add"}', ("", [("add", '{"b": "x"}'), ("add", "{}")])),
        ('{"name": "add", "parameters": {"b": "x\n{"name": "add"}', ("", [("add", '{"b": "x\\n"}'), ("add", "{}")])),
        ('{"name": "Bob", "parameters": {"b": "x}}\n{"name": "add"}',
         ('{"name": "Bob", "parameters": {"b": "x}}', [("add", "{}")])),
        ('{"name": "add", "parameters": {"b": "}}; {\\"name\\": 1"}}',
         ("", [("add", '{"b": "}}; {\\"name\\": 1"}')])),
        ('{"name": "add", "parameters": {}, "more": [1]}', ('"more": [1]', [("add", "{}")])),
        ('{"name": "add"};', (";", [("add", "{}")])),
        # A list of calls, and the other places of the name.
        ('[{"name": "add", "parameters": {"a": 1}}, {"name": "get_weather"}]',
         ("", [("add", '{"a": 1}'), ("get_weather", "{}")])),
        ('So:\n[{"name": "add"}] Done.', ("So: Done.", [("add", "{}")])),
        ('<|python_tag|>[{"name": "add"}]', ("", [("add", "{}")])),
        ('[{"name": "add"}, 5]', (", 5]", [("add", "{}")])),
        ('[{"name": "add", "parameters": {"b": "x}}, {"name": "add"}]', ("", [("add", '{"b": "x"}'), ("add", "{}")])),
        ('[{"name": "add"}\n[{"name": "add"}]', ("", [("add", "{}")] * 2)),
        ('[[{"name": "add"}]\n[{"name": "add"}]', ('[[{"name": "add"}]\n', [("add", "{}")])),
        ('[1]\n [{"name": "add"}]', ("[1]", [("add", "{}")])),
        ('[1] [{"name": "add"}]', ('[1] [{"name": "add"}]', [])),
        ('{"function": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
        ('{"arguments": {"a": 1}, "function": "add"}', ("", [("add", '{"a": 1}')])),
        ('{"type": "function", "function": "add"}', ("", [("add", "{}")])),
        ('{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}', ("", [("add", '{"a": 1}')])),
        ('{"function": {"parameters": {"a": 1}, "name": "add", "x": 2}, "y": [3]}',
         ('"x": 2, "y": [3]', [("add", '{"a": 1}')])),
        ('{"function": {"name": "add"}, "name": "Bob", "parameters": {"a": 1}}',
         ('"name": "Bob", "parameters": {"a": 1}', [("add", "{}")])),
    ],
)  # fmt: skip
def test_llama_calls_stand_by_themselves(text, expected):
    assert test_tools.whole("llama3_json", text) == expected
    assert test_tools.message(test_tools.Llama3Json(test_tools.NAMES), [*text, ""]) == expected


def test_text_that_resembles_calls_is_read_in_time():
    """Each beginning of a call is read again when it turns out to be none: not from every one to the end."""
    for kind, text in (
        ("hermes", '<tool_call>{"a": "'),
        ("llama3_json", '{"name": {"parameters": '),
        ("pythonic", "```tool_code\nnow('''"),
        ("glm45", "<tool_call>now <arg_key>"),
        ("mistral", "[TOOL_CALLS][{"),
        ("openai", "to="),
        ("openai", "to=now "),
        ("openai", "<|channel|>"),
        ("openai", "<|start|>a"),
    ):
        made, count = parser(kind), 0
        feed = made._in_call

        def counted(*given, feed=feed):
            nonlocal count
            count += 1
            feed(*given)

        made._in_call = counted
        made.push(text * 2000, True)
        assert count < 20 * len(text) * 2000, kind

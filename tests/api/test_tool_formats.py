"""Formats of tool calls: recorded answers give the same messages for every cut, and malformed ones stay text."""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir import technique
from kvasir.api.calls import tools
from kvasir.api.calls.tools import ToolParser
from kvasir.errors import ConfigError
from tests.api.running import running
from tests.api.test_tools import message
from tests.models.small_tokenizers import make

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["metric", "imperial"]},
            "wind": {"type": "boolean"},
        },
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "modes": {"type": "array"}},
    },
    "now": {"type": "object", "properties": {}},
    "place": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Point"}, "scale": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
}
CITY = ("get_weather", {"city": "Paris", "days": 3})
FILE = ("write_file", {"path": "a.py", "text": 'if a < b:\n    print("]}</é🙂")\n'})
PLACE = ("place", {"at": {"x": 1.5, "tags": ["a", None, True]}, "scale": None})


def parser(kind):
    return technique.find(tools.PACKAGE, kind, ToolParser)[0](SCHEMAS)


def parsed(kind, pieces):
    content, calls = message(parser(kind), pieces)
    return content, calls


def whole(kind, text):
    """Content and calls of a whole answer, the arguments as objects."""
    content, calls = parsed(kind, [text])
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


# Answers as the models of each family write them, after their published templates.
RECORDED = {
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": "VvvODy9mT"}]',
            ("", [CITY]),
        ),
        (
            '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"arguments": {"city": "Paris", "days": 3}, "name": '
            '"get_weather"}]',
            ("", [("now", {}), CITY]),
        ),
        (
            'Let me look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}',
            ("Let me look.", [CITY, ("now", {})]),
        ),
        ('[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Paris", "days": 3}', ("", [CITY])),
        ('[TOOL_CALLS] get_weather{"city": "Paris", "days": 3} Done.', ("Done.", [CITY])),
        ('[TOOL_CALLS]{"name": "now", "arguments": {}}', ("", [("now", {})])),
    ],
    "glm45": [
        (
            "I look it up.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            ("I look it up.", [CITY]),
        ),
        (
            "<tool_call>now</tool_call>\n<tool_call>write_file<arg_key>path</arg_key><arg_value>a.py</arg_value>"
            f"<arg_key>text</arg_key><arg_value>{FILE[1]['text']}</arg_value></tool_call>\nDone.",
            ("Done.", [("now", {}), FILE]),
        ),
        (
            '<tool_call>place\n<arg_key>at</arg_key>\n<arg_value>{"x": 1.5, "tags": ["a", null, true]}</arg_value>\n'
            "<arg_key>scale</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
            ("", [PLACE]),
        ),
    ],
    "qwen3_coder": [
        (
            "I look it up.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            ("I look it up.", [CITY]),
        ),
        (
            "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=write_file>\n"
            f"<parameter=path>\na.py\n</parameter>\n<parameter=text>\n{FILE[1]['text']}\n</parameter>\n</function>\n"
            "</tool_call>\n",
            ("", [("now", {}), FILE]),
        ),
        (
            "<tool_call>\n<function=place>\n<parameter=at>\n{'x': 1.5, 'tags': ['a', None, True]}\n</parameter>\n"
            "<parameter=scale>\nNone\n</parameter>\n</function>\n</tool_call> Done.",
            ("Done.", [PLACE]),
        ),
        ("<function=now>\n</function>\n</tool_call>", ("", [("now", {})])),
    ],
    "gemma4": [
        ('Sure.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>', ("Sure.", [CITY])),
        (
            '<|tool_call>call:now{}<tool_call|><|tool_call>call:write_file{path:<|"|>a.py<|"|>,'
            f'text:<|"|>{FILE[1]["text"]}<|"|>}}<tool_call|>',
            ("", [("now", {}), FILE]),
        ),
        (
            '<|tool_call>call:place{at:{x:1.5,tags:[<|"|>a<|"|>,null,true]},scale:null}<tool_call|>\nDone.',
            ("Done.", [PLACE]),
        ),
        ('<|tool_call>call:get_weather{<|"|>city<|"|>:"Paris", days: 3}<tool_call|>', ("", [CITY])),
    ],
    "openai": [
        (
            '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris","days":3}'
            "<|call|>",
            ("", [CITY]),
        ),
        (
            ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 3}',
            ("", [CITY]),
        ),
        (
            "Let me look.<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
            "<|call|>"
            "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "Paris", "days": 3}<|call|>',
            ("Let me look.", [("now", {}), CITY]),
        ),
    ],
    "pythonic": [
        ("[get_weather(city='Paris', days=3)]", ("", [CITY])),
        ('<|python_start|>[now(), get_weather(city="Paris", days=3)]<|python_end|>', ("", [("now", {}), CITY])),
        (
            "I look it up.\n```tool_code\nprint(get_weather(city='Paris', days=3))\n```\nDone.",
            ("I look it up.", [CITY]),
        ),
        ("```tool_code\nnow()\nget_weather('Paris', days=3)\n```", ("", [("now", {}), CITY])),
        ("```tool_code\n[now()]\n```\n```tool_code\nnow()\n```", ("", [("now", {}), ("now", {})])),
        (f"[write_file(path='a.py', text={FILE[1]['text']!r})]", ("", [FILE])),
        (
            '[write_file(path="a.py", text="""a "b" ]) \\"""c""", modes=["", \'\'])]',
            ("", [("write_file", {"path": "a.py", "text": 'a "b" ]) """c', "modes": ["", ""]})]),
        ),
        ("[place(at={'x': 1.5, 'tags': ['a', None, True]}, scale=None)]", ("", [PLACE])),
    ],
}
RECORDED["pythonic"][2] = (RECORDED["pythonic"][2][0], ("I look it up.Done.", [CITY]))
CASES = [
    pytest.param(kind, text, expected, id=f"{kind}-{i}")
    for kind, cases in RECORDED.items()
    for i, (text, expected) in enumerate(cases)
]


@pytest.mark.parametrize("kind, text, expected", CASES)
def test_recorded_answers(kind, text, expected):
    assert whole(kind, text) == expected


@pytest.mark.parametrize("kind, text, expected", CASES)
def test_every_cut_in_two_and_every_width(kind, text, expected):
    found = parsed(kind, [text])
    for cut in range(len(text) + 1):
        assert parsed(kind, [text[:cut], text[cut:]]) == found
    for width in range(1, 12):
        assert parsed(kind, [*(text[i : i + width] for i in range(0, len(text), width)), ""]) == found


@pytest.mark.parametrize("kind, text, expected", CASES)
def test_an_answer_that_is_cut_short(kind, text, expected):
    """Every beginning of an answer: calls that ended are whole, and at most the last one is not."""
    for end in range(len(text)):
        content, calls = parsed(kind, [text[:end]])
        for i, (name, arguments) in enumerate(calls):
            assert name == expected[1][i][0]
            if i < len(calls) - 1:
                assert json.loads(arguments) == expected[1][i][1]
        if not calls:
            assert content.strip() == text[:end].strip()


MALFORMED = {
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_",
        "[TOOL_CALLS] hello",
        "[TOOL_CALLS] [5]",
        '[TOOL_CALLS] [{"name": 5}]',
        "[TOOL_CALLS]now[ARGS]5",
        "[TOOL_CALLS]now[CALL_ID]a b",
        "[TOOL_CALLS]]",
        "see [TOOL_CALLS] [",
        "a [b] c",
    ],
    "glm45": [
        "<tool_call>",
        "<tool_call>now",
        "<tool_call>now<b>",
        "<tool_call>now <arg_value>",
        "<tool_call>\n</tool_call>",
        "<tool_call>now<arg_key>a</arg_key>5",
        "<tool_call>a b</tool_call>",
        "1 < 2",
        "</tool_call>",
    ],
    "qwen3_coder": [
        "<tool_call>",
        "<tool_call>\n<functions>",
        "<tool_call><function=>",
        "<function=other>",
        "<function=now> x",
        "<tool_call><function=now><parameter=a",
        "Use <function=f> for that.",
        "</tool_call>",
    ],
    "gemma4": [
        "<|tool_call>",
        "<|tool_call>now{}",
        "<|tool_call>call:now",
        "<|tool_call>call:{}",
        "<|tool_call>call:now(a)",
        "a <|b",
        "<tool_call|>",
    ],
    "openai": [
        "Hello",
        "<|channel|>final<|message|>Hi",
        "<|channel|>commentary to=functions.now<|message|>5",
        "it goes to=functions.now",
        "<|channel|>commentary",
        "to=me",
        "<|start|>assistant",
        "to=functions.now\n\nnext",
    ],
    "pythonic": [
        "[1, 2]",
        "[now(]",
        "[other()]",
        "[now(x)]",
        "[get_weather(city=paris)]",
        "[",
        "[now",
        "f(x)",
        "```tool_code\nfoo()\n```",
        "```python\nnow()\n```",
        "[a](b)",
        "[get_weather(city=)]",
        "[get_weather(city={1: 2})]",
        "[get_weather(city=f'{x}')]",
        "[now({]})]",
        "see [now()]",
    ],
}


@pytest.mark.parametrize("kind, text", [(k, t) for k, texts in MALFORMED.items() for t in texts])
def test_malformed_is_content(kind, text):
    assert parsed(kind, [text]) == (text, [])
    assert parsed(kind, [*text, ""]) == (text, [])


@pytest.mark.parametrize(
    "kind, text, expected",
    [
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, 5]', (", 5]", [("now", "{}")])),
        ("gemma4", "<|tool_call>call:now{a:1]", ("]", [("now", '{"a": 1}')])),
        ("glm45", "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value> x", ("x", [("now", '{"a": 1}')])),
        ("openai", "<|channel|>commentary to=functions.now<|message|>{]", ("]", [("now", "{}")])),
        ("pythonic", "[now(), other()]", (", other()]", [("now", "{}")])),
        ("pythonic", "[now() for x in y]", ("for x in y]", [("now", "{}")])),
        ("pythonic", "[get_weather(city='a', city='b')]", (" city='b')]", [("get_weather", '{"city": "a"}')])),
    ],
)
def test_broken_behind_an_announced_call(kind, text, expected):
    """An announced call stays a call, and only the rest is content."""
    assert parsed(kind, [text]) == expected and parsed(kind, [*text, ""]) == expected


SAVE = "<tool_call>\n<function=write_file>\n"
PATH = "<parameter=path>\na.txt\n"
TAIL = "</function>\n</tool_call>"
A = ("write_file", {"path": "a.txt"})


@pytest.mark.parametrize(
    "text, expected",
    [
        (f'{SAVE}{PATH}</parameter>\n<parameter=modes>\n["x"]\n{TAIL}',
         ("", [("write_file", {"path": "a.txt", "modes": ["x"]})])),
        (f"{SAVE}{PATH}{TAIL}", ("", [A])),
        (f"{SAVE}{PATH}<parameter=text>\nhello\n</parameter>\n{TAIL}",
         ("", [("write_file", {"path": "a.txt", "text": "hello"})])),
        (f"{SAVE}{PATH}{TAIL}\n<tool_call>\n<function=now>\n{TAIL}", ("", [A, ("now", {})])),
        (f"{SAVE}{PATH}</parameter>\n</tool_call>", ("", [A])),
        (f"{SAVE}{PATH}</tool_call>", ("", [A])),
        (f"{SAVE}{PATH}</parameter>\n</parameter>\n{TAIL}", ("", [A])),
        (f"{SAVE}{PATH}</parameter>\n<tool_call>\n<function=now>\n{TAIL}", ("", [A, ("now", {})])),
        (f"{SAVE}{PATH}</parameter>\n<parameter=\nbody\n</parameter>\n{TAIL}",
         ("<parameter=\nbody\n</parameter>", [A])),
        (f"{SAVE}{PATH}</parameter>\n<parameter=body=\n</parameter>\n{TAIL}", ("<parameter=body=\n</parameter>", [A])),
        (f"{SAVE}{PATH}</parameter>\n<parameter=path>\nb\n</parameter>\n{TAIL}",
         ("<parameter=path>\nb\n</parameter>", [A])),
        (f"{SAVE}<parameter=text>\nuse </parameter> to close\n</parameter>\n{TAIL}",
         ("", [("write_file", {"text": "use </parameter> to close"})])),
    ],
)  # fmt: skip
def test_qwen3_coder_without_its_marks(text, expected):
    assert whole("qwen3_coder", text) == expected
    assert parsed("qwen3_coder", [*text, ""]) == parsed("qwen3_coder", [text])


SCRAPS = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", ", ", '{"name": "now", "arguments": {}}', "now", "{}"],
    "glm45": [
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "now",
        "city",
        "5",
    ],
    "qwen3_coder": [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "now",
        ">",
        "</function>",
        "<parameter=",
        "city",
        "</parameter>",
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", "call:", "now", "{", "}", "[", "]", "a:", ",", '<|"|>', "5", '"'],
    "openai": [
        "<|channel|>",
        "commentary",
        " to=functions.now",
        "<|constrain|>json",
        "<|message|>",
        "{}",
        "<|call|>",
        "<|start|>assistant",
        "analysis",
        "<|end|>",
    ],
    "pythonic": [
        "[",
        "now(",
        "get_weather(",
        "city=",
        "'",
        '"',
        ")",
        "]",
        ", ",
        "```tool_code",
        "```",
        "print(",
        "\\",
        "<|python_start|>",
        "<|python_end|>",
        "(",
        "{",
    ],
}


@pytest.mark.parametrize("kind", SCRAPS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_text_gives_the_same_message_for_any_cut(kind, data):
    scraps = st.sampled_from([*SCRAPS[kind], "\n", " ", "text", "🙂", "<", "1"])
    text = "".join(data.draw(st.lists(scraps, max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    found = parsed(kind, [text])
    assert parsed(kind, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == found
    assert parsed(kind, [*text, ""]) == found
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[1])
    if not found[1]:
        assert found[0] == text  # no call: not a character is lost


@pytest.mark.parametrize(
    "kind, text, expected",
    [
        ("openai", "<|channel|>commentary to=functions.now<|message|><|call|>", ("", [("now", {})])),
        ("openai", "<|channel|>commentary to=functions.now<|message|>", ("", [("now", {})])),
        ("openai", "<|channel|>analysis to=python code<|message|>print(1)\n<|call|>",
         ("", [("python", {"code": "print(1)\n"})])),
        ("glm45", "<tool_call>write_file<arg_key>path</arg_key><arg_value>a<arg_key>text</arg_key><arg_value>b"
         "</arg_value></tool_call>", ("", [("write_file", {"path": "a", "text": "b"})])),
        ("glm45", "<tool_call>write_file<arg_key>path</arg_key><arg_value>a\n<tool_call>now</tool_call>",
         ("", [("write_file", {"path": "a\n"}), ("now", {})])),
        ("mistral", '[TOOL_CALLS]write_file[ARGS]{"text": "a\nb"}', ("", [("write_file", {"text": "a\nb"})])),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": null}]', ("", [("now", {})])),
        ("openai", "<|channel|>commentary to=functions.now <|constrain|>json{}<|call|>", ("", [("now", {})])),
        ("openai", "<|channel|>commentary to=functions.now<|call|>", ("", [("now", {})])),
        ("openai", '<|channel|>analysis to=browser.open code<|message|>{"id": 3}<|call|>',
         ("", [("browser.open", {"id": 3})])),
    ],
)  # fmt: skip
def test_repaired_calls(kind, text, expected):
    assert whole(kind, text) == expected
    assert parsed(kind, [*text, ""]) == parsed(kind, [text])


def test_arguments_stream():
    """A long string arrives while it is written, in every format with strings of its own."""
    for kind, head in (
        ("glm45", "<tool_call>write_file<arg_key>text</arg_key><arg_value>"),
        ("qwen3_coder", "<tool_call>\n<function=write_file>\n<parameter=text>\n"),
        ("gemma4", '<|tool_call>call:write_file{text:<|"|>'),
        ("mistral", '[TOOL_CALLS]write_file[ARGS]{"text": "'),
        ("openai", '<|channel|>commentary to=functions.write_file<|message|>{"text": "'),
    ):
        made = parser(kind)
        made.push(head)
        assert [made.push(c)[0].arguments for c in "abc"] == ["a", "b", "c"], kind


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("city", "123", "123"),
        ("city", '"Paris"', '"Paris"'),
        ("city", " a ", " a "),
        ("city", "", ""),
        ("days", "3", 3),
        ("days", "3.0", 3.0),
        ("days", "three", "three"),
        ("days", " 3\n", 3),
        ("days", "123456789012345678901234567890", 123456789012345678901234567890),
        ("wind", "true", True),
        ("wind", "True", True),
        ("wind", "1", "1"),
        ("units", "metric", "metric"),
        ("unknown", "5", 5),
        ("unknown", "01", "01"),
        ("unknown", "NaN", "NaN"),
        ("unknown", '{"a": [1]}', {"a": [1]}),
        ("unknown", "{'a': 1}", "{'a': 1}"),
        ("unknown", "5 6", "5 6"),
        ("unknown", "[" * 300, "[" * 300),
    ],
)
def test_values_have_the_type_of_the_schema(key, text, value):
    glm = f"<tool_call>get_weather\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    qwen = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for kind, answer in (("glm45", glm), ("qwen3_coder", qwen)):
        content, calls = whole(kind, answer)
        assert content == "" and calls == [("get_weather", {key: value})]
        assert type(calls[0][1][key]) is type(value)


# ------------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    "template, kind",
    [
        ("{{ '<tool_call>' }}{'name': ...}", "hermes"),
        ("{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key><arg_value>", "glm45"),
        ("If you call: <tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{ '<|tool_call>call:' }}", "gemma4"),
        ("<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>", "openai"),
        ("the format of [func_name1(params_name1=params_value1, params_name2=params_value2...)]", "pythonic"),
    ],
)
def test_auto_knows_the_templates(template, kind):
    assert tools.choose("auto", make("wordpiece", template)).name == kind


def test_other_names():
    used = make("byte_level")
    for word, kind in (
        ("llama4_json", "llama3_json"),
        ("llama4_pythonic", "pythonic"),
        ("glm47", "glm45"),
        ("qwen3_xml", "qwen3_coder"),
        ("qwen3-xml", "qwen3_coder"),
    ):
        assert tools.choose(word, used).name == kind
    with pytest.raises(ConfigError, match="mistral"):
        tools.choose("mistrl", used)


# ------------------------------------------------------------------------------------------------------- over the wire


@pytest.mark.parametrize("kind", RECORDED)
def test_a_served_answer(kind):
    """A stream and a collected reply hold the same call, and the answer ends with ``tool_calls``."""
    text, (content, calls) = RECORDED[kind][0]
    offered = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    with running(tool_call_parser=kind) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        messages = [{"role": "user", "content": f"say: {text}"}]
        body = {"model": "fake", "messages": messages, "tools": offered}
        whole_reply = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    function = whole_reply["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == calls[0]
    assert (whole_reply["message"]["content"] or "") == content and whole_reply["finish_reason"] == "tool_calls"
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in streamed.splitlines() if line[6:7] == "{"]
    parts = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(part.get("arguments", "") for part in parts) == function["arguments"]
    assert [part["name"] for part in parts if "name" in part] == [function["name"]]


@pytest.mark.parametrize("kind, thinking", [("openai", "openai_gptoss"), ("glm45", "glm45")])
def test_where_the_grammar_of_a_forced_call_starts(kind, thinking):
    """Harmony's grammar describes the whole answer; the others start after the thinking."""
    offered = [{"type": "function", "function": {"name": "now", "parameters": SCHEMAS["now"]}}]
    body = {"model": "fake", "messages": [{"role": "user", "content": "<|start|>"}]}  # as if the prompt ended with it
    settings = {"tool_call_parser": kind, "reasoning_parser": thinking}
    with running(**settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        http.post("/v1/chat/completions", json={**body, "tools": offered, "tool_choice": "required"})
        http.post("/v1/chat/completions", json={**body, "response_format": {"type": "json_object"}})
        calls, text = (request.params.grammar for request in server.engine.seen)
    assert (calls.after == ()) == (kind == "openai") and text.after

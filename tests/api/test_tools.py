"""Tool calls: messages do not depend on cuts of the stream, malformed calls are text, grammars force right calls."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvasir import technique
from kvasir.api.calls import tools
from kvasir.api.calls.json_scan import Malformed, ValueScan
from kvasir.api.calls.tool_parsers.hermes import Hermes
from kvasir.api.calls.tool_parsers.llama3_json import Llama3Json
from kvasir.api.http.body import SamplingBody
from kvasir.api.protocols.sampling import grammar_of
from kvasir.api.text.text import Text
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar
from tests.models.small_tokenizers import make

PARSERS = {"hermes": Hermes, "llama3_json": Llama3Json}
NAMES = {"add": {}, "get_weather": {}}


def tool(name="add", **parameters):
    return {
        "type": "function",
        "function": {
            "name": name,
            "parameters": parameters
            or {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


def message(parser, pieces):
    """Content and calls of an answer that comes in pieces; also checks that the deltas are well formed."""
    content, calls = "", []
    for i, piece in enumerate(pieces):
        for delta in parser.push(piece, i == len(pieces) - 1):
            if isinstance(delta, str):
                assert delta
                content += delta
            elif delta.name is not None:
                assert delta.id.startswith("call_") and delta.index == len(calls)
                calls.append([delta.name, delta.arguments])
            else:
                assert delta.id is None and delta.arguments
                calls[delta.index][1] += delta.arguments
    return content, [tuple(c) for c in calls]


def whole(kind, text, names=NAMES):
    return message(PARSERS[kind](names), [text])


# -------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Hello.", ("Hello.", [])),
        (" Hello. \n", (" Hello. \n", [])),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ("", [("add", '{"a": 1}')])),
        (
            'Wait.\n\n<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n'
            '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>\n',
            ("Wait.", [("add", '{"a":1}'), ("x", "{}")]),
        ),
        (
            '<tool_call>{"arguments": {"a": [1, {"b": "}</tool_call>"}]}, "id": 3, "name": "add"}</tool_call> Done.',
            ("Done.", [("add", '{"a": [1, {"b": "}</tool_call>"}]}')]),
        ),
        ('<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', ("", [("add", "{}")])),
        ('<tool_call>{"arguments": null, "name": "add"}</tool_call>', ("", [("add", "{}")])),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "x\ny\t\x01"}}</tool_call>',
            ("", [("add", '{"a": "x\\ny\\t\\u0001"}')]),
        ),
        ('<tool_call>\n<tool_call>{"name": "add"}</tool_call>', ("<tool_call>\n", [("add", "{}")])),
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', ("", [("add", '{"a": 1}')])),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("add", '{"a": 1}')])),
        ('<tool_call>{"name": "add", "parameters": {"a": -1.5e3}}', ("", [("add", '{"a": -1.5e3}')])),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "é\\u00e9🙂"}}</tool_call>',
            ("", [("add", '{"a": "é\\u00e9🙂"}')]),
        ),
    ],
)
def test_hermes(text, expected):
    assert whole("hermes", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Use `<tool_call>` for that.",
        "<tool_call>",
        "<tool_c",
        "a <tool_call>{",
        '<tool_call>\n{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "argum',
        '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\ud800}"}</tool_call>',
        "<tool_call>{'name': 'add'}</tool_call>",
        "</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call> \n \n<tool_call> x",
        '<tool_call>{"name": "add" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "name": "x", "arguments": {}}</tool_call>',
    ],
)
def test_hermes_malformed_is_content(text):
    assert whole("hermes", text) == (text, [])


def test_hermes_broken_inside_the_arguments():
    """An announced call stays a call; the rest is content."""
    assert whole("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1]}}</tool_call>') == (
        "]}}</tool_call>",
        [("add", '{"a": 1}')],
    )
    assert whole("hermes", '<tool_call>{"name": "add", "arguments": {"a": "hal') == (
        "",
        [("add", '{"a": "hal"}')],
    )  # cut by max_tokens


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
        ('\n<|python_tag|>{"name": "add", "arguments": {"a": 1}} ', ("", [("add", '{"a": 1}')])),
        (
            '{"type": "function", "name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {"x": ";"}}',
            ("", [("add", "{}"), ("get_weather", '{"x": ";"}')]),
        ),
        ('{"name": "add"}', ("", [("add", "{}")])),
        ('{"name": "add"}\n{"name": "add", "parameters": null}', ("", [("add", "{}")] * 2)),
        ('{"name": "add"}, {"name": "get_weather"}', ("", [("add", "{}"), ("get_weather", "{}")])),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "Bob"}', ('; {"name": "Bob"}', [("add", '{"a": 1}')])),
        ('{"name": "add", "parameters": {"a": 1}} and so on', (" and so on", [("add", '{"a": 1}')])),
        ('{"name": "add", "parameters": {"a": 1, }}', ("}}", [("add", '{"a": 1}')])),
    ],
)
def test_llama3(text, expected):
    assert whole("llama3_json", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Hi {",
        '{"name": "Bob", "parameters": {}}',
        "{}",
        '{"answer": 42}',
        " \n ",
        '[{"name": "Bob", "parameters": {}}]',
        '[1, {"name": "add", "parameters": {}}]',
        '[[{"name": "add", "parameters": {}}]]',
        '{"function": "Bob", "parameters": {}}',
        '{"type": "function", "function": {"name": "Bob", "parameters": {}}}',
        '{"type": "function", "function": ["add"]}',
        "<|python_tag|>x()",
        '{"name": "add", "param',
        "<|pyth",
        "; ",
        "{{",
        '{"name": "add", "parameters": 3}',
        'As JSON: {"result": {"name": "add", "parameters": {}}}.',
        'Either [{"name": "add"}, {"name": "add"}] or {"add": {"name": "add"}}',
        '{"name": "add"',
        'f(){ return {"name": 1} }',
    ],
)
def test_llama3_other_text_is_content(text):
    assert whole("llama3_json", text) == (text, [])


# ------------------------------------------------------------------------------------------- streaming == not streaming

SCRAPS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "<|python_tag|>",
    "\n",
    " ",
    ";",
    "{",
    "}",
    '"name"',
    ": ",
    ", ",
    '"add"',
    '"arguments"',
    '"parameters"',
    '{"a": 1}',
    '{"name": "add", "arguments": {"a": "x\\n"}}',
    '{"name": "get_weather", "parameters": {"b": [true, null]}}',
    "[",
    "]",
    '"',
    "\\",
    "\\u12",
    "text",
    "🙂",
    "1.5",
    "-",
    "tru",
    "</think>",
]


@pytest.mark.parametrize("kind", PARSERS)
@given(st.lists(st.sampled_from(SCRAPS), max_size=12).map("".join), st.data())
@settings(max_examples=200, deadline=None)
def test_any_cut_gives_the_same_message(kind, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    expected = whole(kind, text)
    assert message(PARSERS[kind](NAMES), pieces) == expected
    assert message(PARSERS[kind](NAMES), [*text, ""]) == expected
    assert text or expected == ("", [])
    if not expected[1]:
        assert expected[0] == text  # no call: not a character is lost


@pytest.mark.parametrize("kind", PARSERS)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(
                st.text(max_size=5),
                st.recursive(
                    st.none()
                    | st.booleans()
                    | st.integers()
                    | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                    max_leaves=5,
                ),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.integers(1, 7),
)
@settings(max_examples=60, deadline=None)
def test_every_right_call_is_found(kind, calls, ascii_only, width):
    key = PARSERS[kind].arguments_key
    written = [json.dumps({"name": name, key: arguments}, ensure_ascii=ascii_only) for name, arguments in calls]
    text = (
        "; ".join(written) if kind == "llama3_json" else "\n".join(f"<tool_call>\n{w}\n</tool_call>" for w in written)
    )
    content, found = message(PARSERS[kind](NAMES), [text[i : i + width] for i in range(0, len(text), width)])
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_arguments_stream():
    parser = Hermes()
    deltas = [parser.push(c) for c in '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>']
    assert sum(bool(d) for d in deltas) == 2  # the bracket with the name, then a key with its whole value
    parser = Hermes()
    parser.push('<tool_call>{"name": "add", "arguments": {"a": "')
    assert [parser.push(c)[0].arguments for c in "xyz"] == ["x", "y", "z"]


@given(st.text(st.sampled_from('{}[]",:\\0123456789.eE+-truefalsn u\n/bxd'), max_size=14))
@example("1d2")
@example("1es1")
@settings(max_examples=400, deadline=None)
def test_the_scanner_agrees_with_json(text):
    def accepted(feed):
        scan = ValueScan()
        try:
            for char in feed + " ":
                if scan.done and char.strip():
                    return False
                if not scan.done and not scan.feed(char) and char.strip():
                    return False  # ended a number
        except Malformed:
            return False
        return scan.done

    try:
        json.loads(text)
        right = True
    except ValueError:
        right = False
    assert accepted(text) == right


def test_deep_nesting_is_content_not_an_error():
    text = '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 5000
    content, calls = whole("hermes", text)
    assert len(calls) == 1 and json.loads(calls[0][1]) and content.count('"a"') + calls[0][1].count('"a"') == 5000


# --------------------------------------------------------------------------------------------------- choosing, checking


def test_choose():
    assert tools.choose("auto", make("byte_level")) is Hermes
    assert (
        tools.choose("auto", make("byte_level", "{{ messages[0].content }}")).__name__ == "Hermes"
    )  # by its added tokens
    assert (
        tools.choose(
            "auto",
            make(
                "wordpiece",
                'Respond with {"name": function name, "parameters": dictionary of argument name and its value}',
            ),
        )
        is Llama3Json
    )
    assert tools.choose("auto", make("byte_level", None)) is None and tools.choose("none", make("byte_level")) is None
    assert tools.choose("llama3-json", make("byte_level")) is Llama3Json
    assert tools.parser(Hermes, [tool()]).names == {"add"} and tools.parser(None, [tool()]) is None
    with pytest.raises(ConfigError, match="hermes"):
        tools.choose("hermse", make("byte_level"))


def test_an_answer_does_not_look_for_its_parsers(monkeypatch):
    """Looking for parsers reads the metadata of all installed packages, while all other requests wait."""
    text = Text(lambda: make("byte_level"))
    text.load()
    monkeypatch.setattr(technique, "names", None)
    monkeypatch.setattr(technique, "module", None)
    message = text.message([1, 2], [tool()], True)
    assert message is not None and text.tool_format is Hermes


@pytest.mark.parametrize(
    "given_tools, choice, param",
    [
        ([tool(f"t{i}") for i in range(513)], None, "tools"),
        ([tool("a"), tool("a")], None, "tools[1].function.name"),
        ([tool('x", "evil": "')], None, "tools[0].function.name"),
        ([tool("a\nb")], None, "tools[0].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a" * 129)], None, "tools[0].function.name"),
        ([tool(5)], None, "tools[0].function.name"),
        ({}, None, "tools"),
        ([7], None, "tools[0]"),
        ([{"type": "function"}], None, "tools[0]"),
        ([{"type": "web_search", "function": {"name": "a"}}], None, "tools[0].type"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "tools[0].function.parameters"),
        ([tool("a", type="array")], None, "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "a", "description": 5}}], None, "tools[0].function.description"),
        ([{"type": "function", "function": {"name": "a", "strict": "yes"}}], None, "tools[0].function.strict"),
        ([tool()], {"type": "function", "function": {"name": "ad"}}, "tool_choice.function.name"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], "always", "tool_choice"),
        ([tool()], {"function": {"name": "add"}}, "tool_choice"),
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "add"}}, "tool_choice"),
    ],
)
def test_bad_tools(given_tools, choice, param):
    with pytest.raises(RequestError) as e:
        tools.validate(given_tools, choice)
    assert (e.value.status, e.value.param) == (400, param)


def test_good_tools():
    for choice in (None, "none", "auto", "required", {"type": "function", "function": {"name": "add"}}):
        tools.validate([tool(), tool("get-weather_2"), {"type": "function", "function": {"name": "bare"}}], choice)
    tools.validate(None, "none")
    tools.validate([], "auto")


# ------------------------------------------------------------------------------------------------------------ grammars


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    from kvasir.decoding.grammar import GrammarCompiler

    tokenizer, file = make("byte_level"), tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer._backend.save(str(file))
    return GrammarCompiler(file, tokenizer.size, tokenizer.eos_ids)


def accepts(compiler, grammar, text):
    """Whether ``text`` is a complete output under ``grammar``."""
    matcher = compiler.compile(grammar)
    return (
        matcher.accept(make("byte_level").encode(text, add_special=False, parse_special=True))
        and matcher.is_accepting()
    )


def test_no_grammar_unless_a_call_is_asked_for():
    assert (
        tools.grammar([tool()], "auto", Hermes, make("byte_level")) is None
        and tools.grammar([tool()], None, make("byte_level"), Hermes) is None
    )
    assert (
        tools.grammar([tool()], "none", Hermes, make("byte_level")) is None
        and tools.grammar(None, "none", Hermes, make("byte_level")) is None
    )
    with pytest.raises(RequestError, match="--tool-call-parser"):
        tools.grammar([tool()], "required", None, make("byte_level"))


@pytest.mark.parametrize("kind", PARSERS)
def test_required(kind, compiler):
    key, wrap = (
        PARSERS[kind].arguments_key,
        (lambda t: t) if kind == "llama3_json" else (lambda t: f"<tool_call>\n{t}\n</tool_call>"),
    )
    both = [tool(), {"type": "function", "function": {"name": "get_weather"}}]
    grammar = tools.grammar(both, "required", PARSERS[kind], make("byte_level"), after=(7,))
    assert isinstance(grammar, Grammar) and grammar.kind == "lark" and grammar.after == (7,)
    grammar = tools.grammar(both, "required", PARSERS[kind], make("byte_level"))
    add, weather = (
        wrap(f'{{"name": "{n}", "{key}": {a}}}') for n, a in (("add", '{"a": 1, "b": "x\\"y"}'), ("get_weather", "{}"))
    )
    two = (";" if kind == "llama3_json" else "").join([add, ("\n" if kind == "hermes" else " ") + weather])
    assert accepts(compiler, grammar, add) and accepts(compiler, grammar, weather) and accepts(compiler, grammar, two)
    assert whole(kind, two) == ("", [("add", '{"a": 1, "b": "x\\"y"}'), ("get_weather", "{}")])
    for wrong in (
        "Hello",
        "",
        wrap(f'{{"name": "other", "{key}": {{}}}}'),
        wrap(f'{{"name": "add", "{key}": {{"b": 1}}}}'),
        add[:-2],
        wrap(f'{{"name": "get_weather", "{key}": {{"x": 1}}}}'),
    ):
        assert not accepts(compiler, grammar, wrong), wrong
    assert not accepts(
        compiler, tools.grammar(both, "required", PARSERS[kind], make("byte_level"), parallel=False), two
    )
    named = tools.grammar(
        both, {"type": "function", "function": {"name": "get_weather"}}, PARSERS[kind], make("byte_level")
    )
    assert accepts(compiler, named, weather) and not accepts(compiler, named, add)


def test_schemas_in_a_grammar(compiler):
    """Text in a schema that looks like Lark is escaped, and schemas beyond the limits are refused."""
    odd = tool(
        type="object",
        properties={
            "speed/max": {"type": "integer", "maximum": 1000000, "description": "km/h (?=x)/ {2,999999} ~5..99999"}
        },
        required=["speed/max"],
    )
    grammar = tools.grammar([odd], "required", Llama3Json, make("byte_level"))
    assert accepts(compiler, grammar, '{"name": "add", "parameters": {"speed/max": 999999}}')
    assert not accepts(compiler, grammar, '{"name": "add", "parameters": {"speed/max": 1000001}}')
    for bad in ({"$ref": "http://169.254.169.254/"}, {"x-guidance": {}}, {"minItems": 10**9}):
        with pytest.raises(RequestError) as e:
            tools.grammar([tool(type="object", properties={"a": bad})], "required", Llama3Json, make("byte_level"))
        assert e.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    "bad, why",
    [
        ({"type": "strng"}, "Invalid type: strng"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"not": {}}, "'not' at #/properties/a/not is not supported"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"const": "\ud800"}, "cannot be used"),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bad"}}])
def test_the_schema_that_does_not_compile_is_named(bad, why, choice, compiler):
    offered = [tool(), tool("bad", type="object", properties={"type": {"type": "string"}, "a": bad}, required=["a"])]
    with pytest.raises(RequestError, match=why) as e:
        compiler.compile(tools.grammar(offered, choice, Hermes, make("byte_level")))
    assert (e.value.param, e.value.code, "\n" in e.value.message) == (
        "tools[1].function.parameters",
        "invalid_grammar",
        False,
    )
    tools.grammar(
        offered, {"type": "function", "function": {"name": "add"}}, Hermes, make("byte_level")
    )  # not asked for, not compiled


def test_a_grammar_of_all_tools_is_blamed_on_them():
    forced = Grammar("lark", "start: x")
    assert grammar_of(SamplingBody(), {"tool_choice": forced}) == ("tools", forced)
    large = [tool(f"f{i}", type="object", properties={"a": {"const": "x" * 20_000}}) for i in range(4)]
    for offered, param in (
        (large, "tools"),
        ([tool(type="object", properties={"a": {"const": "x" * 70_000}})], "tools[0].function.parameters"),
    ):
        with pytest.raises(RequestError, match="bytes, more than") as e:
            tools.grammar(offered, "required", Hermes, make("byte_level"))
        assert e.value.param == param
    assert tools.grammar(large, {"type": "function", "function": {"name": "f2"}}, Hermes, make("byte_level"))


@pytest.mark.parametrize("kind", ["byte_level", "wordpiece"])
def test_marks_are_tokens_where_there_are_such_tokens(kind):
    bare = make(kind)
    text = tools.grammar([tool()], "required", Hermes, bare).text
    assert "one: <tool_call>" in text
    bare._added = frozenset()
    try:
        assert 'one: "<tool_call>"' in tools.grammar([tool()], "required", Hermes, bare).text
    finally:
        bare._added = frozenset(t.content for t in bare._backend.get_added_tokens_decoder().values())


@pytest.mark.parametrize("kind", PARSERS)
def test_text_in_a_format_or_calls(kind, compiler):
    """With ``auto`` and a format the model may do either, and nothing else."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    either = tools.grammar(
        [tool()],
        "auto",
        PARSERS[kind],
        make("byte_level"),
        text_format=Grammar("json_schema", json.dumps(schema), whitespace="fixed"),
    )
    call = f'{{"name": "add", "{PARSERS[kind].arguments_key}": {{"a": 1, "b": "x"}}}}'
    call = call if kind == "llama3_json" else f"<tool_call>\n{call}\n</tool_call>"
    assert accepts(compiler, either, call) and accepts(compiler, either, '{"city": "Oslo"}')
    for wrong in ("Oslo", '{"city": 1}', call + '{"city": "Oslo"}', '{"city":  "Oslo"}'):
        assert not accepts(compiler, either, wrong)
    forced = tools.grammar([tool()], "required", PARSERS[kind], make("byte_level"), text_format=Grammar("json_object"))
    assert accepts(compiler, forced, call) and not accepts(compiler, forced, '{"city": "Oslo"}')
    no_calls = tools.grammar([tool()], "none", PARSERS[kind], make("byte_level"), text_format=Grammar("json_object"))
    assert no_calls is None


def test_a_tool_that_is_not_strict_drops_what_no_grammar_can_hold(compiler):
    offered = [tool(type="object", properties={"a": {"type": "array", "uniqueItems": True}}, required=["a"])]
    offered[0]["function"]["strict"] = False
    dropped = []
    grammar = tools.grammar(offered, "required", Llama3Json, make("byte_level"), dropped=dropped)
    assert dropped == ["tools[0].function.parameters/properties/a/uniqueItems"]
    assert accepts(compiler, grammar, '{"name": "add", "parameters": {"a": []}}')
    assert offered[0]["function"]["parameters"]["properties"]["a"]["uniqueItems"], "the client's schema is not changed"


def test_white_space_is_bounded(compiler):
    grammar = tools.grammar([tool()], "required", Llama3Json, make("byte_level"))
    assert accepts(compiler, grammar, '{"name": "add", "parameters": {"a": 1}}')
    assert not accepts(compiler, grammar, '{"name": "add", "parameters": {\n  "a": 1}}')
    assert not accepts(compiler, grammar, '{"name": "add", "parameters": {' + " " * 50 + '"a": 1}}')


@pytest.mark.parametrize("kind", PARSERS)
def test_whatever_a_grammar_allows_is_parsed(kind, compiler):
    """Random walks under the mask end in text that the parser turns into a right call."""
    import random

    import numpy as np

    tokenizer = make("byte_level")
    small = tool(
        type="object",
        properties={"a": {"enum": [1, "two"]}, "b": {"type": "boolean"}},
        required=["a"],
        additionalProperties=False,
    )
    grammar = tools.grammar([small], "required", PARSERS[kind], tokenizer, parallel=False)
    for seed in range(8):
        rng, matcher, ids = random.Random(seed), compiler.compile(grammar), []
        mask = np.zeros(-(-tokenizer.size // 32), np.int32)
        while not matcher.is_stopped() and len(ids) < 400:
            matcher.fill(mask)
            allowed = [i for i in range(tokenizer.size) if mask.view(np.uint32)[i // 32] >> np.uint32(i % 32) & 1]
            ids.append(rng.choice(allowed))
            assert matcher.accept([ids[-1]])
        content, calls = whole(kind, tokenizer.decode(ids))
        assert content == "" and len(calls) == 1 and calls[0][0] == "add"
        assert json.loads(calls[0][1])["a"] in (1, "two")

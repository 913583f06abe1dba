"""How much work the parsers of answers do for text that nearly begins a call: a model may write any text for ever, and
the event loop waits meanwhile."""

import pytest

from kvasir import technique
from kvasir.api.calls import reasoning, tools
from kvasir.api.calls.growing import Growing
from kvasir.api.calls.marked_calls import BRACKETS, MarkedCalls
from kvasir.api.calls.reasoning import ReasoningParser
from kvasir.api.calls.tools import ToolParser
from tests.api.call_texts import SCHEMAS

LENGTH = 3000
# Text that begins another call up to its last character, again and again.
UNITS = ("]}", "}", "] \n", "], ", "]}{", '}{"', "]}```", "}</tool_call>", " ", "\n", "\n{", "\n[ ", "<tool_call>", "{")
HEADS = {
    "hermes": '<tool_call>{"name": "save", "arguments": {"path": "',
    "llama3_json": '{"name": "save", "parameters": {"path": "',
    "mistral": '[TOOL_CALLS][{"name": "save", "arguments": {"path": "',
    "glm45": "<tool_call>save\n<arg_key>path</arg_key>\n<arg_value>",
    "qwen3_coder": "<tool_call>\n<function=save>\n<parameter=path>\n",
    "gemma4": '<|tool_call>call:save{path:<|"|>',
}


@pytest.fixture
def tried(monkeypatch):
    """The number of tries of a pattern, as a list of one."""
    count = [0]
    for name in ("may", "match", "starts"):
        monkeypatch.setattr(Growing, name, counting(count, getattr(Growing, name)))
    return count


def counting(count, method):
    def counted(self, text):
        count[0] += 1
        return method(self, text)

    return counted


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", HEADS)
def test_each_character_of_a_call_is_tried_a_few_times(name, unit, tried):
    parser = technique.find(tools.PACKAGE, name, ToolParser)[0](SCHEMAS)
    parser.push(HEADS[name] + unit * (LENGTH // len(unit)))
    parser.push("", True)
    assert tried[0] < 6 * LENGTH


@pytest.mark.parametrize("name", technique.own(tools.PACKAGE))
def test_no_pattern_shares_brackets_between_two_parts(name):
    """It would try every way of sharing them, for every character."""
    cls = technique.find(tools.PACKAGE, name, ToolParser)[0]
    found = [p for p in vars(cls).values() if isinstance(p, Growing)] if issubclass(cls, MarkedCalls) else []
    for pattern in found:
        assert all("".join(BRACKETS * 2) not in way.pattern for way in pattern._whole)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", technique.own(reasoning.PACKAGE))
def test_each_character_of_thinking_is_tried_a_few_times(name, unit, tried):
    cls = technique.find(reasoning.PACKAGE, name, ReasoningParser)[0]
    parser = cls(cls.start)
    for _ in range(LENGTH // len(unit)):
        parser.push(unit, False)
    assert tried[0] < 70 * LENGTH, "a beginning of a call has at most so many characters"
    parser.push("", True)

"""Random calls, whole and with dropped, doubled and cut marks: any cut of the stream gives the same message, arguments
are JSON, no word is lost, and a broken call does not take the next one with it."""

import copy
import json
import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvasir import technique
from kvasir.api.calls import tools
from kvasir.api.calls.tools import CallDelta, ToolParser
from tests.api.call_texts import FORMATS, SCHEMAS
from tests.api.test_tools import message

PIECES = re.compile(r"<[^<>\n]*>|\[[A-Z_]+\]|```\w*|[{}()\[\]\"',:=]|\w+|\s|.", re.DOTALL)
WORDS = ("alpha", "beta", "gamma", "delta", "ключ", "é🙂ß")
LAST = ("save", {"path": "omega"})  # a call behind the mutated ones
AMOUNTS = [pytest.param(1, id="few"), pytest.param(10, id="many", marks=pytest.mark.slow)]


def parser_of(label):
    return technique.find(tools.PACKAGE, FORMATS[label].kind, ToolParser)[0]


def message_of(cls, pieces):
    return message(cls(SCHEMAS), pieces)


# ------------------------------------------------------------------------------------------------------ what is written


@st.composite
def arguments(draw, label):
    """Arguments of ``save``. Strings hold escapes, any characters, and one of the format's marks between words."""
    words, mark = st.sampled_from(WORDS), draw(st.sampled_from(FORMATS[label].marks))
    others = st.sampled_from((mark, '"', "'", "\\", "\\n", "\n", "\t", "{", "] }", "</", "1 < 2", ","))
    free = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>|`"), max_size=3)
    text = st.one_of(words, st.builds(lambda a, m, z: " ".join([a, *m, z]), words, st.lists(others | free), words))
    plain = text | st.integers(-9, 2**60) | st.booleans() | st.none() | st.sampled_from((0.5, -1e30))
    keys = st.sampled_from(("a", "b_2", "é"))
    deep = st.recursive(plain, lambda v: st.lists(v, max_size=2) | st.dictionaries(keys, v, max_size=2), max_leaves=4)
    values = {
        "path": text,
        "n": st.integers(-9, 9),
        "more": st.dictionaries(keys, deep, max_size=2),
        "all": st.lists(deep, max_size=2),
    }
    return draw(st.fixed_dictionaries({}, optional=values))


@st.composite
def right(draw, label):
    saves = st.tuples(st.just("save"), arguments(label))
    return draw(st.lists(saves | st.just(("now", {})), min_size=1, max_size=3))


@st.composite
def mutated(draw, label, most):
    """The text of calls of which up to ``most`` pieces that are no words are dropped, doubled or cut."""
    pieces = PIECES.findall(FORMATS[label].write(draw(right(label))))
    places = st.sampled_from([i for i, piece in enumerate(pieces) if not piece.isalpha()])
    for at in draw(st.lists(places, min_size=1, max_size=most)):
        cut = draw(st.integers(0, len(pieces[at])))
        pieces[at] = draw(st.sampled_from(("", pieces[at] * 2, pieces[at][:cut], pieces[at][cut:])))
    return "".join(pieces)


def each_mutated(label):
    """Yield a call in which one piece that is no word is dropped, doubled or cut, for all pieces."""
    pieces = PIECES.findall(FORMATS[label].one("save", {"n": 5, "path": "alpha beta", "all": ["gamma", "delta"]}))
    for at, piece in enumerate(pieces):
        if not piece.isalpha():
            for changed in ("", piece * 2, piece[: len(piece) // 2], piece[1:]):
                yield "".join([*pieces[:at], changed, *pieces[at + 1 :]])


# ----------------------------------------------------------------------------------------------------- what must hold


def check(cls, text, cuts=()):
    """Raise AssertionError unless the parser keeps the promises for this text; return its message."""
    content, calls = found = message_of(cls, [text])
    assert message_of(cls, [*text, ""]) == found
    assert message_of(cls, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == found
    parsed = [(name, json.loads(written)) for name, written in calls]
    assert all(isinstance(values, dict) and name in text for name, values in parsed)
    kept = content + "".join(name + written for name, written in calls)
    for word in ("alpha", "beta", "gamma", "delta", "omega", "ключ", "🙂"):
        assert kept.count(word) == text.count(word), word
    return content, parsed


def check_every_cut(cls, text):
    """Raise AssertionError unless the message is the same for each cut in two, and each beginning is one, too."""
    expected, made = message_of(cls, [text]), cls(SCHEMAS)
    before = []
    for at in range(len(text) + 1):
        rest, end = copy.deepcopy(made), copy.deepcopy(made)
        assert joined([*before, *rest.push(text[at:], True)]) == expected
        assert all(isinstance(json.loads(a), dict) for _, a in joined([*before, *end.push("", True)])[1])
        before += made.push(text[at : at + 1])


def joined(deltas):
    class Said:
        def push(self, piece, final):
            return piece

    return message(Said(), [deltas])


def holds(cls, label, amount=1):
    """Raise what a check raises for random texts of the format."""

    def run(examples, body):
        fixed = settings(max_examples=examples * amount, deadline=None, database=None, report_multiple_bugs=False)
        settings(fixed, derandomize=True, phases=[Phase.generate])(given(st.data())(body))()

    def whole(data):
        calls = data.draw(right(label))
        text = FORMATS[label].write(calls)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        assert check(cls, text, cuts) == ("", calls)

    def broken(data):
        text = data.draw(mutated(label, 3))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        check(cls, text, cuts)

    def behind(data):
        followed(data.draw(mutated(label, 1)))

    def followed(text):
        form = FORMATS[label]
        assert check(cls, text + form.between + form.one(*LAST))[1][-1:] == [LAST]

    def anywhere(data):
        check_every_cut(cls, data.draw(mutated(label, 2)))

    for text in each_mutated(label):
        followed(text)
    for examples, body in ((25, whole), (40, broken), (25, behind), (4, anywhere)):
        run(examples, body)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("label", FORMATS)
def test_calls_keep_the_promises(label, amount):
    holds(parser_of(label), label, amount)


# ------------------------------------------------------------------------------------------- parsers that break them

Hermes = parser_of("hermes")


class Silent(Hermes):
    def push(self, text, final=False):
        return [delta for delta in super().push(text, final) if isinstance(delta, CallDelta)]


class Unclosed(Hermes):
    def end_call(self):
        return ""


class Swallows(Hermes):
    restarts = None


class Hasty(Hermes):
    """Gives up a mark that is cut."""

    def push(self, text, final=False):
        out = super().push(text, final)
        self._mark = ""
        return out


class Invents(Hermes):
    def open_call(self, name):
        super().open_call(name + "_")


class Repeats(Hermes):
    def say(self, text):
        super().say(text * 2)


@pytest.mark.parametrize("cls", [Silent, Unclosed, Swallows, Hasty, Invents, Repeats])
def test_a_broken_parser_is_noticed(cls):
    with pytest.raises((AssertionError, ValueError)):
        holds(cls, "hermes")

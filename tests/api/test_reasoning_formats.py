"""Reasoning of further formats: marks of Mistral and Gemma, and the channels of harmony, with the calls behind them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir import technique
from kvasir.api.calls import reasoning
from kvasir.api.calls.reasoning import ReasoningParser
from kvasir.api.text.chat import Message
from tests.api.test_tool_formats import parser as tool_parser
from tests.models.small_tokenizers import make

START = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"


def parser(kind, prompt):
    return technique.find(reasoning.PACKAGE, kind, ReasoningParser)[0](prompt)


def split(kind, pieces, prompt):
    """The deltas of an answer, neighbours of a kind joined: their order must not depend on the cut."""
    made, out = parser(kind, prompt), []
    for i, piece in enumerate(pieces):
        for delta in made.push(piece, i == len(pieces) - 1):
            for name, text in zip(("reasoning", "content"), delta):
                if text and out and out[-1][0] == name:
                    out[-1] = (name, out[-1][1] + text)
                elif text:
                    out.append((name, text))
    return out


R, C = "reasoning", "content"
RECORDED = [
    ("mistral", "[/INST]", "[THINK]hm\n1 < 2[/THINK]Yes.", [(R, "hm\n1 < 2"), (C, "Yes.")]),
    ("mistral", "[/INST][THINK]", "hm[/THINK]\n\nYes.", [(R, "hm"), (C, "Yes.")]),
    ("mistral", "[/INST]", "Yes [THINK].", [(C, "Yes [THINK].")]),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nhm\n<channel|>Yes.", [(R, "hm"), (C, "Yes.")]),
    ("gemma4", "<|turn>model\n", "<|channel>thought\n<channel|>Yes.", [(C, "Yes.")]),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes.", [(C, "Yes.")]),
    ("gemma4", "<|turn>model\n", "Yes.", [(C, "Yes.")]),
    (
        "gemma4",
        "<|turn>model\n",
        "<|channel>thought\nhm\n<|tool_call>call:now{}<tool_call|>",
        [(R, "hm"), (C, "<|tool_call>call:now{}<tool_call|>")],
    ),
    (
        "openai_gptoss",
        START,
        f"{ANALYSIS}hm, 1 < 2\n<|end|>{START}{FINAL}Yes.<|return|>",
        [(R, "hm, 1 < 2\n"), (C, "Yes.")],
    ),
    ("openai_gptoss", START, f"{FINAL}Yes.", [(C, "Yes.")]),
    ("openai_gptoss", START, "Yes: a <b|c> d", [(C, "Yes: a <b|c> d")]),
    ("openai_gptoss", f"{START}{FINAL}Ye", "s.<|return|>", [(C, "s.")]),
    ("openai_gptoss", f"{START}{ANALYSIS}", f"hm<|end|>{START}{FINAL}Yes.", [(R, "hm"), (C, "Yes.")]),
    (
        "openai_gptoss",
        START,
        f"{ANALYSIS}one<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>{START}{ANALYSIS}two<|end|>"
        f"{START}{FINAL}Yes.",
        [(R, "one"), (C, "I look."), (R, "\ntwo"), (C, "\nYes.")],
    ),
    (
        "openai_gptoss",
        START,
        f"{ANALYSIS}hm<|end|>{START}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}<|call|>",
        [(R, "hm"), (C, f"{START}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}<|call|>")],
    ),
    *(
        (
            "openai_gptoss",
            START,
            f"{head}<|end|>{START}{ANALYSIS}Secret<|end|>{START}{FINAL}Yes.<|return|>",
            [(R, f"{text}\nSecret"), (C, "Yes.")],
        )
        for head, text in (
            ("<|channel|>commentary??", "commentary??"),
            ("<|channel|>We need to answer", "We need to answer"),
        )
    ),
    (
        "openai_gptoss",
        START,
        f"<|channel|>analy<|message|>Secret<|end|>{START}{FINAL}Yes.",
        [(R, "Secret"), (C, "Yes.")],
    ),
    ("openai_gptoss", START, f"{ANALYSIS}cut sho", [(R, "cut sho")]),
    ("mistral", "[/INST]", "[THINK]hm\n[TOOL_CALLS]now[ARGS]{}[/THINK]", [(R, "hm"), (C, "[TOOL_CALLS]now[ARGS]{}")]),
    *(
        ("openai_gptoss", START, f"{head}Secret<|end|>{START}{FINAL}Yes.<|return|>", [(R, "Secret"), (C, "Yes.")])
        for head in ("analysis<|message|>", f"assistant{ANALYSIS}", "<|channel|><|message|>")
    ),
    *(
        ("openai_gptoss", START, f"<|channel|>{to}<|message|>I look.<|end|>", [(C, "I look.")])
        for to in ("commentary to=user", "commentary to=assistant", "final to=functions.now")
    ),
    ("openai_gptoss", START, f"{FINAL}I look.{ANALYSIS}Secret", [(C, "I look."), (R, "Secret")]),
    *(("openai_gptoss", START, text, [(C, text)]) for text in ("a", "to", "final", "<", "to=functions.now")),
    ("openai_gptoss", START, f"{FINAL}Yes.<|end|>{START}<|channel|>comm", [(C, "Yes.")]),
    ("openai_gptoss", START, "<|channel|>We need", [(R, "We need")]),
    ("openai_gptoss", START, f"{FINAL}The <|message|> mark", [(C, "The <|message|> mark")]),
    ("openai_gptoss", START, f"{FINAL}The mark <|channel|> begins", [(C, "The mark <|channel|> begins")]),
    ("openai_gptoss", START, f"{ANALYSIS}a<|en", [(R, "a<|en")]),
]


@pytest.mark.parametrize("kind, prompt, text, expected", RECORDED)
def test_recorded_answers_and_every_cut(kind, prompt, text, expected):
    assert split(kind, [text], prompt) == expected
    for cut in range(len(text) + 1):
        assert split(kind, [text[:cut], text[cut:]], prompt) == expected
    assert split(kind, [*text, ""], prompt) == expected


SCRAPS = {
    "mistral": ["[THINK]", "[/THINK]", "[TH", "INK]"],
    "gemma4": ["<|channel>", "thought", "<channel|>", "<|", "<|tool_call>"],
    "openai_gptoss": [ANALYSIS, FINAL, START, "<|end|>", "<|call|>", "<|channel|>commentary", " to=functions.now",
                      "<|message|>", "<|return|>", "<|"],
}  # fmt: skip


@pytest.mark.parametrize("kind", SCRAPS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_cut_gives_the_same_deltas(kind, data):
    text = "".join(data.draw(st.lists(st.sampled_from([*SCRAPS[kind], "\n", " ", "a", "é🙂"]), max_size=12)))
    prompt = data.draw(st.sampled_from([None, "", START, f"{START}{FINAL}", "[THINK]", "<channel|>"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    expected = split(kind, [text], prompt)
    assert split(kind, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])], prompt) == expected
    assert split(kind, [*text, ""], prompt) == expected


def test_harmony_through_both_parsers():
    """Reasoning, a preamble and a call become the parts of one message, whatever the pieces."""
    text = (
        f"{ANALYSIS}I need the time.<|end|>{START}<|channel|>commentary<|message|>Let me look.<|end|>"
        f"{START}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}<|call|>"
    )
    for width in (1, 3, 1000):
        message = Message(parser("openai_gptoss", START), tool_parser("openai"))
        kinds = [p.kind for i in range(0, len(text), width) for p in message.push(text[i : i + width], [], False)]
        message.push("", [], True)
        assert (message.reasoning, message.content) == ("I need the time.", "Let me look.")
        assert [(c.name, c.arguments) for c in message.calls] == [("now", "{}")]
        assert sorted(kinds, key=["reasoning", "content", "call"].index) == kinds
        assert message.finish_reason("stop") == "tool_calls"


CALL = "<|channel|>commentary to=functions.now"


@pytest.mark.parametrize(
    "text, content, calls",
    [
        (f"{CALL} <|constrain|>json<|message|>{{}}", "", [("now", "{}")]),  # cut before its end
        (f"{CALL}<|message|>", "", [("now", "{}")]),
        (f"{CALL}<|message|><|call|>", "", [("now", "{}")]),
        (f"{CALL}<|call|>", "", [("now", "{}")]),
        (f"{CALL} <|constrain|>json{{}}<|call|>", "", [("now", "{}")]),
        (f"{START} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>", "", [("now", "{}")]),
        ("<|channel|>analysis to=functions.now<|message|>{}<|call|>", "", [("now", "{}")]),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "", [("python", '{"code": "print(1)"}')]),
        ("<|channel|>analysis to=browser.open<|message|>{}<|call|>", "", [("browser.open", "{}")]),
        ("<|channel|>commentary to=container.exec<|message|><|call|>", "", [("container.exec", "{}")]),
        (f"<|channel|>commentary<|message|>I look.<|end|>{START}{CALL}<|message|>{{}}<|call|>", "I look.",
         [("now", "{}")]),
        (f'{CALL}<|message|>{{"a": "b<|call|>{START}{CALL}<|message|>{{}}<|call|>', "",
         [("now", '{"a": "b"}'), ("now", "{}")]),
        (f"{CALL}<|message|>{{}}<|call|>{START}{ANALYSIS}More.<|end|>{START}{FINAL}Yes.", "Yes.", [("now", "{}")]),
    ],
)  # fmt: skip
def test_calls_of_harmony(text, content, calls):
    text = f"{ANALYSIS}Secret.<|end|>{START}{text}"
    for width in (1, 2, 7, 1000):
        message = Message(parser("openai_gptoss", START), tool_parser("openai"))
        for i in range(0, len(text), width):
            message.push(text[i : i + width], [], False)
        message.push("", [], True)
        assert message.reasoning.split("\n")[0] == "Secret." and message.content == content
        assert [(c.name, c.arguments) for c in message.calls] == calls


def test_a_malformed_header_shows_no_thinking():
    """Each mark and each word of the headers is dropped, doubled and cut in half."""
    text = (
        f"{ANALYSIS}Secret one.<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>{START}{ANALYSIS}"
        f"Secret two.<|end|>{START}{FINAL}Yes.<|return|>"
    )
    pieces = re.findall(r"<\|\w+\|>|\w+|.", text)
    for at, piece in enumerate(pieces):
        for changed in ("", piece * 2, piece[: len(piece) // 2], piece[len(piece) // 2 :]) if len(piece) > 3 else ():
            broken = "".join([*pieces[:at], changed, *pieces[at + 1 :]])
            found = split("openai_gptoss", [broken], START)
            assert found == split("openai_gptoss", [*broken, ""], START)
            content = "".join(part for kind, part in found if kind == C)
            assert "Secret" not in content and " one" not in content and " two" not in content, broken
            kept = "".join(part for _, part in found)
            assert all(kept.count(word) == broken.count(word) for word in (" one", " look", " two")), broken


@pytest.mark.parametrize(
    "template, kind",
    [
        ("{{ '[THINK]' + m.thinking + '[/THINK]' }}", "mistral"),
        ("{{ '<|channel>thought\\n<channel|>' }}", "gemma4"),
        ("<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>", "openai_gptoss"),
        ("{{ '<think></think>' }}", "qwen3"),
        ("{{ '<｜Assistant｜><think>' }}", "deepseek_r1"),
        ("{{ '<｜Assistant｜>' }}", None),
    ],
)
def test_auto_knows_the_templates(template, kind):
    found = reasoning.choose("auto", make("wordpiece", template))
    assert (found.name if found else None) == kind
    assert reasoning.choose("glm45", make("wordpiece")).name == "qwen3"


def test_where_a_grammar_starts():
    tokenizer = make("byte_level")
    encode = lambda text: tuple(tokenizer.encode(text, add_special=False, parse_special=True))  # noqa: E731
    assert parser("openai_gptoss", START).end_ids(tokenizer) == encode(FINAL)
    assert parser("openai_gptoss", START).thought_ids(tokenizer) == encode("<|end|>")
    assert parser("openai_gptoss", START + FINAL).end_ids(tokenizer) == ()
    gemma = technique.find(reasoning.PACKAGE, "gemma4", ReasoningParser)[0]
    made = reasoning.parser(gemma, tokenizer, tokenizer.encode("<|turn>model"))
    assert made.end_ids(tokenizer) == () and made.thought_ids(tokenizer) == encode("<channel|>")

"""What the first hour shows is true: the examples of README and playground are answered as they promise, by `base`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvasir import LLM, SamplingParams
from tests.api.test_playground import SCRIPT_TEXTS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r'^  \["([^"]+)", "([^"]+)"\],$', SCRIPT_TEXTS["examples.js"].split("GENERAL")[0], re.M)
# What an answer ends with, by the first words of the example.
ANSWERS = {
    "Compute modulo 97": "Answer: 67",
    "Roads": "Answer: M O H I",
    "Make a JSON object": '{"old": true, "tags": ["red", "grey"], "items": ["coat"], "hair": "blue"}',
}


@pytest.fixture(scope="module")
def llm():
    with LLM() as it:
        yield it


def answer(llm, text: str, **params) -> str:
    messages = [{"role": "user", "content": text}]
    [out] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=256, **params))
    return out.outputs[0].text


def test_there_are_three_examples():
    assert len(EXAMPLES) == 3 and len({title for title, _ in EXAMPLES}) == 3


@pytest.mark.parametrize("title, text", EXAMPLES)
def test_base_can_do_the_playgrounds_examples(llm, title, text):
    [right] = [end for start, end in ANSWERS.items() if text.startswith(start)]
    assert answer(llm, text).endswith(right)


def test_the_readmes_request_is_answered_rightly(llm):
    body = json.loads(re.search(r"-d '(\{.*?\})'", README, re.S).group(1))
    result = 12
    for step in re.findall(r"([+*-])(\d+)", body["messages"][0]["content"]):
        number = int(step[1])
        result = (result + number if step[0] == "+" else result - number if step[0] == "-" else result * number) % 97
    promised = re.search(r"Answer: (\d+)", README)
    assert promised and int(promised[1]) == result, "the README says what comes out"
    assert answer(llm, body["messages"][0]["content"]).endswith(f"Answer: {result}")

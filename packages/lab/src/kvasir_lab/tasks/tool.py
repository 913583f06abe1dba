"""Tool calls: pick the offered function, copy the arguments out of the question, and answer from its result.

There are three kinds of problem: a question that needs a call, one that needs none, and a turn after the tool has
replied. Names of functions and parameters are random, so the model must read them instead of remembering them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kvasir_lab.task import Problem, Split, Task
from kvasir_lab.tasks.schema import CITIES, COLOURS, NAMES, THINGS

VERBS = "get find read check look_up fetch show".split()
NOUNS = "weather time news price map train letter book song picture recipe score".split()
PARAMETERS: dict[str, list[str]] = {
    "city": CITIES,
    "location": CITIES,
    "name": NAMES,
    "person": NAMES,
    "item": THINGS,
    "thing": THINGS,
    "color": COLOURS,
}
ASKS = (
    "What is the {noun} for {values}?",
    "Can you {verb} the {noun} for {values}?",
    "Please {verb} the {noun}: {values}.",
    "I need the {noun} for {values}.",
    "What is the {noun} in {values}?",
    "Use {function} with {values}.",
)
NO_CALL = (
    ("Hello!", "Hello! How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Who are you?", "I am the small model built into kvasir."),
)


def _tool(rng: np.random.Generator) -> tuple[dict[str, Any], str, str]:
    """A function definition as in OpenAI's API, its verb and its noun."""
    verb, noun = VERBS[rng.integers(len(VERBS))], NOUNS[rng.integers(len(NOUNS))]
    keys = sorted(PARAMETERS)
    chosen = [keys[i] for i in rng.permutation(len(keys))[: rng.integers(1, 3)]]
    function = {
        "name": f"{verb}_{noun}",
        "description": f"{verb.capitalize().replace('_', ' ')} the {noun}.",
        "parameters": {"type": "object", "properties": {k: {"type": "string"} for k in chosen}, "required": chosen},
    }
    return {"type": "function", "function": function}, verb.replace("_", " "), noun


class Tool(Task):
    """Hermes-style tool calls, and when to make none."""

    pool = 12000

    def belongs(self, problem: Problem, split: Split) -> bool:
        last = problem.messages[-1]["content"]
        return any(last == asked for asked, _ in NO_CALL) or super().belongs(problem, split)

    def draw(self, rng: np.random.Generator, split: Split) -> Problem:
        offered = [_tool(rng) for _ in range(rng.integers(1, 3))]
        tools = tuple(tool for tool, _, _ in offered)
        if rng.random() < 0.15:
            asked, reply = NO_CALL[rng.integers(len(NO_CALL))]
            return Problem(({"role": "user", "content": asked},), reply, reply, 0, tools)
        tool, verb, noun = offered[rng.integers(len(offered))]
        function = tool["function"]
        arguments = {k: PARAMETERS[k][rng.integers(len(PARAMETERS[k]))] for k in function["parameters"]["required"]}
        values = " and ".join(arguments.values())
        asked = ASKS[rng.integers(len(ASKS))].format(verb=verb, noun=noun, values=values, function=function["name"])
        call = "<tool_call>\n" + json.dumps({"name": function["name"], "arguments": arguments}) + "\n</tool_call>"
        user = {"role": "user", "content": asked}
        if rng.random() < 0.7:
            return Problem((user,), call, call, len(arguments), tools)
        result = [COLOURS, THINGS, NAMES][rng.integers(3)]
        found = result[rng.integers(len(result))] if rng.random() < 0.5 else str(rng.integers(0, 100))
        reply = f"The {noun} is {found}."
        turns = (
            user,
            {"role": "assistant", "content": call},
            {"role": "tool", "content": json.dumps({"result": found})},
        )
        return Problem(turns, reply, reply, len(arguments), tools)

    def check(self, problem: Problem, reply: str) -> bool:
        if not problem.answer.startswith("<tool_call>"):
            return reply.strip() == problem.answer
        return self.answer(reply) == self.answer(problem.answer)

    def answer(self, reply: str) -> str | None:
        """A call with its keys sorted, or the text as it is."""
        reply = reply.strip()
        if not (reply.startswith("<tool_call>") and reply.endswith("</tool_call>")):
            return reply or None
        try:
            return "<tool_call>" + json.dumps(
                json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>")), sort_keys=True
            )
        except (ValueError, RecursionError):
            return None

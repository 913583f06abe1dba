"""Beginnings of a call in each format, as parts of a ``Growing`` pattern.

A parser of the format looks for its own within a text that has no end, like a string whose quote is missing; the
reasoning parsers look for all of them, because a call ends the thinking.
"""

from __future__ import annotations

from kvasir.api.growing import SPACE, spelled
from kvasir.api.tools import NAME

NAMED = ("(?P<name>", NAME.pattern, ")")  # a function's name
# A call as a JSON object. Within a string, the first quote would have ended it, and no letter would follow.
KEYS = ("name", "arguments", "parameters", "type", "function", "id")
OBJECTS = [[r"\{", SPACE, '"', *spelled(key), '"', r"\s{0,2}", ":"] for key in KEYS]

HERMES = [[*spelled("<tool_call>"), SPACE, *begun] for begun in OBJECTS]
QWEN3_CODER = [*spelled("<tool_call>"), SPACE, *spelled("<function="), *NAMED, ">"]
QWEN3_CODER_BARE = [r"\n", *spelled("<function="), *NAMED, ">"]  # without <tool_call>
GLM45 = [[*spelled("<tool_call>"), *NAMED, r"\s{0,2}", *spelled(mark)] for mark in ("<arg_key>", "</tool_call>")]
MISTRAL = [
    *([*spelled("[TOOL_CALLS]"), SPACE, r"\[?", SPACE, *begun] for begun in OBJECTS),
    [*spelled("[TOOL_CALLS]"), SPACE, *NAMED, *spelled("[CALL_ID]"), r"\w{1,40}", *spelled("[ARGS]"), r"\{"],
    [*spelled("[TOOL_CALLS]"), SPACE, *NAMED, *spelled("[ARGS]"), SPACE, r"\{"],
    [*spelled("[TOOL_CALLS]"), SPACE, *NAMED, SPACE, r"\{", SPACE, r"[\"}]"],
]
GEMMA4 = [*spelled("<|tool_call>"), SPACE, *spelled("call:"), SPACE, *NAMED, r"\{"]
LLAMA3 = [[*spelled("<|python_tag|>"), SPACE, *begun] for begun in OBJECTS]
# A whole head of a call, on a line of its own: it is looked for within thinking, where other JSON may stand.
LLAMA3_BARE = [
    [r"\n", r"\{", SPACE, *spelled('"name"'), SPACE, ":", SPACE, '"', *NAMED, '"', SPACE, ",", SPACE]
    + [*spelled(f'"{key}"'), SPACE, ":", SPACE, r"\{"]
    for key in ("parameters", "arguments")
]
PYTHONIC = [
    [*spelled("<|python_start|>"), SPACE, r"\[", *NAMED, r"\("],
    [*spelled("```tool_code"), r"\s", SPACE, *NAMED, r"\("],
    [*spelled("```tool_code"), r"\s", SPACE, *spelled("print("), *NAMED, r"\("],
]

ALL = [*HERMES, QWEN3_CODER, QWEN3_CODER_BARE, *GLM45, *MISTRAL, GEMMA4, *LLAMA3, *LLAMA3_BARE, *PYTHONIC]

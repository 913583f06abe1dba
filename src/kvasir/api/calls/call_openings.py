"""Beginnings of a call in each format, as parts of a ``Growing`` pattern.

A parser of the format looks for its own within a text that has no end, like a string whose quote is missing; the
reasoning parsers look for all of them, because a call ends the thinking.
"""

from __future__ import annotations

from kvasir.api.calls.growing import SPACE, spelled
from kvasir.api.calls.tools import NAME

NAMED = ("(?P<name>", NAME.pattern, ")")  # a function's name
# A call as a JSON object. Within a string, the first quote would have ended it, and no letter would follow.
KEYS = ("name", "arguments", "parameters", "type", "function", "id")
OBJECTS = [[r"\{", SPACE, '"', *spelled(key), '"', r"\s{0,2}", ":"] for key in KEYS]

LIST = (r"\[?", SPACE)
HERMES = [
    [*spelled("<tool_call>"), SPACE, *fence, *LIST, *begun]
    for begun in OBJECTS
    for fence in ([], [*spelled("```"), r"\w{0,20}", SPACE])
]
QUOTE = "[\"']?"
QWEN3_NAMED = [*spelled("<function="), QUOTE, *NAMED, QUOTE, ">"]
QWEN3_CODER = [*spelled("<tool_call>"), SPACE, *QWEN3_NAMED]
QWEN3_CODER_BARE = [r"\n", *QWEN3_NAMED]  # without <tool_call>
GLM45 = [[*spelled("<tool_call>"), *NAMED, r"\s{0,2}", *spelled(mark)] for mark in ("<arg_key>", "</tool_call>")]
MISTRAL = [
    *([*spelled("[TOOL_CALLS]"), SPACE, *LIST, *begun] for begun in OBJECTS),
    [*spelled("[TOOL_CALLS]"), SPACE, *NAMED, *spelled("[CALL_ID]"), r"\w{1,40}", *spelled("[ARGS]"), r"\{"],
    [*spelled("[TOOL_CALLS]"), SPACE, *NAMED, *spelled("[ARGS]"), SPACE, r"\{"],
    [*spelled("[TOOL_CALLS]"), SPACE, *NAMED, SPACE, r"\{", SPACE, r"[\"}]"],
]
GEMMA4 = [*spelled("<|tool_call>"), SPACE, *spelled("call:"), SPACE, *NAMED, r"\{"]
LLAMA3 = [[*spelled("<|python_tag|>"), SPACE, *LIST, *begun] for begun in OBJECTS]
TYPED = [*spelled('"type"'), SPACE, ":", SPACE, *spelled('"function"'), SPACE]
# A whole head of a call, on a line of its own: it is looked for within thinking, where other JSON may stand.
LLAMA3_BARE = [
    [r"\n", *LIST, r"\{", SPACE, *head, *spelled(f'"{name}"'), SPACE, ":", SPACE, '"', *NAMED, '"', SPACE, ",", SPACE]
    + [*spelled(f'"{key}"'), SPACE, ":", SPACE, r"\{"]
    for key in ("parameters", "arguments")
    for head, name in (
        ([], "name"),
        ([], "function"),
        ([*TYPED, ",", SPACE], "name"),
        ([*TYPED, ",", SPACE], "function"),
        ([*TYPED, ",", SPACE, *spelled('"function"'), SPACE, ":", SPACE, r"\{", SPACE], "name"),
    )
]
PYTHONIC = [
    [*spelled("<|python_start|>"), SPACE, r"\[", *NAMED, r"\("],
    [*spelled("```tool_code"), r"\s", SPACE, *NAMED, r"\("],
    [*spelled("```tool_code"), r"\s", SPACE, *spelled("print("), *NAMED, r"\("],
]

ALL = [*HERMES, QWEN3_CODER, QWEN3_CODER_BARE, *GLM45, *MISTRAL, GEMMA4, *LLAMA3, *LLAMA3_BARE, *PYTHONIC]

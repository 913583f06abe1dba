"""The chat format of the lab's models: ChatML turns and Hermes tool calls, as a Jinja template and in Python.

Training must know which characters the assistant wrote, so `segments` renders in Python. A test compares its text with
`TEMPLATE`, which ships with every checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

TOOLS_BEFORE = "You can call these functions:\n<tools>\n"
TOOLS_AFTER = '</tools>\nTo call one, write:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'

# A backslash at the end of a line continues it: the template has one line there.
TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set turns = messages -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages and messages[0].role == 'system' -%}
        {{- text(messages[0].content) + '\\n\\n' -}}
        {%- set turns = messages[1:] -%}
    {%- endif -%}
    {{- BEFORE -}}
    {%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
    {{- AFTER + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function else call -%}
            {{- '\\n' if message.content or not loop.first -}}
            {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
            {{- (function.arguments if function.arguments is string else function.arguments | tojson) \
+ '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
    {%- elif message.role in ['system', 'developer', 'user'] -%}
        {{- '<|im_start|>' + ('user' if message.role == 'user' else 'system') + '\\n' \
+ text(message.content) + '<|im_end|>\\n' -}}
    {%- else -%}
        {{- raise_exception('unknown role: ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".replace("BEFORE", repr(TOOLS_BEFORE)).replace("AFTER", repr(TOOLS_AFTER))

Message = dict[str, Any]
Segment = tuple[str, bool]  # text, and whether the assistant wrote it


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _reply(message: Message) -> str:
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function["arguments"] if isinstance(function["arguments"], str) else _json(function["arguments"])
        calls.append(f'<tool_call>\n{{"name": {_json(function["name"])}, "arguments": {arguments}}}\n</tool_call>')
    content = message.get("content") or ""
    return "\n".join([content, *calls] if content else calls)


def segments(messages: Sequence[Message], tools: Sequence[dict] = (), *, generate: bool = False) -> list[Segment]:
    """The conversation as text pieces, each with whether the assistant wrote it (its end-of-turn mark included).

    Contents are plain strings. ``generate`` adds the header of the assistant's next turn. Raises KeyError for a message
    without role and ValueError for an unknown role.
    """
    out: list[Segment] = [("<bos>", False)]
    messages = list(messages)
    if tools:
        system = messages.pop(0)["content"] + "\n\n" if messages and messages[0]["role"] == "system" else ""
        listed = "".join(_json(tool) + "\n" for tool in tools)
        out.append((f"<|im_start|>system\n{system}{TOOLS_BEFORE}{listed}{TOOLS_AFTER}<|im_end|>\n", False))
    for message in messages:
        role = message["role"]
        if role == "assistant":
            out += [("<|im_start|>assistant\n", False), (_reply(message) + "<|im_end|>", True), ("\n", False)]
        elif role == "tool":
            out.append(
                (f"<|im_start|>tool\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n", False)
            )
        elif role in ("system", "user"):
            out.append((f"<|im_start|>{role}\n{message['content']}<|im_end|>\n", False))
        else:
            raise ValueError(f"unknown role: {role}")
    if generate:
        out.append(("<|im_start|>assistant\n", False))
    return out


def prompt(messages: Sequence[Message], tools: Sequence[dict] = ()) -> str:
    """The text from which a model writes the assistant's next turn."""
    return "".join(text for text, _ in segments(messages, tools, generate=True))

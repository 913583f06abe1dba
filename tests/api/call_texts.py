"""Calls as models write them in each format, for tests: values of any kind, and the marks that a value may hold."""

import json
from collections.abc import Callable
from dataclasses import dataclass

SCHEMAS = {
    "save": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "n": {"type": "integer"},
            "more": {"type": "object"},
            "all": {"type": "array"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Format:
    """How calls are written: ``one`` call, and the text ``between`` two. ``marks``: texts that a string may hold."""

    kind: str
    one: Callable[[str, dict], str]
    between: str = "\n"
    marks: tuple[str, ...] = ()

    def write(self, calls: list[tuple[str, dict]]) -> str:
        return self.between.join(self.one(name, arguments) for name, arguments in calls)


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


def hermes(name, arguments):
    return f"<tool_call>\n{dumped({'name': name, 'arguments': arguments})}\n</tool_call>"


def hermes_fence(name, arguments):
    return f"<tool_call>\n```json\n{dumped({'name': name, 'arguments': arguments})}\n```\n</tool_call>"


def hermes_list(name, arguments):
    return f"<tool_call>\n[{dumped({'name': name, 'arguments': arguments})}]\n</tool_call>"


def hermes_function(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return f"<tool_call>\n{dumped(call)}\n</tool_call>"


def llama3_list(name, arguments):
    return f"[{llama3_json(name, arguments)}]"


def llama3_function(name, arguments):
    return dumped({"type": "function", "function": name, "parameters": arguments})


def llama3_nested(name, arguments):
    return dumped({"type": "function", "function": {"name": name, "parameters": arguments}})


def llama3_json(name, arguments):
    return dumped({"name": name, "parameters": arguments})


def mistral(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}"


def mistral_list(name, arguments):
    return f"[TOOL_CALLS][{dumped({'name': name, 'arguments': arguments})}]"


def bare(value):
    return value if isinstance(value, str) else dumped(value)


def glm45(name, arguments):
    parts = (f"<arg_key>{k}</arg_key>\n<arg_value>{bare(v)}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"


def qwen3_coder(name, arguments):
    parts = (f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def qwen3_quoted(name, arguments):
    parts = (f'<parameter="{k}">\n{bare(v)}\n</parameter>\n' for k, v in arguments.items())
    return f'<tool_call>\n<function="{name}">\n{"".join(parts)}</function>\n</tool_call>'


def gemma_value(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
    return "[" + ",".join(map(gemma_value, value)) + "]" if isinstance(value, list) else dumped(value)


def gemma4(name, arguments):
    return f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>"


def openai(name, arguments):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}<|call|>"


def pythonic(name, arguments):
    return f"```tool_code\n{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})\n```"


def llama_list(name, arguments):
    return f"<|python_start|>[{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]<|python_end|>"


FORMATS = {
    "hermes": Format("hermes", hermes, marks=("<tool_call>", "</tool_call>", "<tool_call>{", '}}"')),
    "hermes fence": Format("hermes", hermes_fence, marks=("```", "<tool_call>", "```\n</tool_call>", "}}\n```")),
    "hermes list": Format("hermes", hermes_list, marks=("<tool_call>[", "</tool_call>", '}}, {"name": "now"}', "}}]")),
    "hermes function": Format("hermes", hermes_function, marks=("<tool_call>", "</tool_call>", '"function": {')),
    "llama3_json": Format("llama3_json", llama3_json, marks=("{", '}}, {"name": "now"}', "<|python_tag|>", "}};")),
    "llama3 list": Format("llama3_json", llama3_list, marks=("[{", '}}, {"name": "now"}]', "<|python_tag|>", "}}]")),
    "llama3 function": Format("llama3_json", llama3_function, marks=("{", '"function": "now"', "}};")),
    "llama3 nested": Format("llama3_json", llama3_nested, marks=("{", '"function": {', "}}};")),
    "mistral": Format("mistral", mistral, "", ("[TOOL_CALLS]", "[ARGS]{", "[TOOL_CALLS]x[ARGS]")),
    "mistral list": Format("mistral", mistral_list, "", ("[TOOL_CALLS]", '[TOOL_CALLS][{"', "}}]")),
    "glm45": Format("glm45", glm45, marks=("</arg_value>", "<arg_key>", "<tool_call>", "</tool_call>", "</arg_key>")),
    "glm45 json": Format("glm45", hermes, marks=("</arg_value>", "<tool_call>{", "</tool_call>", "<tool_call>now")),
    "glm45 list": Format("glm45", hermes_list, marks=("<arg_key>", "<tool_call>[", "</tool_call>", "}}]")),
    "glm45 fence": Format("glm45", hermes_fence, marks=("<arg_key>", "<tool_call>[", "</tool_call>", "```")),
    "qwen3 quotes": Format("qwen3_coder", qwen3_quoted, "\n", ("</parameter>", '<parameter="', "<tool_call>")),
    "qwen3_coder": Format("qwen3_coder", qwen3_coder, "\n", ("</parameter>", "<parameter=", "<tool_call>")),
    "gemma4": Format("gemma4", gemma4, "", ("<|tool_call>", "<tool_call|>", "}<tool_call|>", "call:")),
    "openai": Format("openai", openai, "<|start|>assistant", ("<|call|>", "<|message|>", "<|end|>", "<|start|>")),
    "pythonic": Format("pythonic", pythonic, marks=("```", "```tool_code", "[now()]", "')")),
    "python list": Format("pythonic", llama_list, "", ("<|python_end|>", "<|python_start|>", "')]", "```")),
}  # fmt: skip

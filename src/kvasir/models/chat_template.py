"""Chat templates: Jinja in a sandbox, with the helpers that model folders expect and limits on time and size.

A template comes with a model, and so from a stranger. It cannot reach Python's objects (immutable sandbox), and it
cannot block the server or fill its memory: every loop turn, call and growing operator checks a clock and sizes. A
template sent by a client runs in a process of its own, with hard limits on memory and time (``render_isolated``).
"""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvasir.errors import ConfigError, RequestError

# Seconds of CPU time of the rendering thread, so that a busy machine does not fail requests.
TIME_LIMIT = 1.0
# Most characters of a prompt or of a text that a template makes.
MAX_CHARS = 1 << 25
# Longest template that a client may send.
MAX_TEMPLATE_CHARS = 1 << 17
# Memory of the process that renders a client's template.
MAX_MEMORY_BYTES = 1 << 30
# Names that only the server may set; all others in ``chat_template_kwargs`` go to the template.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "chat_template",
        "tokenize",
        "raise_exception",
        "strftime_now",
        "continue_final_message",
        "return_dict",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
    }
)
# Name of the clock among a template's variables. Jinja has no such identifier, so no template can read or replace it.
CLOCK = "clock!"


class LimitError(Exception):
    """A template took too long or grew too large."""


class Clock:
    """The time limit of one rendering.

    The time between two checks counts for at most half of the limit. The interpreter may collect its garbage there,
    which takes long in a large process and is not the template's work.
    """

    def __init__(self) -> None:
        self.left = TIME_LIMIT
        self.seen = time.thread_time()

    def check(self) -> None:
        """Raise LimitError when the time is over."""
        now = time.thread_time()
        self.left -= min(now - self.seen, TIME_LIMIT / 2)
        self.seen = now
        if self.left <= 0:
            raise LimitError(f"took longer than {TIME_LIMIT:g} s")


def _check(context: jinja2.runtime.Context) -> None:
    clock = context.parent.get(CLOCK)
    if clock is not None:
        clock.check()


@pass_context
def _each(context: jinja2.runtime.Context, items: Iterable) -> Iterator:
    clock = context.parent[CLOCK]
    for item in items:
        clock.check()
        yield item


class _WatchLoops(NodeTransformer):
    """The rewriting of ``for x in items`` to ``for x in _each(items)``."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "each!", [], [], None, None, lineno=node.lineno)
        return node


class _Generation(Extension):
    """The tag ``{% generation %}...{% endgeneration %}``, which marks
    assistant text for training and does nothing here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates. It raises LimitError in a template that exceeds a limit."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["each!"] = _each
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _WatchLoops().visit(super()._parse(source, name, filename))

    def call(self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check(__context)
        if isinstance(getattr(__obj, "__self__", None), str) and any(
            isinstance(a, int) and a > MAX_CHARS for a in args
        ):
            raise LimitError("makes a text that is too long")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _check(context)
        sizes = [len(v) for v in (left, right) if isinstance(v, (str, list, tuple))]
        times = [abs(v) for v in (left, right) if isinstance(v, int)] if operator == "*" else []
        if operator == "%" and isinstance(left, str):
            raise LimitError("uses the % operator on a text; write ~ or format() instead")
        if (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * abs(right) > 4096
        ):
            raise LimitError("computes a number that is too large")
        if (sizes and times and sizes[0] * times[0] > MAX_CHARS) or sum(sizes) > MAX_CHARS:
            raise LimitError("makes a text that is too long")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """One compiled template. Raises ConfigError when it is not valid Jinja."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            environment = Sandbox()
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as e:
            raise ConfigError(f"the chat template is not valid Jinja: {e}") from e
        self.reads = frozenset(meta.find_undeclared_variables(tree))  # names of the variables it expects
        # All texts that the template writes or compares with, joined, to search for names and marks.
        self.literals = "\0".join(
            [n.data for n in tree.find_all(nodes.TemplateData)]
            + [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]
        )

    @functools.cached_property
    def reads_parts(self) -> bool:
        """Whether the template writes the content of a user's message from a list of text parts, found by a try."""
        parts = [{"type": "text", "text": text} for text in ("first\U000f0000", "second\U000f0000")]
        message = {"role": "user", "content": parts}
        try:
            text = self.render(
                {"messages": [message], "tools": None, "documents": None, "add_generation_prompt": False}
            )
        except RequestError:
            return False
        return all(p["text"] in text for p in parts) and "'type'" not in text and '"type"' not in text

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the prompt's text. Raises RequestError 400 when the template
        refuses the messages or exceeds a limit."""
        parts, size = [], 0
        try:
            for part in self._template.generate({**variables, CLOCK: Clock()}):
                size += len(part)
                if size > MAX_CHARS:
                    raise LimitError(f"made more than {MAX_CHARS} characters")
                parts.append(part)
        except LimitError as e:
            raise RequestError(f"the chat template {e}", param="messages", code="chat_template_limit") from e
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as e:
            raise RequestError(
                f"the chat template refuses these messages: {str(e)[:500] or type(e).__name__}",
                param="messages",
                code="chat_template_error",
            ) from e
        return "".join(parts)


def render_isolated(source: str, variables: Mapping[str, Any]) -> str:
    """Render a client's template in a process with hard limits; blocks for up to ten seconds.
    Raises RequestError 400."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise RequestError(f"a chat template may have at most {MAX_TEMPLATE_CHARS} characters", param="chat_template")
    work = json.dumps({"source": source, "variables": dict(variables)}).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], input=work, capture_output=True, timeout=TIME_LIMIT + 9, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise RequestError("the chat template took too long", param="chat_template", code="chat_template_limit") from e
    if done.returncode != 0:
        raise RequestError(
            "the chat template took too much time or memory", param="chat_template", code="chat_template_limit"
        )
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise RequestError(reply["error"], param="chat_template", code="chat_template_error")
    return reply["text"]


def _child() -> None:
    work = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    seconds = int(time.process_time() + TIME_LIMIT) + 2  # the imports before are not the template's
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        reply = {"text": ChatTemplate(work["source"]).render(work["variables"])}
    except (ConfigError, RequestError) as e:
        reply = {"error": str(e)}
    except MemoryError:
        reply = {"error": "the chat template took too much memory"}
    sys.stdout.buffer.write(json.dumps(reply).encode())


if __name__ == "__main__":
    _child()

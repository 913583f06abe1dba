"""Chat templates: Jinja in a sandbox, with the helpers that model folders expect and limits on time and size.

A template comes with a model, and so from a stranger. It cannot reach Python's objects (immutable sandbox), and it
cannot block the server or fill its memory: what costs no more than its operands runs here, under a meter
(``template_sandbox``), and every other template, and every one that a client sends, runs in a process of its own with
hard limits on memory and time (``template_process``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes

from kvasir.errors import ConfigError, RequestError
from kvasir.models.template_process import Worker
from kvasir.models.template_render import render_metered
from kvasir.models.template_sandbox import ROOM, Apart, Meter, Sandbox, is_cheap

# Seconds of CPU time of the rendering thread, so that a busy machine does not fail requests.
TIME_LIMIT = 1.0
# Longest template that a client may send, and longest that is compiled in this process.
MAX_TEMPLATE_CHARS = 1 << 17
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


class ChatTemplate:
    """One template of a checkpoint. Raises ConfigError when it is not valid Jinja.

    ``apart``: it is rendered in a process of its own, because it does more than may run here.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
        self.source = source
        try:
            environment = Sandbox()
            plain = environment.plain(source)
            self.apart = not is_cheap(plain)
            self._template = None if self.apart else environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise ConfigError(f"the chat template is not valid Jinja: {e}") from e
        self._worker = Worker()
        self.reads = frozenset(meta.find_undeclared_variables(plain))  # names of the variables it expects
        # All texts that the template writes or compares with, joined, to search for names and marks.
        self.literals = "\0".join(
            [n.data for n in plain.find_all(nodes.TemplateData)]
            + [n.value for n in plain.find_all(nodes.Const) if isinstance(n.value, str)]
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
        if self._template is not None and not self.apart:
            try:
                return render_metered(self._template, variables, Meter(TIME_LIMIT, ROOM))
            except Apart as e:
                self.apart = e.always
        return self._worker.render(self.source, variables, TIME_LIMIT, "messages")


def render_isolated(source: str, variables: Mapping[str, Any]) -> str:
    """Render a client's template in a process of its own; blocks for up to ten seconds. Raises RequestError 400."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise RequestError(f"a chat template may have at most {MAX_TEMPLATE_CHARS} characters", param="chat_template")
    worker = Worker()
    try:
        return worker.render(source, variables, TIME_LIMIT, "chat_template")
    finally:
        worker.close()

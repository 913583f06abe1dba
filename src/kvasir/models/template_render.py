"""The rendering of chat templates under a meter, in the server or in a process of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jinja2

from kvasir.errors import RequestError
from kvasir.models.template_sandbox import MAX_CHARS, METER, Apart, LimitError, Meter, Sandbox


def render_metered(template: jinja2.Template, variables: Mapping[str, Any], meter: Meter) -> str:
    """Render a compiled template. Raises RequestError 400, and Apart where ``meter`` has room."""
    parts, size = [], 0
    try:
        for part in template.generate({**variables, METER: meter}):
            size += len(part)
            if size > MAX_CHARS:
                raise LimitError(f"made more than {MAX_CHARS} characters")
            parts.append(part)
    except Apart:
        raise
    except (LimitError, MemoryError) as e:
        raise RequestError(
            f"the chat template {str(e) or 'took too much memory'}", param="messages", code="chat_template_limit"
        ) from e
    except Exception as e:
        raise RequestError(
            f"the chat template refuses these messages: {str(e)[:500] or type(e).__name__}",
            param="messages",
            code="chat_template_error",
        ) from e
    return "".join(parts)


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    return Sandbox().from_string(source)


def render_here(source: str, variables: Mapping[str, Any], seconds: float) -> str:
    """Compile and render any template in this process, which has limits of its own. Raises RequestError 400."""
    try:
        template = _compiled(source)
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as e:
        raise RequestError(f"the chat template is not valid Jinja: {e}", code="chat_template_error") from e
    return render_metered(template, variables, Meter(seconds, None))

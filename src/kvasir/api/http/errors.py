"""Error replies in the form of the protocol that the route speaks.

OpenAI's form is ``{"error": {"message", "type", "param", "code"}}``. Paths under ``/v1/messages`` speak Anthropic's:
``{"type": "error", "error": {"type", "message"}, "request_id"}``, with its own statuses and words for types.
"""

from __future__ import annotations

import math
import re
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import Response

from kvasir.api.http.limits import request_id
from kvasir.api.http.memory import forget_frames
from kvasir.api.http.streaming import encode, sse
from kvasir.errors import RequestError

Scope = MutableMapping[str, Any]
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Anthropic's words, where they differ, and its status for a server that is loading, full or draining.
ANTHROPIC_TYPES = {
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    529: "overloaded_error",
}
ANTHROPIC_OVERLOADED = 529
MESSAGES = re.compile(r"/+(?:v1/+)*messages(?:/|$)")


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of an error reply. ``type`` follows from the status; ``code`` is ours and machine-readable."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError, scope: Scope | None = None) -> Response:
    """The error reply to the request of this ASGI scope (None: in OpenAI's form). 429, 503 and 529 always carry
    ``Retry-After`` in whole seconds; 401 names the expected scheme. The error forgets the frames that it came from,
    which hold the body."""
    forget_frames(error)
    headers = {}
    if error.status in (429, 503) or error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1.0)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    status, body = error.status, error_object(error)
    if scope is not None and speaks_anthropic(scope["path"]):
        status, body = _anthropic_status(error), _anthropic_object(error, request_id(scope))
        headers |= id_headers(scope)
    return Response(encode(body), status, headers, media_type="application/json")


def error_event(error: RequestError, scope: Scope) -> bytes:
    """The server-sent event of an error after the headers of a stream."""
    if speaks_anthropic(scope["path"]):
        return sse(_anthropic_object(error, request_id(scope)), "error")
    return sse(error_object(error))


def id_headers(scope: Scope, name: str | None = None) -> dict[str, str]:
    """The headers that name the request, under the name that the route's clients read as well. ``name``: one from the
    body, which replaces that of the request's headers."""
    name = name or request_id(scope)
    return {"x-request-id": name} | ({"request-id": name} if speaks_anthropic(scope["path"]) else {})


def speaks_anthropic(path: str) -> bool:
    """Whether a path is that of the messages API, also where no route serves it: a client whose base URL is wrong still
    reads its own form."""
    return MESSAGES.match(path) is not None


def _anthropic_status(error: RequestError) -> int:
    return {422: 400, 503: ANTHROPIC_OVERLOADED}.get(error.status, error.status)


def _anthropic_object(error: RequestError, request: str) -> dict[str, Any]:
    status = _anthropic_status(error)
    default = "api_error" if status >= 500 else "invalid_request_error"
    kind = ANTHROPIC_TYPES.get(status) or TYPES.get(status, default)
    # This form has no field for the parameter.
    places = {error.param or "", (error.param or "").rpartition(".")[0]} - {""}
    named = not places or any(place in error.message for place in places)
    message = error.message if named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request}

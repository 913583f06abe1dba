"""Error replies in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import Response

from kvasir.api.streaming import encode
from kvasir.errors import RequestError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of an error reply. ``type`` follows from the status; ``code`` is ours and machine-readable."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> Response:
    """The error reply. 429 and 503 always carry ``Retry-After`` in whole seconds; 401 names the expected scheme."""
    headers = {}
    if error.status in (429, 503) or error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1.0)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(encode(error_object(error)), error.status, headers, media_type="application/json")

"""The errors of requests that failed in the engine, as their clients see them."""

from __future__ import annotations

from kvasir.decoding.grammar_rows import constraints
from kvasir.errors import Failure
from kvasir.types import Request


def span_failure(request: Request, error: str) -> Failure:
    """Describe a span that failed. ``error``: its code, a colon, and the reason."""
    code, param = error.split(":")[0], None
    if code == "no_token_allowed":  # what the request asks for leaves nothing to sample
        names = constraints(request)
        param = names[0] if names else None
        error = f"{code}: {' and '.join(names) or 'the constraints'} of this request leave no token to choose from"
    elif code == "grammar_error":
        param = "grammar"
    own = code in ("no_token_allowed", "grammar_error")
    return Failure(status=400 if own else 500, code=code, message=error, param=param)

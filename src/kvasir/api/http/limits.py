"""Limits on requests, checked before any work: body size, time to arrive, nesting, number of parts, open requests.

A body is read with a limit, checked for depth and parts without parsing, then decoded strictly: UTF-8 only, no NaN or
Infinity, no lone surrogates. Among duplicate keys the last one wins. Every violation raises RequestError, so a bad body
costs a 4xx and nothing else.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from kvasir.errors import RequestError

if TYPE_CHECKING:
    import numpy as np  # imported by the first body, or while the engine starts

# Deepest nesting of brackets.
MAX_DEPTH = 64
# Most strings, arrays and objects in a body: millions of them take the decoder seconds, in one call that blocks all
# others.
MAX_PARTS = 1 << 18
# Most members of arrays and objects, numbers included: a million token ids take the loop less than 0.1 s, eight million
# 0.7 s. The longest contexts of models have a million tokens.
MAX_MEMBERS = 1 << 20
# Most numbers like 1e300, or 1e-300 with many digits: 350,000 of them take the decoder three seconds.
MAX_EXPONENTS = 1 << 14
# Seconds that may pass between two pieces of a body.
CHUNK_TIMEOUT = 10.0
# Bytes whose depth is measured in one go; other threads run in between.
PIECE = 1 << 16
_EXPONENT = re.compile(rb"\d[eE][+-]?\d{3}")
_MARKS = bytes(c if c in b'"\\[]' else {ord("{"): ord("["), ord("}"): ord("]")}.get(c, ord(" ")) for c in range(256))
_MARKS_AND_COMMAS = _MARKS[: ord(",")] + b"," + _MARKS[ord(",") + 1 :]


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """Read the raw body.

    Raises RequestError 415 (not JSON, or compressed), 413 (longer than ``limit`` bytes) or 408 (too slow).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(
            f"the content type must be application/json, not '{kind[:80]}'", status=415, code="unsupported_media_type"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(
            "compressed bodies are not read; send the JSON as it is", status=415, code="unsupported_encoding"
        )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(timeout):
            stream = request.stream().__aiter__()
            while (piece := await asyncio.wait_for(anext(stream, None), CHUNK_TIMEOUT)) is not None:
                size += len(piece)
                if size > limit:
                    raise _too_large(limit)
                pieces.append(piece)
    except TimeoutError as e:
        raise RequestError("the body took too long to arrive", status=408, code="body_timeout") from e
    except ClientDisconnect as e:
        raise RequestError("the client went away", status=499, code="disconnected") from e
    return b"".join(pieces)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is longer than {limit} bytes", status=413, code="body_too_large")


def check_shape(body: bytes) -> None:
    """Raise RequestError when brackets nest deeper than MAX_DEPTH or do not match (brackets in strings do not count),
    and 413 when there are more than MAX_PARTS strings, arrays and objects, more than MAX_MEMBERS members of arrays and
    objects, or more than MAX_EXPONENTS numbers with large exponents (or text that looks like them).

    It takes linear time without recursion, whatever the bytes are, and no call of it lasts long: a large body must not
    stall other streams.
    """
    import numpy as np

    depth, inside, start, parts, exponents, members = 0, False, 0, 0, 0, 0
    table = _MARKS_AND_COMMAS if body.count(b",") >= MAX_MEMBERS else _MARKS
    while start < len(body):
        # All bytes except marks become spaces, so that places stay the same; then each backslash with the byte it
        # escapes.
        piece = body[start : start + PIECE].translate(table).replace(rb"\\", b"  ")
        if piece.endswith(b"\\") and len(piece) > 1:
            piece = piece[:-1]  # the byte it escapes is in the next piece
        exponents += len(_EXPONENT.findall(body, start, start + len(piece)))
        if exponents > MAX_EXPONENTS:
            raise RequestError(
                f"the body holds more than {MAX_EXPONENTS} numbers with exponents", status=413, code="body_too_large"
            )
        start += len(piece)
        marks = np.frombuffer(piece.replace(rb"\"", b" e").translate(None, b" \\"), np.uint8)
        if marks.size:
            quoted = _quoted(marks, inside)
            closing = marks == ord("]")
            steps = (marks == ord("[")).astype(np.int32) - closing
            depths = depth + np.cumsum(np.where(quoted, 0, steps))
            if depths.min() < 0 or depths.max() > MAX_DEPTH:
                raise _unbalanced()
            commas = marks == ord(",")
            members += int(np.count_nonzero(commas & ~quoted))
            if members >= MAX_MEMBERS:
                raise RequestError(
                    f"the body holds more than {MAX_MEMBERS} numbers or other members of arrays",
                    status=413,
                    code="body_too_large",
                )
            parts += int(np.count_nonzero(~(quoted | closing | commas)))  # opening brackets, and ends of strings
            if parts > MAX_PARTS:
                raise RequestError(
                    f"the body holds more than {MAX_PARTS} strings, arrays and objects",
                    status=413,
                    code="body_too_large",
                )
            depth, inside = int(depths[-1]), bool(quoted[-1])
    if depth:
        raise _unbalanced()


def _quoted(marks: np.ndarray, inside: bool) -> np.ndarray:
    """Whether a string is open after each mark. A quote opens or closes a string. An ``e`` (a quote after an
    odd number of backslashes) leaves it open, or opens one: outside of strings nothing is escaped."""
    import numpy as np

    flips = np.logical_xor.accumulate(marks == ord('"'))
    escaped = np.flatnonzero(marks == ord("e"))
    if not escaped.size:
        return flips ^ inside
    last = np.zeros(marks.size, np.int64)
    last[escaped] = escaped
    np.maximum.accumulate(last, out=last)
    quoted = ~(flips ^ flips[last])
    quoted[: escaped[0]] = flips[: escaped[0]] ^ inside
    return quoted


def _unbalanced() -> RequestError:
    return RequestError(
        f"the body is not valid JSON: brackets do not match, or nest deeper than {MAX_DEPTH}", code="invalid_json"
    )


def decode_json(body: bytes) -> dict[str, Any]:
    """Decode the body into an object. Raises RequestError:
    400 when it is not a JSON object, 413 when it has too many parts."""
    if body.startswith(BOM_UTF8):
        body = body.removeprefix(BOM_UTF8)  # some editors and shells begin UTF-8 with it, and RFC 8259 lets it pass
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object", code="invalid_json")
    check_shape(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as e:
        raise RequestError(f"the body is not valid JSON: {e}", code="invalid_json") from e
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return value


def clean_id(text: str | None) -> str:
    """The client's request id, reduced to 64 letters, digits and ``._-`` at most; a fresh id when there is none."""
    return re.sub(r"[^A-Za-z0-9._-]", "", text or "")[:64] or uuid.uuid4().hex


def request_id(scope: MutableMapping[str, Any]) -> str:
    """The id of the request of this ASGI scope: the client's ``x-request-id``, cleaned, or a fresh one; always the
    same for one request."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        header = dict(scope["headers"]).get(b"x-request-id", b"")
        state["request_id"] = clean_id(header.decode("latin-1"))
    return state["request_id"]


def unique_id(prefix: str, client_id: str) -> str:
    """An id that no other request has, whatever ids clients choose."""
    return f"{prefix}-{client_id}-{uuid.uuid4().hex[:12]}"


class Concurrency:
    """Counter of each key's open requests; ``limit`` 0 means no limit.
    A request calls ``enter`` once and ``leave`` once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open: Counter[str] = Counter()

    def enter(self, key: str) -> None:
        """Count one more request. Raises RequestError 429 when the key already has ``limit`` requests open."""
        if self.limit and self.open[key] >= self.limit:
            raise RequestError(
                f"this key already has {self.limit} requests open",
                status=429,
                code="too_many_requests",
                retry_after=1.0,
            )
        self.open[key] += 1

    def leave(self, key: str) -> None:
        """Count one request less."""
        self.open[key] -= 1
        if not self.open[key]:
            del self.open[key]

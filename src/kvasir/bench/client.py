"""An open-loop client of ``/v1/completions``: requests leave when they are due, whatever the server does.

It speaks HTTP itself and only counts the lines of a stream, so that tens of thousands of tokens a second leave it
mostly idle. It measures how late it sent requests and how late its event loop ran, and reports both next to the
server's figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kvasir.bench.result import percentile
from kvasir.errors import ConfigError
from kvasir.logs import log

_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
_NO_CHOICE = re.compile(rb'"choices":\s*\[\]')
# Seconds between looks at the event loop's clock.
TICK = 0.01


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send. ``due`` is in seconds from the start of the window; ``extra`` are further parameters of its
    body; ``api_key`` is its own key, where it has one."""

    due: float
    prompt: list[int]
    output: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None


@dataclass(slots=True)
class Reply:
    """Outcome of a call, with times in seconds of ``time.perf_counter``.

    A ``status`` of 0 says that the connection failed. ``events`` holds the time of each event with tokens;
    ``completion`` and ``cached`` are tokens by the server's own count.
    """

    due: float
    sent: float = 0.0
    status: int = 0
    events: array = field(default_factory=lambda: array("d"))
    completion: int = 0
    cached: int = 0
    ended: float = 0.0


class _Stream(asyncio.Protocol):
    """A connection that sends one request and reads server-sent events. ``done`` is set when it ends."""

    def __init__(self, request: bytes, reply: Reply, done: asyncio.Future) -> None:
        self.request, self.reply, self.done = request, reply, done
        self.rest = b""
        self.in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(self.request)
        self.reply.sent = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        data = self.rest + data
        if not self.in_body:
            head, separator, body = data.partition(b"\r\n\r\n")
            if not separator:
                self.rest = data
                return
            self.reply.status, self.in_body, data = int(head.split(b" ", 2)[1]), True, body
        # Every event is one line. The framing of the body's chunks is on lines of its own.
        *lines, self.rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._event(line, now)
            elif line.startswith(b"data: [DONE]"):
                self.transport.close()

    def _event(self, line: bytes, now: float) -> None:
        if b'"error"' in line and "error" in json.loads(line[6:]):
            self.reply.status = 500
            return
        if b'"usage"' in line and (count := _COMPLETION.search(line)):
            self.reply.completion = int(count[1])
            cached = _CACHED.search(line)
            self.reply.cached = int(cached[1]) if cached else 0
            if _NO_CHOICE.search(line):
                return
        self.reply.events.append(now)

    def connection_lost(self, error: Exception | None) -> None:
        self.reply.ended = time.perf_counter()
        if error is not None or (self.reply.status == 200 and not self.reply.completion):
            self.reply.status = 0  # the connection ended before the reply did
        if not self.done.done():
            self.done.set_result(None)


class Asker:
    """Sends one call at a time for each of many tasks, as a closed loop does. It is an asynchronous context.

    ``lags``: how late the event loop ran, in seconds.
    """

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        self._place, self._model, self._api_key = urlsplit(url), model, api_key
        self._stack = contextlib.ExitStack()
        self.lags: list[float] = []

    async def __aenter__(self) -> Asker:
        self._stack.enter_context(_undisturbed())
        ticker = asyncio.get_running_loop().create_task(_tick(self.lags))
        self._stack.callback(ticker.cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()

    async def ask(self, call: Call) -> Reply:
        """Send a call ``call.due`` seconds from now. The body is written before that time is over."""
        due = time.perf_counter() + call.due
        request = _request(self._place, self._model, call, call.api_key or self._api_key)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        reply = Reply(due)
        await _one(self._place, request, reply)
        return reply


async def replay(
    url: str, model: str, calls: list[Call], api_key: str | None = None
) -> tuple[list[Reply], list[float]]:
    """Send every call when it is due and wait for all.

    Returns the replies in order, and how late the event loop ran, in seconds.
    """
    place = urlsplit(url)
    requests = [_request(place, model, call, call.api_key or api_key) for call in calls]
    loop = asyncio.get_running_loop()
    lags: list[float] = []
    ticker = loop.create_task(_tick(lags))
    replies: list[Reply] = []
    with _undisturbed():
        started = time.perf_counter() + 0.05
        tasks = []
        for call, request in zip(calls, requests):
            await asyncio.sleep(max(0.0, started + call.due - time.perf_counter()))
            replies.append(Reply(started + call.due))
            tasks.append(loop.create_task(_one(place, request, replies[-1])))
        await asyncio.gather(*tasks)
    ticker.cancel()
    return replies, lags


def send(url: str, name: str, model: str, calls: list[Call], least: int = 1) -> list[Reply]:
    """Send all calls when they are due and return the replies. Raises ConfigError where one of the server ``name``
    failed, or has fewer than ``least`` events."""
    replies, _ = asyncio.run(replay(url, model, calls))
    if failed := [r.status for r in replies if r.status != 200 or len(r.events) < least]:
        raise ConfigError(f"{len(failed)} of {len(replies)} requests to {name} failed: {failed[:3]}")
    return replies


def _request(place: SplitResult, model: str, call: Call, api_key: str | None) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": call.prompt,
            "max_tokens": call.output,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            **call.extra,
        }
    ).encode()
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {place.path}/v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\n{key}Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _one(place: SplitResult, request: bytes, reply: Reply) -> None:
    loop, secure = asyncio.get_running_loop(), place.scheme == "https"
    done = loop.create_future()
    try:
        await loop.create_connection(
            lambda: _Stream(request, reply, done),
            place.hostname,
            place.port or (443 if secure else 80),
            ssl=True if secure else None,
        )
        await done
    except OSError:
        reply.status, reply.ended = 0, time.perf_counter()


async def _tick(lags: list[float]) -> None:
    while True:
        asked = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        lags.append(time.perf_counter() - asked)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Turn garbage collection off in the window, and allow a connection for each request."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def root(url: str) -> str:
    """The root of an API, from an address with or without ``/v1`` at its end."""
    return url.rstrip("/").removesuffix("/v1")


def served_model(url: str, api_key: str | None = None) -> str:
    """The name of the model that a server serves. Raises ConfigError."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        f"{url}/v1/models", headers={"Authorization": f"Bearer {api_key}"} if api_key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)["data"][0]["id"]
    except urllib.error.HTTPError as e:
        hint = "; it requires a key: set KVASIR_API_KEY" if e.code in (401, 403) else ""
        raise ConfigError(f"the server at {url} answers {e.code} to GET /v1/models{hint}") from e
    except (urllib.error.URLError, ValueError, LookupError, TypeError, OSError) as e:
        raise ConfigError(f"no server with an OpenAI API answers at {url}: {e}") from e


def summarise(replies: list[Reply], calls: list[Call], lags: list[float]) -> dict[str, Any]:
    """Metrics of one window, from the first due time to the last.

    Latencies are in milliseconds from when a request was due. ``itl`` holds the gaps between events with tokens;
    ``tokens_per_event`` tells whether that is per token. ``tpot`` is the time from the first event to the last, divided
    by the number of tokens after the first. ``output_tok_s`` is the number of tokens that came within the window, over
    its length. ``client_late`` is how late requests were sent, ``client_lag`` how late the event loop ran.
    """
    good = [r for r in replies if r.status == 200 and r.events]
    first, last = replies[0].due, replies[-1].due
    ended = max(r.ended for r in replies)
    until = last if last > first else ended  # requests that are all due at once: the window is the whole run
    per_event = sum(r.completion for r in good) / max(1, sum(len(r.events) for r in good))
    inside = sum(sum(1 for t in r.events if t <= until) * r.completion / len(r.events) for r in good)
    metrics: dict[str, Any] = {
        "requests": len(replies),
        "failed": len(replies) - len(good),
        "window_s": round(until - first, 2),
        "output_tok_s": round(inside / max(until - first, 1e-9), 2),
        "requests_s": round(len(good) / max(ended - first, 1e-9), 3),
        "short": sum(r.completion != c.output for r, c in zip(replies, calls) if r.status == 200),
        "tokens_per_event": round(per_event, 3),
        "prompt_tokens": sum(len(c.prompt) for c in calls),
        "cached_tokens": sum(r.cached for r in good),
    }
    for name, values, shares in (
        ("ttft_ms", [r.events[0] - r.due for r in good], (0.5, 0.9, 0.99)),
        ("itl_ms", [b - a for r in good for a, b in zip(r.events, r.events[1:])], (0.5, 0.9, 0.99)),
        ("tpot_ms", [(r.events[-1] - r.events[0]) / (r.completion - 1) for r in good if r.completion > 1], (0.5, 0.99)),
        ("e2e_ms", [r.ended - r.due for r in good], (0.5, 0.99)),
        ("client_late_ms", [r.sent - r.due for r in replies if r.sent], (0.5, 0.99)),
        ("client_lag_ms", lags, (0.5, 0.99)),
    ):
        for share in shares if values else ():
            metrics[f"{name}_p{share * 100:.0f}"] = round(1000 * percentile(values, share), 3)
    return metrics


def capacity(replies: list[Reply]) -> float:
    """Requests a second that a server completes while it is full.

    The rate is that of the middle three fifths of all tokens: at first the server only reads prompts, and at the end
    too few requests are left.
    """
    good = [r for r in replies if r.status == 200 and r.events]
    if len(good) < 10:
        raise ConfigError(f"the capacity needs at least 10 good replies; there were {len(good)} of {len(replies)}")
    if len(good) < len(replies):  # a server that rejects some completes the others sooner
        log.warning(
            "%d of %d requests failed while the capacity was measured; it counts only the others",
            len(replies) - len(good),
            len(replies),
        )
    events = sorted(t for r in good for t in r.events)
    low, high = len(events) // 5, len(events) - len(events) // 5 - 1
    return len(good) * (high - low) / len(events) / max(events[high] - events[low], 1e-6)

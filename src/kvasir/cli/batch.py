"""``kvasir generate -i`` on a file in OpenAI's batch format: each line holds ``custom_id``, ``method``, ``url`` and
``body``, each answer is a line with ``custom_id``, ``response`` and ``error``.

The bodies go through the server's own routes, in this process and without a port, so that an answer is what the server
would have sent. Answers are written as they finish. Lines whose ``custom_id`` the output has answered are skipped, so
an interrupted run goes on where it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir import records
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, RequestError, nearest

# Longest custom_id, in characters.
MAX_ID_CHARS = 512
# The beginning of a row of the output.
ROW = b'{"id": "batch_req_'
# Routes that start work without waiting for it.
NOT_SERVED = {"/v1/scaling/runs"}


def is_batch(text: str) -> bool:
    """Whether the first line that is not empty is one of a batch."""
    line = next((line for line in text.split("\n") if line.strip()), "")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and "custom_id" in entry and ("body" in entry or "url" in entry)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a batch. ``name``: its custom_id, if it has one. ``fault``: why it cannot be sent, else empty."""

    name: str | None
    url: str = ""
    body: bytes = b""
    fault: str = ""


def parse(text: str) -> list[Line]:
    """The lines of a batch. A bad line does not stop the others."""
    lines, seen = [], set()
    for number, text_line in enumerate(text.split("\n"), start=1):
        if text_line.strip():
            line = _line(text_line, number)
            if line.name in seen and not line.fault:
                line = Line(line.name, fault=f"line {number}: the custom_id was used by an earlier line")
            seen.add(line.name)
            lines.append(line)
    return lines


def _line(text: str, number: int) -> Line:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as e:
        return Line(None, fault=f"line {number} is not JSON: {e}")
    if not isinstance(entry, dict):
        return Line(None, fault=f"line {number} is not a JSON object")
    name = entry.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS:
        return Line(None, fault=f"line {number}: custom_id must be text of 1 to {MAX_ID_CHARS} characters")
    body = entry.get("body")
    for bad, why in (
        (set(entry) - {"custom_id", "method", "url", "body"}, "holds more than custom_id, method, url and body"),
        (entry.get("method", "POST") != "POST", "method must be POST"),
        (not isinstance(entry.get("url"), str), "url must name a route, for example /v1/chat/completions"),
        (not isinstance(body, dict), "body must be a JSON object"),
        (isinstance(body, dict) and body.get("stream"), "a batch cannot stream: leave 'stream' out"),
        (isinstance(body, dict) and body.get("background"), "a batch waits for answers: leave 'background' out"),
    ):
        if bad:
            return Line(name, fault=f"line {number}: {why}")
    return Line(name, entry["url"], json.dumps(body).encode())


def run(
    config: EngineConfig,
    text: str,
    output: Path | None,
    errors: Path | None,
    max_output_tokens: int = 0,
    replicas: int = 1,
) -> None:
    """Answer a batch. Without ``errors``, lines that failed go to the output, too. ``max_output_tokens``: the server's
    setting. Raises ConfigError, and RequestError at the end when any line failed."""
    if errors is not None and output is not None and errors.resolve() == output.resolve():
        raise ConfigError("--errors is the file that --output writes; leave --errors out to have both in one file")
    lines = parse(text)
    answered = _answered(output)
    todo = [line for line in lines if line.name not in answered]
    if len(todo) < len(lines):
        print(f"{len(lines) - len(todo)} of {len(lines)} lines are answered in {output} already", file=sys.stderr)
    if not todo:
        return
    outcome = Outcome()
    try:
        asyncio.run(_run(config, todo, output, errors, outcome, max_output_tokens, replicas))
    except KeyboardInterrupt:
        where = output or "stdout"
        print(f"interrupted: {outcome.done} of {len(todo)} lines were written to {where}", file=sys.stderr)
        raise
    if outcome.failed:
        raise RequestError(f"{outcome.failed} of {len(todo)} lines failed; the first: {outcome.first}")


def _answered(output: Path | None) -> set[str]:
    """The custom_ids that an earlier run has answered. Other lines of the output are removed: they are tried again.
    Raises ConfigError for a file that is no output of a batch."""
    if output is None or not output.is_file():
        return set()
    try:
        found = records.read(output, _row)
        if found.lost and not found.records and not found.first.startswith(ROW[: len(found.first)]):
            raise ConfigError(
                f"--output {output} exists and is no output of a batch, which could be continued; name another file"
            )
        found.tell(output)
        good = [row for row in found.records if (row["response"] or {}).get("status_code") == 200]
        if found.lost or len(good) < len(found.records):
            fresh = output.with_name(f"{output.name}.new")
            fresh.unlink(missing_ok=True)
            with records.RecordFile(fresh) as file:
                file.append(*map(_encoded, good))
            fresh.replace(output)
    except OSError as e:
        raise ConfigError(f"--output {output} cannot be continued: {e.strerror}") from e
    return {row["custom_id"] for row in good}


def _row(line: bytes) -> dict[str, Any]:
    """Decode a row of the output. Raises one of ``records.UNREADABLE``."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row["response"], dict | None) or "custom_id" not in row:
        raise TypeError("no row")
    return row


class Outcome:
    """Counts of the lines that are written and of those that failed, and the first failure."""

    def __init__(self) -> None:
        self.done = self.failed = 0
        self.first = ""

    def add(self, fault: str) -> None:
        """Count a line that is written. ``fault``: why it failed, else empty."""
        self.done += 1
        if fault:
            self.failed += 1
            self.first = self.first or fault


async def _run(
    config: EngineConfig,
    todo: list[Line],
    output: Path | None,
    errors: Path | None,
    outcome: Outcome,
    max_output_tokens: int,
    replicas: int,
) -> None:
    async with serving(config, max_output_tokens, replicas) as app, contextlib.AsyncExitStack() as stack:
        # Files are opened once the model is there, so that a failed start leaves earlier ones as they are.
        out = stack.enter_context(_opened(output)) if output else None
        err = stack.enter_context(_opened(errors, emptied=True)) if errors else out
        advance = stack.enter_context(_progress(len(todo), output is not None))
        routes = sorted(
            route.path
            for route in app.routes
            if "POST" in (route.methods or ()) and "{" not in route.path and route.path not in NOT_SERVED
        )
        waiting = iter(todo)

        async def work() -> None:
            for line in waiting:
                row, fault = await _answer(app, line, routes)
                _write(err if fault else out, row)
                outcome.add(fault)
                advance()

        # Twice as many as run at once, so that the queue never runs dry.
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(todo), 2 * replicas * config.scheduler.max_num_seqs)):
                    group.create_task(work())
        except BaseExceptionGroup as failed:  # all for the same reason: a full disk, a closed pipe
            raise failed.exceptions[0] from failed


async def _answer(app: Any, line: Line, routes: list[str]) -> tuple[dict[str, Any], str]:
    """The output row of a line, and why it failed, if it did."""
    row: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.name,
        "response": None,
        "error": None,
    }
    fault = line.fault
    if not fault and line.url not in routes:
        fault = f"the url '{line.url[:200]}' is not served.{nearest(line.url, routes)} There are {', '.join(routes)}"
    if fault:
        return {**row, "error": {"code": "invalid_line", "message": fault}}, fault
    while True:
        status, headers, data = await post(app, line.url, line.body)
        body = json.loads(data)
        error = body.get("error") if status >= 400 else None
        if error is None or status not in (429, 503) or error.get("code") == "engine_down":
            break
        await asyncio.sleep(float(headers.get("retry-after", "1")))
    row["response"] = {"status_code": status, "request_id": headers.get("x-request-id", row["id"]), "body": body}
    return row, f"{line.name}: {error.get('message')}" if error else ""


@contextlib.asynccontextmanager
async def serving(config: EngineConfig, max_output_tokens: int = 0, replicas: int = 1) -> AsyncIterator[Any]:
    """The server's app with a running engine, without a port. Raises ConfigError when it cannot start."""
    from kvasir.api.server import create_app, open_text
    from kvasir.cluster.cluster_client import open_client, with_replicas

    settings = with_replicas(config, replicas).replace(max_output_tokens=max_output_tokens)
    app = create_app(open_client(settings), open_text(settings), settings.server)
    service = app.state.service
    async with app.router.lifespan_context(app):
        await service.started()
        if service.failure is not None:
            raise service.failure
        yield app


async def post(app: Any, url: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send one request to an ASGI app. Returns status, headers and body of the reply."""
    request = [{"type": "http.request", "body": body, "more_body": False}]
    start: dict[str, Any] = {}
    pieces: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if not request:
            await asyncio.Event().wait()  # this client never leaves
        return request.pop()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            pieces.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, b"".join(pieces)


@contextlib.contextmanager
def _opened(path: Path, emptied: bool = False) -> Iterator[records.RecordFile]:
    """Open a file for rows. ``emptied``: without those that it holds. Raises ConfigError when it cannot be written, now
    or later."""
    try:
        if emptied:
            path.write_bytes(b"")
        with records.RecordFile(path) as file:
            yield file
    except OSError as e:
        raise ConfigError(
            f"cannot write {path}: {e.strerror}. The rows before are in it; the same command goes on from there"
        ) from e


def _encoded(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace")  # UTF-8 cannot hold lone surrogates


def _write(file: records.RecordFile | None, row: dict[str, Any]) -> None:
    """Append a row to a file; None: print it."""
    if file is not None:
        return file.append(_encoded(row))
    sys.stdout.write(_encoded(row).decode() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], Any]]:
    """A progress bar on a terminal; yields the function that advances it."""
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("lines", total=total)
        yield lambda: bar.advance(task)
